"""The real protocol, walked exhaustively and at random, in a ring of pure ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eplb_async.core import coordinator, events, participant, protocol, views
from eplb_async.core.events import Phase, Proof
from eplb_async.testing.explorer import Explored, explore
from eplb_async.testing.ring import UNLIMITED, Limits, Move, Ring, Violation


def walk(ring: Ring, *, max_states: int = 500_000, liveness: bool = True) -> Explored:
    found = explore(ring, max_states=max_states, liveness=liveness)
    print(f"{ring.ep_size} ranks, {ring.num_layers} layers, {ring.limits}: {found}")
    return found


def all_open(ring: Ring) -> None:
    """An epoch is open everywhere, and nothing under way."""
    for rank in range(ring.ep_size):
        ring.migrate(rank)
    ring.settle(stage=False)


# ------------------------------------------------------------------------------------------------- exhaustive


@pytest.mark.parametrize(
    ("ep_size", "num_layers", "limits", "majority_rule"),
    [
        (2, 2, Limits(migrations=2, crashes=1), False),
        (2, 2, Limits(migrations=2, crashes=1, doubts=UNLIMITED), True),
        (2, 2, Limits(crashes=1, duplicates=1, doubts=UNLIMITED, fifo=False), True),
        (3, 1, Limits(crashes=1), False),
        (3, 1, Limits(crashes=1, doubts=UNLIMITED), True),
    ],
    ids=["2x2 twice", "2x2 twice, doubts", "2x2 any order", "3x1", "3x1 doubts"],
)
def test_every_schedule_is_safe_and_leads_back_to_rest(
    ep_size: int, num_layers: int, limits: Limits, majority_rule: bool
) -> None:
    """I-7, I-9, I-10, I-19: crashes in mid-broadcast too, giving up at any moment, a next epoch."""
    found = walk(Ring(ep_size, num_layers, limits=limits, majority_rule=majority_rule))
    assert found.exhaustive
    assert found.at_rest > 0


@pytest.mark.parametrize(("ep_size", "closes", "majority_rule"), [(2, 2, False), (2, 2, True), (3, 1, True)])
def test_closing_at_any_moment_leads_back_to_rest(ep_size: int, closes: int, majority_rule: bool) -> None:
    limits = Limits(closes=closes)
    assert walk(Ring(ep_size, 1, limits=limits, majority_rule=majority_rule, pings=True)).exhaustive


def test_excluding_a_live_rank_at_any_moment_fences_it() -> None:
    """Rule 8: the others agree, and whoever is out hears of it."""
    assert walk(Ring(3, 1, limits=Limits(exclusions=1), pings=True)).exhaustive


def test_lost_links_never_make_two_views() -> None:
    """I-7 behind cut links: a majority on one side at most."""
    limits = Limits(cuts=2, give_ups=0)
    assert walk(Ring(3, 1, limits=limits), liveness=False).exhaustive


@pytest.mark.parametrize(
    ("ep_size", "num_layers", "limits"),
    [
        (3, 1, Limits(migrations=2, crashes=2, duplicates=1, doubts=UNLIMITED, fifo=False)),
        (3, 2, Limits(crashes=1, closes=1, exclusions=1)),
        (4, 1, Limits(crashes=1, cuts=2)),
    ],
    ids=["3x1 twice, any order", "3x2 closing, excluding", "4x1 cuts"],
)
def test_the_beginning_of_what_is_too_large_to_finish_is_safe(ep_size: int, num_layers: int, limits: Limits) -> None:
    walk(Ring(ep_size, num_layers, limits=limits, pings=bool(limits.exclusions)), max_states=40_000)


# --------------------------------------------------------------------------- the checks see what they are for


def _never_bound(part: participant.Participant) -> bool:
    return False


def _no_promise(view: views.View, term: int) -> bool:
    return term == view.installed


def _lowest_commit(answers: list[Any]) -> int:
    return int(min(answer.upto for answer in answers))


def _end_unheard(answers: list[Any]) -> int:
    return max((answer.upto for answer in answers if not answer.ended), default=0)


def _never_stale(books: coordinator.Coordinator, rank: int, attempt: int) -> bool:
    return False


def _always_majority(view: views.View, members: int | None = None) -> bool:
    return True


CRASH = Limits(crashes=1)


@pytest.mark.parametrize(
    ("owner", "name", "broken", "ep_size", "num_layers", "limits"),
    [
        (participant.Participant, "bound", property(_never_bound), 2, 1, Limits()),
        (views.View, "accepts", _no_promise, 3, 1, CRASH),
        (views, "_last_committed", _lowest_commit, 3, 2, Limits(crashes=1, give_ups=0)),
        (views, "_last_committed", _end_unheard, 3, 1, CRASH),
        (coordinator.Coordinator, "_is_stale", _never_stale, 2, 1, Limits(duplicates=1)),
        (views.View, "majority", _always_majority, 3, 1, Limits(cuts=2)),
    ],
    ids=["leaves with a vote", "no promise", "lowest commit", "end unheard", "stale join", "no majority"],
)
def test_without_a_clause_of_the_rules_the_walk_finds_a_violation(
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    broken: Callable[..., Any] | property,
    ep_size: int,
    num_layers: int,
    limits: Limits,
) -> None:
    """Each clause that the design has in bold, switched off; the table of moves too, to see what follows."""
    monkeypatch.setattr(owner, name, broken)
    monkeypatch.setattr(protocol, "check_move", lambda before, kind, after: None)
    ring = Ring(ep_size, num_layers, limits=limits, majority_rule=name == "majority")
    if not limits.duplicates:
        all_open(ring)
    with pytest.raises(Violation, match=r"I-\d+: ") as caught:
        explore(ring, max_states=200_000, liveness=not limits.cuts)
    print(caught.value)


# -------------------------------------------------------------------------------------------------- at random

_RINGS: dict[tuple[int, int, Limits], tuple[Ring, Any]] = {}
"""Rings are kept, with what they have learnt, and put back to their first state for each example."""


def ring_of(ep_size: int, num_layers: int, limits: Limits) -> Ring:
    key = (ep_size, num_layers, limits)
    if key not in _RINGS:
        ring = Ring(ep_size, num_layers, limits=limits, pings=True)
        _RINGS[key] = (ring, ring.state)
    ring, start = _RINGS[key]
    ring.state = start
    ring.log = []
    return ring


def touches(move: Move, rank: int | None) -> bool:
    """Whether a move needs ``rank`` to run."""
    if rank is None:
        return False
    return bool(move.args[1] == rank if move.act == "deliver" else move.args[0] == rank)


def step(ring: Ring, choose: st.DataObject, stopped: int | None) -> bool:
    moves = [move for move in ring.moves() if not touches(move, stopped)]
    if not moves:
        return False
    move = choose.draw(st.sampled_from(moves))
    ring.play(move)
    ring.check()
    return True


def come_to_rest(ring: Ring) -> None:
    """All who live run on, callers time out, and say who is dead where nobody has a majority."""
    for _ in range(4):
        ring.settle()
        for rank in ring.alive():
            if ring.face(rank).phase in (Phase.JOINED, Phase.OPEN):
                ring.give_up(rank)
        ring.settle()
        for rank in ring.alive():
            ring.tick(rank)
            if not ring.face(rank).has_majority:
                for other in range(ring.ep_size):
                    if ring.face(rank).members >> other & 1 and not ring.body(other).alive:
                        ring.gone(rank, other, Proof.EXCLUDED)
        ring.settle()
    ring.check()


random_rings = st.tuples(st.integers(2, 4), st.integers(1, 3))
random_settings = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@random_settings
@given(size=random_rings, data=st.data())
def test_any_order_of_messages_deaths_and_stops_comes_to_rest_and_is_usable(
    size: tuple[int, int], data: st.DataObject
) -> None:
    """I-7, I-9, I-10, I-19: no order, duplicates, crashes, closes, a rank that stops and wakes."""
    limits = Limits(migrations=3, crashes=1, closes=1, duplicates=2, doubts=UNLIMITED, fifo=False)
    ring = ring_of(*size, limits)
    stopped = data.draw(st.none() | st.integers(0, size[0] - 1))
    for number in range(data.draw(st.integers(0, 60))):
        if not step(ring, data, stopped if number < 40 else None):
            break
    come_to_rest(ring)
    for rank in ring.alive():
        assert ring.face(rank).phase is Phase.IDLE, (rank, ring.log)
        assert ring.body(rank).owed == 0
    assert ring.is_at_rest(), ring.log
    ring.check_usable()


@random_settings
@given(size=random_rings, data=st.data())
def test_cut_links_losses_and_wrong_words_never_break_a_promise(size: tuple[int, int], data: st.DataObject) -> None:
    """Safety alone: what is lost for good between live ranks can only leave them in doubt."""
    limits = Limits(migrations=2, crashes=1, closes=1, exclusions=1, cuts=2, duplicates=1, doubts=9, fifo=False)
    ring = ring_of(*size, limits)
    for _ in range(data.draw(st.integers(0, 60))):
        if not step(ring, data, None):
            break
        loads = [(i, j) for i in range(size[0]) for j in range(size[0]) if ring.queue(i, j)]
        if loads and data.draw(st.integers(0, 15)) == 0:
            ring.drop(*data.draw(st.sampled_from(loads)))
    ring.settle()
    for rank in ring.alive():
        ring.tick(rank)
    ring.check()
    for rank in ring.alive():
        if ring.face(rank).phase is Phase.IN_DOUBT:
            assert any(isinstance(c, events.InDoubt) and c.reason for c in ring.commands(rank))


@random_settings
@given(size=random_rings, data=st.data())
def test_after_cut_links_whoever_still_reaches_all_others_goes_on(size: tuple[int, int], data: st.DataObject) -> None:
    """I-9: once one end of each cut link has died."""
    ring = ring_of(*size, Limits(2, closes=1, cuts=2, duplicates=1, doubts=9, fifo=False))
    for _ in range(data.draw(st.integers(0, 60))):
        if not step(ring, data, None):
            break
    ring.settle()
    for one in range(size[0]):
        if any(ring.is_cut(one, other) for other in ring.alive()) and ring.body(one).alive:
            ring.crash(one)
    come_to_rest(ring)
    assert ring.is_at_rest(), ring.log
    ring.check_usable()


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_giving_up_always_ends_at_one_layer(data: st.DataObject) -> None:
    """I-10: whoever gives up, and whenever, all end the epoch alike without any other failure."""
    ring = ring_of(3, 3, Limits(migrations=1, give_ups=0, fifo=False))
    all_open(ring)
    for _ in range(data.draw(st.integers(0, 30))):
        step(ring, data, None)
    ring.give_up(data.draw(st.integers(0, 2)), "cancelled")
    ring.settle()
    ends = {(c.epoch, c.committed) for _, c in ring.log if isinstance(c, events.Ended) if c.epoch}
    assert len(ends) <= 1
    assert ring.is_at_rest()
    ring.check_usable()
