"""The window: never more in flight than allowed; the outbox: what may go goes, whatever waits before it."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_async.core.window import Outbox, Waiting, Window

NAMES = ("max_bytes", "max_requests", "max_peer_bytes", "max_peer_requests", "max_peers", "few_bytes")


def window(**limits):
    """A window without limits but those given."""
    return Window(**{**dict.fromkeys(NAMES, 1 << 40), "few_bytes": 1, **limits})


def waiting(source, nbytes, *, layer=0, sharers=1, owner="job"):
    """A batch that waits; of the batch itself only source and size matter here."""
    return Waiting(layer, SimpleNamespace(source=source, nbytes=nbytes), sharers, owner)


limits_of_all_kinds = st.fixed_dictionaries({name: st.integers(1, 60) for name in NAMES})
requests_to_three = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 50), st.integers(1, 4)), max_size=40)


@given(requests_to_three, limits_of_all_kinds, st.randoms(use_true_random=False))
def test_limits_hold_and_everything_gets_through(requests, limits, random):
    """Each limit holds unless a request is alone in its scope; all goes in the end."""
    limiter = Window(**limits)
    outbox = Outbox(limiter)
    outbox.put([waiting(peer, nbytes, sharers=sharers) for peer, nbytes, sharers in requests])
    flying = []
    while len(outbox) or flying:
        while (taken := outbox.take()) is not None:
            before = [(w.batch.source, w.batch.nbytes) for w in flying]
            flying.append(taken)
            theirs = [nbytes for peer, nbytes in before if peer == taken.batch.source]
            if not theirs:
                few = sum(nbytes for _, nbytes in before) < limits["few_bytes"]
                assert len({peer for peer, _ in before}) < limits["max_peers"] or few
            else:
                assert sum(theirs) + taken.batch.nbytes <= limits["max_peer_bytes"] // taken.sharers
                assert len(theirs) < limits["max_peer_requests"]
            if before:
                assert sum(nbytes for _, nbytes in before) + taken.batch.nbytes <= limits["max_bytes"]
                assert len(before) < limits["max_requests"]
        assert flying, "work that waits while nothing is in flight"
        assert (limiter.requests, limiter.nbytes) == (len(flying), sum(w.batch.nbytes for w in flying))
        assert limiter.peers == len({w.batch.source for w in flying})
        done = flying.pop(random.randrange(len(flying)))
        limiter.done(done.batch.source, done.batch.nbytes)
    assert (limiter.requests, limiter.nbytes, limiter.peers) == (0, 0, 0)


@given(requests_to_three, limits_of_all_kinds, st.randoms(use_true_random=False))
def test_it_conserves_work_and_batches_of_one_source_keep_their_order(requests, limits, random):
    """Once nothing is let out, no first batch of any source would be; each source's batches go as they were put."""
    limiter = Window(**limits)
    outbox = Outbox(limiter)
    batches = [
        waiting(peer, nbytes, layer=i // 10, sharers=sharers) for i, (peer, nbytes, sharers) in enumerate(requests)
    ]
    outbox.put(batches)
    flying, gone = [], []
    while len(outbox) or flying:
        while (taken := outbox.take()) is not None:
            flying.append(taken)
            gone.append(taken)
        first = {}
        for left in batches:
            if left not in gone:
                first.setdefault(left.batch.source, left)
        for left in first.values():
            assert not limiter.admit(left.batch.source, left.batch.nbytes, sharers=left.sharers)
        done = flying.pop(random.randrange(len(flying)))
        limiter.done(done.batch.source, done.batch.nbytes)
    for peer in range(3):
        assert [w for w in gone if w.batch.source == peer] == [w for w in batches if w.batch.source == peer]


def test_a_source_that_has_enough_to_do_holds_up_nobody_else():
    """Ten batches of a source that answers nothing: those of the others go on, past it, in their order."""
    outbox = Outbox(window(max_peer_requests=2))
    outbox.put([waiting(1, 5) for _ in range(10)] + [waiting(2, 5), waiting(3, 5), waiting(2, 5), waiting(2, 5)])
    assert Counter(iter(lambda: (taken := outbox.take()) and taken.batch.source, None)) == {1: 2, 2: 2, 3: 1}
    outbox.window.done(2, 5)
    assert outbox.take().batch.source == 2
    assert outbox.take() is None
    assert len(outbox) == 8


def test_no_more_peers_at_once_than_allowed_unless_little_is_in_flight():
    """Two peers, and further ones only while fewer than 10 bytes are in flight."""
    limiter = window(max_peers=2, few_bytes=10)
    assert [limiter.admit(peer, 3) for peer in (1, 2, 3, 4)] == [True] * 4
    assert not limiter.admit(5, 3)
    assert limiter.admit(1, 3)
    for peer in (1, 1, 2):
        limiter.done(peer, 3)
    assert limiter.admit(5, 30)
    assert not limiter.admit(6, 1)


def test_what_is_read_ahead_of_the_layer_to_be_decided_begins_with_fewer_peers():
    """Two thirds of the peers, at least one; none is given up, and after the decision it is as any other."""
    limiter = window(max_peers=6)
    assert [limiter.admit(peer, 10, ahead=True) for peer in range(6)] == [True] * 4 + [False] * 2
    assert limiter.admit(0, 10, ahead=True)
    assert limiter.admit(4, 10)
    assert window(max_peers=1).admit(0, 10, ahead=True)
    outbox = Outbox(window(max_peers=3))
    outbox.put(waiting(peer, 10, layer=layer) for peer, layer in enumerate([0, 1, 1, 1]))
    assert [outbox.take().batch.source for _ in range(2)] == [0, 1]
    assert outbox.take() is None
    outbox.undecided = 1
    assert outbox.take().batch.source == 2


def test_those_who_read_from_one_source_share_its_bytes():
    """100 bytes between 4 readers: 25 each, and always one READ each."""
    limiter = window(max_peer_bytes=100)
    assert [limiter.admit(1, 10, sharers=4) for _ in range(3)] == [True, True, False]
    assert limiter.admit(2, 90, sharers=4)
    assert not limiter.admit(2, 1, sharers=4)
    assert limiter.admit(3, 99)
    assert limiter.admit(3, 1)


def test_earlier_layers_go_first_and_a_job_can_be_taken_back():
    """What is put later for an earlier layer overtakes; what is dropped never goes."""
    outbox = Outbox(window())
    outbox.put([waiting(1, 1, layer=2, owner="c"), waiting(1, 1, layer=3, owner="d")])
    outbox.put([waiting(1, 1, layer=1, owner="a"), waiting(1, 1, layer=2, owner="b")])
    assert outbox.holds("b")
    outbox.drop("c")
    assert not outbox.holds("c")
    assert [outbox.take().owner for _ in range(3)] == ["a", "b", "d"]
    assert outbox.take() is None


def test_a_request_larger_than_every_limit_goes_alone():
    """It waits for the others and the others for it, but it goes."""
    limiter = window(max_bytes=10, max_peer_bytes=5)
    assert limiter.admit(1, 1)
    assert not limiter.admit(2, 100)
    limiter.done(1, 1)
    assert limiter.admit(2, 100)
    assert not limiter.admit(1, 0)


def test_requests_without_bytes_count_as_requests():
    """The cap on requests holds whatever they weigh."""
    limiter = window(max_requests=1)
    assert limiter.admit(1, 0)
    assert not limiter.admit(1, 0)


def test_a_window_refuses_nonsense():
    """Limits below one, and completions of what is not in flight."""
    with pytest.raises(ValueError, match="must be 1 or more"):
        window(max_requests=0)
    limiter = window()
    limiter.admit(1, 5)
    for peer, nbytes in ((2, 5), (1, 6)):
        with pytest.raises(ValueError, match=f"peer {peer} has .* {nbytes} are not"):
            limiter.done(peer, nbytes)
    assert (limiter.requests, limiter.nbytes) == (1, 5)
