"""Batches: every byte of every READ once, under the limits; the window: never more in flight than allowed."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_async.core.plan import Move
from eplb_async.core.schedule import ALIGNMENT, Window, pieces

ROOMY = {"max_bytes": 1 << 30, "max_descriptors": 1 << 20}


def reads(*sources, rank=0):
    """One move per source, experts and slots numbered."""
    return [Move(rank, expert, source, expert, (expert,)) for expert, source in enumerate(sources)]


moves_of_rank_2 = st.lists(st.integers(0, 4), max_size=12).map(lambda sources: reads(*sources, rank=2))
row_sizes = st.lists(st.sampled_from([0, 1, 7, 4096, 5000, 3 * 4096, 50_000]), max_size=4)


@given(moves_of_rank_2, row_sizes, st.integers(1, 60_000), st.integers(1, 6))
def test_every_byte_of_every_read_is_read_once(moves, row_bytes, max_bytes, max_descriptors):
    """The pieces of a row adjoin from its first byte to its last; local copies and empty rows have none."""
    limits = {"max_bytes": max(max_bytes, 1000), "max_descriptors": max_descriptors}
    covered = {}
    for batch in pieces(moves, row_bytes, rank=2, ep_size=5, **limits):
        columns = zip(batch.move, batch.tensor, batch.offset, batch.length, strict=True)
        for move, tensor, offset, length in columns:
            assert moves[move].source == batch.source
            assert covered.get((move, tensor), 0) == offset
            assert length > 0
            covered[move, tensor] = offset + length
    assert covered == {
        (move, tensor): nbytes
        for move in range(len(moves))
        if not moves[move].is_local
        for tensor, nbytes in enumerate(row_bytes)
        if nbytes
    }


@given(moves_of_rank_2, row_sizes, st.integers(100, 60_000), st.integers(1, 6))
def test_no_batch_exceeds_its_limits_and_only_long_rows_are_split(moves, row_bytes, max_bytes, max_descriptors):
    """Bytes and descriptors are bounded; cuts are aligned where the limit allows it."""
    limits = {"max_bytes": max_bytes, "max_descriptors": max_descriptors}
    for batch in pieces(moves, row_bytes, rank=2, ep_size=5, **limits):
        assert batch.nbytes == batch.length.sum() <= max_bytes
        assert 1 <= len(batch.length) <= max_descriptors
        whole = np.array(row_bytes)[batch.tensor]
        assert np.array_equal(batch.length < whole, whole > max_bytes)
        if max_bytes >= ALIGNMENT:
            assert not (batch.offset % ALIGNMENT).any()


@given(moves_of_rank_2, st.integers(1, 3))
def test_sources_alternate_from_the_rank_after_the_reader(moves, max_descriptors):
    """The first round goes once over all sources, in the order rank+1, rank+2, … around the group."""
    batches = pieces(moves, [8], rank=2, ep_size=5, max_bytes=64, max_descriptors=max_descriptors)
    order = [batch.source for batch in batches]
    left = Counter(order)
    expected = []
    while left:
        expected += [source for source in (3, 4, 0, 1) if left[source]]
        left -= Counter(set(left))
    assert order == expected


def test_readers_start_on_different_sources():
    """Four readers that each need a row of every other rank begin on four sources."""
    first = [
        pieces(reads(*({0, 1, 2, 3} - {rank}), rank=rank), [8], rank=rank, ep_size=4, **ROOMY)[0].source
        for rank in range(4)
    ]
    assert first == [1, 2, 3, 0]


def test_small_experts_of_one_source_share_a_batch():
    """128 experts of three tensors are one post if the limits allow it."""
    (batch,) = pieces(reads(*[1] * 128), [65536, 65536, 64], rank=0, ep_size=2, **ROOMY)
    assert (len(batch.length), batch.nbytes) == (384, 128 * 131136)
    assert batch.move[:4].tolist() == [0, 0, 0, 1]
    assert batch.tensor[:4].tolist() == [0, 1, 2, 0]


def test_a_row_longer_than_a_batch_is_cut_at_aligned_offsets():
    """10 000 bytes under a limit of 5 000: 4096, 4096 and the rest."""
    batches = pieces(reads(1), [10_000], rank=0, ep_size=2, max_bytes=5_000, max_descriptors=8)
    assert [(b.offset.tolist(), b.length.tolist()) for b in batches] == [
        ([0], [4096]),
        ([4096], [4096]),
        ([8192], [1808]),
    ]
    assert {column.dtype for b in batches for column in (b.move, b.tensor, b.offset, b.length)} == {np.dtype("int64")}


def test_c17_empty_rows_are_skipped_and_an_empty_plan_posts_nothing():
    """A tensor without bytes keeps its index; no moves, or none but empty rows, give no batch."""
    (batch,) = pieces(reads(1), [128, 0, 16], rank=0, ep_size=2, **ROOMY)
    assert batch.tensor.tolist() == [0, 2]
    assert pieces([], [128], rank=0, ep_size=2, **ROOMY) == ()
    assert pieces(reads(1), [0], rank=0, ep_size=2, **ROOMY) == ()
    assert pieces(reads(0, 0), [128], rank=0, ep_size=2, **ROOMY) == ()


@pytest.mark.parametrize("limits", [{"max_bytes": 0}, {"max_descriptors": 0}])
def test_limits_below_one_are_refused(limits):
    """A batch must be able to hold something."""
    with pytest.raises(ValueError, match="must both be 1 or more"):
        pieces([], [1], rank=0, ep_size=2, **{**ROOMY, **limits})


def window(**limits):
    """A window without limits but those given."""
    names = ("max_bytes", "max_requests", "max_peer_bytes", "max_peer_requests")
    return Window(**{**dict.fromkeys(names, 1 << 40), **limits})


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 50)), max_size=40),
    st.fixed_dictionaries(
        {name: st.integers(1, 60) for name in ("max_bytes", "max_requests", "max_peer_bytes", "max_peer_requests")}
    ),
    st.randoms(use_true_random=False),
)
def test_a_window_keeps_its_limits_and_lets_everything_through(requests, limits, random):
    """Limits hold unless a request is alone in its scope; retrying lets all through."""
    limiter = window(**limits)
    waiting, flying = list(requests), []
    while waiting or flying:
        refused = []
        for peer, nbytes in waiting:
            if limiter.admit(peer, nbytes):
                flying.append((peer, nbytes))
            else:
                refused.append((peer, nbytes))
        waiting = refused
        assert flying
        assert (limiter.requests, limiter.nbytes) == (len(flying), sum(nbytes for _, nbytes in flying))
        for peer in range(3):
            theirs = [nbytes for to, nbytes in flying if to == peer]
            assert len(theirs) <= limits["max_peer_requests"]
            assert sum(theirs) <= limits["max_peer_bytes"] or len(theirs) == 1
        assert len(flying) <= limits["max_requests"]
        assert sum(nbytes for _, nbytes in flying) <= limits["max_bytes"] or len(flying) == 1
        limiter.done(*flying.pop(random.randrange(len(flying))))
    assert (limiter.requests, limiter.nbytes) == (0, 0)


def test_c6_three_hundred_tiny_rows_under_a_cap_of_32():
    """All go out, never more than 32 at once, and 32 whenever that many are left."""
    limiter = window(max_requests=32)
    batches = list(pieces(reads(*[1] * 300), [8], rank=0, ep_size=2, max_bytes=1 << 20, max_descriptors=1))
    flying, most = [], 0
    while batches or flying:
        while batches and limiter.admit(batches[0].source, batches[0].nbytes):
            flying.append(batches.pop(0))
        most = max(most, len(flying))
        assert len(flying) == limiter.requests == min(32, len(batches) + len(flying))
        done = flying.pop(0)
        limiter.done(done.source, done.nbytes)
    assert most == 32


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
