"""Batches: every byte of every READ once, under the limits; turns: whose it is at which source."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_async.core.plan import Move
from eplb_async.core.schedule import ALIGNMENT, turns
from eplb_async.core.schedule import pieces as pieces_of
from eplb_async.core.window import Window

ROOMY = {"max_bytes": 1 << 30, "max_descriptors": 1 << 20}


def reads(*sources, rank=0):
    """One move per source, experts and slots numbered."""
    return [Move(rank, expert, source, expert, (expert,)) for expert, source in enumerate(sources)]


def pieces(moves, row_bytes, **limits):
    """The pieces of what these moves read."""
    return pieces_of([move.source for move in moves], row_bytes, **limits)


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


def test_c6_three_hundred_tiny_rows_under_a_cap_of_32():
    """All go out, never more than 32 at once, and 32 whenever that many are left."""
    names = ("max_bytes", "max_requests", "max_peer_bytes", "max_peer_requests", "max_peers", "few_bytes")
    limiter = Window(**{**dict.fromkeys(names, 1 << 40), "max_requests": 32})
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


def test_batches_go_in_turns():
    """The batches of a source are spread over its turns; sources without a turn come last and alternate."""
    moves = reads(1, 1, 1, 2, 3, 3, 4)
    limits = {"max_bytes": 8, "max_descriptors": 1}
    batches = pieces(moves, [8], rank=0, ep_size=5, order=(2, 1, 4, 1), **limits)
    assert [batch.source for batch in batches] == [2, 1, 1, 4, 1, 3, 3]
    batches = pieces(moves, [8, 4], rank=0, ep_size=5, order=(2, 1, 2, 2, 1, 1), **limits)
    assert [batch.source for batch in batches] == [2, 1, 1, 2, 1, 1, 1, 1, 3, 4, 3, 4, 3, 3]


layers_reads = st.integers(2, 9).flatmap(
    lambda n: st.tuples(
        st.just(n), st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).filter(lambda e: e[0] != e[1]))
    )
)


def all_turns(n, edges, expert_bytes=10, max_bytes=10):
    """Turns of every rank."""
    reader, source = np.array(edges, dtype=np.int32).reshape(-1, 2).T
    sizes = {"expert_bytes": expert_bytes, "max_bytes": max_bytes}
    return [turns(reader, source, rank=rank, ep_size=n, **sizes) for rank in range(n)]


@given(layers_reads, st.sampled_from([1, 10, 1000]), st.randoms(use_true_random=False))
def test_turns_hold_each_read_once_and_do_not_depend_on_the_order_of_the_plan(layer, expert_bytes, random):
    """A turn for each expert, or for as many as fit into a batch; the same from the same READs in another order."""
    n, edges = layer
    found = all_turns(n, edges, expert_bytes, 100)
    for rank, mine in enumerate(found):
        wanted = Counter(source for reader, source in edges if reader == rank)
        assert Counter(mine.order) == {
            source: min(count, -(-count * expert_bytes // 100)) for source, count in wanted.items()
        }
        assert mine.readers == tuple(len({r for r, s in edges if s == source}) for source in range(n))
    shuffled = list(edges)
    random.shuffle(shuffled)
    assert all_turns(n, shuffled, expert_bytes, 100) == found


def test_the_turns_of_a_source_go_on_in_the_next_layer():
    """A reader begins at the source that served least before, and comes last to the one that served most.

    Turns in which all sources have served are forgotten, so what is kept does not grow with the layers.
    """
    edges = np.array([(3, 0), (3, 1), (3, 2)], dtype=np.int32)
    sizes = {"rank": 3, "ep_size": 4, "expert_bytes": 10, "max_bytes": 10}
    alone = turns(*edges.T, **sizes)
    assert alone.order == (0, 1, 2)
    assert alone.taken == (0b1, 0b10, 0b100, 0)
    after = turns(*edges.T, **sizes, taken=(0b111, 0b11, 0b1, 0))
    assert after.order == (2, 1, 0)
    assert after.taken == (0b11, 0b1, 0, 0)
    taken = ()
    for _ in range(100):
        taken = turns(*edges.T, **sizes, taken=taken).taken
    assert max(taken) < 1 << 4


def crowds(orders):
    """Most readers that one source serves in each step, if every rank takes its turns one after the other."""
    steps = max(map(len, orders))
    return [max(Counter(order[i] for order in orders if i < len(order)).values()) for i in range(steps)]


@pytest.mark.parametrize("n", [2, 3, 8, 13])
@pytest.mark.parametrize("times", [1, 3])
def test_where_everybody_reads_from_everybody_no_source_serves_two_at_once(n, times):
    """The least number of turns, and one reader at each source in each of them."""
    edges = [(r, s) for r in range(n) for s in range(n) if r != s] * times
    assert crowds([mine.order for mine in all_turns(n, edges)]) == [1] * times * (n - 1)


def test_readers_that_keep_to_their_turns_seldom_meet():
    """Random READs of 32 ranks, 10 each: until few are left, fewer meet than if each went around the group."""
    rng = np.random.default_rng(7)
    ours, around = [], []
    for _ in range(10):
        wanted = [[int(s) for s in rng.choice([s for s in range(32) if s != r], 10)] for r in range(32)]
        ours += crowds([mine.order for mine in all_turns(32, [(r, s) for r in range(32) for s in wanted[r]])])[:7]
        around += crowds([sorted(wanted[r], key=lambda s: (s - r) % 32) for r in range(32)])[:7]
    assert np.mean(ours) < 0.75 * np.mean(around), (np.mean(ours), np.mean(around))


def test_a_hot_source_is_busy_from_the_first_turn_on():
    """All of 16 ranks need a row of rank 0 and rows of others: in the first turn exactly one reads from rank 0."""
    edges = [(r, s) for r in range(1, 16) for s in (0, r % 15 + 1, (r + 6) % 15 + 1)]
    first = [mine.order[0] for mine in all_turns(16, edges) if mine.order]
    assert first.count(0) == 1
    assert max(Counter(first).values()) <= 2
