"""Ranks that are gone for good, and READs that fail, on real NIXL."""

from __future__ import annotations

from typing import Any

import pytest

from eplb_async.communicator import AsyncEplbCommunicator
from eplb_async.core.placement import Placement
from eplb_async.testing.processes import Failure, RankProcesses
from tests.real.conftest import Start

pytestmark = pytest.mark.faults  # minutes of real processes: run by `pytest -m faults`, not by default

MIB = 1 << 20
# Rank 2 alone holds experts 4 and 5, and second copies of 0 and 1.
OLD = Placement([[0, 1, -1, -1, 2, 3, -1, -1, 4, 5, 0, 1]] * 3, ep_size=3)
WITHOUT = Placement([[3, 1, 4, 5, 2, 0, 5, 4, -1, -1, -1, -1]] * 3, ep_size=3)


def until_out(ranks: RankProcesses, dead: int, members: list[int]) -> None:
    """Have the survivors learn that a rank was killed, and be in a view without it."""
    for rank in members:
        ranks.call(rank, "exclude", dead)
    for rank in members:
        ranks.send(rank, "members", *members)
    for rank in members:
        assert ranks.receive(rank) is None


@pytest.mark.parametrize("dead", [0, 2])
def test_survivors_migrate_without_a_rank_that_was_killed(start: Start, transport: str, dead: int) -> None:
    """Coordinator or not: killed, out of the view, its slots -1; every byte right, and on to further placements."""
    old = Placement([[0, 1, 2, -1, 2, 3, 0, -1, 3, 1, -1, -1]] * 3, ep_size=3)
    empty = [-1] * 4
    new, next_one = (
        Placement([[*empty, *one, *two] if dead == 0 else [*one, *two, *empty]] * 3, ep_size=3)
        for one, two in (([0, 1, 2, 3], [2, 1, 0, 3]), ([3, 2, 0, 1], [1, 0, 0, 2]))
    )
    survivors = [rank for rank in range(3) if rank != dead]
    ranks = start(old, transport=transport, row_bytes=(70_000, 512))
    ranks.kill(dead)
    until_out(ranks, dead, survivors)
    answer = ranks.call(survivors[0], "migrate", old, 5.0)
    assert isinstance(answer, Failure)
    assert answer.kind == "PlacementError"
    assert f"rank {dead}, slot 0 of layer 0" in answer.text
    for placement in (new, next_one):
        ranks.all("migrate", placement, 60.0, ranks=survivors)
        assert ranks.all("check", placement, ranks=survivors) == [0, 0]
        assert ranks.all("placement", ranks=survivors) == [placement] * 2
    assert all(health["members"] == tuple(survivors) for health in ranks.all("health", ranks=survivors))


def test_c29_experts_that_died_with_their_rank_are_named_and_loaded(start: Start, transport: str) -> None:
    """Named on every survivor, one that cannot load ends it for the other, then both load; every byte right."""
    ranks = start(OLD, transport=transport, row_bytes=(70_000, 512))
    ranks.kill(2)
    until_out(ranks, 2, [0, 1])
    for rank in (0, 1):
        ranks.send(rank, "migrate", WITHOUT, 20.0)
    for rank in (0, 1):
        answer = ranks.receive(rank)
        assert isinstance(answer, Failure)
        assert answer.kind == "ExpertsLost", answer.text
        assert answer.parts["lost"] == dict.fromkeys(range(3), (4, 5))
    ranks.send(0, "migrate", WITHOUT, 20.0, True)
    ranks.send(1, "migrate", WITHOUT, 20.0)
    answers = [ranks.receive(rank) for rank in (0, 1)]
    assert [answer.kind for answer in answers] == ["MigrationAborted", "ExpertsLost"]
    assert "every rank passes load_expert" in answers[0].text
    reports = ranks.all("migrate", WITHOUT, 60.0, True, ranks=[0, 1])
    assert [report["loads"] for report in reports] == [6, 6]
    assert ranks.all("check", WITHOUT, ranks=[0, 1]) == [0, 0]
    swapped = Placement([[5, 4, 0, 2, 3, 1, 4, 4, -1, -1, -1, -1]] * 3, ep_size=3)
    reports = ranks.all("migrate", swapped, 60.0, ranks=[0, 1])
    assert [report["loads"] for report in reports] == [0, 0]
    assert ranks.all("check", swapped, ranks=[0, 1]) == [0, 0]


async def forget(comm: AsyncEplbCommunicator, rank: int) -> None:
    """Take a peer from this rank's native agent, behind the library's back: NIXL refuses READs from it."""
    session = comm._session

    async def remove() -> None:
        member = session._roster.get(rank)
        assert member is not None
        session.endpoint.native.remove_remote(member.peer.name)

    await comm._engine.run(remove)


async def forget_mid_read(comm: AsyncEplbCommunicator, rank: int) -> bool:
    """As :func:`forget`, when READs from that peer are in flight; answers whether there were any."""
    session = comm._session
    member = session._roster.get(rank)
    assert member is not None
    endpoint, native, name = session.endpoint, session.endpoint.native, member.peer.name
    post, seen = native.post, []

    def posted(handle: Any, notif: bytes = b"") -> Any:
        state = post(handle, notif)
        if not seen and endpoint.transfers and endpoint.transfers[-1].peer == name and state.name == "PROC":
            seen.append(state)
            native.remove_remote(name)
        return state

    native.post = posted  # type: ignore[method-assign]
    return not seen


def test_a_read_that_nixl_refuses_is_made_from_another_rank(start: Start, transport: str) -> None:
    """Rank 1's NIXL knows rank 2 no more, and says nixlNotFoundError: rank 0 serves what rank 2 was to."""
    old = Placement([[0, 1, -1, -1, -1, -1, -1, -1, 0, 1, -1, -1]] * 4, ep_size=3)
    new = Placement([[0, 1, -1, -1, 0, 1, -1, -1, 0, 1, -1, -1]] * 4, ep_size=3)
    ranks = start(old, transport=transport, row_bytes=(70_000, 512))
    ranks.call(1, "run", __name__, "forget", 2)
    reports = ranks.all("migrate", new, 60.0)
    assert reports[1]["retries"] >= 1
    assert ranks.all("check", new) == [0, 0, 0]
    health = ranks.call(1, "health")
    assert "nixlNotFoundError" in health["degraded"][2], health
    assert health["phase"] == "idle"


def test_a_read_that_fails_in_flight_is_made_from_another_rank_and_may_land_late(start: Start) -> None:
    """N-19: over tcp a READ in flight fails with nixlNotFoundError and lands all the same: not where the other does."""
    old = Placement([[0, 1, -1, -1, -1, -1, 0, 1]] * 3, ep_size=4)
    new = Placement([[0, 1, 0, 1, -1, -1, 0, 1]] * 3, ep_size=4)
    ranks = start(old, transport="tcp", row_bytes=(4 * MIB,))
    ranks.call(1, "run", __name__, "forget_mid_read", 3)
    reports = ranks.all("migrate", new, 60.0)
    assert reports[1]["retries"] >= 1
    assert ranks.all("check", new) == [0, 0, 0, 0]
    health = ranks.call(1, "health")
    assert "nixlNotFoundError" in health["degraded"][3], health
    assert health["quarantined_bytes"] > 0
    ranks.all("migrate", old, 60.0)
    assert ranks.all("check", old) == [0, 0, 0, 0]
