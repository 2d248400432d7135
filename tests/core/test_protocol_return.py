"""Rule 12 by scenario: a rank that restarts comes back, whatever dies, is lost or comes late meanwhile."""

from __future__ import annotations

import sys
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eplb_async.core import events, messages
from eplb_async.core.events import Phase, Proof
from eplb_async.core.protocol import Protocol
from eplb_async.core.returns import Meeting
from eplb_async.core.views import View
from eplb_async.testing.explorer import explore
from eplb_async.testing.ring import UNLIMITED, Limits, Ring, Violation

START = 2


def die(ring: Ring, rank: int) -> None:
    """A rank dies, and the others go on without it, by a caller's word where they are no majority."""
    ring.crash(rank)
    ring.settle()
    for other in ring.alive():
        if not ring.face(other).has_majority:
            ring.gone(other, rank, Proof.EXCLUDED)
    ring.settle()


def without(ep_size: int, *dead: int) -> Ring:
    """A ring that goes on without some ranks, which have started again and are outside."""
    ring = Ring(ep_size, 2, pings=True)
    for rank in dead:
        die(ring, rank)
    members = sum(1 << rank for rank in ring.alive())
    assert all(ring.face(rank).members == members for rank in ring.alive())
    for rank in dead:
        ring.restart(rank)
    ring.log = []
    return ring


def insiders(ring: Ring) -> list[int]:
    return [rank for rank in ring.alive() if not ring.face(rank).outside]


def all_met(ring: Ring, rank: int, start: int = START) -> None:
    for other in insiders(ring):
        if not ring.face(other).members >> rank & 1:
            ring.met(other, rank, start)


def come_to_rest(ring: Ring) -> None:
    for _ in range(8):
        ring.settle()
        for rank in ring.alive():
            ring.ping(rank)
    ring.settle()


def check_whole(ring: Ring) -> None:
    """All who live are in one view, and an epoch works."""
    come_to_rest(ring)
    assert ring.is_at_rest(), [(rank, ring.face(rank)) for rank in ring.alive()]
    ring.check()
    ring.check_usable()


@pytest.mark.parametrize(("ep_size", "dead"), [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2), (4, 0), (4, 2)])
def test_a_restarted_rank_is_let_in_when_all_have_met_it(ep_size: int, dead: int) -> None:
    ring = without(ep_size, dead)
    first, *others = insiders(ring)
    for other in others:
        ring.met(other, dead)
    ring.settle()
    assert ring.face(dead).outside
    ring.met(first, dead)
    check_whole(ring)
    everybody = frozenset(range(ep_size))
    for rank in range(ep_size):
        assert ring.protocol(rank).members == everybody
        assert ring.protocol(rank).coordinator == 0
        assert ring.protocol(rank).gone == frozenset()
        assert not ring.protocol(rank).view_changing


def test_a_rank_outside_neither_opens_a_term_nor_joins_an_epoch() -> None:
    """It answers pings, and nothing else comes from it, whoever is gone."""
    ring = without(3, 0)
    ring.gone(0, 1)
    ring.gone(0, 2)
    ring.tick(0)
    assert not ring.queue(0, 1)
    assert not ring.queue(0, 2)
    with pytest.raises(ValueError, match="cannot migrate"):
        ring.migrate(0)
    protocol = ring.protocol(0)
    (answer,) = protocol.handle(events.Received(messages.Ping(term=2, sender=1)), 0.0)
    assert answer == events.Send(1, messages.Pong(term=0, sender=0))


def test_a_rank_outside_closes_at_once() -> None:
    ring = without(3, 2)
    ring.close(2)
    assert ring.face(2).phase is Phase.CLOSED
    assert not any(ring.queue(2, other) for other in (0, 1))


def test_members_that_met_different_starts_wait_until_they_agree() -> None:
    ring = without(3, 2)
    ring.met(0, 2, 2)
    ring.met(1, 2, 3)
    come_to_rest(ring)
    assert ring.face(2).outside
    assert ring.protocol(0).waiting_for == {1}
    assert ring.protocol(1).waiting_for == {0}
    ring.met(0, 2, 3)
    check_whole(ring)
    assert not ring.face(2).outside


