"""The READs of one call: few posts for each source, a bounded number in flight, at the end all over or quarantined."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from eplb_async.core.layout import Layout
from eplb_async.errors import NixlTransferFailed
from eplb_async.integrations.vllm.tensors import Fetch, Tensors, blocks_of
from eplb_async.nixl.blocks import Blocks, chunks
from eplb_async.nixl.endpoint import Endpoint, Peer
from eplb_async.nixl.transfer import Origin, Transfer
from eplb_async.settings import Settings

__all__ = ["Post", "posts_of", "read_all"]


@dataclass(frozen=True, slots=True)
class Post:
    """One READ to post.

    Attributes:
        blocks: What it moves.
        origin: Rank, layer and experts, for errors.
    """

    blocks: Blocks
    origin: Origin


def posts_of(
    fetches: Iterable[Fetch],
    layer: int,
    tensors: Tensors,
    layouts: Mapping[int, Layout],
    *,
    rank: int,
    settings: Settings,
) -> list[Post]:
    """The READs of a call, one of each source in turn, beginning with the rank after this one.

    Args:
        fetches: What is received.
        layer: The layer.
        tensors: This rank's.
        layouts: The others' weights.
        rank: This rank.
        settings: How large a post may be.
    """
    by_source: dict[int, list[Fetch]] = {}
    for fetch in fetches:
        by_source.setdefault(fetch.source, []).append(fetch)
    lists = []
    for source in sorted(by_source, key=lambda other: (other - rank) % (len(layouts) + 1)):
        wanted = by_source[source]
        origin = Origin(source, layer, tuple(sorted(fetch.expert for fetch in wanted)))
        pieces = blocks_of(wanted, layer, tensors, layouts[source])
        lists.append([Post(piece, origin) for blocks in pieces for piece in chunks(blocks, settings)])
    return [post for turn in itertools.zip_longest(*lists) for post in turn if post is not None]


async def read_all(endpoint: Endpoint, posts: Sequence[Post], peers: Mapping[int, Peer], *, deadline: float) -> None:
    """Post them in order, as far as the limits of the settings let them out, and wait for their end.

    Cancelled or failed: those that have not ended are in quarantine, and their memory stays leased (I-3, I-5).

    Raises:
        NixlTransferFailed: One failed; the others that did are in its ``failures``.
    """
    loop = asyncio.get_running_loop()
    sent: list[Transfer] = []
    pending: list[Transfer] = []
    try:
        for post in posts:
            peer = peers[post.origin.rank if post.origin.rank is not None else -1]
            await _room(endpoint, pending, peer.name, post.blocks.nbytes)
            sent.append(
                endpoint.post(
                    post.blocks.local,
                    post.blocks.remote,
                    peer,
                    timeout=max(0.0, deadline - loop.time()),
                    local_memory=post.blocks.local_memory,
                    remote_memory=post.blocks.remote_memory,
                    origin=post.origin,
                )
            )
            pending.append(sent[-1])
            await asyncio.sleep(0)  # a post can do the whole copy: messages are heard in between
        for transfer in sent:
            await transfer.future
    except BaseException as error:
        for transfer in sent:
            endpoint.abandon(transfer)
        if isinstance(error, NixlTransferFailed):
            error.failures = tuple(t.error for t in sent if t.error is not None and t.error is not error)
        raise


async def _room(endpoint: Endpoint, pending: list[Transfer], peer: str, nbytes: int) -> None:
    """Wait until one more may be in flight.

    Args:
        endpoint: Whose limits hold.
        pending: READs that had not ended when it was looked at last; those that have are taken out.
        peer: Whom one more would be from.
        nbytes: Its length.

    Raises:
        NixlTransferFailed: One that was posted has failed.
    """
    limits = endpoint.settings
    while True:
        for transfer in pending:
            if transfer.error is not None:
                raise transfer.error
        pending[:] = [transfer for transfer in pending if not transfer.future.done()]
        if not pending or (
            len(pending) < limits.max_requests_in_flight
            and sum(transfer.peer == peer for transfer in pending) < limits.max_peer_requests_in_flight
            and sum(transfer.nbytes for transfer in pending) + nbytes <= limits.max_bytes_in_flight
        ):
            return
        await asyncio.wait([transfer.future for transfer in pending], return_when=asyncio.FIRST_COMPLETED)
