"""Real ranks: the last of many migrations is as the first (C31), and collecting garbage loses nothing (C36)."""

from __future__ import annotations

from typing import Any

import pytest

from eplb_async.core.placement import Placement
from tests.real.conftest import Start

pytestmark = pytest.mark.faults  # minutes of real processes: run by `pytest -m faults`, not by default

A = Placement([[0, 1, 2, 3, 4, -1]] * 3, ep_size=2)
B = Placement([[3, 4, 0, 1, -1, 2]] * 3, ep_size=2)
C = Placement([[4, 4, 2, 0, 1, 3]] * 3, ep_size=2)
COUNTED = ("bytes_read", "bytes_copied", "layers_committed")


def test_the_last_of_many_migrations_is_as_the_first(start: Start, transport: str) -> None:
    """Fifteen round trips over three placements: each A to B reads and copies the same, and every byte is right."""
    ranks = start(A, transport=transport, row_bytes=(70_001, 333))
    seen: list[list[dict[str, Any]]] = []
    for i in range(15):
        reports = ranks.all("migrate", B, 60.0)
        seen.append([{name: report[name] for name in COUNTED} for report in reports])
        assert ranks.all("check", B) == [0, 0], f"migration {3 * i + 1}"
        ranks.all("migrate", C, 60.0)
        assert ranks.all("check", C) == [0, 0], f"migration {3 * i + 2}"
        ranks.all("migrate", A, 60.0)
    assert seen == [seen[0]] * 15
    assert [health["epoch"] for health in ranks.all("health")] == [45, 45]


def test_garbage_collection_in_the_middle_of_a_migration(start: Start, transport: str) -> None:
    """Collections on both users' loops while bytes move."""
    ranks = start(A, transport=transport, row_bytes=(4 << 20,))
    for target in (B, C, A):
        assert min(ranks.all("run", "tests.real.collect", "migrate", target)) > 0
        assert ranks.all("check", target) == [0, 0]
