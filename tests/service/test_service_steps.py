"""Thousands of steps through services of real ranks: layers change between the same two steps, and what that costs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eplb_async.core.placement import Placement
from tests.real.conftest import Start
from tests.real.stepping import BEGUN
from tests.service.engine import ROWS
from tests.service.ranks import everywhere, serve, stepping, stopped, until

STEPS, MOVED = 4_000, 15


def cost(seconds: list[float]) -> str:
    """Median and 99th percentile, in microseconds."""
    p50, p99 = np.percentile(seconds, [50, 99]) * 1e6
    return f"p50 {p50:.1f} us, p99 {p99:.1f} us, of {len(seconds)}"


def told(seen: dict[int, dict[str, Any]]) -> None:
    """What the steps cost."""
    for rank, each in seen.items():
        print(f"rank {rank}: forward(), nothing due: {cost(each['quiet'])}; record(): {cost(each['recorded'])}")
        if each["busy"]:
            print(f"rank {rank}: forward(), something due: {cost(each['busy'])}")


@pytest.mark.faults
@pytest.mark.timeout(400)
def test_thousands_of_steps_through_services_change_layers_between_the_same_two(
    start: Start, tmp_path: Path, transport: str
) -> None:
    """Random delays, pauses, idle phases and dummy steps; rounds come by the steps, and the skew moves on."""
    placement = Placement.initial(4, 12, ep_size=3, num_redundant=3)
    settings = {"activation": "step", "step_margin": 2}
    loop = "uvloop" if transport == "tcp" else "asyncio"
    ranks = start(placement, transport=transport, settings=settings, row_bytes=ROWS, loop=loop)
    serve(ranks, step_interval=80, window_steps=80, min_interval=0.0)
    board = stepping(ranks, tmp_path / "board", seed=5)
    until(lambda: board.words[BEGUN].min() >= STEPS, 300.0)
    seen = stopped(ranks, board)
    healths = everywhere(ranks, "health")
    steps, changes = board.check()
    rounds = Counter(healths[0]["rounds"])
    print(f"\n{transport}: {steps} steps, {changes} changes of placement, rounds {dict(rounds)}")
    told(seen)
    assert steps >= STEPS
    assert rounds["moved"] >= MOVED
    assert changes >= rounds["moved"]
    assert seen[0]["applied"] == seen[1]["applied"] == seen[2]["applied"]  # layer, step and placement of each apply
    assert len(seen[0]["applied"]) == placement.num_layers * rounds["moved"]
    assert all(health["rounds"].get("failed", 0) == 0 for health in healths.values()), healths
    assert ranks.all("check") == [0, 0, 0]
    assert len({placement.digest() for placement in ranks.all("placement")}) == 1
    everywhere(ranks, "close")