@pytest.mark.parametrize("other", [0, 1])
def test_a_word_taken_back_counts_no_more(other: int) -> None:
    """A cancelled reconnect, at the coordinator and elsewhere; said again, it works."""
    ring = without(3, 2)
    ring.met(other, 2)
    ring.settle()
    ring.met(other, 2, 0)
    ring.settle()
    ring.met(1 - other, 2)
    come_to_rest(ring)
    assert ring.face(2).outside
    ring.met(other, 2)
    check_whole(ring)


def test_who_joins_an_epoch_waits_for_nobody_to_come_back() -> None:
    """MET and then JOIN: the word is over, even if the one that takes it back is lost."""
    ring = without(3, 2)
    ring.met(1, 2)
    ring.settle()
    ring.met(1, 2, 0)
    ring.drop(1, 0)
    ring.migrate(1)
    ring.settle()
    ring.met(0, 2)
    ring.settle()
    assert ring.face(2).outside
    ring.met(0, 2, 0)
    ring.migrate(0)
    ring.settle()
    assert next(command for command in ring.commands(1) if isinstance(command, events.Ended)).complete


def test_the_word_is_said_again_until_it_arrives() -> None:
    ring = without(3, 2)
    all_met(ring, 2)
    ring.drop(1, 0)
    ring.settle()
    assert ring.face(2).outside
    check_whole(ring)
    assert not ring.face(2).outside


def test_a_late_or_repeated_word_moves_nothing() -> None:
    """I-8: MET of an older term, of a member, again, and to a rank that keeps no books."""
    ring = without(3, 2)
    all_met(ring, 2)
    check_whole(ring)
    protocol = ring.protocol(0)
    before = protocol.snapshot()
    for term in (0, protocol.term - 1, protocol.term + 3):
        message = messages.Met(term=term, sender=1, rank=2, start=START)
        assert protocol.handle(events.Received(message), 0.0) == ()
    assert protocol.snapshot() == before
    protocol.handle(events.Received(messages.Met(term=protocol.term, sender=1, rank=2, start=9)), 0.0)
    assert protocol.members == {0, 1, 2}
    assert not protocol.view_changing
    elsewhere = ring.protocol(1)
    assert elsewhere.handle(events.Received(messages.Met(term=elsewhere.term, sender=0, rank=2, start=9)), 0.0) == ()
    assert elsewhere.dropped["foreign"] == 1


def test_members_that_mean_different_things_by_it_do_not_have_it_back() -> None:
    """Else they would be of different minds on where the experts are; it comes in when all say the same."""
    ring = without(3, 2)
    protocols = [ring.protocol(rank) for rank in (0, 1)]  # copies: what they are told, the ring does not know
    for rank, digest in ((0, b"a" * 16), (1, b"b" * 16)):
        for command in protocols[rank].handle(events.Met(2, START, digest), 0.0):
            assert isinstance(command, events.Send)
            protocols[command.to].handle(events.Received(command.message), 0.0)
    assert not protocols[0].view_changing
    assert protocols[0].waiting_for == {1}
    (said,) = protocols[1].handle(events.Met(2, START, b"a" * 16), 0.0)
    assert isinstance(said, events.Send)
    protocols[0].handle(events.Received(said.message), 0.0)
    assert protocols[0].view_changing


def test_who_is_waited_for_may_be_asked_from_another_thread() -> None:
    """``health`` does, while the engine loop meets ranks and gives them up."""
    coordinator = Protocol(rank=0, ep_size=4, num_layers=1, settle_timeout=1.0, ping_interval=1.0)
    for dead in (1, 2, 3):
        coordinator.handle(events.Gone(dead, Proof.EXCLUDED), 0.0)
    assert coordinator.members == {0}
    failures: list[Exception] = []
    over = threading.Event()

    def ask() -> None:
        try:
            while not over.is_set():
                assert not coordinator.waiting_for
        except Exception as error:
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    asking = threading.Thread(target=ask)
    asking.start()
    for start in range(1, 2000):
        for rank in (1, 2, 3):
            coordinator._returns.want(rank, Meeting(start, bytes(16)))
        for rank in (1, 2, 3):
            coordinator.handle(events.Met(rank, 0), 0.0)
    over.set()
    asking.join()
    sys.setswitchinterval(interval)
    assert not failures


