"""Services of real ranks over real NIXL: they balance an engine in lock-step, and outlive a rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from eplb_async.core.placement import Placement
from eplb_async.testing.processes import Failure
from tests.real.conftest import Start
from tests.service.engine import ROWS
from tests.service.ranks import MODULE, everywhere, serve, stepping, stopped, until


def test_real_services_balance_engines_in_lock_step(start: Start, tmp_path: Path) -> None:
    """A round comes by the steps; every step of all ranks has one placement."""
    placement = Placement.initial(3, 12, ep_size=3, num_redundant=3)
    ranks = start(placement, settings={"activation": "step", "step_margin": 2}, row_bytes=ROWS, loop="uvloop")
    serve(ranks, step_interval=40, window_steps=40, min_interval=0.0)
    board = stepping(ranks, tmp_path / "board")
    until(lambda: everywhere(ranks, "health", only=[0])[0]["rounds"].get("moved", 0) >= 1)
    stopped(ranks, board)
    assert ranks.all("check") == [0, 0, 0]
    assert len({placement.digest() for placement in ranks.all("placement")}) == 1
    assert board.check()[1] >= 1
    for health in everywhere(ranks, "health").values():
        assert health["rounds"].get("failed", 0) == 0, health
        assert health["last_report"]["balancedness_after"] >= health["last_report"]["balancedness_before"]
    everywhere(ranks, "close")


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.parametrize("dead", [0, 2])
def test_a_rank_killed_in_a_round_is_named_and_emptied(start: Start, tmp_path: Path, transport: str, dead: int) -> None:
    """While the policy runs: the round fails on the others, naming it, and the next one goes on without it."""
    placement = Placement(np.tile(np.arange(8), (3, 3)), ep_size=3)  # every rank holds every expert
    gate = tmp_path / "gate"
    ranks = start(placement, transport=transport, row_bytes=(50_000, 333), settings={"idle_tick": 0.1})
    serve(ranks, gate=str(gate), step_interval=100_000, round_timeout=60.0, backoff=0.5, watch_interval=0.2)
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
