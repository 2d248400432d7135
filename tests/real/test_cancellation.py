"""A hundred cancels of real migrations over tcp: nothing torn, nothing late, nothing left."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from eplb_async.core.placement import Placement
from eplb_async.testing.placements import random_placement
from eplb_async.testing.processes import Failure, RankProcesses
from tests.real.conftest import Start

pytestmark = pytest.mark.faults  # minutes of real processes: run by `pytest -m faults`, not by default

KIB = 1 << 10
CANCELS, WARM = 100, 15
SHAPE = {"num_layers": 3, "num_logical": 8, "num_local_experts": 4, "ep_size": 3}
FLAT = ("fds", "threads", "shm", "handles", "leases", "registrations", "peers", "staging", "calls", "tasks")
RSS_KIB = 8 * KIB


def migrated(ranks: RankProcesses, placement: Placement) -> None:
    """A migration that must succeed; right after another rank's cancel it may be ended once more."""
    answers: list[Any] = []
    for _ in range(4):
        for rank in range(3):
            ranks.send(rank, "migrate", placement, 20.0)
        answers = [ranks.receive(rank) for rank in range(3)]
        if not any(isinstance(answer, Failure) for answer in answers):
            break
        assert all("cancelled" in answer.text for answer in answers if isinstance(answer, Failure)), answers
    assert ranks.all("check", placement) == [0, 0, 0], answers


@pytest.mark.timeout(300)
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_hundred_cancels_leave_nothing(start: Start, loop: str) -> None:
    """I-3, I-7, I-9, I-10: at random times within a migration; one layer everywhere, every byte right, counts flat."""
    rng, numbers = random.Random(5), np.random.default_rng(5)
    current = random_placement(numbers, **SHAPE)
    ranks = start(current, row_bytes=(512 * KIB, 64 * KIB), transport="tcp", loop=loop)
    whole = []
    for _ in range(5):
        current = random_placement(numbers, **SHAPE)
        whole.append(max(report["seconds"]["total"] for report in ranks.all("migrate", current, 20.0)))
    seconds = sorted(whole)[2]
    done: dict[str, int] = {}
    before: list[dict[str, int]] = []
    while done.get("cancelled", 0) < CANCELS // 2:
        target, victim = random_placement(numbers, **SHAPE), rng.randrange(3)
        for rank in range(3):
            if rank != victim:
                ranks.send(rank, "migrate", target, 3.0)
        how = ranks.call(victim, "run", "tests.real.inside", "cut", target, 20.0, rng.uniform(0.01, 1.2) * seconds)
        assert isinstance(how, str), how
        done[how] = done.get(how, 0) + 1
        for rank in range(3):
            if rank != victim:
                ranks.receive(rank)
        found = ranks.all("run", "tests.real.inside", "quiet")
        assert found[0] in [current.with_layers(target, count) for count in range(4)], "not the layers that were moved"
        assert found[1:] == found[:2], f"ranks at different layers after {done}"
        assert ranks.all("check", found[0]) == [0, 0, 0]
        current = found[0]
        if sum(done.values()) % 5 == 0:
            current = random_placement(numbers, **SHAPE)
            migrated(ranks, current)
        if sum(done.values()) == WARM:
            before = ranks.all("run", "tests.real.inside", "counts")
    migrated(ranks, random_placement(numbers, **SHAPE))
    ranks.all("run", "tests.real.inside", "quiet")
    after = ranks.all("run", "tests.real.inside", "counts")
    print(f"{seconds * 1e3:.0f} ms a migration; {done}", *zip(before, after, strict=True), sep="\n")
    for was, now in zip(before, after, strict=True):
        assert {name: now[name] for name in FLAT} == {name: was[name] for name in FLAT}
        assert now["rss_kib"] - was["rss_kib"] < RSS_KIB


@pytest.mark.timeout(300)
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_c34_a_process_opens_and_closes_often(start: Start, transport: str, loop: str) -> None:
    """Twenty lives of two ranks in the same processes, warnings as errors: no task, thread, descriptor is left."""
    old, new = Placement([[0, 1]], ep_size=2), Placement([[1, 0]], ep_size=2)
    ranks = start(old, transport=transport, loop=loop)
    ranks.all("run", "tests.real.complaints", "listen")
    before: list[dict[str, int]] = []
    for life in range(20):
        ranks.all("migrate", new if life % 2 == 0 else old, 20.0)
        assert ranks.all("close") == [(), ()]
        ranks.all("open", new if life % 2 == 0 else old)
        if life == 4:
            before = ranks.all("run", "tests.real.inside", "counts")
    after = ranks.all("run", "tests.real.inside", "counts")
    assert ranks.all("run", "tests.real.complaints", "found") == [[], []]
    print(*zip(before, after, strict=True), sep="\n")
    for was, now in zip(before, after, strict=True):
        assert {name: now[name] for name in FLAT} == {name: was[name] for name in FLAT}
        assert now["rss_kib"] - was["rss_kib"] < RSS_KIB
