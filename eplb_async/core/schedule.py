"""One rank's READs of one layer, or of several small ones, cut into batches, and the order in which they go.

A batch is one post: rows of one source, bounded in bytes and descriptors, so that a lap of the poller, a
deadline and a cancel never wait behind one huge post.

All ranks have the same plan, so each works out by itself whose turn it is at which source: in each **turn** a reader
reads from one source and a source serves one reader (a colouring of the edges between readers and sources). Nobody
waits for a turn to end. It is an order, and readers that keep to it meet seldom at one source.

The turns of a source go on where those of earlier layers ended: READs of the next layer begin at sources that this one
leaves idle, and come last to those whose NIC it still needs.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain, zip_longest
from operator import and_

import numpy as np
from numpy.typing import NDArray

__all__ = ["ALIGNMENT", "Batch", "Turns", "pieces", "turns"]

ALIGNMENT = 4096
"""Bytes at whose multiples a row is cut."""

_Longs = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """What one post reads from one source: ``[D]`` descriptors, in the order of the moves.

    Attributes:
        source: Rank that is read.
        move: Index into the moves that were cut, int64 ``[D]``.
        tensor: Index of the tensor in its layer, int64 ``[D]``.
        offset: Bytes into the row, int64 ``[D]``.
        length: Bytes, all above 0, int64 ``[D]``.
        nbytes: Sum of ``length``.
    """

    source: int
    move: _Longs
    tensor: _Longs
    offset: _Longs
    length: _Longs
    nbytes: int

    def part(self, chosen: NDArray[np.bool_]) -> Batch:
        """Some of its descriptors, bool ``[D]``."""
        length = self.length[chosen]
        columns = self.move[chosen], self.tensor[chosen], self.offset[chosen]
        return Batch(self.source, *columns, length, int(length.sum()))


def pieces(
    sources: Sequence[int] | _Longs,
    row_bytes: Sequence[int],
    *,
    max_bytes: int,
    max_descriptors: int,
    rank: int,
    ep_size: int,
    order: Sequence[int] = (),
) -> tuple[Batch, ...]:
    """Cuts the READs among some moves into batches; what is copied or loaded, and empty rows, take no part.

    Only rows longer than ``max_bytes`` are split.

    Args:
        sources: Source of each move that ``rank`` receives, in one layer or in several that are alike
            ``[num_moves]``; ``rank`` for a local copy, -1 for a lost expert.
        row_bytes: Bytes of one expert row in each tensor of a layer ``[num_tensors]``.
        max_bytes: Most bytes in a batch.
        max_descriptors: Most descriptors in a batch.
        rank: The reader.
        ep_size: Ranks in the group.
        order: The source of each turn; its batches are spread evenly over its turns. Those of sources without a turn
            come last and alternate, beginning with the ranks after ``rank``.

    Raises:
        ValueError: A limit is below 1.
    """
    if max_bytes < 1 or max_descriptors < 1:
        raise ValueError(f"max_bytes={max_bytes} and max_descriptors={max_descriptors} must both be 1 or more")
    expert = _expert_pieces(row_bytes, max_bytes)
    given = np.asarray(sources, dtype=np.int64)
    queues = {
        source: deque(_fill(source, np.flatnonzero(given == source), expert, max_bytes, max_descriptors))
        for source in sorted(set(given.tolist()) - {rank, -1}, key=lambda source: (source - rank) % ep_size)
    }
    left = Counter(order)
    batches: list[Batch] = []
    for source in order:
        queue = queues.get(source, deque())
        batches += [queue.popleft() for _ in range(-(-len(queue) // left[source]))]
        left[source] -= 1
    alternating = chain.from_iterable(zip_longest(*queues.values()))
    return (*batches, *(batch for batch in alternating if batch is not None))


@dataclass(frozen=True, slots=True)
class Turns:
    """When a reader reads from whom in the layers that it reads together.

    Attributes:
        order: The source of each of its turns.
        readers: Ranks that read from each source ``[ep_size]``.
        taken: Turns in which each source serves, in these layers and those before, as bits ``[ep_size]``.
    """

    order: tuple[int, ...]
    readers: tuple[int, ...]
    taken: tuple[int, ...]


def turns(
    reader: NDArray[np.int32],
    source: NDArray[np.int32],
    *,
    rank: int,
    ep_size: int,
    expert_bytes: int,
    max_bytes: int,
    taken: Sequence[int] = (),
) -> Turns:
    """Gives each READ of some layers its turn; every rank that asks for the same layers comes to the same turns.

    A turn is one expert, or as many of one source as fit into a batch. Readers and sources at equal distance around
    the group are paired first and all at once, so that where everybody reads from everybody no turn is left empty.
    First fit takes less than twice the least number of turns, and about that number on what is met in practice.

    Args:
        reader: Reader of each READ of the layers ``[num_reads]``.
        source: Its source ``[num_reads]``.
        rank: Whose turns are wanted.
        ep_size: Ranks in the group.
        expert_bytes: Bytes of one expert, all its tensors together.
        max_bytes: Most bytes in a batch.
        taken: What the turns of the layers before say of them; default: nothing is before.
    """
    pairs, count = np.unique(reader.astype(np.int64) * ep_size + source, return_counts=True)
    readers = np.bincount(pairs % ep_size, minlength=ep_size)
    shares = np.minimum(count, -(-count * expert_bytes // max_bytes))
    pair = np.repeat(np.arange(pairs.size), shares)
    nth = np.arange(pair.size) - np.repeat(np.cumsum(shares) - shares, shares)
    by, at = np.divmod(pairs[pair], ep_size)
    first = np.lexsort((at, (at - by) % ep_size, nth))
    reads, serves = [0] * ep_size, list(taken) or [0] * ep_size  # turns that are taken, as bits
    mine: list[tuple[int, int]] = []
    for by_rank, at_rank in zip(by[first].tolist(), at[first].tolist(), strict=True):
        free = ~(reads[by_rank] | serves[at_rank])
        turn = free & -free
        reads[by_rank] |= turn
        serves[at_rank] |= turn
        if by_rank == rank:
            mine.append((turn, at_rank))
    order = tuple(at_rank for _, at_rank in sorted(mine))
    return Turns(order, tuple(readers.tolist()), _without_full(serves))


def _without_full(serves: Sequence[int]) -> tuple[int, ...]:
    """Turns without the first ones, in which all sources serve: nothing more goes there."""
    full = reduce(and_, (bits for bits in serves if bits), -1)
    first = (~full & (full + 1)).bit_length() - 1 if full != -1 else 0
    return tuple(bits >> first for bits in serves)


def _expert_pieces(row_bytes: Sequence[int], max_bytes: int) -> _Longs:
    """Tensor, offset and length of each piece of one expert ``[3, num_pieces]``."""
    step = max_bytes - max_bytes % ALIGNMENT or max_bytes
    cut = [
        (tensor, offset, min(size, nbytes - offset))
        for tensor, nbytes in enumerate(row_bytes)
        for size in [nbytes if nbytes <= max_bytes else step]
        for offset in range(0, nbytes, size or 1)
    ]
    return np.array(cut, dtype=np.int64).reshape(-1, 3).T


def _fill(source: int, moves: _Longs, expert: _Longs, max_bytes: int, max_descriptors: int) -> list[Batch]:
    """Puts the pieces of all experts from one source into as few batches as their order allows."""
    count = expert.shape[1]
    move = np.repeat(moves, count)
    tensor, offset, length = np.broadcast_to(expert[:, None], (3, moves.size, count)).reshape(3, move.size)
    ends = np.cumsum(length)
    batches = []
    first = before = 0
    while first < move.size:
        fitting = int(np.searchsorted(ends, before + max_bytes, side="right"))
        part = slice(first, min(fitting, first + max_descriptors))
        nbytes = int(ends[part.stop - 1]) - before
        batches.append(Batch(source, move[part], tensor[part], offset[part], length[part], nbytes))
        first, before = part.stop, before + nbytes
    return batches
