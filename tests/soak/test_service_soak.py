"""Minutes of rounds on three real ranks in lock-step, over tcp: what they hold stays flat, and nothing stalls.

``pytest -m soak -s tests/soak/test_service_soak.py``; ``EPLB_ASYNC_SOAK_SECONDS`` says for how long (300),
``EPLB_ASYNC_SOAK_SEED`` what happens. A table of samples is printed as it goes.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from eplb_async.core.placement import Placement
from eplb_async.testing.processes import Failure, RankProcesses, Spec
from tests.service.engine import ROWS
from tests.service.ranks import MODULE, everywhere, serve, stepping, stopped
from tests.soak.flat import judge

SECONDS = float(os.environ.get("EPLB_ASYNC_SOAK_SECONDS", "300"))
SEED = int(os.environ.get("EPLB_ASYNC_SOAK_SEED", "1"))
STRETCH, REOPEN_EVERY = 10.0, 3
PLACEMENT = Placement.initial(3, 12, ep_size=3, num_redundant=3)
SETTINGS = {"step_interval": 60, "window_steps": 60, "min_interval": 0.0, "watch_interval": 0.5}
BUCKETS = 10  # a window has eight, the one that is filled, and the one that is forgotten next
FLAT = ("waiters", "round_tasks")
SERIES = 16  # outcomes, and figures of the last round, that a new service has not had yet
COLUMNS = ("rss_kib", "kept_kib", "fds", "threads", "leases", "staging", "tasks", "objects", "window", "series")


class Soak:
    """The ranks, and what was seen of them in stretches of steps with a rest after each."""

    def __init__(self, ranks: RankProcesses, folder: Path) -> None:
        self.ranks, self.folder = ranks, folder
        self.asked: Counter[str] = Counter()
        self.rounds: Counter[str] = Counter()
        self.steps = self.changes = 0
        self.longest = 0.0
        self.samples: list[list[tuple[float, dict[str, int]]]] = [[], [], []]
        self._random = random.Random(SEED)
        self._moved = 0

    def go(self) -> None:
        """Stretch after stretch, until the time is up; now and then the services are made anew."""
        started, number = time.monotonic(), 0
        while time.monotonic() - started < SECONDS:
            if number % REOPEN_EVERY == 0:
                self._reopen(first=number == 0)
            self._stretch(number)
            self._sample(time.monotonic() - started)
            number += 1

    def _reopen(self, *, first: bool) -> None:
        if not first:
            everywhere(self.ranks, "close")
        serve(self.ranks, metrics=True, **SETTINGS)
        self._moved = 0

    def _stretch(self, number: int) -> None:
        """Engines step; meanwhile ranks ask for rounds, give up on some, and pause."""
        path = self.folder / f"board{number}"
        board = stepping(self.ranks, path, seed=SEED + number, period=90)
        until = time.monotonic() + STRETCH
        while time.monotonic() < until:
            self._disturb(self._random.randrange(3))
            time.sleep(self._random.uniform(0.1, 1.0))
        seen = stopped(self.ranks, board)
        steps, changes = board.check()
        self.steps, self.changes = self.steps + steps, self.changes + changes
        self.longest = max(self.longest, *(max(each["busy"], default=0.0) for each in seen.values()))
        assert seen[0]["applied"] == seen[1]["applied"] == seen[2]["applied"]
        assert self.ranks.all("check") == [0, 0, 0]
        assert len(set(self.ranks.all("placement"))) == 1
        path.unlink()

    def _disturb(self, rank: int) -> None:
        """Ask for a round, and wait for it or not; or pause."""
        command: tuple[Any, ...] = ("pause", rank, 0.1)
        if self._random.random() < 0.8:
            command = ("ask", rank, self._random.random() < 0.5, self._random.choice((0.0, 0.05, 60.0)))
        answer = self.ranks.call(rank, "run", MODULE, *command)
        assert not isinstance(answer, Failure), answer
        self.asked[answer or "pause"] += 1

    def _sample(self, at: float) -> None:
        """Note what every rank holds, at rest; rounds have gone on, and none has failed."""
        healths = everywhere(self.ranks, "health")
        moved = healths[0]["rounds"].get("moved", 0)
        assert moved > self._moved, f"no round moved anything in {STRETCH} s: {healths}"
        assert not any(health["rounds"].get("failed") or health["failures"] for health in healths.values()), healths
        self.rounds["moved"] += moved - self._moved
        self._moved = moved
        held = everywhere(self.ranks, "held")
        for rank, counts in enumerate(self.ranks.all("run", "tests.real.inside", "counts")):
            self.samples[rank].append((at, counts | held[rank]))
            if len(self.samples[0]) == 1 and rank == 0:
                print("\n     s rank " + " ".join(f"{name:>8}" for name in COLUMNS))
            print(f"{at:6.0f} {rank:4} " + " ".join(f"{(counts | held[rank])[name]:8}" for name in COLUMNS), flush=True)


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 300)
def test_what_services_hold_stays_flat(tmp_path: Path) -> None:
    """Steps, automatic and asked rounds, pauses, services made anew, with metrics: flat, and on to the end."""
    spec = Spec(
        placement=PLACEMENT,
        rendezvous=f"file://{tmp_path}/rendezvous",
        row_bytes=ROWS,
        transport="tcp",
        loop="uvloop",
        settings={"activation": "step", "step_margin": 2},
        telemetry="tests.service.metrics",
    )
    with RankProcesses(spec) as ranks:
        soak = Soak(ranks, tmp_path)
        soak.go()
    print(
        f"seed {SEED}, {SECONDS:.0f} s: {soak.steps} steps, {soak.rounds['moved']} rounds moved, "
        f"{soak.changes} changes, a step began after {soak.longest:.2f} s at most; asked: {dict(soak.asked)}"
    )
    bucket = 8 * PLACEMENT.num_layers * (PLACEMENT.num_physical + PLACEMENT.num_logical)
    for rank, samples in enumerate(soak.samples):
        judge(rank, samples[1:], FLAT)  # the first comes before all has been used once
        assert max(counts["window"] for _, counts in samples) <= BUCKETS * bucket, rank
        series = [counts["series"] for _, counts in samples[1:]]
        assert max(series) - min(series) <= SERIES, (rank, series)
