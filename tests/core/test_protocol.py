"""The protocol by scenario: two to four ranks, every message in the test's hands."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_async.core import events, messages, transitions
from eplb_async.core.events import Phase, Proof
from eplb_async.core.protocol import Protocol
from eplb_async.testing.ring import Ring

SAME = (b"c" * 16, b"n" * 16, b"p" * 16)


def a_protocol(rank: int = 0, ep_size: int = 3, num_layers: int = 2, **options: float | bool) -> Protocol:
    values: dict[str, float | bool] = {"settle_timeout": 5.0, "ping_interval": 1.0, **options}
    return Protocol(
        rank=rank,
        ep_size=ep_size,
        num_layers=num_layers,
        settle_timeout=float(values["settle_timeout"]),
        ping_interval=float(values["ping_interval"]),
        majority_rule=bool(values.get("majority_rule", True)),
    )


def ended(ring: Ring, rank: int) -> list[events.Ended]:
    return [command for command in ring.commands(rank) if isinstance(command, events.Ended)]


def doubts(ring: Ring, rank: int) -> list[events.InDoubt]:
    return [command for command in ring.commands(rank) if isinstance(command, events.InDoubt)]


def opened(ring: Ring) -> None:
    """An epoch is open everywhere, and nothing under way."""
    for rank in range(ring.ep_size):
        ring.migrate(rank)
    ring.settle(stage=False)
    assert {ring.face(rank).phase for rank in range(ring.ep_size)} == {Phase.OPEN}


# --------------------------------------------------------------------------------------------------- an epoch


@pytest.mark.parametrize("ep_size", [1, 2, 3, 8])
def test_an_epoch_commits_every_layer_on_every_rank(ep_size: int) -> None:
    ring = Ring(ep_size, 3)
    for rank in range(ep_size):
        ring.migrate(rank)
    ring.settle()
    for rank in range(ep_size):
        commits = [c for c in ring.commands(rank) if isinstance(c, events.Commit)]
        assert [layer for c in commits for layer in range(c.first, c.upto)] == [0, 1, 2]
        assert ended(ring, rank) == [events.Ended(1, 3, True, -1, "")]


@pytest.mark.parametrize("ep_size", [4, 16, 64])
@pytest.mark.parametrize("num_layers", [1, 10])
def test_messages_per_rank_and_layer_are_constant(ep_size: int, num_layers: int) -> None:
    ranks = [a_protocol(rank, ep_size, num_layers) for rank in range(ep_size)]
    sent: Counter[str] = Counter()

    def act(rank: int, event: events.Event) -> None:
        for command in ranks[rank].handle(event, 0.0):
            if isinstance(command, events.Send):
                sent[type(command.message).__name__] += 1
                act(command.to, events.Received(command.message))

    for rank in reversed(range(ep_size)):
        act(rank, events.Migrate(SAME))
    for layer in range(num_layers):
        for rank in range(ep_size):
            act(rank, events.Staged(layer + 1))
    others = ep_size - 1
    assert sent == {
        "Join": others,
        "Begin": others,
        "Prepared": others * num_layers,
        "Commit": others * num_layers,
    }
    assert all(protocol.phase is Phase.IDLE for protocol in ranks)


def test_a_thousand_ranks_make_an_epoch() -> None:
    """No message costs the coordinator more than a pass over the ranks."""
    ep_size = 1024
    lead = a_protocol(0, ep_size, 2)
    join = messages.Join(term=0, attempt=1, digests=SAME, last_epoch=0)
    lead.handle(events.Migrate(SAME), 0.0)
    begun: tuple[events.Command, ...] = ()
    for rank in range(1, ep_size):
        begun = lead.handle(events.Received(replace(join, sender=rank)), 0.0)
    assert sum(isinstance(command, events.Send) for command in begun) == ep_size - 1
    assert lead.handle(events.Staged(2), 0.0) == ()
    vote = messages.Prepared(epoch=1, upto=2, holds=(0, 0))
    done: tuple[events.Command, ...] = ()
    for rank in range(1, ep_size):
        done = lead.handle(events.Received(replace(vote, sender=rank)), 0.0)
    assert lead.phase is Phase.IDLE
    assert len(done) == ep_size - 1 + 2


def test_no_read_is_posted_before_begin() -> None:
    ring = Ring(3, 1)
    ring.migrate(1)
    ring.migrate(2)
    ring.settle()
    assert ring.commands(1) == ring.commands(2) == []
    ring.migrate(0)
    assert ring.commands(0) == [events.Begin(1, frozenset({0, 1, 2}))]


def test_a_layer_is_committed_when_the_last_member_has_prepared_it() -> None:
    """I-6."""
    ring = Ring(3, 2)
    opened(ring)
    ring.stage(0)
    ring.stage(0)
    ring.stage(1)
    ring.settle(stage=False)
    assert not [c for _, c in ring.log if isinstance(c, events.Commit)]
    ring.stage(2)
    ring.settle(stage=False)
    commits = [(rank, c.first, c.upto) for rank, c in ring.log if isinstance(c, events.Commit)]
    assert sorted(commits) == [(0, 0, 1), (1, 0, 1), (2, 0, 1)]


def test_unequal_joins_end_for_all_and_name_who_differs_in_what() -> None:
    ring = Ring(4, 1)
    ring.migrate(0, SAME)
    ring.migrate(1, SAME)
    ring.migrate(2, (SAME[0], b"x" * 16, SAME[2]))
    ring.migrate(3, (SAME[0], b"x" * 16, b"y" * 16))
    ring.settle()
    for rank in range(4):
        (end,) = ended(ring, rank)
        assert (end.epoch, end.committed, end.complete, end.origin) == (0, 0, False, -1)
        assert "the new placement of ranks 2, 3" in end.reason
        assert "the plan settings of rank 3" in end.reason
        assert "the current placement" not in end.reason
        assert ring.face(rank).phase is Phase.IDLE


def test_unequal_weight_versions_are_named_as_such() -> None:
    """The update has not reached rank 1: no talk of settings that are the same."""
    ring = Ring(3, 1)
    for rank, version in enumerate((7, 6, 7)):
        ring.migrate(rank, (*SAME[:2], b"settings" + version.to_bytes(8)))
    ring.settle()
    for rank in range(3):
        (end,) = ended(ring, rank)
        assert "version 6 on rank 1, version 7 on ranks 0, 2: call updating_weights()" in end.reason
        assert "differ" not in end.reason
    ring.check_usable()


def test_the_epoch_after_unequal_joins_completes() -> None:
    ring = Ring(2, 1)
    ring.migrate(0, SAME)
    ring.migrate(1, (b"z" * 16, *SAME[1:]))
    ring.settle()
    assert ring.is_at_rest()
    ring.check_usable()


def test_a_commit_takes_effect_at_the_latest_hold_and_never_before_an_earlier_layer() -> None:
    ring = Ring(2, 2)
    opened(ring)
    ring.stage(0, (7, 0))
    ring.stage(0, (99, 3))
    ring.stage(1, (5, 0))
    ring.stage(1, (0, 6))
    ring.settle()
    for rank in range(2):
        last = [c for c in ring.commands(rank) if isinstance(c, events.Commit)][-1]
        assert last.at == (7, 7)


# --------------------------------------------------------------------------------------------- stale messages


def test_a_join_of_an_old_attempt_moves_nothing() -> None:
    """I-8: the copy of a JOIN that was given up arrives when its rank has gone on."""
    ring = Ring(2, 1)
    ring.migrate(1)
    ring.duplicate(1, 0)
    ring.give_up(1)
    ring.deliver(1, 0)
    ring.deliver(1, 0, 1)
    ring.settle()
    assert ring.face(1).phase is Phase.IDLE
    before = ring.state.protocols
    assert ended(ring, 1) == [events.Ended(0, 0, False, 1, "timeout")]
    lead = ring.protocol(0)
    lead.handle(events.Received(messages.Join(attempt=1, sender=1, digests=SAME, last_epoch=0)), 0.0)
    assert lead.dropped == {"stale": 1}
    assert ring.state.protocols == before


def test_a_begin_of_an_old_attempt_moves_nothing() -> None:
    protocol = a_protocol(1)
    protocol.handle(events.Migrate(SAME), 0.0)
    protocol.handle(events.GiveUp("cancelled"), 0.0)
    protocol.handle(events.Migrate(SAME), 0.0)
    assert protocol.handle(events.Received(messages.Begin(epoch=1, attempt=1)), 0.0) == ()
    assert (protocol.phase, protocol.attempt) == (Phase.JOINED, 2)
    assert protocol.dropped == {"stale": 1}


def test_a_member_that_joins_anew_ends_the_open_epoch_for_all() -> None:
    """Rule 1, and its ABORT? has not even arrived."""
    ring = Ring(3, 1)
    opened(ring)
    ring.give_up(2)
    ring.migrate(2)
    ring.deliver(2, 0, 1)
    ring.settle(stage=False)
    assert ring.face(1).phase is Phase.IDLE
    assert "rank 2 has begun a new attempt" in ended(ring, 1)[0].reason
    assert ring.face(2).phase is Phase.JOINED


def test_nobody_but_the_coordinator_decides() -> None:
    protocol = a_protocol(1)
    protocol.handle(events.Migrate(SAME), 0.0)
    end = messages.End(attempt=1, sender=2, upto=0, at=(0, 0), origin=2, reason="no")
    assert protocol.handle(events.Received(end), 0.0) == ()
    assert protocol.handle(events.Received(messages.Begin(epoch=1, attempt=1, sender=2)), 0.0) == ()
    assert protocol.dropped == {"foreign": 2}


def test_a_decision_beyond_what_was_prepared_is_refused() -> None:
    """I-19: a member that holds the key and is wrong cannot make this rank apply what it has not staged."""
    protocol = a_protocol(1)
    protocol.handle(events.Migrate(SAME), 0.0)
    protocol.handle(events.Received(messages.Begin(epoch=1, attempt=1)), 0.0)
    protocol.handle(events.Staged(1), 0.0)
    assert protocol.handle(events.Received(messages.Commit(epoch=1, upto=2, at=(0, 0))), 0.0) == ()
    end = messages.End(epoch=1, attempt=1, upto=2, at=(0, 0), origin=-1, reason="")
    assert protocol.handle(events.Received(end), 0.0) == ()
    assert protocol.dropped == {"impossible": 2}
    assert (protocol.phase, protocol.committed) == (Phase.OPEN, 0)


def test_what_a_rank_seems_to_send_itself_is_dropped() -> None:
    protocol = a_protocol(0, 2, 1)
    protocol.handle(events.Received(messages.Leave(sender=0)), 0.0)
    assert protocol.dropped == {"foreign": 1}
    assert protocol.leaving == frozenset()


# -------------------------------------------------------------------------------------------------- giving up


def test_giving_up_without_a_vote_ends_at_once_and_for_all() -> None:
    """I-10."""
    ring = Ring(3, 1)
    opened(ring)
    ring.give_up(2, "disk full")
    assert ended(ring, 2) == [events.Ended(1, 0, False, 2, "disk full")]
    ring.settle(stage=False)
    assert ended(ring, 1) == [events.Ended(1, 0, False, 2, "disk full")] == ended(ring, 0)


def test_giving_up_with_a_vote_outstanding_waits_for_the_end() -> None:
    """I-10, I-7: it settles, and the layer that the others could commit stays possible until END."""
    ring = Ring(2, 2)
    opened(ring)
    ring.stage(1)
    ring.give_up(1, "cancelled")
    assert ring.face(1).phase is Phase.SETTLING
    assert ended(ring, 1) == []
    ring.deliver(1, 0)
    ring.stage(0)
    ring.settle(stage=False)
    assert ended(ring, 1) == [events.Ended(1, 1, False, 1, "cancelled")]
    assert ended(ring, 0) == [events.Ended(1, 1, False, 1, "cancelled")]


def test_an_epoch_that_completes_after_all_is_complete() -> None:
    ring = Ring(2, 1)
    opened(ring)
    ring.stage(1)
    ring.give_up(1, "cancelled")
    ring.stage(0)
    ring.deliver(1, 0)
    ring.settle()
    assert ended(ring, 1) == [events.Ended(1, 1, True, -1, "")]


def test_no_vote_is_cast_after_the_end_was_asked_for() -> None:
    ring = Ring(2, 2)
    opened(ring)
    ring.stage(1)
    ring.give_up(1)
    queue = ring.queue(1, 0)
    ring.stage(1)
    assert ring.queue(1, 0) == queue


def test_a_long_reason_is_cut_to_what_a_message_may_carry() -> None:
    ring = Ring(2, 1)
    ring.migrate(1)
    ring.give_up(1, "\ud800" + "ü" * 5000)
    (_, request) = ring.queue(1, 0)
    assert isinstance(request, messages.AbortRequest)
    assert len(request.reason.encode()) <= 512


def test_giving_up_twice_or_when_idle_does_nothing() -> None:
    protocol = a_protocol(1)
    assert protocol.handle(events.GiveUp("late"), 0.0) == ()
    protocol.handle(events.Migrate(SAME), 0.0)
    protocol.handle(events.Received(messages.Begin(epoch=1, attempt=1)), 0.0)
    protocol.handle(events.Staged(1), 0.0)
    assert len(protocol.handle(events.GiveUp("first"), 0.0)) == 1
    assert protocol.handle(events.GiveUp("second"), 0.0) == ()


# ------------------------------------------------------------------------------------------------------- gone


def test_a_dead_coordinator_is_taken_over_from_and_nothing_is_lost() -> None:
    """I-19: one survivor has applied the layer, so the other does too."""
    ring = Ring(3, 2)
    opened(ring)
    for rank in range(3):
        ring.stage(rank)
    ring.deliver(1, 0)
    ring.deliver(2, 0)
    ring.deliver(0, 1)
    ring.crash(0)
    ring.drop(0, 2)
    ring.settle(stage=False)
    for rank in (1, 2):
        (end,) = ended(ring, rank)
        assert (end.epoch, end.committed, end.complete) == (1, 1, False)
        assert "ranks 1, 2 go on without rank 0" in end.reason
        assert events.Installed(ring.face(rank).term, frozenset({1, 2})) in ring.commands(rank)
        assert ring.protocol(rank).coordinator == 1
    assert ring.is_at_rest()
    ring.check_usable()


@pytest.mark.parametrize("told", [False, True])
def test_an_epoch_that_nobody_who_stays_has_begun_may_be_made_again(told: bool) -> None:
    """All who stay say the same: if BEGIN reached one of them, none makes it again."""
    ring = Ring(3, 1)
    for rank in range(3):
        ring.migrate(rank)
    ring.deliver(1, 0)
    ring.deliver(2, 0)
    if told:
        ring.deliver(0, 1)
        ring.drop(0, 2)
    else:
        ring.drop(0, 1)
        ring.drop(0, 2)
    ring.crash(0)
    ring.settle(stage=False)
    assert [end.again for rank in (1, 2) for end in ended(ring, rank)] == [not told] * 2
    ring.check_usable()


def test_an_epoch_that_its_caller_gave_up_is_not_made_again() -> None:
    ring = Ring(3, 1)
    ring.migrate(1)
    ring.give_up(1)
    ring.crash(0)
    ring.settle()
    assert [end.again for end in ended(ring, 1)] == [False]


def test_no_vote_is_cast_after_a_newer_term_was_promised() -> None:
    ring = Ring(3, 1)
    opened(ring)
    ring.gone(1, 0)
    ring.deliver(1, 2)
    assert (ring.face(2).term, ring.face(2).promised) == (0, 4)
    queue = ring.queue(2, 0)
    ring.stage(2)
    assert ring.queue(2, 0) == queue


def test_a_view_waits_until_all_agree_on_who_is_gone() -> None:
    """Everyone needs their own proof."""
    ring = Ring(4, 1)
    ring.crash(3)
    ring.gone(0, 3)
    ring.settle(detect=False)
    assert {ring.face(rank).term for rank in (0, 1, 2)} == {0}
    assert ring.protocol(0).waiting_for == {1, 2}
    ring.gone(1, 3)
    ring.gone(2, 3)
    ring.settle(detect=False)
    assert {ring.face(rank).term for rank in (0, 1, 2)} == {4}


def test_an_opener_that_was_outbid_by_one_that_died_opens_anew() -> None:
    """The link between 0 and 1 is cut, rank 2 has promised to 0 last, and 0 dies."""
    ring = Ring(3, 1)
    ring.cut(0, 1)
    ring.gone(1, 0)
    ring.deliver(1, 2)
    ring.gone(0, 1)
    ring.settle(detect=False)
    assert ring.face(2).promised == 6
    assert {ring.face(rank).term for rank in range(3)} == {0}
    ring.crash(0)
    ring.settle()
    assert ring.protocol(1).members == ring.protocol(2).members == {1, 2}
    assert ring.is_at_rest()


def test_ranks_that_are_told_each_other_is_dead_do_not_outbid_each_other_for_ever() -> None:
    ring = Ring(4, 1, pings=True)
    ring.exclude(1, 0)
    ring.exclude(2, 1)
    ring.cut(0, 3)
    ring.settle()
    ring.tick(1)
    ring.settle()
    assert ring.face(2).members == ring.face(3).members == 0b1100


def test_whoever_waits_pings_and_says_whom_it_knows_gone() -> None:
    protocol = a_protocol(2, 4)
    protocol.handle(events.Gone(0, Proof.DISCONNECTED), 10.0)
    assert protocol.waiting_for == {1}
    assert protocol.next_wakeup == 11.0
    (command,) = protocol.handle(events.Tick(), 11.0)
    assert command == events.Send(1, messages.Ping(sender=2, gone=1))
    assert protocol.next_wakeup == 12.0


def test_a_rank_that_hears_of_a_death_looks_for_its_own_proof() -> None:
    protocol = a_protocol(1, 4)
    (pong,) = protocol.handle(events.Received(messages.Ping(sender=2, gone=1)), 0.0)
    assert pong == events.Send(2, messages.Pong(sender=1))
    (ping,) = protocol.handle(events.Tick(), 1.0)
    assert ping == events.Send(0, messages.Ping(sender=1))
    protocol.handle(events.Received(messages.Pong(sender=0)), 1.1)
    assert protocol.next_wakeup is None


def test_an_idle_rank_wants_no_wakeup() -> None:
    assert a_protocol().next_wakeup is None


def test_the_word_of_one_caller_reaches_all() -> None:
    ring = Ring(4, 1)
    ring.exclude(2, 3)
    assert ring.face(2).term == 0
    waiting = ring.protocol(2)
    (command,) = waiting.handle(events.Tick(), waiting.next_wakeup or 0.0)
    assert isinstance(command, events.Send)
    assert command.to == 0
    opener = ring.protocol(0)
    sends = opener.handle(events.Received(command.message), 0.0)
    assert [s.to for s in sends if isinstance(s, events.Send) and isinstance(s.message, messages.View)] == [
        1,
        2,
    ]


def test_an_excluded_rank_is_fenced_by_the_answer_to_what_it_says() -> None:
    ring = Ring(3, 1)
    opened(ring)
    ring.exclude(0, 2)
    ring.deliver(0, 1)
    ring.deliver(1, 0)
    ring.drop(0, 2)
    assert ring.face(2).phase is Phase.OPEN
    ring.stage(2)
    ring.settle(stage=False)
    assert ring.face(2).phase is Phase.FENCED
    kinds = [type(command) for command in ring.commands(2)]
    assert kinds == [events.Begin, events.Ended, events.Fenced]
    assert ring.face(0).members == ring.face(1).members == 0b011


def test_a_ping_of_a_rank_that_is_out_is_answered_by_fencing_it() -> None:
    protocol = a_protocol(0, 2, majority_rule=False)
    protocol.handle(events.Gone(1, Proof.DISCONNECTED), 0.0)
    assert protocol.members == {0}
    (answer,) = protocol.handle(events.Received(messages.Ping(sender=1)), 0.0)
    assert isinstance(answer, events.Send)
    assert isinstance(answer.message, messages.Install)
    assert answer.message.members == 1


# --------------------------------------------------------------------------------------------------- in doubt


def test_the_survivor_of_two_is_in_doubt_until_its_caller_says_who_is_dead() -> None:
    ring = Ring(2, 1)
    opened(ring)
    ring.stage(1)
    ring.crash(0)
    ring.gone(1, 0)
    assert ring.face(1).phase is Phase.IN_DOUBT
    assert "exclude()" in doubts(ring, 1)[0].reason
    assert ended(ring, 1) == []
    ring.gone(1, 0, Proof.EXCLUDED)
    assert ring.face(1).phase is Phase.IDLE
    (end,) = ended(ring, 1)
    assert (end.epoch, end.committed) == (1, 0)
    assert ring.protocol(1).members == {1}
    ring.check_usable()


def test_the_surviving_coordinator_of_two_knows_its_own_decision() -> None:
    ring = Ring(2, 1)
    opened(ring)
    ring.stage(0)
    ring.crash(1)
    ring.gone(0, 1)
    (end,) = ended(ring, 0)
    assert (end.epoch, end.committed, end.origin) == (1, 0, 0)
    assert doubts(ring, 0) == []
    assert ring.face(0).phase is Phase.IDLE


def test_without_a_vote_outstanding_no_majority_is_no_doubt() -> None:
    ring = Ring(2, 1)
    opened(ring)
    ring.crash(0)
    ring.gone(1, 0)
    (end,) = ended(ring, 1)
    assert (end.committed, end.complete) == (0, False)
    assert ring.face(1).phase is Phase.IDLE


def test_without_the_majority_rule_a_death_is_enough() -> None:
    ring = Ring(2, 1, majority_rule=False)
    opened(ring)
    ring.stage(1)
    ring.crash(0)
    ring.gone(1, 0)
    assert ring.protocol(1).members == {1}
    assert ring.face(1).phase is Phase.IDLE


def test_half_of_a_view_is_no_majority() -> None:
    ring = Ring(4, 1)
    ring.cut(0, 2)
    ring.cut(0, 3)
    ring.cut(1, 2)
    ring.cut(1, 3)
    ring.settle()
    assert {ring.face(rank).term for rank in range(4)} == {0}


def test_who_left_does_not_count_for_the_majority() -> None:
    ring = Ring(3, 1)
    ring.close(2)
    ring.settle()
    assert ring.face(2).phase is Phase.CLOSED
    assert ring.protocol(0).members == {0, 1}


def test_silence_after_giving_up_is_doubt_and_the_end_resolves_it() -> None:
    protocol = a_protocol(1)
    protocol.handle(events.Migrate(SAME), 0.0)
    protocol.handle(events.Received(messages.Begin(epoch=1, attempt=1)), 0.0)
    protocol.handle(events.Staged(1), 0.0)
    protocol.handle(events.GiveUp("cancelled"), 0.0)
    assert protocol.prepared == 1
    pings = protocol.handle(events.Tick(), 1.0)
    assert [type(c.message) for c in pings if isinstance(c, events.Send)] == [messages.Ping, messages.AbortRequest]
    late = protocol.handle(events.Tick(), 5.0)
    (doubt,) = [command for command in late if isinstance(command, events.InDoubt)]
    assert "within 5 s" in doubt.reason
    assert "cancelled" in doubt.reason
    assert protocol.phase.value == "in_doubt"
    assert protocol.waiting_for == {0}
    end = messages.End(epoch=1, attempt=1, upto=1, at=(4, 4), origin=2, reason="elsewhere")
    assert protocol.handle(events.Received(end), 6.0) == (
        events.Commit(1, 0, 1, (4, 0)),
        events.Ended(1, 1, False, 1, "cancelled"),
    )
    assert protocol.phase is Phase.IDLE


# ---------------------------------------------------------------------------------------------------- closing


def test_a_rank_that_closes_is_let_go_by_those_who_stay() -> None:
    ring = Ring(3, 1)
    ring.close(0)
    ring.settle()
    assert ring.commands(0) == [events.Closed()]
    assert ring.protocol(1).members == ring.protocol(2).members == {1, 2}
    assert ring.is_at_rest()
    ring.check_usable()


def test_all_may_close_at_once() -> None:
    ring = Ring(3, 1)
    for rank in range(3):
        ring.close(rank)
    ring.settle()
    assert {ring.face(rank).phase for rank in range(3)} == {Phase.CLOSED}


def test_the_last_rank_closes_at_once() -> None:
    ring = Ring(1, 1)
    ring.close(0)
    assert ring.commands(0) == [events.Closed()]


def test_closing_in_an_open_epoch_gives_up_first() -> None:
    ring = Ring(3, 1)
    opened(ring)
    ring.stage(2)
    ring.close(2)
    assert ring.face(2).phase is Phase.SETTLING
    ring.settle(stage=False)
    assert [type(command) for command in ring.commands(2)[1:]] == [events.Ended, events.Closed]
    for rank in (0, 1):
        assert ended(ring, rank)[0].committed == 0
    assert ring.is_at_rest()


def test_a_rank_that_closes_spreads_a_word_also_after_it_opened_a_term_that_is_not_its_own_any_more() -> None:
    """Rule 6: it waits for who opens the next term, not for itself, so its pings go out."""
    ring = Ring(4, 1, pings=True)
    ring.crash(1)
    ring.gone(0, 1)  # rank 0 opens a term
    ring.close(0)
    ring.exclude(0, 2)  # wrongly; now only rank 3 can open
    assert ring.protocol(0).waiting_for == {3}
    ring.settle()
    ring.tick(0)
    ring.settle()
    ring.gone(3, 1, Proof.EXCLUDED)  # alone, it has no majority before
    ring.settle()
    assert ring.face(0).phase is Phase.CLOSED
    assert ring.face(2).phase is Phase.FENCED
    assert ring.is_at_rest()


def test_nothing_can_be_migrated_while_closing_or_busy() -> None:
    protocol = a_protocol(1)
    protocol.handle(events.Migrate(SAME), 0.0)
    with pytest.raises(ValueError, match="cannot migrate"):
        protocol.handle(events.Migrate(SAME), 0.0)
    protocol.handle(events.Close(), 0.0)
    assert protocol.phase is Phase.IDLE
    with pytest.raises(ValueError, match="closing"):
        protocol.handle(events.Migrate(SAME), 0.0)


def test_a_migration_asked_for_while_the_view_changes_is_ended_by_the_new_view() -> None:
    ring = Ring(3, 1)
    ring.gone(2, 0)
    ring.gone(1, 0)
    ring.deliver(1, 2)
    assert ring.protocol(2).view_changing
    ring.migrate(2)
    assert ring.queue(2, 0) == ()
    ring.deliver(2, 1)
    ring.deliver(1, 2)
    (end,) = ended(ring, 2)
    assert (end.epoch, end.committed, end.complete, end.again) == (0, 0, False, True)
    assert not ring.protocol(2).view_changing


# ------------------------------------------------------------------------------------------ the callers' side


@pytest.mark.parametrize(
    "event",
    [
        events.Staged(3),
        events.Staged(-1),
        events.Staged(1, (0,)),
        events.Gone(9, Proof.LEFT),
        events.Gone(0, Proof.LEFT),
    ],
    ids=str,
)
def test_what_does_not_exist_is_a_value_error(event: events.Event) -> None:
    with pytest.raises(ValueError, match=r"staged|gone"):
        a_protocol().handle(event, 0.0)


@pytest.mark.parametrize("options", [{"rank": 3}, {"rank": -1}, {"num_layers": 0}])
def test_a_rank_that_does_not_exist_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="no rank"):
        a_protocol(**options)


def test_waiting_for_says_whose_vote_is_missing() -> None:
    ring = Ring(3, 2)
    opened(ring)
    ring.stage(0)
    ring.stage(1)
    ring.settle(stage=False)
    assert ring.protocol(0).waiting_for == {2}
    assert ring.protocol(1).waiting_for == {0}
    assert ring.protocol(2).waiting_for == frozenset()


def test_every_phase_is_in_the_diagram() -> None:
    drawn = transitions.mermaid()
    assert drawn.startswith("stateDiagram-v2\n")
    assert all(phase.name in drawn for phase in Phase)
    assert "    SETTLING --> IN_DOUBT: Gone, Tick\n" in drawn


def test_a_move_that_is_not_in_the_table_is_a_bug() -> None:
    with pytest.raises(transitions.InvariantViolation, match="IDLE to OPEN on Commit"):
        transitions.check_move(Phase.IDLE, messages.Commit, Phase.OPEN)


# ---------------------------------------------------------------------------------------- nonsense from peers

RANKS, LAYERS = 3, 2
small = st.integers(0, 4)
ranks = st.integers(0, (1 << RANKS) - 1)
layer = st.integers(0, LAYERS)
pair = st.tuples(small, small)
header = {"term": st.integers(0, 9), "epoch": small, "attempt": small, "sender": st.integers(0, RANKS - 1)}
bodies: dict[type[messages.Message], dict[str, st.SearchStrategy[object]]] = {
    messages.Hello: {},
    messages.Introduce: {"blob": st.just(b"")},
    messages.Ping: {"gone": ranks, "declared": ranks, "stride": small},
    messages.Pong: {"stride": small},
    messages.Join: {"digests": st.just(SAME), "last_epoch": small},
    messages.Begin: {},
    messages.Prepared: {"upto": layer, "holds": pair},
    messages.Commit: {"upto": layer, "at": pair},
    messages.AbortRequest: {"reason": st.just("why")},
    messages.End: {"upto": layer, "at": pair, "origin": st.just(-1), "reason": st.just("")},
    messages.View: {"gone": ranks, "declared": ranks},
    messages.Term: {},
    messages.State: {
        "last_epoch": small,
        "upto": layer,
        "ended": st.booleans(),
        "at": pair,
        "highest_epoch": small,
        "gone": ranks,
        "declared": ranks,
        "leaving": ranks,
        "installed_term": st.integers(0, 9),
        "members": ranks,
        "last_attempt": small,
    },
    messages.Install: {"members": ranks, "upto": layer, "at": pair, "next_epoch": small},
    messages.Leave: {},
}
any_message = st.one_of(*(st.builds(kind, **header, **fields) for kind, fields in bodies.items()))
any_event: st.SearchStrategy[events.Event] = st.one_of(
    any_message.map(events.Received),
    any_message.map(events.Received),
    st.just(events.Migrate(SAME)),
    layer.map(events.Staged),
    st.just(events.GiveUp("enough")),
    st.builds(events.Gone, st.just(2), st.sampled_from(Proof)),
    st.just(events.Close()),
    st.just(events.Tick()),
)


@settings(max_examples=600, deadline=None)
@given(rank=st.sampled_from([0, 1]), majority=st.booleans(), script=st.lists(any_event, max_size=40))
def test_no_peer_can_make_it_raise_or_break_its_promises(rank: int, majority: bool, script: list[events.Event]) -> None:
    """I-8: authentic messages that mean nothing. One ``Ended`` each; commits in order and prepared."""
    protocol = a_protocol(rank, RANKS, LAYERS, majority_rule=majority)
    wanted = over = 0
    for now, event in enumerate(script):
        if isinstance(event, events.Migrate):
            if protocol.phase is not Phase.IDLE or rank in protocol.leaving:
                continue
            wanted += 1
        term = protocol.term
        prepared = event.upto if isinstance(event, events.Staged) else protocol.prepared
        committed = protocol.committed
        for command in protocol.handle(event, float(now)):
            match command:
                case events.Commit(_, first, upto, at):
                    assert committed == first < upto <= prepared
                    assert len(at) == LAYERS
                    committed = upto
                case events.Ended():
                    over += 1
                case events.Send(to, message):
                    assert to != rank
                    assert message.sender == rank
        assert over == wanted - (protocol.phase in (Phase.JOINED, Phase.OPEN, Phase.SETTLING, Phase.IN_DOUBT))
        assert protocol.term >= term
        assert protocol.snapshot() is not None