@pytest.mark.parametrize("dead", [0, 1, 2, 3])
@pytest.mark.parametrize("told", range(5))
def test_the_opener_dies_in_mid_install(dead: int, told: int) -> None:
    """Whoever has heard of the view with the rank that comes back: those who live go on in one view."""
    ring = without(4, dead)
    all_met(ring, dead)
    opener = insiders(ring)[0]
    receivers = [rank for rank in range(4) if rank != opener]
    for _ in range(50):
        install = [r for r in receivers if any(isinstance(m, messages.Install) for m in ring.queue(opener, r))]
        if len(install) == 3:
            break
        source, to = next((s, t) for s in range(4) for t in range(4) if ring.queue(s, t))
        ring.deliver(source, to)
    else:
        raise AssertionError("no INSTALL")
    ring.crash(opener)
    for rank in receivers[: min(told, 3)] if told < 4 else receivers[:0:-1]:
        ring.deliver(opener, rank)
    for rank in receivers:
        while ring.queue(opener, rank):
            ring.drop(opener, rank)
    come_to_rest(ring)
    assert not ring.face(dead).outside, "where nobody had heard of the view all say again whom they have met"
    ring.check()
    living = ring.alive()
    assert set(receivers) - {dead} <= set(living)
    members = {ring.protocol(rank).members for rank in living}
    assert members == {frozenset(living)}
    ring.check_usable()


@pytest.mark.parametrize("dead", [0, 1, 2])
@pytest.mark.parametrize("heard", [False, True])
def test_a_newcomer_that_dies_at_once_is_left_out_again(dead: int, heard: bool) -> None:
    """Before or after it has heard of the view; and it may come back a second time."""
    ring = without(3, dead)
    all_met(ring, dead)
    if heard:
        come_to_rest(ring)
    else:
        for _ in range(50):
            if ring.face(insiders(ring)[0]).members >> dead & 1:
                break
            source, to = next((s, t) for s in range(3) for t in range(3) if ring.queue(s, t))
            ring.deliver(source, to)
    ring.crash(dead)
    come_to_rest(ring)
    living = frozenset(ring.alive())
    assert all(ring.protocol(rank).members == living for rank in living)
    ring.check_usable()
    ring.restart(dead)
    all_met(ring, dead, 3)
    check_whole(ring)
    assert ring.protocol(dead).members == {0, 1, 2}


@pytest.mark.parametrize("dead", [0, 1])
def test_a_member_that_dies_while_a_rank_comes_back_goes_first(dead: int) -> None:
    """The view without the one and the view with the other are two, so that majorities always meet."""
    ring = without(4, dead)
    all_met(ring, dead)
    ring.crash(3)
    come_to_rest(ring)
    assert not ring.face(dead).outside
    views = [c.members for c in ring.commands(2) if isinstance(c, events.Installed)]
    assert all(len(a ^ b) <= 1 for a, b in zip([frozenset(range(4)) - {dead}, *views], views, strict=False))
    check_whole(ring)


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (3, 1), (2, 4)])
def test_two_ranks_come_back_one_after_the_other(order: tuple[int, int]) -> None:
    ring = without(5, *order)
    for rank in order:
        all_met(ring, rank)
        come_to_rest(ring)
        assert not ring.face(rank).outside
    check_whole(ring)


def test_two_ranks_wanted_at_once_come_one_a_term() -> None:
    ring = without(5, 0, 4)
    for rank in (0, 4):
        all_met(ring, rank)
    come_to_rest(ring)
    all_met(ring, 4)  # rank 0 has to say it too
    check_whole(ring)
    sizes = [len(c.members) for c in ring.commands(1) if isinstance(c, events.Installed)]
    assert sizes == [4, 5]


