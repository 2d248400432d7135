"""Real ranks whose layers are used while they migrate: nobody inside ever sees a layer half applied."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_async.testing.placements import random_placement
from tests.real.conftest import Start

MODULE = "tests.real.users"
ROW_BYTES = (150_000, 333)


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_users_never_see_a_layer_half_applied(start: Start, transport: str) -> None:
    """Threads and tasks look at rows and placement, again while inside; 20 migrations go on meanwhile."""
    rng = np.random.default_rng(7)
    placements = [
        random_placement(rng, num_layers=4, num_logical=6, num_local_experts=5, ep_size=2, empty=1) for _ in range(21)
    ]
    ranks = start(placements[0], transport=transport, row_bytes=ROW_BYTES)
    for rank in range(2):
        ranks.call(rank, "run", MODULE, "begin", rank, ROW_BYTES)
    for placement in placements[1:]:
        ranks.all("migrate", placement, 60.0)
    ended = ranks.all("run", MODULE, "end")
    print("looks, changes seen, wrong:", ended)
    for looks, changes, wrong in ended:
        assert wrong == []
        assert looks > 100
        assert changes > 20
    assert ranks.all("check", placements[-1]) == [0, 0]
    assert [health["in_use"] for health in ranks.all("health")] == [{}, {}]
