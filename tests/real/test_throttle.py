"""Pause and limit over real NIXL, on both transports."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_async.core.placement import Placement
from tests.real.conftest import Start

MIB = 1 << 20
pytestmark = pytest.mark.faults


def exchange() -> tuple[Placement, Placement]:
    """Two ranks, two layers of 16 experts each, all exchanged."""
    row = np.arange(32)
    return Placement(np.stack([row] * 2), ep_size=2), Placement(np.stack([np.roll(row, 16)] * 2), ep_size=2)


def test_a_limit_is_kept_and_a_pause_holds(start: Start, transport: str) -> None:
    """64 MiB a second, never a tenth more; then a pause in mid-migration posts nothing, costs little, and ends."""
    one, two = exchange()
    ranks = start(one, row_bytes=(2 * MIB, MIB), transport=transport, loop="uvloop", timeout=120.0)
    for nbytes, seconds in ranks.all("run", "tests.real.throttle", "limited", two, 64 * MIB):
        assert nbytes > 96 * MIB
        assert 0.6 <= nbytes / seconds / (64 * MIB) <= 1.1, (nbytes, seconds)
    assert ranks.all("check", two) == [0, 0]
    ranks.send(1, "migrate", one, 60.0)
    found = ranks.call(0, "run", "tests.real.throttle", "paused", one, 1.0)
    assert (found["posted"], found["in flight"], found["phase"], found["paused"]) == (0, 0, "open", True)
    assert found["cpu"] < 0.5, found
    assert ranks.receive(1)["layers_committed"] == 2
    assert ranks.all("check", one) == [0, 0]
