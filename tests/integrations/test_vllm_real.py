"""The vLLM drop-in on real ranks: real processes, real NIXL, a gloo group; killed and stopped for real."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eplb_async.core.placement import Placement
from eplb_async.testing.placements import random_placement
from eplb_async.testing.processes import Failure, RankProcesses, Spec

RANKS = "tests.integrations.vllm_ranks"
ROW_BYTES = (40_000, 1024)
Start = Callable[..., "Group"]


def placements(size: int, count: int, layers: int = 3, slots: int = 5) -> list[Placement]:
    """Random ones, with experts held twice and empty slots."""
    rng = np.random.default_rng(size)
    made = {"num_layers": layers, "num_logical": slots * size - 3, "num_local_experts": slots, "ep_size": size}
    return [random_placement(rng, empty=1, **made) for _ in range(count)]


class Group:
    """Ranks, driven at once."""

    def __init__(self, ranks: RankProcesses, size: int) -> None:
        self.ranks = ranks
        self.size = size

    def all(self, function: str, *args: Any, but: tuple[int, ...] = ()) -> list[Any]:
        """Run a function on all ranks, or all but some; failures are answers."""
        chosen = [rank for rank in range(self.size) if rank not in but]
        for rank in chosen:
            self.ranks.send(rank, "run", RANKS, function, *args)
        return [self.ranks.receive(rank) for rank in chosen]

    def good(self, function: str, *args: Any) -> list[Any]:
        """As ``all``; a failure fails the test."""
        answers = self.all(function, *args)
        bad = [a for a in answers if isinstance(a, Failure)]
        assert not bad, bad
        return answers


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as stack:

        def begin(placement: Placement, transport: str, *, row_bytes: tuple[int, ...] = ROW_BYTES) -> Group:
            spec = Spec(placement=placement, rendezvous="", transport=transport)
            ranks = stack.enter_context(RankProcesses(spec, open_now=False))
            group = Group(ranks, placement.ep_size)
            for rank in range(group.size):
                ranks.send(rank, "run", RANKS, "meet", rank, placement, f"{tmp_path}/store", row_bytes)
            assert [ranks.receive(rank) for rank in range(group.size)] == [None] * group.size
            return group

        yield begin


def failed(answers: list[Any], kind: str = "NixlTransferFailed") -> list[str]:
    """All failed so; their texts."""
    assert all(isinstance(a, Failure) and kind in a.bases and "NixlTransferFailed" in a.bases for a in answers), answers
    assert all(a.text.startswith("NIXL transfer failed with state=") for a in answers)
    return [a.text for a in answers]


def test_moves_experts_and_goes_on_after_a_call_that_failed(start: Start) -> None:
    one, two, three = placements(2, 3)
    group = start(one, "auto")
    assert all("could not open" in a.text and "rank 1: WeightsError" in a.text for a in group.all("make", 10.0, 1))
    group.good("make", 10.0)
    group.good("move", two)
    assert group.good("check", two) == [0, 0]
    group.ranks.send(0, "run", RANKS, "move", three, (1,))
    group.ranks.send(1, "run", RANKS, "move", three, (2,))
    texts = failed([group.ranks.receive(rank) for rank in range(2)])
    assert all("layer 1 on rank 0, layer 2 on rank 1" in text for text in texts)
    group.good("move", three)
    assert group.good("check", three) == [0, 0]
    assert group.good("drop") == [[], []]


@pytest.mark.faults
@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("size", [2, 3])
def test_random_placements_arrive(start: Start, transport: str, size: int) -> None:
    first, *others = placements(size, 6)
    group = start(first, transport)
    group.good("make", 20.0)
    for placement in others:
        group.good("move", placement)
        assert group.good("check", placement) == [0] * size
    assert max(group.good("idle_cpu", 3.0)) < 0.05
    group.good("close")


@pytest.mark.faults
@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("victim", [0, 2])
def test_killed_rank_fails_the_call_of_every_other_at_once(start: Start, transport: str, victim: int) -> None:
    one, two = placements(3, 2)
    group = start(one, transport)
    group.good("make", 20.0)
    group.good("move", two)
    for rank in range(3):
        if rank != victim:
            group.ranks.send(rank, "run", RANKS, "move", one)
    time.sleep(0.3)
    started = time.monotonic()
    group.ranks.kill(victim)
    answers = [group.ranks.receive(rank) for rank in range(3) if rank != victim]
    assert all(f"rank {victim} is gone" in text for text in failed(answers, "NixlPeerDisconnected"))
    assert time.monotonic() - started < 10.0  # the deadline is 20 s
    again = group.all("move", one, but=(victim,))
    assert all(f"rank {victim} is gone" in text for text in failed(again, "NixlPeerDisconnected"))


@pytest.mark.faults
@pytest.mark.parametrize("victim", [0, 1])
def test_stopped_rank_lets_the_others_time_out_and_takes_part_again(start: Start, victim: int) -> None:
    one, two = placements(3, 2)
    group = start(one, "tcp")
    group.good("make", 1.5)
    group.good("move", two)
    group.ranks.stop(victim)
    failed(group.all("move", one, but=(victim,)), "NixlTransferTimeout")
    group.ranks.resume(victim)
    group.good("move", one)
    assert group.good("check", one) == [0, 0, 0]


@pytest.mark.faults
def test_row_that_a_read_may_still_write_is_waited_for_and_can_be_read_anew(start: Start) -> None:
    """Rank 1 stands still in the midst of rank 0's READ, over tcp; rank 0 may not use that row until it has ended."""
    one, two = (Placement([slots], ep_size=2) for slots in ([0, 1, 2, 3], [2, 3, 0, 1]))
    group = start(one, "tcp", row_bytes=(48 << 20,))
    group.good("make", 2.0)
    for rank in range(2):
        group.ranks.send(rank, "run", RANKS, "move", two, (0,))
    group.ranks.send(0, "run", RANKS, "reading")
    assert group.ranks.receive(0) is None
    group.ranks.stop(1)
    failed([group.ranks.receive(0)], "NixlTransferTimeout")
    texts = failed([group.ranks.call(0, "run", RANKS, "move", two, (0,))], "NixlTransferTimeout")
    assert "a READ from rank 1 may still write into row" in texts[0]
    group.ranks.resume(1)
    failed([group.ranks.receive(1)])
    texts = failed(group.all("move", one, (0,)))  # it receives nothing, but may have copied into that row
    assert all("READs of a call that had failed ended after it" in text for text in texts)
    group.good("move", two)
    assert group.good("check", two) == [0, 0]


@pytest.mark.faults
def test_weights_that_moved_fail_the_call_of_every_rank(start: Start) -> None:
    one, two = placements(2, 2)
    group = start(one, "auto")
    group.good("make", 20.0)
    group.ranks.call(1, "run", RANKS, "moved")
    assert all("not where it was registered" in text for text in failed(group.all("move", two)))


@pytest.mark.faults
def test_second_call_at_once_is_refused_and_a_closed_rank_fails_the_others(start: Start) -> None:
    one, two = placements(2, 2)
    group = start(one, "auto")
    group.good("make", 1.0)
    assert group.ranks.call(0, "run", RANKS, "twice") == ["CommunicatorBusy", "NixlTransferTimeout"]
    group.good("move", two)
    group.ranks.call(1, "run", RANKS, "close")
    texts = failed([group.ranks.call(0, "run", RANKS, "move", one)], "NixlPeerDisconnected")
    assert "rank 1 closed its communicator" in texts[0] or "rank 1 is gone" in texts[0]
