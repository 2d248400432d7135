"""Migrations between real ranks over real NIXL."""

from __future__ import annotations

import time

import numpy as np
import pytest

from eplb_async.core.placement import Placement
from eplb_async.testing.placements import random_placement
from eplb_async.testing.processes import Failure
from tests.real.conftest import Start

MIB = 1 << 20


def placements(
    seed: int, count: int, *, ranks: int, layers: int = 3, local: int = 4, logical: int = 6, empty: int = 1
) -> list[Placement]:
    rng = np.random.default_rng(seed)
    return [
        random_placement(
            rng, num_layers=layers, num_logical=logical, num_local_experts=local, ep_size=ranks, empty=empty
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_random_placements_bring_the_right_bytes_to_the_same_pointers(start: Start, transport: str, loop: str) -> None:
    """Redundancy, empty slots, copies of one expert on one rank: every byte right, I-12."""
    first, *rest = placements(1, 7, ranks=3)
    ranks = start(first, transport=transport, loop=loop, row_bytes=(70_001, 333, 8))
    for number, placement in enumerate(rest, 1):
        reports = ranks.all("migrate", placement, 60.0)
        assert [report["epoch"] for report in reports] == [number] * 3
        assert ranks.all("check", placement) == [0, 0, 0]
        assert ranks.all("placement") == [placement] * 3


def test_identity_swaps_cycles_and_idle_ranks(start: Start, transport: str) -> None:
    """C30: swaps and cycles inside a rank, a rank that only sends, one with nothing to do; everybody votes."""
    first = Placement([[0, 1, 2, 3, 4, 5, -1, -1, -1]], ep_size=3)
    ranks = start(first, transport=transport)
    for row in (
        [0, 1, 2, 3, 4, 5, -1, -1, -1],  # nothing moves
        [1, 0, 2, 4, 5, 3, -1, -1, -1],  # a swap, a cycle, and nothing
        [1, 0, 2, 4, 5, 3, 0, 0, 4],  # rank 2 reads, the others only send
        [5, 0, 2, 4, 1, 3, 0, -1, 4],  # an exchange, and a slot is emptied
        [0, 0, 0, 1, 2, 3, 4, 5, 5],
    ):
        placement = Placement([row], ep_size=3)
        ranks.all("migrate", placement, 60.0)
        assert ranks.all("check", placement) == [0, 0, 0]


def test_one_read_per_expert_then_local_copies(start: Start) -> None:
    """C28: an expert wanted in two slots of a rank is read once and copied."""
    old = Placement([[0, 1, 2, 0]], ep_size=2)
    new = Placement([[2, 2, 0, 1]], ep_size=2)
    ranks = start(old, row_bytes=(4096,), settings={"verify": "off"})
    reports = ranks.all("migrate", new, 60.0)
    assert all(set(report["seconds"]) == {"plan", "join", "move", "apply", "total"} for report in reports)
    assert [report["bytes_read"] for report in reports] == [4096, 4096]
    assert [report["bytes_copied"] for report in reports] == [8192, 8192]
    assert ranks.all("check", new) == [0, 0]


def test_staging_of_one_layer_is_enough(start: Start, transport: str) -> None:
    """C22: with room for one layer, the next one's READs wait for its apply, and every byte is right."""
    first, *rest = placements(2, 3, ranks=2, layers=6, logical=6, empty=0)
    ranks = start(first, transport=transport, row_bytes=(300_000,), settings={"staging_layers": 1})
    for placement in rest:
        ranks.all("migrate", placement, 60.0)
        assert ranks.all("check", placement) == [0, 0]


def test_many_tiny_rows_and_rows_larger_than_a_post(start: Start, transport: str) -> None:
    """C6 and posts bounded in bytes: neither many rows nor a long one breaks the limits."""
    first, *rest = placements(3, 3, ranks=2, layers=2, local=64, logical=100, empty=3)
    settings = {"max_post_bytes": 65536, "max_post_descriptors": 16, "max_requests_in_flight": 4}
    ranks = start(first, transport=transport, row_bytes=(200_000, 16), settings=settings)
    for placement in rest:
        reports = ranks.all("migrate", placement, 60.0)
        assert all(report["reads"] >= report["bytes_read"] / 65536 for report in reports)
        assert ranks.all("check", placement) == [0, 0]


def test_ranks_that_want_different_placements_are_told_which_differ(start: Start) -> None:
    """Unequal JOINs end for all, naming who differs in what; the next migration works."""
    first, one, two = placements(4, 3, ranks=3)
    ranks = start(first)
    for rank in range(3):
        ranks.send(rank, "migrate", two if rank == 2 else one, 30.0)
    for rank in range(3):
        answer = ranks.receive(rank)
        assert isinstance(answer, Failure)
        assert answer.kind == "MigrationAborted"
        assert "2" in answer.text
        assert "new placement" in answer.text
    ranks.all("migrate", one, 60.0)
    assert ranks.all("check", one) == [0, 0, 0]


def test_weights_that_moved_are_noticed_and_rebound(start: Start, transport: str) -> None:
    """N-47: storage that moved since ``open`` is refused before JOIN; ``rebind`` makes it usable."""
    first, second, third = placements(5, 3, ranks=2)
    ranks = start(first, transport=transport)
    ranks.call(1, "move_weights")
    answer = ranks.call(1, "migrate", second, 5.0)
    assert isinstance(answer, Failure)
    assert (answer.kind, "rebind" in answer.text) == ("WeightsError", True)
    assert ranks.call(1, "rebind") is None
    for placement in (second, third):
        ranks.all("migrate", placement, 60.0)
        assert ranks.all("check", placement) == [0, 0]
    assert ranks.call(1, "health")["recycled"] == 1


def test_an_idle_peer_hears_of_a_replaced_agent(start: Start, transport: str) -> None:
    """It looks for messages every two seconds only, and connecting takes its progress several times."""
    first, *_ = placements(5, 1, ranks=2)
    ranks = start(first, transport=transport)
    time.sleep(4.5)  # the pause doubles: idle for so long, a peer has reached the longest one
    ranks.call(0, "rebind")
    assert [(health["members"], health["degraded"]) for health in ranks.all("health")] == [((0, 1), {})] * 2


def test_two_groups_share_one_rendezvous_over_tcp(start: Start) -> None:
    """Port 0 is not for ranks that cannot know it; a tcp rendezvous on a free port works for all."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    first, second = placements(6, 2, ranks=2)
    ranks = start(first, rendezvous=f"tcp://127.0.0.1:{port}")
    ranks.all("migrate", second, 60.0)
    assert ranks.all("check", second) == [0, 0]
