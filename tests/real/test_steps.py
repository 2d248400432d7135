"""Real ranks in lock-step over real NIXL: layers change between the same two steps (C21 and rule 11)."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eplb_async.core.placement import Placement
from eplb_async.testing.placements import random_placement
from eplb_async.testing.processes import Failure, RankProcesses
from tests.real.conftest import Start
from tests.real.stepping import BEGUN, STOP, STUCK, Board

OLD, NEW = Placement([[0, 1]] * 3, ep_size=2), Placement([[1, 0]] * 3, ep_size=2)
MODULE = "tests.real.stepping"


def stepping(ranks: RankProcesses, folder: Path, *, seed: int = 0) -> Board:
    """Have the engines of all ranks step."""
    size = ranks.spec.placement.ep_size
    path = str(folder / "board")
    board = Board(path, size)
    for rank in range(size):
        ranks.send(rank, "run", MODULE, "begin", path, rank, size, seed)
    for rank in range(size):
        assert ranks.receive(rank) is None
    return board


def stopped(ranks: RankProcesses, board: Board, *, after: int = 20) -> list[tuple[float, float]]:
    """Have the engines stop after the same step; answers what a step took to begin on each."""
    size = ranks.spec.placement.ep_size
    board.words[STOP] = board.words[BEGUN].max() + after
    for rank in range(size):
        ranks.send(rank, "run", MODULE, "end", rank, 60.0)
    costs = [ranks.receive(rank) for rank in range(size)]
    assert not any(isinstance(cost, Failure) for cost in costs), costs
    return costs


def until(condition: Callable[[], Any], timeout: float = 60.0) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it does not come true"
        time.sleep(0.005)


def settings(**more: Any) -> dict[str, Any]:
    return {"activation": "step", "step_margin": 2, **more}


def migrate_at_random(start: Start, folder: Path, *, transport: str, migrations: int, steps: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    placements = [
        random_placement(rng, num_layers=4, num_logical=6, num_local_experts=3, ep_size=3, empty=1)
        for _ in range(migrations + 1)
    ]
    ranks = start(placements[0], transport=transport, settings=settings(), row_bytes=(200_000, 333))
    board = stepping(ranks, folder, seed=seed)
    for placement in placements[1:]:
        ranks.all("migrate", placement, 60.0)
    until(lambda: board.words[BEGUN].min() >= steps, 300.0)
    costs = stopped(ranks, board)
    assert ranks.all("check", placements[-1]) == [0, 0, 0]
    ended, changes = board.check()
    assert ended >= steps
    print(
        f"{ended} steps, {changes} changes in {migrations} migrations; a step took to begin (median, longest): {costs}"
    )
    assert changes >= migrations


def test_real_ranks_in_lock_step_change_layers_between_the_same_two_steps(start: Start, tmp_path: Path) -> None:
    migrate_at_random(start, tmp_path, transport="auto", migrations=3, steps=40, seed=1)


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_thousands_of_steps_of_real_ranks(start: Start, tmp_path: Path, transport: str) -> None:
    """Pauses, work and idle phases at random; each step of each rank on record."""
    migrate_at_random(start, tmp_path, transport=transport, migrations=60, steps=2_000, seed=2)


@pytest.mark.faults
@pytest.mark.parametrize("stuck", [False, True], ids=["it steps", "it is stuck in its step"])
def test_c21_a_rank_that_does_not_vote_ends_the_migration_on_both(
    start: Start, tmp_path: Path, transport: str, stuck: bool
) -> None:
    """Before COMMIT: rank 0 waits before its hold and only for so long, or, in its step, until its deadline."""
    ranks = start(OLD, transport=transport, settings=settings(activation_timeout=0.5))
    board = stepping(ranks, tmp_path)
    until(lambda: board.words[BEGUN].min() >= 5)
    ranks.call(1, "run", MODULE, "mute", True)
    board.words[STUCK, 1] = int(stuck)
    begun = time.monotonic()
    for rank in range(2):
        ranks.send(rank, "migrate", NEW, 4.0 if stuck else 40.0)
    failures = [ranks.receive(rank) for rank in range(2)]
    assert time.monotonic() - begun < 35.0
    for failure in failures:
        assert isinstance(failure, Failure), failure
        assert "MigrationAborted" in failure.bases
    why = "layer 0 undecided, waiting for ranks [1]" if stuck else "layer 0 was not decided before step"
    assert why in failures[0].text
    assert [(health["phase"], health["due"]) for health in ranks.all("health")] == [("idle", {})] * 2
    ranks.call(1, "run", MODULE, "mute", False)
    board.words[STUCK, 1] = 0
    ranks.all("migrate", NEW, 60.0)
    stopped(ranks, board)
    assert ranks.all("check", NEW) == [0, 0]
    assert board.check()[1] == 3


@pytest.mark.faults
@pytest.mark.parametrize("stuck", [0, 1])
def test_c21_a_rank_that_does_not_come_to_the_step_of_a_committed_layer_is_named(
    start: Start, tmp_path: Path, transport: str, stuck: int
) -> None:
    """After COMMIT: both name rank, layer and step; nothing changes until it comes, and then on both."""
    ranks = start(OLD, transport=transport, settings=settings())
    board = stepping(ranks, tmp_path)
    until(lambda: board.words[BEGUN].min() >= 5)
    board.words[STUCK, stuck] = 1
    time.sleep(0.2)  # the other comes to where it waits for that rank
    for rank in range(2):
        ranks.send(rank, "migrate", NEW, 3.0)
    failures = [ranks.receive(rank) for rank in range(2)]
    healths = ranks.all("health")
    for failure, health in zip(failures, healths, strict=True):
        assert isinstance(failure, Failure), failure
        assert failure.kind == "ActivationTimeout", failure
        assert (failure.parts["layer"], failure.parts["ranks"]) == (0, (stuck,))
        assert health["due"] == {0: failure.parts["step"]}
        assert health["behind"] == (stuck,)
        assert health["phase"] == "activating"
    assert ranks.all("placement") == [OLD, OLD]
    board.words[STUCK, stuck] = 0
    ranks.all("migrate", NEW, 60.0)
    stopped(ranks, board)
    assert ranks.all("check", NEW) == [0, 0]
    assert board.check()[1] == 3
