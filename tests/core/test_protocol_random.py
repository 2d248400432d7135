"""The real protocol at random, in a ring of pure ranks: what is too large to be walked. Hypothesis shrinks what fails.

``MODEL_EXAMPLES=100000 pytest tests/core/test_protocol_random.py`` takes a longer walk.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from eplb_async.core import events, messages
from eplb_async.core.events import Phase, Proof
from eplb_async.testing.ring import UNLIMITED, Limits, Move, Ring

MADE_GOOD = (
    messages.Join,
    messages.AbortRequest,
    messages.Prepared,
    messages.Begin,
    messages.Commit,
    messages.End,
    messages.Ping,
    messages.Pong,
    messages.Met,
    messages.Leave,
)
"""Messages whose loss a deadline, or asking again, makes good. A change of views relies on NIXL, which loses none."""

IMPATIENT = ("give_up", "expire")
EXAMPLES = int(os.environ.get("MODEL_EXAMPLES", "100"))
many = settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
any_ring = st.tuples(st.integers(2, 4), st.integers(1, 3))
large_ring = st.tuples(st.integers(3, 4), st.integers(1, 3))
_RINGS: dict[tuple[int, int, Limits], tuple[Ring, object]] = {}
"""Rings are kept, with what they have learnt, and put back to their first state for each example."""


def ring_of(ep_size: int, num_layers: int, limits: Limits) -> Ring:
    key = (ep_size, num_layers, limits)
    if key not in _RINGS or len(_RINGS[key][0].faces) > 200_000:
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


def step(
    ring: Ring, data: st.DataObject, stopped: int | None = None, may_be_lost: tuple[type[messages.Message], ...] = ()
) -> bool:
    """One move. One in 32 is a fault, one a loss, one a new start, one gives up; the others help."""
    moves = [move for move in ring.moves() if not touches(move, stopped)]
    if not moves:
        return False
    chosen, kind = divmod(data.draw(st.integers(0, 4095)), 32)
    groups = {
        29: [m for m in moves if m.act in IMPATIENT],
        28: [m for m in moves if m.act == "restart"],
        30: [m for m in moves if not m.helpful],
        31: [
            m._replace(act="drop")
            for m in moves
            if m.act == "deliver" and isinstance(ring.queue(*m.args[:2])[m.args[2]], may_be_lost)
        ],
    }
    moves = groups.get(kind) or [m for m in moves if m.helpful and m.act not in IMPATIENT] or moves
    move = moves[chosen % len(moves)]
    note(str(move))
    ring.play(move)
    ring.check()
    return True


def come_to_rest(ring: Ring) -> None:
    """All who live run on, callers time out, say who is dead where nobody has a majority, and have back who opens."""
    for _ in range(4 + ring.limits.returns):
        ring.settle()
        for rank in ring.alive():
            if ring.face(rank).phase in (Phase.JOINED, Phase.OPEN):
                ring.give_up(rank)
        ring.settle()
        for rank in ring.alive():
            ring.tick(rank)
            if not ring.face(rank).has_majority:
                for other in range(ring.ep_size):
                    if ring.face(rank).members >> other & 1 and ring.has_ended(other):
                        ring.gone(rank, other, Proof.EXCLUDED)
        ring.settle()
        let_in(ring)
    ring.check()


def let_in(ring: Ring) -> None:
    """Callers have one back that opens; where nobody is left to, it gives up."""
    for rank in ring.alive():
        if ring.face(rank).outside:
            inside = [q for q in ring.alive() if not ring.face(q).outside]
            for q in inside:
                if not ring.face(q).members >> rank & 1:
                    ring.met(q, rank)
            if not inside:
                ring.expire(rank)
            break
    ring.settle()


def check_rest(ring: Ring) -> None:
    """I-9: all who are left are idle, in one view of exactly them."""
    for rank in ring.alive():
        assert ring.face(rank).phase is Phase.IDLE, (rank, ring.log)
        assert ring.body(rank).owed == 0
    assert ring.is_at_rest(), ring.log


@many
@given(size=large_ring, data=st.data())
def test_whatever_happens_in_two_epochs_those_who_are_left_go_on(size: tuple[int, int], data: st.DataObject) -> None:
    """I-7, I-9, I-10, I-19: any order, duplicates, losses, a crash, a close, a wrong word, a stop that ends late,
    and ranks that come back.
    """
    limits = Limits(2, crashes=1, closes=1, exclusions=1, duplicates=3, doubts=UNLIMITED, returns=2, fifo=False)
    ring = ring_of(*size, limits)
    stopped = data.draw(st.none() | st.integers(0, size[0] - 1))
    wakes = data.draw(st.integers(0, 100)) if stopped is not None else 0
    for number in range(data.draw(st.integers(0, 150))):
        if not step(ring, data, stopped if number < wakes else None, MADE_GOOD):
            break
    come_to_rest(ring)
    check_rest(ring)
    for rank in ring.alive():  # a lost ABORT? may cost the next epoch too, and no more
        ring.migrate(rank)
    come_to_rest(ring)
    check_rest(ring)
    ring.check_usable()


@many
@given(size=any_ring, data=st.data())
def test_any_order_of_messages_deaths_and_stops_comes_to_rest_and_is_usable(
    size: tuple[int, int], data: st.DataObject
) -> None:
    """I-7, I-9, I-10, I-19: two crashes and two closes, two come back, nothing lost: the very next epoch
    completes.
    """
    limits = Limits(migrations=3, crashes=2, closes=2, duplicates=2, doubts=UNLIMITED, returns=2, fifo=False)
    ring = ring_of(*size, limits)
    stopped = data.draw(st.none() | st.integers(0, size[0] - 1))
    for number in range(data.draw(st.integers(0, 100))):
        if not step(ring, data, stopped if number < 60 else None):
            break
    come_to_rest(ring)
    check_rest(ring)
    ring.check_usable()


@many
@given(size=any_ring, data=st.data())
def test_cut_links_losses_and_wrong_words_never_break_a_promise(size: tuple[int, int], data: st.DataObject) -> None:
    """Safety alone: what is lost for good between live ranks can only leave them in doubt."""
    limits = Limits(migrations=2, crashes=1, closes=1, exclusions=1, cuts=2, duplicates=1, doubts=9, fifo=False)
    ring = ring_of(*size, limits)
    for _ in range(data.draw(st.integers(0, 100))):
        if not step(ring, data, may_be_lost=(messages.Message,)):
            break
    ring.settle()
    for rank in ring.alive():
        ring.tick(rank)
    ring.check()
    for rank in ring.alive():
        if ring.face(rank).phase is Phase.IN_DOUBT:
            assert any(isinstance(c, events.InDoubt) and c.reason for c in ring.commands(rank))


@many
@given(size=any_ring, data=st.data())
def test_after_cut_links_whoever_still_reaches_all_others_goes_on(size: tuple[int, int], data: st.DataObject) -> None:
    """I-9: once one end of each cut link has died."""
    ring = ring_of(*size, Limits(2, closes=1, cuts=2, duplicates=1, doubts=9, fifo=False))
    for _ in range(data.draw(st.integers(0, 100))):
        if not step(ring, data):
            break
    ring.settle()
    for one in range(size[0]):
        if any(ring.is_cut(one, other) for other in ring.alive()) and ring.body(one).alive:
            ring.crash(one)
    come_to_rest(ring)
    check_rest(ring)
    ring.check_usable()


@many
@given(size=any_ring, data=st.data())
def test_giving_up_always_ends_at_one_layer(size: tuple[int, int], data: st.DataObject) -> None:
    """I-10: whoever gives up, and whenever, all end the epoch alike without any other failure."""
    ring = ring_of(*size, Limits(migrations=1, give_ups=0, fifo=False))
    for rank in range(size[0]):
        ring.migrate(rank)
    ring.settle(stage=False)
    for _ in range(data.draw(st.integers(0, 60))):
        if not step(ring, data):
            break
    ring.give_up(data.draw(st.integers(0, size[0] - 1)), "cancelled")
    ring.settle()
    ends = {(c.epoch, c.committed) for _, c in ring.log if isinstance(c, events.Ended) if c.epoch}
    assert len(ends) <= 1
    assert ring.is_at_rest()
    ring.check_usable()
