"""Copies of expert rows: into staging before the vote, out of it after COMMIT. One implementation per device."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from eplb_async.engine import LoopEngine


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
    to: Sequence[int]
    source: torch.Tensor
    frm: Sequence[int]

    @property
    def nbytes(self) -> int:
        """Bytes to copy."""
        return len(self.to) * self.target.shape[1]


class Copier(Protocol):
    """Copies expert bytes off the engine loop, and says when they are there (I-1, I-18)."""

    async def copy(self, copies: Sequence[Copy]) -> None:
        """Return when every byte is in place and visible to peers: on CUDA, when the event has completed."""
        ...


class CpuCopier:
    """Copies on the engine's worker thread, with the GIL released during each row."""

    def __init__(self, engine: LoopEngine) -> None:
        self._engine = engine

    async def copy(self, copies: Sequence[Copy]) -> None:
        """See :class:`Copier`."""
        if copies:
            await self._engine.offload(lambda: _copy_rows(copies))


class CudaCopier:
    """Copies on a CUDA stream and waits for the event behind them (DESIGN §5, CUDA).

    Rows are enqueued on the given stream in order with the engine's kernels; the event after them is polled,
    never synchronised with, so the engine loop goes on. Copies of CPU rows (the entry table) run on the worker.

    Args:
        engine: The engine loop.
        stream: Returns the stream to copy on: the server's current one, or one given to us.
        poll_seconds: Pause between two looks at the event.
    """

    def __init__(
        self, engine: LoopEngine, stream: Callable[[], Any] | None = None, poll_seconds: float = 0.001
    ) -> None:
        self._engine = engine
        self._stream = stream or torch.cuda.current_stream
        self._poll_seconds = poll_seconds

    async def copy(self, copies: Sequence[Copy]) -> None:
        """See :class:`Copier`."""
        on_device = [c for c in copies if c.target.is_cuda or c.source.is_cuda]
        event = await self._engine.offload(lambda: self._enqueue(on_device)) if on_device else None
        rest = [c for c in copies if not (c.target.is_cuda or c.source.is_cuda)]
        if rest:
            await self._engine.offload(lambda: _copy_rows(rest))
        while event is not None and not event.query():
            await asyncio.sleep(self._poll_seconds)

    def _enqueue(self, copies: Sequence[Copy]) -> Any:
        stream = self._stream()
        with torch.cuda.stream(stream):
            for c in copies:
                rows = torch.as_tensor(c.frm, device=c.source.device)
                to = torch.as_tensor(c.to, device=c.target.device)
                c.target.index_copy_(0, to, c.source.index_select(0, rows))
            event = torch.cuda.Event()
            event.record(stream)
        return event


def _copy_rows(copies: Sequence[Copy]) -> None:
    for c in copies:
        target, source = c.target.numpy(), c.source.numpy()
        for to, frm in zip(c.to, c.frm, strict=True):
            target[to] = source[frm]
