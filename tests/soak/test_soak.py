"""Minutes of random migrations, cancels and kills on three real ranks over tcp: what they hold stays flat.

``pytest -m soak -s``; ``EPLB_ASYNC_SOAK_SECONDS`` says for how long (600), ``EPLB_ASYNC_SOAK_SEED`` what happens.
A table of samples is printed as it goes.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eplb_async.core.placement import Placement
from eplb_async.testing.placements import random_placement
from eplb_async.testing.processes import Failure, RankProcesses, Spec
from tests.soak.flat import KIB, judge

SECONDS = float(os.environ.get("EPLB_ASYNC_SOAK_SECONDS", "600"))
SEED = int(os.environ.get("EPLB_ASYNC_SOAK_SEED", "1"))
SHAPE = {"num_layers": 3, "num_logical": 8, "num_local_experts": 4, "ep_size": 3}
KILL_EVERY, SAMPLE_EVERY = 40.0, 10.0
COLUMNS = ("pid", "rss_kib", "kept_kib", "fds", "threads", "maps", "shm", "handles", "peers", "tasks", "objects")


class Soak:
    """The ranks, what was done to them, and what they said of themselves."""

    def __init__(self, ranks: RankProcesses, placement: Placement) -> None:
        self.ranks = ranks
        self.placement = placement
        self.done: Counter[str] = Counter()
        self.samples: list[tuple[float, int, dict[str, int]]] = []
        self.started = time.monotonic()
        self.seconds = 0.1  # what a migration takes
        self._random = random.Random(SEED)
        self._numpy = np.random.default_rng(SEED)

    def go(self) -> None:
        """Migrate at random until the time is up."""
        sampled = killed = self.started
        while (now := time.monotonic()) - self.started < SECONDS:
            if now - killed > KILL_EVERY:
                killed = now
                self.kill()
            elif now - sampled > SAMPLE_EVERY:
                sampled = now
                self.sample()
            elif self._random.random() < 0.4:
                self.cut()
            else:
                self.migrate()
        self.sample()

    def migrate(self) -> None:
        """A migration that must succeed; right after another rank's cancel it may be ended once more."""
        target, answers = self._another(), []
        for _ in range(4):
            started = time.monotonic()
            for rank in range(3):
                self.ranks.send(rank, "migrate", target, 20.0)
            answers = [self.ranks.receive(rank) for rank in range(3)]
            failed = [answer for answer in answers if isinstance(answer, Failure)]
            if not failed:
                break
            self.done["ended once more"] += 1
            assert all("cancelled" in answer.text for answer in failed), failed
        assert self.ranks.all("check", target) == [0, 0, 0], answers
        self.seconds = 0.9 * self.seconds + 0.1 * (time.monotonic() - started)
        self.placement = target
        self.done["migrated"] += 1

    def cut(self) -> None:
        """A migration that one rank, or two, cancel."""
        target, after = self._another(), self._random.uniform(0.01, 1.2)
        victims = self._random.sample(range(3), self._random.choice((1, 1, 2)))
        for rank in range(3):
            if rank in victims:
                self.ranks.send(rank, "run", "tests.real.inside", "cut", target, 20.0, after * self.seconds)
            else:
                self.ranks.send(rank, "migrate", target, 3.0)
        answers = [self.ranks.receive(rank) for rank in range(3)]
        for rank in victims:
            assert isinstance(answers[rank], str), answers[rank]
            self.done["cut: " + answers[rank]] += 1
        self.agree(target, range(3))

    def kill(self) -> None:
        """SIGKILL in the middle of a migration; the others end at one layer, and the rank is brought back."""
        target, dead = self._another(), self._random.randrange(3)
        for rank in range(3):
            self.ranks.send(rank, "migrate", target, 10.0)
        time.sleep(self._random.uniform(0.0, 1.2) * self.seconds)
        self.ranks.kill(dead)
        self.ranks.exit_code(dead)
        gone = {dead}
        for rank in {0, 1, 2} - gone:
            try:
                answer = self.ranks.receive(rank)
                assert not isinstance(answer, Failure) or "EplbError" in answer.bases, answer
            except (
                TimeoutError
            ):  # UCX on tcp aborts a source that must answer a peer that is gone (docs/decisions/0002)
                assert self.ranks.exit_code(rank, 5) is not None
                gone.add(rank)
                self.done["aborted by UCX"] += 1
        self.done["killed"] += 1
        self.bring_back(gone, target)

    def bring_back(self, gone: set[int], target: Placement) -> None:
        """Have one rank back with ``reconnect``; or close the others, and open the group anew."""
        others = [rank for rank in range(3) if rank not in gone]
        if others:
            self.agree(target, others)
        if len(gone) == 1 and self._random.random() < 0.5:
            (dead,) = gone
            self.ranks.start(dead, self.placement)
            self.ranks.send(dead, "open")
            self.ranks.all("reconnect", dead, 30.0, ranks=others)
            answer = self.ranks.receive(dead)
            assert answer is None, answer
            self.done["reconnected"] += 1
        else:
            self.ranks.all("close", ranks=others)
            for rank in gone:
                self.ranks.start(rank)
            self.ranks.all("open", self.placement)
            self.done["opened anew"] += 1
        assert self.ranks.all("check", self.placement) == [0, 0, 0]

    def agree(self, target: Placement, ranks: Any) -> None:
        """I-7: the ranks are at one layer, and every byte is right."""
        found = self.ranks.all("run", "tests.real.inside", "quiet", ranks=ranks)
        assert found[0] in [self.placement.with_layers(target, count) for count in range(4)]
        assert all(placement == found[0] for placement in found)
        assert self.ranks.all("check", found[0], ranks=ranks) == [0] * len(found)
        self.placement = found[0]

    def sample(self) -> None:
        """Note what every rank holds, at rest."""
        self.agree(self.placement, range(3))
        at = time.monotonic() - self.started
        for rank, counts in enumerate(self.ranks.all("run", "tests.real.inside", "counts")):
            self.samples.append((at, rank, counts))
            if len(self.samples) == 1:
                print("\n     s rank " + " ".join(f"{name:>8}" for name in COLUMNS))
            print(f"{at:6.0f} {rank:4} " + " ".join(f"{counts[name]:8}" for name in COLUMNS), flush=True)

    def _another(self) -> Placement:
        return random_placement(self._numpy, **SHAPE)

    def lives(self) -> Iterator[tuple[int, list[tuple[float, dict[str, int]]]]]:
        """The samples of each process: its rank, and (seconds, counts)."""
        for pid in dict.fromkeys(counts["pid"] for _, _, counts in self.samples):
            found = [(at, rank, counts) for at, rank, counts in self.samples if counts["pid"] == pid]
            if len(found) > 2:  # the first comes before all buffers have been used once
                yield found[0][1], [(at, counts) for at, _, counts in found[1:]]


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 300)
def test_what_ranks_hold_stays_flat(tmp_path: Path) -> None:
    """RSS, descriptors, threads, handles, registrations, tasks: flat under migrations, cancels and kills."""
    placement = random_placement(np.random.default_rng(SEED), **SHAPE)
    spec = Spec(
        placement=placement,
        rendezvous=f"file://{tmp_path}/rendezvous",
        row_bytes=(512 * KIB, 64 * KIB),
        transport="tcp",
        loop="uvloop",
    )
    with RankProcesses(spec) as ranks:
        soak = Soak(ranks, placement)
        soak.go()
    print(f"seed {SEED}, {SECONDS:.0f} s: {dict(soak.done)}")
    for rank, life in soak.lives():
        judge(rank, life)