def test_an_install_that_is_lost_is_sent_again_to_who_comes_back() -> None:
    ring = without(3, 2)
    all_met(ring, 2)
    for _ in range(50):
        source, to = next((s, t) for s in range(2) for t in range(2) if ring.queue(s, t))
        ring.deliver(source, to)
        if not any(ring.queue(s, t) for s in range(2) for t in range(2)):
            break
    for source in (0, 1):
        while ring.queue(source, 2):
            ring.drop(source, 2)
    assert ring.protocol(0).members == {0, 1, 2}
    assert ring.protocol(0).view_changing, "no migration is begun before it has spoken in the view"
    assert ring.face(2).outside
    ring.tick(0)
    check_whole(ring)


def test_what_was_known_of_the_start_before_does_not_hold() -> None:
    """Excluded by word, and closing: neither sticks to the start that comes back; late words change nothing."""
    ring = Ring(3, 1, pings=True, limits=Limits(exclusions=1))
    ring.exclude(0, 2)
    ring.settle()
    assert ring.face(2).phase is Phase.FENCED
    old = ring.protocol(0)
    ring.restart(2)
    all_met(ring, 2)
    check_whole(ring)
    protocol = ring.protocol(1)
    for late in (
        messages.Ping(term=old.term, sender=0, gone=4, declared=4),
        messages.View(term=old.term, sender=0, gone=4, declared=4),
    ):
        protocol.handle(events.Received(late), 0.0)
    assert protocol.members == {0, 1, 2}
    assert protocol.gone == frozenset()
    assert not protocol.view_changing
    ring.gone(0, 2, Proof.EXCLUDED)
    come_to_rest(ring)
    assert ring.protocol(0).members == {0, 1}, "excluding it works again"


def test_a_proof_of_the_new_start_before_it_is_in_takes_the_word_back() -> None:
    ring = without(3, 2)
    ring.met(1, 2)
    ring.settle()
    ring.gone(1, 2)
    ring.settle()
    ring.met(0, 2)
    come_to_rest(ring)
    assert ring.face(2).outside
    assert ring.protocol(0).members == {0, 1}


def test_a_member_that_closes_as_a_rank_comes_back_is_let_go() -> None:
    """Who came back opens the next view, and was no member yet when LEAVE was said: it is said again."""
    ring = without(3, 0)
    all_met(ring, 0)
    for _ in range(20):
        if ring.face(1).members == 0b111:
            break
        source, to = next((s, t) for s in (1, 2) for t in (1, 2) if ring.queue(s, t))
        ring.deliver(source, to)
    ring.close(2)
    check_whole(ring)
    assert ring.face(2).phase is Phase.CLOSED
    assert ring.protocol(0).members == {0, 1}


def test_suspecting_a_member_looks_for_a_proof() -> None:
    """A ping at once; an answer clears it; who is no member is not suspected."""
    protocol = Protocol(rank=0, ep_size=3, num_layers=1, settle_timeout=1.0, ping_interval=1.0)
    (ping,) = protocol.handle(events.Suspect(2), 0.0)
    assert isinstance(ping, events.Send)
    assert (ping.to, type(ping.message)) == (2, messages.Ping)
    assert protocol.waiting_for == {2}
    protocol.handle(events.Received(messages.Pong(sender=2)), 0.0)
    assert protocol.waiting_for == frozenset()
    with pytest.raises(ValueError, match="rank 0"):
        protocol.handle(events.Suspect(0), 0.0)
    with pytest.raises(ValueError, match="rank 3"):
        protocol.handle(events.Met(3, 1), 0.0)


@pytest.mark.parametrize("dead", [0, 2, None])
@pytest.mark.parametrize("lost", range(14))
def test_any_lost_message_of_a_view_change_is_made_good(dead: int | None, lost: int) -> None:
    """VIEW, STATE, INSTALL, TERM, MET: asked and said again with the pings, for a death and for a return."""
    ring = without(4, 3) if dead is None else Ring(4, 1, pings=True)
    if dead is None:
        all_met(ring, 3)
    else:
        ring.crash(dead)
        for rank in ring.alive():
            ring.gone(rank, dead)
    for _ in range(lost):
        links = [(s, t) for s in range(4) for t in range(4) if ring.queue(s, t)]
        if not links:
            return
        ring.deliver(*links[0])
    links = [(s, t) for s in range(4) for t in range(4) if ring.queue(s, t)]
    if links:
        ring.drop(*links[0])
    check_whole(ring)
    assert not any(ring.face(rank).outside for rank in ring.alive())


