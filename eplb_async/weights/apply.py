"""Copies of expert rows: into staging before the vote, out of it after COMMIT. One implementation per device."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from eplb_async.engine import LoopEngine
from eplb_async.errors import WeightsError

_Bytes = npt.NDArray[np.uint8]
_Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """Rows of one tensor to copy: ``target[to[i]] = source[frm[i]]``.

    Attributes:
        target: Byte rows, uint8 ``[n, row_bytes]``.
        to: Rows of the target.
        source: Byte rows, uint8 ``[m, row_bytes]``.
        frm: Rows of the source.
    """

    target: torch.Tensor
    to: Sequence[int] | _Rows
    source: torch.Tensor
    frm: Sequence[int] | _Rows

    @property
    def nbytes(self) -> int:
        """Bytes to copy."""
        return len(self.to) * self.target.shape[1]


class Copier(Protocol):
    """Copies expert bytes off the engine loop, and says when they are there (I-1, I-18)."""

    async def copy(self, copies: Sequence[Copy]) -> None:
        """Return when every byte is in place and visible to peers: on CUDA, when the event has completed."""
        ...

    async def fence(self) -> None:
        """Return when what the server has queued on its stream so far is done: peers may then read the rows."""
        ...

    async def call(self, work: Callable[[], object]) -> None:
        """Run work that belongs to an apply off the engine loop, and return when what it has queued is done."""
        ...

    @property
    def mark(self) -> Callable[[], object] | None:
        """Called in the thread that steps, it has the copies to come wait for what that has queued; None: needless."""
        ...


class CpuCopier:
    """Copies on the engine's worker thread, with the GIL released."""

    def __init__(self, engine: LoopEngine) -> None:
        self._engine = engine

    async def copy(self, copies: Sequence[Copy]) -> None:
        """See :class:`Copier`."""
        if copies:
            await self._engine.offload(lambda: _copy_rows(copies))

    async def fence(self) -> None:
        """See :class:`Copier`; nothing is queued on a CPU."""

    async def call(self, work: Callable[[], object]) -> None:
        """See :class:`Copier`."""
        await self._engine.offload(work)

    @property
    def mark(self) -> Callable[[], object] | None:
        """See :class:`Copier`; nothing is queued on a CPU."""
        return None


class CudaCopier:
    """Copies on a CUDA stream and waits for the event behind them (DESIGN §5, CUDA).

    Rows are enqueued in order with the kernels of the server's stream; the event after them is polled, never
    synchronised with, so the engine loop goes on. Rows go one by one: no temporary as large as a layer is
    allocated, and no index has to be brought to the device. CPU rows (the entry table) are copied by the worker.

    Args:
        engine: The engine loop.
        stream: Returns the server's stream, or one given to us, on the device of the weights. It is asked on
            the worker thread, where "the current stream" would be another one.
        poll_seconds: Pause between two looks at the event.
    """

    def __init__(self, engine: LoopEngine, stream: Callable[[], Any], poll_seconds: float = 0.001) -> None:
        self._engine = engine
        self._stream = stream
        self._poll_seconds = poll_seconds
        self._behind: Any = None

    async def copy(self, copies: Sequence[Copy]) -> None:
        """See :class:`Copier`.

        Raises:
            WeightsError: The stream is of another device than the rows; nothing was copied.
        """
        if not copies:
            return
        await self._done(await self._engine.offload(lambda: self._start(copies)))

    async def fence(self) -> None:
        """See :class:`Copier`."""
        await self._done(await self._engine.offload(lambda: self._stream().record_event()))

    async def call(self, work: Callable[[], object]) -> None:
        """See :class:`Copier`; the server's stream is the current one in ``work``."""

        def run() -> Any:
            stream = self._stream()
            with torch.cuda.stream(stream):
                work()
            return stream.record_event()

        await self._done(await self._engine.offload(run))

    @property
    def mark(self) -> Callable[[], object] | None:
        """See :class:`Copier`; the event is on the stream that is current in the thread that steps."""
        return self._record

    def _record(self) -> None:
        self._behind = torch.cuda.current_stream(self._stream().device).record_event()

    async def _done(self, event: Any) -> None:
        while event is not None and not event.query():
            await asyncio.sleep(self._poll_seconds)

    def _start(self, copies: Sequence[Copy]) -> Any:
        """Copy CPU rows, then enqueue the others; returns the event behind them, or ``None`` if there are none."""
        on_device = [c for c in copies if c.target.device.type == "cuda"]
        if not on_device:
            _copy_rows(copies)
            return None
        stream = self._stream()
        for c in on_device:
            if c.target.device != stream.device:
                raise WeightsError(f"rows on {c.target.device} cannot be copied on a stream of {stream.device}")
        _copy_rows([c for c in copies if c.target.device.type != "cuda"])
        if self._behind is not None:
            stream.wait_event(self._behind)
        with torch.cuda.stream(stream):
            for c in on_device:
                for to, frm in zip(np.asarray(c.to).tolist(), np.asarray(c.frm).tolist(), strict=True):
                    c.target[to].copy_(c.source[frm], non_blocking=True)
        return stream.record_event()


def _copy_rows(copies: Sequence[Copy]) -> None:
    arrays: dict[int, _Bytes] = {}  # most copies of an apply share their source

    def array(rows: torch.Tensor) -> _Bytes:
        found = arrays.get(id(rows))
        if found is None:
            found = arrays[id(rows)] = rows.numpy()
        return found

    for c in copies:
        target, source = array(c.target), array(c.source)
        if target.flags.c_contiguous and source.flags.c_contiguous:
            _take_rows(target, np.asarray(c.to), source, np.asarray(c.frm))
        else:
            for to, frm in zip(c.to, c.frm, strict=True):
                target[to] = source[frm]


def _take_rows(target: _Bytes, to: _Rows, source: _Bytes, frm: _Rows) -> None:
    """Copy rows, each run of neighbouring targets in one call that holds no GIL."""
    slots: list[int] = to.tolist()
    if slots == list(range(slots[0], slots[0] + len(slots))):  # a layer that is exchanged whole
        runs = [(0, len(slots))]
    else:
        order = np.argsort(to)
        to, frm = to[order], frm[order]
        slots = to.tolist()
        runs = list(itertools.pairwise([*np.flatnonzero(np.diff(to, prepend=-2) != 1).tolist(), len(slots)]))
    for start, stop in runs:
        # Any other mode of take() copies twice. The numbers are a plan's, which has checked them.
        source.take(frm[start:stop], axis=0, out=target[slots[start] : slots[start] + stop - start], mode="clip")
