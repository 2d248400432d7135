"""Services of real ranks over real NIXL: they balance engines in lock-step, and outlive a rank."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eplb_async.core.placement import Placement
from eplb_async.testing.processes import Failure, RankProcesses
from tests.real.conftest import Start
from tests.real.stepping import BEGUN, STOP, Board

MODULE = "tests.service.serving"


def everywhere(ranks: RankProcesses, function: str, *args: Any, only: tuple[int, ...] = ()) -> dict[int, Any]:
    """Have every rank run something with its number as first argument; answers by rank."""
    chosen = only or tuple(range(ranks.spec.placement.ep_size))
    for rank in chosen:
        ranks.send(rank, "run", MODULE, function, rank, *args)
    answers = {rank: ranks.receive(rank) for rank in chosen}
    assert not any(isinstance(answer, Failure) for answer in answers.values()), answers
    return answers


def serve(ranks: RankProcesses, gate: str = "", **settings: Any) -> None:
    for rank in range(ranks.spec.placement.ep_size):
        ranks.send(rank, "run", "tests.service.test_service_real", "open_service", rank, gate, settings)
    answers = [ranks.receive(rank) for rank in range(ranks.spec.placement.ep_size)]
    assert answers == [None] * len(answers), answers


async def open_service(comm: Any, rank: int, gate: str, settings: dict[str, Any]) -> None:
    from tests.service import serving

    await serving.serve(comm, rank, gate, **settings)


def until(condition: Any, timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it does not come true"
        time.sleep(0.01)


def balance_in_lock_step(start: Start, folder: Path, *, transport: str, moved: int, interval: int) -> None:
    """Engines step, the skew moves on, rounds come by the steps; every step of all ranks has one placement."""
    placement = Placement.initial(3, 12, ep_size=3, num_redundant=3)
    settings = {"activation": "step", "step_margin": 2}
    ranks = start(placement, transport=transport, settings=settings, row_bytes=(100_000, 333), loop="uvloop")
    serve(ranks, step_interval=interval, window_steps=interval, min_interval=0.0)
    board = Board(str(folder / "board"), 3)
    for rank in range(3):
        ranks.send(rank, "run", MODULE, "step", str(folder / "board"), rank, 3)
    assert [ranks.receive(rank) for rank in range(3)] == [None] * 3
    until(lambda: ranks.call(0, "run", MODULE, "health", 0)["rounds"].get("moved", 0) >= moved, 240.0)
    board.words[STOP] = board.words[BEGUN].max() + 20
    costs = everywhere(ranks, "stop")
    everywhere(ranks, "settled")
    healths = everywhere(ranks, "health")
    assert ranks.all("check") == [0, 0, 0]
    assert len({placement.digest() for placement in ranks.all("placement")}) == 1
    steps, changes = board.check()
    assert changes >= moved
    for health in healths.values():
        assert health["rounds"].get("failed", 0) == 0, health
        report = health["last_report"]
        assert report["balancedness_after"] >= report["balancedness_before"]
    print(
        f"{transport}: {steps} steps, {changes} changes, rounds {healths[0]['rounds']}; forward, record, steps: {costs}"
    )
    everywhere(ranks, "close")


def test_real_services_balance_engines_in_lock_step(start: Start, tmp_path: Path) -> None:
    balance_in_lock_step(start, tmp_path, transport="auto", moved=1, interval=40)


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_many_rounds_of_real_services_in_lock_step(start: Start, tmp_path: Path, transport: str) -> None:
    balance_in_lock_step(start, tmp_path, transport=transport, moved=15, interval=100)


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.parametrize("dead", [0, 2])
def test_a_rank_killed_in_a_round_is_named_and_emptied(start: Start, tmp_path: Path, transport: str, dead: int) -> None:
    """While the policy runs: the round fails on the others, naming it, and the next one goes on without it."""
    placement = Placement(np.tile(np.arange(8), (3, 3)), ep_size=3)  # every rank holds every expert
    gate = tmp_path / "gate"
    ranks = start(placement, transport=transport, row_bytes=(50_000, 333), settings={"idle_tick": 0.1})
    serve(ranks, str(gate), step_interval=100_000, round_timeout=60.0, backoff=0.5, watch_interval=0.2)
    everywhere(ranks, "record", 5)
    asks = 1
    ranks.send(asks, "run", MODULE, "rebalance", asks, True)
    until(lambda: Path(str(gate) + ".waits").exists())
    ranks.kill(dead)
    failure = ranks.receive(asks)
    assert isinstance(failure, Failure), failure
    assert failure.kind == "RebalanceFailed", failure
    assert f"without ranks [{dead}]" in failure.text
    gate.touch()
    alive = tuple(rank for rank in range(3) if rank != dead)
    for rank in alive:
        ranks.send(rank, "run", MODULE, "emptied", dead)
    assert [ranks.receive(rank) for rank in alive] == [None, None]
    everywhere(ranks, "settled", only=alive)
    healths = everywhere(ranks, "health", only=alive)
    for health in healths.values():
        assert health["members"] == alive
        assert health["coordinator"] == alive[0]
        assert health["failures"] == 0
    assert ranks.all("check", ranks=alive) == [0, 0]
