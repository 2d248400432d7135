"""What a contender is."""

from __future__ import annotations

import time
from typing import ClassVar

from eplb_async.bench.work import Turn, Work

__all__ = ["Contender", "Spinning", "Stopwatch"]


class Contender:
    """One way to do the work. It is opened, does a verified turn, then its timed turns, and is closed.

    Between ``ready`` and ``rest`` nobody else runs, so what spins or holds the machine lives only there.

    Attributes:
        name: Name in the report.
        moves: Whether it moves experts, so that its bytes can be verified.
        on_shared_rows: Whether these are the rows that the rivals share.
    """

    name: ClassVar[str]
    moves: ClassVar[bool] = True
    on_shared_rows: ClassVar[bool] = True

    def __init__(self, work: Work) -> None:
        self.work = work

    @classmethod
    def why_not(cls, work: Work) -> str:
        """Why it cannot run here, for the report; empty if it can."""
        return ""

    async def open(self) -> None:
        """Allocate all but the weights, register, connect; not timed."""

    async def ready(self) -> None:
        """Get ready for a turn; not timed."""

    async def turn(self) -> Turn:
        """Do the work once, every rank at once, after a barrier."""
        raise NotImplementedError

    async def rest(self) -> None:
        """After a turn, when all ranks have ended theirs; not timed."""

    async def verify(self) -> int:
        """Do the work once from known bytes; returns how many bytes are wrong afterwards."""
        work = self.work
        work.rows.fill(work.one)
        work.group.barrier()
        await self.turn()
        work.group.barrier()
        return work.rows.wrong_bytes(work.two)

    async def close(self) -> None:
        """Give everything back."""


class Spinning(Contender):
    """One whose agent lives only during its turns: its progress thread takes a core, which no other should miss."""

    async def open(self) -> None:
        """Allocate what is read into."""
        self._buffers = self.work.buffers()

    async def verify(self) -> int:
        """A verified turn, with an agent for it."""
        await self.ready()
        wrong = await super().verify()
        await self.rest()
        return wrong

    async def close(self) -> None:
        """Give the buffers back."""
        self._buffers.clear()


class Stopwatch:
    """Wall and CPU time of a turn, from the barrier on."""

    def __init__(self, work: Work) -> None:
        work.group.barrier()
        self._wall = time.perf_counter()
        self._cpu = time.process_time()

    def turn(self, *, polls: int | None = None, lags: tuple[float, ...] = (), seconds: float | None = None) -> Turn:
        """What it took; ``seconds`` where the contender knows better."""
        wall = time.perf_counter() - self._wall if seconds is None else seconds
        return Turn(seconds=wall, cpu=time.process_time() - self._cpu, polls=polls, lags=lags)
