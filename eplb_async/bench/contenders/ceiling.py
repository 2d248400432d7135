"""The ceiling: as many bytes copied in memory by as many processes at once, and nothing else."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from eplb_async.bench.contenders.base import Contender, Stopwatch
from eplb_async.bench.lag import lags_while
from eplb_async.bench.work import Turn

__all__ = ["Copies", "CopyOnce", "CopyTwice"]

_CHUNK = 3 << 20
_MOST = 256 << 20  # larger work goes round in pages of this size: far beyond any cache


class _Copy(Contender):
    moves = False
    on_shared_rows = False
    pages_used: ClassVar[int]

    async def open(self) -> None:
        size = min(_MOST, max(1, self.work.bytes_in))
        self._pages: list[np.ndarray[Any, Any]] = [np.full(size, n, np.uint8) for n in range(self.pages_used)]

    async def turn(self) -> Turn:
        watch = Stopwatch(self.work)
        left = self.work.bytes_in
        while left > 0:
            nbytes = min(left, len(self._pages[0]))
            for source, target in pairwise(self._pages):
                for at in range(0, nbytes, _CHUNK):
                    stop = min(at + _CHUNK, nbytes)
                    target[at:stop] = source[at:stop]
            left -= nbytes
        return watch.turn()

    async def close(self) -> None:
        self._pages.clear()


class CopyTwice(_Copy):
    """Every byte copied twice, as by a READ on one host and an apply."""

    name = "copy_twice"
    pages_used = 3


class CopyOnce(_Copy):
    """Every byte copied once, as where the READ needs no CPU."""

    name = "copy_once"
    pages_used = 2


class Copies(_Copy):
    """Both copies in two threads beside the user's loop: what its lag is with the same work and no NIXL."""

    name = "copies"
    pages_used = 2

    async def turn(self) -> Turn:
        source, target = self._pages
        work = self.work

        def copy() -> None:
            left = work.bytes_in
            while left > 0:
                nbytes = min(left, len(source))
                for at in range(0, nbytes, _CHUNK):
                    stop = min(at + _CHUNK, nbytes)
                    target[at:stop] = source[at:stop]
                left -= nbytes

        async def both() -> None:
            await asyncio.gather(asyncio.to_thread(copy), asyncio.to_thread(copy))

        watch = Stopwatch(work)
        lags = await lags_while(both())
        return watch.turn(lags=tuple(lags))
