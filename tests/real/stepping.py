"""An engine in lock-step inside each rank's process: a thread that steps, and a file in which all see all."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from eplb_async.communicator import AsyncEplbCommunicator
from eplb_async.core import events

MAX_STEPS = 1 << 16
BEGUN, STUCK, STOP, TERM = range(4)


class Board:
    """What the engines of all ranks tell each other, and the test tells them; one file, mapped by all.

    Attributes:
        words: ``[4, ranks]``: the last step begun, whether to stay in it, after which step to stop, the term; int64.
        seen: ``[ranks, steps]``: digest of the placement that each step ran with; 0 where none did. int64.
    """

    def __init__(self, path: str, ranks: int) -> None:
        size = 4 * ranks + ranks * MAX_STEPS
        file = Path(path)
        if not file.exists():
            file.write_bytes(bytes(8 * size))
        whole: Any = np.memmap(file, dtype=np.int64, mode="r+", shape=(size,))
        self.words = whole[: 4 * ranks].reshape(4, ranks)
        self.seen = whole[4 * ranks :].reshape(ranks, MAX_STEPS)

    def check(self, ranks: Iterable[int] = ()) -> tuple[int, int]:
        """Every step ran with one placement, on all who ended it; returns how many, and how often it changed.

        Args:
            ranks: Who must have ended a step for it to count; default all.
        """
        chosen = list(ranks) or list(range(len(self.seen)))
        ended = int((self.seen[chosen] != 0).all(axis=0).sum())
        table, one = self.seen[:, 1 : ended + 1], self.seen[chosen[0], 1 : ended + 1]
        different = np.flatnonzero(((table != one) & (table != 0)).any(axis=0))
        assert not different.size, f"steps {different[:5] + 1} ran with several placements"
        return ended, int((one[1:] != one[:-1]).sum())


class _Engine(threading.Thread):
    """Steps until told to stop; pauses, works and idles at random, idles after the same steps on all ranks."""

    def __init__(self, comm: AsyncEplbCommunicator, path: str, rank: int, ranks: int, seed: int) -> None:
        super().__init__(daemon=True)
        self.comm, self.rank, self.board = comm, rank, Board(path, ranks)
        self.error: BaseException | None = None
        self.costs: list[float] = []
        self._own, self._common = random.Random(seed * 1000 + rank), random.Random(seed)

    def run(self) -> None:
        try:
            while not 0 < self.board.words[STOP, self.rank] <= self.comm.health().step:
                self.step()
        except BaseException as error:
            self.error = error

    def step(self) -> None:
        words = self.board.words
        if self._own.random() < 0.3:
            time.sleep(self._own.choice([0.0, 0.001, 0.02]))
        before = time.perf_counter()
        with self.comm.step() as step:
            self.costs.append(time.perf_counter() - before)
            placement = self.comm.placement
            words[BEGUN, self.rank] = step.number
            while (words[BEGUN] < step.number).any() or words[STUCK, self.rank]:
                time.sleep(0.0002)
            time.sleep(self._own.choice([0.0, 0.0, 0.001, 0.003]))
            assert self.comm.placement == placement, f"step {step.number} saw two placements"
            self.board.seen[self.rank, step.number] = int.from_bytes(placement.digest()[:7]) + 1
        if self._common.random() < 0.02:
            self.comm.idle()
            time.sleep(self._common.uniform(0.0, 0.3))


_engines: dict[int, _Engine] = {}


async def begin(comm: AsyncEplbCommunicator, path: str, rank: int, ranks: int, seed: int) -> None:
    """Have this rank's engine step."""
    _engines[rank] = _Engine(comm, path, rank, ranks, seed)
    _engines[rank].start()


async def mute(comm: AsyncEplbCommunicator, muted: bool) -> None:
    """Keep this rank from voting, or no longer."""
    driver = comm._session.driver
    if not muted:
        del driver.feed
        return
    feed = driver.feed
    driver.feed = lambda event: None if isinstance(event, events.Staged) else feed(event)  # type: ignore[method-assign]


async def end(comm: AsyncEplbCommunicator, rank: int, timeout: float) -> tuple[float, float]:
    """Wait for the engine to stop, then idle; answers median and longest seconds that a step took to begin."""
    engine = _engines.pop(rank)
    async with asyncio.timeout(timeout):
        while engine.is_alive():
            await asyncio.sleep(0.01)
    if engine.error is not None:
        raise engine.error
    comm.idle()
    return float(np.median(engine.costs)), max(engine.costs)
