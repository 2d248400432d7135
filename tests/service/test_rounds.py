"""Rounds as pure state: one round serves all, everything ends in time, and nothing out of place changes anything."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_async.service.actions import Collect, Decide, Move
from eplb_async.service.payloads import Ask, Loads, Refused, Verdict, Why
from eplb_async.service.rounds import AUTOMATIC
from tests.service.ring import MOVED, Ring


def test_a_round_moves_all_ranks() -> None:
    """Asked by one, coordinated by the lowest, decided once, moved by all; all know the same of it."""
    ring = Ring()
    ticket = ring.want(1)
    ring.settle()
    end = ring.outcome(ticket)
    assert (end.outcome, end.round) == ("moved", 1)
    assert [rank.moves for rank in ring.ranks] == [{1: 1}] * 3
    for rank in ring.ranks:
        assert [(end.round, end.outcome) for end in rank.ends] == [(1, "moved")]
        assert rank.ends[0].verdict is not None
        assert (rank.ends[0].verdict.before, rank.ends[0].verdict.moves) == (0.5, 8)
        assert rank.rounds.stage == "idle"
        assert rank.rounds.next_wakeup is None


def test_one_round_serves_two_who_ask_at_once() -> None:
    ring = Ring()
    tickets = [ring.want(1), ring.want(2), ring.want(0), ring.want(2)]
    ring.settle()
    assert {ring.outcome(ticket).round for ticket in tickets} == {1}


def test_who_asks_when_the_loads_are_in_is_served_by_the_next_round() -> None:
    """And a wish that comes before that is served by the round that runs."""
    ring = Ring()
    first = ring.want(0)
    ring.deliver()  # ASK to rank 1
    joins = ring.want(1)
    ring.finish(1)
    later = ring.want(1)
    ring.settle()
    assert ring.outcome(first).round == ring.outcome(joins).round == 1
    assert ring.outcome(later).round == 2


def test_a_forced_wish_forces_the_round_that_it_joins() -> None:
    ring = Ring()
    ring.want(0)
    ring.deliver()
    ring.want(1, force=True)
    while not any(isinstance(work, Decide) for work in ring.ranks[0].work):
        ring.deliver() if ring.wire else ring.finish(next(r for r in range(3) if ring.ranks[r].work))
    decide = ring.ranks[0].work[0]
    assert isinstance(decide, Decide)
    assert decide.force
    assert sorted(decide.loads) == [0, 1, 2]
    assert [float(decide.loads[rank].loads[0, 0]) for rank in range(3)] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("asks", [0, 1])
def test_too_soon_is_said_at_once_unless_forced(asks: int) -> None:
    """Within the least interval no round begins, whoever asks; nothing is sent to the others for it."""
    ring = Ring(min_interval=30.0)
    ring.want(0)
    ring.settle()
    ring.pass_time(10.0)
    soon = ring.want(asks)
    ring.settle()
    end = ring.outcome(soon)
    assert (end.outcome, end.round) == ("too_soon", 0)
    assert "20.0 s are left" in end.reason
    forced = ring.want(asks, force=True)
    ring.settle()
    assert ring.outcome(forced).outcome == "moved"
    ring.pass_time(30.0)
    assert ring.ranks[0].rounds.open_before(ring.now) == 0.0


@pytest.mark.parametrize("paused", [0, 1, 2])
@pytest.mark.parametrize("asks", [0, 1])
def test_a_paused_rank_ends_the_round_and_is_named(paused: int, asks: int) -> None:
    ring = Ring()
    ring.ranks[paused].rounds.pause()
    ticket = ring.want(asks)
    ring.settle()
    end = ring.outcome(ticket)
    assert end.outcome == "paused"
    assert end.reason == f"rank {paused} is paused"
    ring.ranks[paused].rounds.paused = False
    again = ring.want(asks)
    ring.settle()
    assert ring.outcome(again).outcome == "moved"


def test_a_rank_without_a_service_is_named_in_time() -> None:
    ring = Ring()
    ring.deaf.add(2)
    ticket = ring.want(1)
    ring.settle()
    ring.pass_time(9.9)
    assert ring.ranks[0].rounds.waiting_for == (2,)
    ring.pass_time(0.2)
    ring.settle()
    end = ring.outcome(ticket)
    assert end.outcome == "failed"
    assert "ranks [2] did not answer within 10 s" in end.reason
    assert "EplbService" in end.reason


def test_a_coordinator_without_a_service_is_named_in_time() -> None:
    ring = Ring()
    ticket = ring.want(2)
    for _ in range(20):
        ring.wire.clear()
        ring.pass_time(1.0)
    end = ring.outcome(ticket)
    assert (end.outcome, end.round, end.ranks) == ("failed", 0, (0,))
    assert "rank 0, the coordinator, began no round" in end.reason


def test_a_verdict_that_never_comes_ends_the_round_and_stops_those_that_move() -> None:
    """The coordinator is named; who got the verdict does not wait for a rank that has given up."""
    ring = Ring()
    ring.want(0)
    while not any(isinstance(message, Verdict) for _, _, message in ring.wire):
        ring.deliver() if ring.wire else ring.finish(next(r for r in range(3) if ring.ranks[r].work))
    ring.deaf.add(2)
    ring.deliver()
    ring.deliver()
    assert ring.ranks[1].rounds.stage == ring.ranks[0].rounds.stage == "moving"
    ring.pass_time(26.0)
    (end,) = ring.ranks[2].ends
    assert end.outcome == "failed"
    assert "rank 0, the coordinator, sent no verdict" in end.reason
    while ring.wire:
        ring.deliver()
    assert ring.ranks[0].stopped == ring.ranks[1].stopped == [1]
    assert all("rank 2 does not move" in ring.ranks[rank].ends[0].reason for rank in (0, 1))


def test_a_migration_that_is_refused_at_once_stops_the_others() -> None:
    """Whether they have begun, or hear of it before the verdict."""
    ring = Ring()
    ticket = ring.want(0)
    while not ring.ranks[1].moves:
        ring.deliver() if ring.wire else ring.finish(next(r for r in range(3) if ring.ranks[r].work))
    assert ring.ranks[2].rounds.stage == "asked"  # the verdict for it is under way
    ring.finish(1, fails=True)
    refusal = next(i for i, (sender, to, _) in enumerate(ring.wire) if (sender, to) == (1, 2))
    ring.deliver(refusal)
    ring.settle()
    assert not ring.ranks[2].moves
    assert ring.ranks[0].stopped == [1]
    end = ring.outcome(ticket)
    assert (end.outcome, end.ranks) == ("failed", (1,))
    assert end.reason == "rank 1 does not move: it does not work"
    assert [rank.ends[0].outcome for rank in ring.ranks] == ["failed"] * 3


def test_a_failed_epoch_is_nothing_to_tell() -> None:
    """All ranks know how an epoch ends: what a rank says of it then reaches nobody that still moves in it."""
    ring = Ring()
    ring.want(0)
    while not all(rank.moves for rank in ring.ranks):
        ring.deliver() if ring.wire else ring.finish(next(r for r in range(3) if ring.ranks[r].work))
    ring.finish(1, fails=True, tell=False)
    assert not ring.wire
    assert ring.ranks[0].rounds.stage == "moving"


def test_another_view_ends_what_is_not_decided() -> None:
    """A member died; the round fails, naming it, and a wish that waits goes to the new coordinator."""
    ring = Ring()
    first = ring.want(1)
    ring.settle()
    ring.want(0)
    ring.deliver()
    ring.lose(0)
    ring.see(1)
    (_, end) = ring.ranks[1].ends
    assert "the view changed: without ranks [0]" in end.reason
    ticket = ring.want(2)  # has not heard yet: it asks rank 0, which is gone
    ring.see(2)
    ring.settle()
    assert ring.outcome(ticket).outcome == "moved"
    assert ring.outcome(ticket).round > ring.outcome(first).round
    assert ring.ranks[1].rounds.coordinator == 1


def test_who_hears_of_the_view_late_is_asked_again() -> None:
    ring = Ring(4)
    ring.lose(0)
    ring.see(1)
    ring.see(3)
    ticket = ring.want(3)
    while ring.wire:
        ring.deliver()  # rank 2 drops what is of a term that it does not know
    assert ring.ranks[2].rounds.dropped["another term"]
    ring.see(2)
    ring.pass_time(2.0)
    ring.settle()
    assert ring.outcome(ticket).outcome == "moved"


def test_a_rank_that_is_out_says_so() -> None:
    ring = Ring()
    ring.members = {0, 1}
    ring.term = 5
    ring.see(2)
    end = ring.outcome(ring.want(2))
    assert end.reason == "this rank is out of the group"


@pytest.mark.parametrize("closes", [0, 1])
@pytest.mark.parametrize("when", ["asking", "moving"])
def test_closing_ends_the_round_on_all(closes: int, when: str) -> None:
    ring = Ring()
    tickets = [ring.want(rank) for rank in range(3)]
    while not all(any(isinstance(work, Collect if when == "asking" else Move) for work in r.work) for r in ring.ranks):
        ring.deliver() if ring.wire else ring.finish(next(r for r in range(3) if ring.ranks[r].work))
    state = ring.ranks[closes]
    ring.do(closes, state.rounds.close("its service closes", ring.now))
    assert bool(state.stopped) == (when == "moving")
    ring.settle()
    for ticket in tickets:
        assert ring.outcome(ticket).outcome == "failed"
        assert "its service closes" in ring.outcome(ticket).reason
    assert all(rank.rounds.stage == "idle" for rank in ring.ranks)
    assert not any(rank.rounds.next_wakeup for rank in ring.ranks)


def test_a_younger_service_of_the_coordinator_counts_on_from_the_groups_rounds() -> None:
    """Its numbers would be old ones to the others; they tell it, and the same round goes on."""
    ring = Ring()
    for _ in range(3):
        ring.want(0)
        ring.settle()
    young = Ring().ranks[0]
    ring.ranks[0] = young
    ring.see(0)
    ticket = ring.want(0)
    ring.settle()
    assert ring.outcome(ticket).round == 4
    assert [rank.moves[4] for rank in ring.ranks] == [1, 1, 1]


def test_what_is_doubled_late_or_foreign_changes_nothing() -> None:
    ring = Ring()
    ring.want(0)
    for rank in (1, 2):
        ring.do(rank, ring.ranks[rank].rounds.receive(3 - rank, Ask(term=0, round=9), ring.now))
    verdict = replace(MOVED, round=1)
    for sender, message in [
        (2, verdict),
        (0, replace(verdict, term=3)),
        (0, replace(verdict, outcome="not_worth_it", placement=None)),
        (0, Loads(term=0, round=1, loads=np.ones((2, 4)), steps=1)),
        (0, Refused(term=0, round=7, why=Why.FAILED, reason="")),
        (0, Ask(term=0, round=1 << 60)),
    ]:
        ring.do(1, ring.ranks[1].rounds.receive(sender, message, ring.now))
    rounds = ring.ranks[1].rounds
    assert (rounds.stage, rounds.number) == ("idle", 0)
    assert sum(rounds.dropped.values()) == 7
    ring.deliver(keep=True)
    ring.deliver()
    ring.settle()
    assert [rank.moves for rank in ring.ranks] == [{1: 1}] * 3


def test_what_cannot_be_ends_the_round_and_names_its_sender() -> None:
    ring = Ring()
    ring.want(0)
    ring.do(0, ring.ranks[0].rounds.damaged(2, "loads that are negative", ring.now))
    ring.settle()
    for rank in ring.ranks:
        (end,) = rank.ends
        assert end.outcome == "failed"
        assert end.reason == "rank 2 sent loads that are negative"


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_in_any_order_with_loss_and_doubles_everything_ends(data: st.DataObject) -> None:
    """Never two verdicts of one round, never a rank twice in one migration; every wish ends once, and all are idle."""
    n = data.draw(st.integers(2, 4), label="ranks")
    ring = Ring(n, min_interval=data.draw(st.sampled_from([0.0, 5.0])))
    closed: set[int] = set()
    for _ in range(data.draw(st.integers(1, 60), label="events")):
        ranks = sorted(ring.members)
        busy = [(rank, i) for rank in ranks for i in range(len(ring.ranks[rank].work))]
        what = data.draw(
            st.sampled_from(
                ["deliver"] * 6 + ["finish"] * 4 + ["want", "drop", "double", "time", "pause", "lose", "fail"]
            ),
            label="what",
        )
        rank = data.draw(st.sampled_from(ranks), label="rank")
        if what in ("deliver", "drop", "double") and ring.wire:
            index = data.draw(st.integers(0, len(ring.wire) - 1), label="which")
            if what == "drop":
                ring.wire.pop(index)
            else:
                ring.deliver(index, keep=what == "double")
        elif what in ("finish", "fail") and busy:
            who, index = data.draw(st.sampled_from(busy), label="work")
            ring.finish(who, index, fails=what == "fail", tell=data.draw(st.booleans()))
        elif what == "want":
            ring.want(rank, force=data.draw(st.booleans()))
        elif what == "time":
            ring.pass_time(data.draw(st.sampled_from([1.0, 7.0, 30.0])))
        elif what == "pause" and rank not in closed:
            rounds = ring.ranks[rank].rounds
            if rounds.paused:
                rounds.paused = False
            else:
                ring.do(rank, rounds.pause())
        elif what == "lose" and len(ring.members) > 1 and data.draw(st.booleans()):
            if data.draw(st.booleans(), label="closes"):
                closed.add(rank)
                ring.do(rank, ring.ranks[rank].rounds.close("it closes", ring.now))
            else:
                ring.lose(rank)
        elif data.draw(st.booleans(), label="sees"):
            ring.see(rank)
    for rank in sorted(ring.members):
        ring.see(rank)
    for _ in range(4):
        ring.settle()
        ring.pass_time(60.0)
    ring.settle()
    assert all(len(texts) == 1 for texts in ring.verdicts.values())
    for rank in ring.members:
        state = ring.ranks[rank]
        assert max(state.moves.values(), default=0) <= 1
        assert (state.rounds.stage, state.rounds.next_wakeup, state.work) == ("idle", None, [])
    for ticket, rank in ring.wanted.items():
        if rank in ring.members:
            ring.outcome(ticket)
    assert AUTOMATIC not in ring.wanted
