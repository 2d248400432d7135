"""A READ of any size: split into bounded posts, awaited as one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from eplb_async.errors import NixlTransferFailed, TransferError
from eplb_async.nixl.blocks import chunks, pair
from eplb_async.nixl.endpoint import Endpoint
from eplb_async.nixl.leases import intervals_of
from eplb_async.nixl.regions import Span
from eplb_async.nixl.transfer import Transfer, TransferStats


async def read(endpoint: Endpoint, local: Span, remote: Span, *, timeout: float, notif: bytes = b"") -> TransferStats:
    """Read a peer's rows into ours; runs on the engine loop.

    The notification goes with the last post, which is made when all others have completed. Fails only when
    every post has ended or is in quarantine (I-5); the error then speaks of the whole READ, not of one post.
    """
    peer = endpoint.peers.get(remote.owner)
    if peer is None:
        raise TransferError(f"region {remote.extent.name!r} belongs to {remote.owner or 'us'}, which is no peer")
    loop, clock = asyncio.get_running_loop(), endpoint.engine.now
    deadline, started = loop.time() + timeout, clock()
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
                    timeout=max(0.0, deadline - loop.time()),
                    local_memory=piece.local_memory,
                    remote_memory=piece.remote_memory,
                    notif=notif if last else b"",
                    within=whole,
                )
            )
            if not last:
                await asyncio.sleep(0)
        for transfer in posted:
            await transfer.future
    except BaseException as error:
        for transfer in posted:
            endpoint.abandon(transfer)
        if isinstance(error, NixlTransferFailed):
            error.nbytes, error.elapsed = local.nbytes, clock() - started
            error.failures = tuple(t.error for t in posted if t.error is not None and t.error is not error)
        raise
    finally:
        endpoint.end_lease(whole)
    if notif and not pieces:
        endpoint.notify(peer, notif)
    return TransferStats(local.nbytes, clock() - started, len(pieces))


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
