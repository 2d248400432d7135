"""What a rank keeps in memory for a group of many: its plan, what it knows of its peers, its part in the protocol."""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from eplb_async.communicator.members import Member, Roster
from eplb_async.core.layout import Layout, TensorPlace, TensorSpec
from eplb_async.core.plan import MigrationPlan
from eplb_async.core.protocol import Protocol
from eplb_async.nixl.card import seal, unseal
from eplb_async.nixl.native import Extent
from eplb_async.nixl.peers import Peer
from eplb_async.rendezvous import blob

__all__ = ["RankMemory", "rank_memory"]

_LAYERS, _TENSORS, _SLOTS = 58, 3, 8
_AGENT_BYTES, _REGION_BYTES = 450, 150  # NIXL's metadata of one agent, and of each registered region
_NO_CONTENT = (type, ModuleType, FunctionType)


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes on one rank, at 58 layers of 3 tensors and 8 slots a rank.

    Attributes:
        plan: The plan of one migration, both placements included.
        peers: Layouts and cards of all peers; what NIXL keeps of them is not known.
        protocol: The coordinator's protocol.
    """

    plan: int
    peers: int
    protocol: int

    @property
    def mib(self) -> float:
        """All together, in MiB."""
        return (self.plan + self.peers + self.protocol) / (1 << 20)


def rank_memory(ranks: int, plan: MigrationPlan) -> RankMemory:
    """Builds what a rank holds, and adds it up.

    Args:
        ranks: Ranks.
        plan: A plan of 58 layers.
    """
    mine = _layout(0)
    roster = Roster()
    for rank in range(1, ranks):
        peer = _peer(rank, _layout(rank))
        sealed = blob.seal(_introduction(rank, ranks, peer.blob), bytes(blob.KEY_SIZE))
        said = blob.open_sealed(sealed, bytes(blob.KEY_SIZE), group="default", rank=rank, ep_size=ranks)
        layout = Layout.from_plain(said.layout, like=mine)
        roster.put(Member(rank, said.incarnation, said.node, peer, layout))
    protocol = Protocol(rank=0, ep_size=ranks, num_layers=_LAYERS, settle_timeout=10, ping_interval=1)
    return RankMemory(deep_size(plan), deep_size(roster), deep_size(protocol))


def deep_size(root: Any) -> int:
    """Bytes of an object and all that it refers to, classes, modules and functions apart."""
    seen: set[int] = set()
    todo = [root]
    total = 0
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, _NO_CONTENT):
            continue
        seen.add(id(one))
        total += sys.getsizeof(one)
        todo += gc.get_referents(one)
    return total


def _layout(rank: int) -> Layout:
    base = (rank + 1) << 40
    return Layout(
        tuple(
            tuple(
                TensorPlace(
                    TensorSpec(f"tensor {i}", 1 << 20, 1 << 20, _SLOTS, (1 << 20,), (1,), "torch.uint8", "cuda:0"),
                    base + ((layer * _TENSORS + i) << 30),
                )
                for i in range(_TENSORS)
            )
            for layer in range(_LAYERS)
        )
    )


def _introduction(rank: int, ranks: int, card: bytes) -> blob.Introduction:
    return blob.Introduction(
        group="default",
        rank=rank,
        ep_size=ranks,
        agent=f"default/{rank}",
        incarnation=1 << 16,
        node="a node",
        metadata=card,
        layout=_layout(rank).to_plain(),
        placement_digest=bytes(16),
    )


def _peer(rank: int, layout: Layout) -> Peer:
    extents = [
        Extent(f"layer {layer} {place.spec.name}", place.address, 1 << 20, 1 << 20, _SLOTS, "VRAM", 0)
        for layer, places in enumerate(layout.layers)
        for place in places
    ]
    card = seal(f"default/{rank}", bytes(_AGENT_BYTES + _REGION_BYTES * len(extents)), extents, b"")
    return Peer(f"default/{rank}", card, unseal(card, b"", limit=1 << 24).extents())
