"""The owner of real weights over real NIXL: updates in mid-READ, digests, and sleep with the memory really freed."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_async.core.placement import Placement
from eplb_async.testing.placements import random_placement
from eplb_async.testing.processes import Failure, RankProcesses
from tests.real.conftest import Start

pytestmark = pytest.mark.faults  # minutes of real processes: run by `pytest -m faults`, not by default

MIB = 1 << 20
OLD, NEW = Placement([[0, 1]] * 3, ep_size=2), Placement([[1, 0]] * 3, ep_size=2)


def migrates(ranks: RankProcesses, placement: Placement) -> None:
    """A migration of all that works, every byte right."""
    ranks.all("migrate", placement, 60.0)
    everyone = range(placement.ep_size)
    assert ranks.all("check", placement) == [0 for _ in everyone]


def in_mid_read(ranks: RankProcesses, reader: int) -> None:
    """Begin a migration on both ranks, and return when one of them reads."""
    for rank in range(2):
        ranks.send(rank, "migrate", NEW, 30.0)
    ranks.send(reader, "reading")
    assert ranks.receive(reader) is None


def same_placement(ranks: RankProcesses) -> Placement:
    one, two = ranks.all("placement")
    assert one == two
    assert ranks.all("check", one) == [0, 0]
    return one


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("verify", ["identity", "full"])
def test_c33_an_update_in_mid_read(start: Start, first: int, verify: str) -> None:
    """The owner writes 72 MiB while its peer reads them over tcp: the epoch ends first, nothing torn is kept."""
    ranks = start(OLD, row_bytes=(24 * MIB,), transport="tcp", settings={"verify": verify})
    reader = 1 - first
    in_mid_read(ranks, reader)
    ranks.send(first, "update")
    answers = [ranks.receive(rank) for rank in (first, reader)]
    for answer in answers:
        assert isinstance(answer, Failure), answer
        assert answer.kind == "MigrationAborted" or "updates its weights" in answer.text
    assert ranks.receive(first) is None
    same_placement(ranks)
    refused = ranks.call(first, "migrate", NEW, 0.5)
    assert isinstance(refused, Failure)
    assert "MigrationTimeout" in refused.bases, "the other rank has to join"
    ranks.call(reader, "update")
    migrates(ranks, NEW)


@pytest.mark.parametrize("verify", ["off", "identity", "full"])
def test_c33_updates_between_migrations(start: Start, transport: str, verify: str) -> None:
    """All weights, then some layers: every replica follows the placement, in every mode."""
    rng = np.random.default_rng(7)
    placements = [
        random_placement(rng, num_layers=3, num_logical=5, num_local_experts=3, ep_size=3, empty=1) for _ in range(4)
    ]
    ranks = start(placements[0], transport=transport, row_bytes=(70_001, 333, 8), settings={"verify": verify})
    for placement, layers in zip(placements[1:], (None, [1], [0, 2]), strict=True):
        migrates(ranks, placement)
        ranks.all("update", layers)
        assert ranks.all("check") == [0, 0, 0]
        migrates(ranks, placements[0])
    assert [health["weight_version"] for health in ranks.all("health")] == [3, 3, 3]


def test_i16_a_scribbled_row_is_caught(start: Start, transport: str) -> None:
    """NIXL says DONE; the digest says otherwise. Both ranks stay at one layer, and an update mends it."""
    ranks = start(OLD, transport=transport, row_bytes=(2 * MIB, 4096), settings={"verify": "full"})
    ranks.call(0, "scribble", 1, 1, 0)
    for rank in range(2):
        ranks.send(rank, "migrate", NEW, 30.0)
    one, two = ranks.receive(0), ranks.receive(1)
    assert (one.kind, two.kind) == ("MigrationAborted", "IntegrityError")
    assert {name: two.parts[name] for name in ("layer", "expert", "rank", "slot")} == {
        "layer": 1,
        "expert": 0,
        "rank": 0,
        "slot": 0,
    }
    placement = ranks.call(1, "placement")
    assert placement in (OLD, OLD.with_layers(NEW, 1))
    assert ranks.call(0, "placement") == placement
    assert ranks.all("check") == [1, 0]
    ranks.all("update", [1])
    migrates(ranks, NEW)


@pytest.mark.parametrize("verify", ["off", "full"])
def test_sleep_and_wake_elsewhere(start: Start, transport: str, verify: str) -> None:
    """Freed memory is neither read nor written; the peer is not lost meanwhile, and what moved is found again."""
    ranks = start(OLD, transport=transport, row_bytes=(8 * MIB, 64), settings={"verify": verify})
    for sleepers in ([1], [0], [0, 1]):
        migrates(ranks, NEW)
        ranks.all("suspend", ranks=sleepers)
        for rank in range(2):
            answer = ranks.call(rank, "migrate", OLD, 1.0)
            assert isinstance(answer, Failure)
            busy = rank in sleepers
            assert answer.kind == ("CommunicatorBusy" if busy else "MigrationTimeout"), answer
            assert busy or f"waiting for ranks {sleepers}" in answer.text
        ranks.all("resume", ranks=sleepers)
        for health in ranks.all("health"):
            assert (health["members"], health["degraded"]) == ((0, 1), {})
        migrates(ranks, OLD)


@pytest.mark.parametrize("victim", [0, 1])
def test_sleep_in_mid_read(start: Start, victim: int) -> None:
    """Over tcp the sleeper's own process answers READs of its memory, which is unmapped: the agent goes first."""
    ranks = start(OLD, row_bytes=(24 * MIB,), transport="tcp")
    in_mid_read(ranks, 1 - victim)
    ranks.send(victim, "suspend")
    answers = [ranks.receive(victim), ranks.receive(1 - victim)]
    assert all(isinstance(answer, Failure) and "suspended" in answer.text for answer in answers), answers
    assert ranks.receive(victim) is None
    assert ranks.call(1 - victim, "check") == 0
    ranks.call(victim, "resume")
    same_placement(ranks)
    migrates(ranks, NEW)
