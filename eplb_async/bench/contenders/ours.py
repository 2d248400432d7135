"""This library, through its public face."""

from __future__ import annotations

import asyncio
import time

from eplb_async.bench.contenders.base import Contender, Stopwatch
from eplb_async.bench.lag import lags_while
from eplb_async.bench.work import Turn, Work
from eplb_async.communicator import AsyncEplbCommunicator
from eplb_async.communicator.report import MigrationReport
from eplb_async.core.placement import Placement
from eplb_async.settings import Settings
from eplb_async.testing.patterns import PatternWeights

__all__ = ["Blocked", "Late", "Ours"]

_TIMEOUT = 120.0
_BLOCK_SECONDS = 0.2
_LATE_SECONDS = 0.15


class Ours(Contender):
    """``await comm.migrate(new)``, timed; then the way back, with a ticker on the user's loop."""

    name = "ours"
    on_shared_rows = False

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self._rows = PatternWeights(work.one, work.rank, work.scenario.row_bytes)

    async def open(self) -> None:
        work, scenario = self.work, self.work.scenario
        self._comm = await AsyncEplbCommunicator.open(
            rank=work.rank,
            ep_size=work.group.size,
            weights=self._rows.layers,
            placement=work.one,
            rendezvous=work.group.store,
            group=f"bench-{scenario.name}-{self.name}",
            settings=Settings.from_env(use_uvloop=scenario.loop == "uvloop", **scenario.settings),
            timeout=_TIMEOUT,
        )

    async def turn(self) -> Turn:
        work = self.work
        watch = Stopwatch(work)
        report = await self._migrate(work.two)
        turn = watch.turn(polls=report.polls)
        work.group.barrier()
        lags = await lags_while(self._migrate(work.one))
        return Turn(seconds=turn.seconds, cpu=turn.cpu, polls=turn.polls, lags=tuple(lags))

    async def verify(self) -> int:
        work, wrong = self.work, 0
        for placement in (work.two, work.one):
            work.group.barrier()
            await self._migrate(placement)
            wrong += self._rows.wrong_bytes(placement)
        return wrong

    async def _migrate(self, placement: Placement) -> MigrationReport:
        return await self._comm.migrate(placement, timeout=_TIMEOUT)

    async def close(self) -> None:
        await self._comm.aclose()


class Late(Ours):
    """Rank 0 comes late, as a block makes it, but its loop is free: what the blocked one is compared with.

    What counts is what the others take from BEGIN on, that is without the waiting for rank 0.
    """

    name = "late"

    async def turn(self) -> Turn:
        await asyncio.sleep(0.2)  # as long a pause before each turn: the caches are cold in both
        watch = Stopwatch(self.work)
        if self.work.rank == 0:
            report = await self._come_late(self.work.two)
        else:
            report = await self._migrate(self.work.two)
        turn = watch.turn(polls=report.polls, seconds=report.seconds["total"] - report.seconds["join"])
        self.work.group.barrier()
        await self._migrate(self.work.one)
        return turn

    async def _come_late(self, placement: Placement) -> MigrationReport:
        await asyncio.sleep(_LATE_SECONDS)
        return await self._migrate(placement)


class Blocked(Late):
    """Rank 0's loop blocks 200 ms at a time all the while: asleep with the GIL released, or computing with it held."""

    name = "blocked"

    async def _come_late(self, placement: Placement) -> MigrationReport:
        self._block(_LATE_SECONDS)
        task = asyncio.ensure_future(self._migrate(placement))
        await asyncio.sleep(0)  # it is submitted
        while not task.done():
            self._block(_BLOCK_SECONDS)
            await asyncio.sleep(0.001)
        return await task

    def _block(self, seconds: float) -> None:
        if self.work.scenario.block == "released":
            time.sleep(seconds)
            return
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass
