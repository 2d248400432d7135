"""Hooks over real NIXL, where the engine has a thread of its own."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_async.core.placement import Placement
from tests.real.conftest import Start


@pytest.mark.parametrize("transport", ["auto", pytest.param("tcp", marks=pytest.mark.faults)])
def test_what_real_ranks_tell_is_what_they_did(start: Start, transport: str) -> None:
    """Bytes by peer, READs, the engine's thread; and a peer that is killed."""
    row = np.arange(8)
    old = Placement(np.stack([row] * 2), ep_size=2)
    new = Placement(np.stack([np.roll(row, 4)] * 2), ep_size=2)
    ranks = start(old, transport=transport, loop="uvloop", telemetry="tests.real.telemetry")
    reports = ranks.all("migrate", new, 30.0)
    for rank, report in enumerate(reports):
        tape = ranks.call(rank, "run", "tests.real.telemetry", "tape")
        assert {thread for _, thread, _ in tape} == {f"eplb-async default/{rank}"}
        (ended,) = [fields for name, _, fields in tape if name == "migration_ended"]
        reads = [fields for name, _, fields in tape if name == "read_ended"]
        assert (ended["outcome"], ended["bytes_by_peer"]) == ("done", {1 - rank: report["bytes_read"]})
        assert sum(read["bytes"] for read in reads) == report["bytes_read"] > 0
        assert all(0 < read["seconds"] < 30 for read in reads)
        seen = ranks.call(rank, "run", "tests.real.telemetry", "scraped")
        assert seen[f"eplb_async_read_bytes_total['{1 - rank}']"] == report["bytes_read"]
        assert seen["eplb_async_read_seconds_count[]"] == report["reads"]
        assert seen["eplb_async_epoch[]"] == 1
    ranks.kill(1)
    assert ranks.call(0, "run", "tests.real.telemetry", "lost") == {"peer": 1, "reason": "disconnected"}
    answer = ranks.call(0, "run", "tests.real.telemetry", "asked", "/health")
    assert answer["status"] == 503
    assert answer["body"]["problems"][0]["rank"] == 1
