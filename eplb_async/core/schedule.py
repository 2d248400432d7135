"""One rank's READs of one layer, cut into batches and let out under limits.

A batch is one post: rows of one source, bounded in bytes and descriptors, so that a lap of the poller, a
deadline and a cancel never wait behind one huge post.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

import numpy as np
from numpy.typing import NDArray

from eplb_async.core.plan import Move

__all__ = ["ALIGNMENT", "Batch", "Window", "pieces"]

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


def pieces(
    moves: Sequence[Move],
    row_bytes: Sequence[int],
    *,
    max_bytes: int,
    max_descriptors: int,
    rank: int,
    ep_size: int,
) -> tuple[Batch, ...]:
    """Cuts the READs among ``moves`` into batches; what is copied or loaded, and empty rows, take no part.

    Batches of different sources alternate, beginning with the ranks after ``rank``: readers do not all start
    on the same source. Only rows longer than ``max_bytes`` are split.

    Args:
        moves: What ``rank`` receives in one layer.
        row_bytes: Bytes of one expert row in each tensor of the layer ``[num_tensors]``.
        max_bytes: Most bytes in a batch.
        max_descriptors: Most descriptors in a batch.
        rank: The reader.
        ep_size: Ranks in the group.

    Raises:
        ValueError: A limit is below 1.
    """
    if max_bytes < 1 or max_descriptors < 1:
        raise ValueError(f"max_bytes={max_bytes} and max_descriptors={max_descriptors} must both be 1 or more")
    expert = _expert_pieces(row_bytes, max_bytes)
    by_source: dict[int, list[int]] = {}
    for index, move in enumerate(moves):
        if move.is_read:
            by_source.setdefault(move.source, []).append(index)
    queues = [
        _fill(source, np.array(by_source[source]), expert, max_bytes, max_descriptors)
        for source in sorted(by_source, key=lambda source: (source - rank) % ep_size)
    ]
    return tuple(batch for batch in chain.from_iterable(zip_longest(*queues)) if batch is not None)


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
    move = np.repeat(moves, expert.shape[1])
    tensor, offset, length = np.tile(expert, moves.size)
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


class Window:
    """Limits requests and bytes in flight, in total and per peer.

    What is alone in its scope is always admitted, however large: nothing waits for room that cannot come.
    """

    def __init__(self, *, max_bytes: int, max_requests: int, max_peer_bytes: int, max_peer_requests: int) -> None:
        """Starts empty.

        Args:
            max_bytes: Most bytes in flight.
            max_requests: Most requests in flight.
            max_peer_bytes: Most bytes in flight with one peer.
            max_peer_requests: Most requests in flight with one peer.

        Raises:
            ValueError: A limit is below 1.
        """
        limits = (max_requests, max_bytes, max_peer_requests, max_peer_bytes)
        if min(limits) < 1:
            raise ValueError(f"limits of requests and bytes must be 1 or more; they are {limits}")
        self._total_limit = (max_requests, max_bytes)
        self._peer_limit = (max_peer_requests, max_peer_bytes)
        self._total = (0, 0)
        self._peers: dict[Hashable, tuple[int, int]] = {}

    @property
    def requests(self) -> int:
        """Requests in flight."""
        return self._total[0]

    @property
    def nbytes(self) -> int:
        """Bytes in flight."""
        return self._total[1]

    def admit(self, peer: Hashable, nbytes: int) -> bool:
        """Counts a request as in flight if it fits; says whether it did."""
        mine = self._peers.get(peer, (0, 0))
        fits = _fits(self._total, nbytes, self._total_limit) and _fits(mine, nbytes, self._peer_limit)
        if fits:
            self._peers[peer] = (mine[0] + 1, mine[1] + nbytes)
            self._total = (self._total[0] + 1, self._total[1] + nbytes)
        return fits

    def done(self, peer: Hashable, nbytes: int) -> None:
        """Takes an admitted request out, with the same ``nbytes``.

        Raises:
            ValueError: That much is not in flight with this peer.
        """
        requests, held = self._peers.get(peer, (0, 0))
        if requests < 1 or held < nbytes:
            raise ValueError(f"peer {peer!r} has {requests} requests of {held} bytes in flight; {nbytes} are not")
        self._total = (self._total[0] - 1, self._total[1] - nbytes)
        if requests == 1:
            del self._peers[peer]
        else:
            self._peers[peer] = (requests - 1, held - nbytes)


def _fits(held: tuple[int, int], nbytes: int, limit: tuple[int, int]) -> bool:
    return held[0] == 0 or (held[0] < limit[0] and held[1] + nbytes <= limit[1])
