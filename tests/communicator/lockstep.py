"""Engines in lock-step: no step ends before every rank has begun it, and what each ran it with is on record."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable

from eplb_async.communicator import AsyncEplbCommunicator
from eplb_async.core.placement import Placement
from eplb_async.settings import Settings


def settings(**more: object) -> Settings:
    values: dict[str, object] = {"secret": b"s" * 16, "activation": "step", "step_margin": 2, "settle_timeout": 4.0}
    return Settings(**(values | more))  # type: ignore[arg-type]


class LockStep:
    """The engines of all ranks.

    Attributes:
        seen: The placement that each rank ran each step with, by step and rank.
        stuck: Ranks that do not leave the step that they are in.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self.ranks = set(ranks)
        self.seen: dict[int, dict[int, Placement]] = defaultdict(dict)
        self.stuck: set[int] = set()
        self._begun: dict[int, int] = dict.fromkeys(self.ranks, 0)
        self._changed = asyncio.Event()

    def free(self) -> None:
        """Nobody is stuck any more."""
        self.stuck.clear()
        self._tell()

    def leave(self, rank: int) -> None:
        """The others step on without a rank."""
        self.ranks.discard(rank)
        self._tell()

    async def run(
        self,
        rank: int,
        comm: AsyncEplbCommunicator,
        steps: int,
        *,
        work: Callable[[], float] = lambda: 0.01,
        pause: Callable[[], float] = lambda: 0.001,
        look: Callable[[Placement], object] = lambda _: None,
        number: int | None = None,
    ) -> None:
        """A rank's engine: ``steps`` steps, each as long as ``work`` says, with a pause before each."""
        for done in range(steps):
            await asyncio.sleep(pause())
            async with comm.step(None if number is None else number + done) as step:
                self._begun[rank] = n = step.number
                placement = comm.placement
                look(placement)
                self._tell()
                await self._until(lambda n=n: all(self._begun[q] >= n for q in self.ranks))
                await asyncio.sleep(work())
                await self._until(lambda: rank not in self.stuck)
                look(placement)
                assert comm.placement == placement, f"step {step.number} of rank {rank} saw two placements"
                self.seen[n][rank] = placement

    def check(self) -> int:
        """Every step ran with one placement on all ranks; returns how often it changed."""
        for number, seen in self.seen.items():
            assert len(set(seen.values())) == 1, f"step {number} ran with {seen}"
        placements = [next(iter(self.seen[number].values())) for number in sorted(self.seen)]
        return sum(one != other for one, other in itertools.pairwise(placements))

    def _tell(self) -> None:
        self._changed.set()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()
