"""A READ of any size: split into bounded posts, awaited as one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from eplb_async.errors import NixlTransferFailed, TransferError
from eplb_async.nixl.endpoint import Endpoint
from eplb_async.nixl.native import Descriptors
from eplb_async.nixl.regions import Span, intervals_of
from eplb_async.nixl.transfer import Transfer, TransferStats
from eplb_async.settings import Settings


@dataclass(frozen=True, slots=True)
class Blocks:
    """Two descriptor lists of equal lengths: from where to where."""

    local: Descriptors
    remote: Descriptors
    local_memory: str
    remote_memory: str


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


async def read(endpoint: Endpoint, local: Span, remote: Span, *, timeout: float, notif: bytes = b"") -> TransferStats:
    """Read a peer's rows into ours; runs on the engine loop.

    The notification goes with the last post, which is made when all others have completed. Fails only when
    every post has ended or is in quarantine (I-5).
    """
    peer = endpoint.peers.get(remote.owner)
    if peer is None:
        raise TransferError(f"region {remote.extent.name!r} belongs to {remote.owner or 'us'}, which is no peer")
    loop = asyncio.get_running_loop()
    started = loop.time()
    blocks = pair(local, remote)
    pieces = list(chunks(blocks, endpoint.settings))
    rows = f"region {local.extent.name!r}, rows {local.first}..{local.first + local.count}"
    whole = _Whole(local.nbytes, peer.name)  # the lease of what is not posted yet, and of what is
    posted: list[Transfer] = []
    endpoint.leases.acquire(whole, intervals_of(blocks.local), rows)
    try:
        for i, piece in enumerate(pieces):
            last = i == len(pieces) - 1
            await _until_below(posted, 1 if last and notif else endpoint.settings.max_peer_requests_in_flight)
            posted.append(
                endpoint.post(
                    piece.local,
                    piece.remote,
                    peer,
                    timeout=max(0.0, started + timeout - loop.time()),
                    local_memory=piece.local_memory,
                    remote_memory=piece.remote_memory,
                    notif=notif if last else b"",
                    within=whole,
                )
            )
            await asyncio.sleep(0)
        for transfer in posted:
            await transfer.future
    except BaseException as error:
        for transfer in posted:
            endpoint.abandon(transfer)
        if isinstance(error, NixlTransferFailed):
            error.failures = tuple(t.error for t in posted if t.error is not None and t.error is not error)
        raise
    finally:
        endpoint.end_lease(whole)
    if notif and not pieces:
        endpoint.notify(peer, notif)
    return TransferStats(local.nbytes, loop.time() - started, len(pieces))


@dataclass(frozen=True, slots=True, eq=False)
class _Whole:
    nbytes: int
    peer: str

    def __str__(self) -> str:
        return f"a READ of {self.nbytes} bytes from {self.peer}"


async def _until_below(posted: list[Transfer], room: int) -> None:
    while True:
        pending = [t.future for t in posted if not t.future.done()]
        for transfer in posted:
            if transfer.error is not None:
                raise transfer.error
        if len(pending) < room:
            return
        await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)


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
