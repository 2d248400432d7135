"""Blocks: what a READ moves from where to where, lined up, checked and cut to size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from eplb_async.errors import TransferError
from eplb_async.nixl.native import Descriptors
from eplb_async.nixl.regions import Span
from eplb_async.settings import Settings


@dataclass(frozen=True, slots=True)
class Blocks:
    """What one READ moves: two descriptor lists ``[n, 3]`` of equal lengths.

    Attributes:
        local: Where the bytes go.
        remote: Where they come from.
        local_memory: NIXL's memory type of our side.
        remote_memory: NIXL's memory type of the peer's side.
    """

    local: Descriptors
    remote: Descriptors
    local_memory: str
    remote_memory: str

    @property
    def nbytes(self) -> int:
        """Bytes to move."""
        return int(self.local[:, 1].sum())

    def check(self, peer: str) -> None:
        """Refuse lists that do not match.

        Raises:
            TransferError: Shapes or lengths differ, or a descriptor is empty.
        """
        local, remote = self.local, self.remote
        if local.shape != remote.shape or local.ndim != 2 or local.shape[1:] != (3,) or not len(local):
            raise TransferError(f"descriptor lists of shapes {local.shape} and {remote.shape}, need equal [n, 3]")
        if not np.array_equal(local[:, 1], remote[:, 1]):
            at = int(np.argmax(local[:, 1] != remote[:, 1]))
            raise TransferError(f"descriptor {at}: {local[at, 1]} bytes here, {remote[at, 1]} bytes at {peer}")
        if not local[:, 1].all():
            raise TransferError("a descriptor of zero bytes")


def pair(local: Span, remote: Span) -> Blocks:
    """Line up the rows of two spans.

    Raises:
        TransferError: They differ in bytes, or in rows where one of them is strided.
    """
    if local.nbytes != remote.nbytes:
        raise TransferError(
            f"local {local.extent.name!r} is {local.nbytes} bytes, remote {remote.extent.name!r} {remote.nbytes}"
        )
    ours, theirs = local.descriptors(), remote.descriptors()
    if len(ours) != len(theirs):
        if len(ours) > 1 and len(theirs) > 1:
            raise TransferError(
                f"local {local.extent.name!r} has rows of {local.extent.row_bytes} bytes, remote "
                f"{remote.extent.name!r} of {remote.extent.row_bytes}"
            )
        ours, theirs = (_cut_like(ours, theirs), theirs) if len(ours) == 1 else (ours, _cut_like(theirs, ours))
    return Blocks(ours, theirs, local.memory, remote.memory)


def chunks(blocks: Blocks, settings: Settings) -> Iterator[Blocks]:
    """Cut into posts of at most ``max_post_bytes`` bytes and ``max_post_descriptors`` descriptors."""
    limit = settings.max_post_bytes
    local, remote = blocks.local, blocks.remote
    if len(local) and int(local[:, 1].max()) > limit:
        local, remote = _split(local, limit), _split(remote, limit)
    start, total = 0, 0
    for i, length in enumerate(local[:, 1].tolist()):
        if i > start and (total + length > limit or i - start >= settings.max_post_descriptors):
            yield Blocks(local[start:i], remote[start:i], blocks.local_memory, blocks.remote_memory)
            start, total = i, 0
        total += length
    if start < len(local):
        yield Blocks(local[start:], remote[start:], blocks.local_memory, blocks.remote_memory)


def _cut_like(one: Descriptors, pattern: Descriptors) -> Descriptors:
    cut = np.empty_like(pattern)
    cut[:, 1] = pattern[:, 1]
    cut[:, 2] = one[0, 2]
    cut[0, 0] = one[0, 0]
    cut[1:, 0] = one[0, 0] + np.cumsum(pattern[:-1, 1], dtype=np.uint64)
    return cut


def _split(blocks: Descriptors, limit: int) -> Descriptors:
    counts = -(-blocks[:, 1].astype(np.int64) // limit)
    out = np.repeat(blocks, counts, axis=0)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    offset = ((np.arange(len(out)) - first) * limit).astype(np.uint64)
    out[:, 0] += offset
    out[:, 1] = np.minimum(np.uint64(limit), out[:, 1] - offset)
    return out