# ------------------------------------------------------------------------------------- everything, and at random


@pytest.mark.parametrize(
    ("ep_size", "dead", "limits"),
    [
        (2, 0, Limits(crashes=2, returns=1)),
        (2, 1, Limits(crashes=2, returns=2)),
        (3, 0, Limits(crashes=1, returns=1)),
        (3, 1, Limits(crashes=1, returns=1)),
        (3, 0, Limits(migrations=0, crashes=2, returns=1)),
        (3, 2, Limits(migrations=0, crashes=2, returns=2)),
    ],
    ids=str,
)
def test_every_schedule_of_a_return_is_safe_and_leads_back_to_rest(ep_size: int, dead: int, limits: Limits) -> None:
    """I-7, I-9, I-19: a rank has died (the first of the crashes); it starts again, is met, others die, all migrate."""
    ring = Ring(ep_size, 1, limits=limits, pings=True)
    die(ring, dead)
    found = explore(ring, max_states=200_000)
    print(f"{ep_size} ranks, rank {dead} has died, {limits}: {found}")
    assert found.exhaustive
    assert found.at_rest > 0


@pytest.mark.model
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("num_layers", "dead", "limits"),
    [
        (1, None, Limits(crashes=1, returns=1)),
        (1, 0, Limits(crashes=1, returns=1, fifo=False)),
        (2, 0, Limits(crashes=1, returns=1)),
    ],
    ids=["3x1 dies at any moment", "3x1 any order", "3x2"],
)
def test_every_schedule_of_a_return_in_larger_rings(num_layers: int, dead: int | None, limits: Limits) -> None:
    """I-7, I-9, I-19, as above."""
    ring = Ring(3, num_layers, limits=limits, pings=True)
    if dead is not None:
        die(ring, dead)
    found = explore(ring, max_states=20_000_000)
    print(f"3 ranks, {num_layers} layers, rank {dead} has died, {limits}: {found}")
    assert found.exhaustive


def test_what_was_known_of_the_start_before_would_leave_no_way_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The walk sees a view that keeps the proofs of those who come back."""
    install = View.install

    def keep(view: View, term: int, members: int) -> int:
        gone, newcomers = view.gone, install(view, term, members)
        view.gone = gone
        return newcomers

    monkeypatch.setattr(View, "install", keep)
    ring = without(3, 0)
    ring.limits = Limits(migrations=0, crashes=1, returns=1)
    with pytest.raises(Violation, match="I-9: no way back"):
        explore(ring, max_states=20_000)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(ep_size=st.integers(2, 4), data=st.data())
def test_deaths_and_returns_in_any_order_come_to_rest(ep_size: int, data: st.DataObject) -> None:
    """Messages in any order and twice, ranks that die and come back, callers that give up or say who is dead."""
    limits = Limits(migrations=2, crashes=3, returns=3, duplicates=2, doubts=UNLIMITED, fifo=False)
    ring = Ring(ep_size, 2, limits=limits, pings=True)
    for _ in range(data.draw(st.integers(0, 80))):
        moves = list(ring.moves())
        if not moves:
            break
        ring.play(data.draw(st.sampled_from(moves)))
        ring.check()
    for _ in range(5):
        come_to_rest(ring)
        for rank in ring.alive():
            if ring.face(rank).phase in (Phase.JOINED, Phase.OPEN):
                ring.give_up(rank)
            if not ring.face(rank).outside and not ring.face(rank).has_majority:
                for other in range(ep_size):
                    if ring.face(rank).members >> other & 1 and not ring.body(other).alive:
                        ring.gone(rank, other, Proof.EXCLUDED)
        come_to_rest(ring)
        outside = [rank for rank in ring.alive() if ring.face(rank).outside]
        if not insiders(ring):
            return
        for rank in outside[:1]:
            all_met(ring, rank)
    check_whole(ring)
