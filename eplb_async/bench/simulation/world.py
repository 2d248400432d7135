"""What is simulated: how many ranks, what their experts weigh, what network joins them, what placements they change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eplb_async.bench.simulation.network import Network
from eplb_async.core.placement import Placement
from eplb_async.core.plan import MigrationPlan
from eplb_async.testing.placements import random_placement

__all__ = ["World", "lower_bound", "random_pair", "skewed_pair"]

_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A group of ranks and its network.

    Attributes:
        ranks: Ranks.
        layers: Layers.
        slots: Slots of each rank.
        row_bytes: Modelled bytes of an expert row in each tensor.
        factor: Modelled bytes that each real byte stands for.
        bytes_per_second: Of each rank's NIC, in either direction.
        latency: Seconds of a message, and of the news that a READ has ended.
        message_seconds: What a control message costs at either end.
        ranks_per_node: Ranks that share a host.
        node_bytes_per_second: Of each rank within its host; ``None``: such READs go through the NIC.
    """

    ranks: int
    layers: int = 4
    slots: int = 8
    row_bytes: tuple[int, ...] = (28 * _MIB, 14 * _MIB)
    factor: int = 3584
    bytes_per_second: float = 50e9
    latency: float = 20e-6
    message_seconds: float = 20e-6
    ranks_per_node: int = 1
    node_bytes_per_second: float | None = None

    @property
    def nodes(self) -> list[int]:
        """Host of each rank."""
        return [rank // self.ranks_per_node for rank in range(self.ranks)]

    def network(self, *, resolution: float = 0.0) -> Network:
        """The network, with nothing on it."""
        return Network(
            self.ranks,
            bytes_per_second=self.bytes_per_second,
            latency=self.latency,
            nodes=self.nodes,
            node_bytes_per_second=self.node_bytes_per_second,
            resolution=resolution,
        )


def lower_bound(plan: MigrationPlan, world: World) -> float:
    """Seconds that the busiest NIC, or way into or out of a rank within its host, needs for its bytes alone."""
    reads = np.flatnonzero((plan.source >= 0) & (plan.source != plan.reader))
    source, reader = plan.source[reads], plan.reader[reads]
    node = np.array(world.nodes)
    near = (node[source] == node[reader]) & (world.node_bytes_per_second is not None)
    busiest = 0.0
    for chosen, rate in ((near, world.node_bytes_per_second), (~near, world.bytes_per_second)):
        for ranks in (source[chosen], reader[chosen]):
            if ranks.size and rate:
                busiest = max(busiest, float(np.bincount(ranks).max()) * sum(world.row_bytes) / rate)
    return busiest


def random_pair(world: World, seed: int = 0) -> tuple[Placement, Placement]:
    """Two placements that have nothing to do with each other; one slot in eight holds a second copy."""
    rng = np.random.default_rng(seed)
    logical = world.ranks * world.slots - max(1, world.ranks * world.slots // 8)
    one, other = (
        random_placement(
            rng,
            num_layers=world.layers,
            num_logical=logical,
            num_local_experts=world.slots,
            ep_size=world.ranks,
        )
        for _ in range(2)
    )
    return one, other


def skewed_pair(world: World, holders: Sequence[int] = (0,)) -> tuple[Placement, Placement]:
    """Every rank comes to need the same hot experts in half of its slots; only ``holders`` have them at first.

    The other half of its slots a rank keeps. Before, those that are no holders have copies of the next rank's.
    """
    hot = world.slots // 2
    own = np.arange(world.ranks * hot).reshape(world.ranks, hot) + hot
    old = np.concatenate([np.roll(own, -1, axis=0), own], axis=1)
    old[list(holders), :hot] = np.arange(hot)
    new = np.concatenate([np.tile(np.arange(hot), (world.ranks, 1)), own], axis=1)
    one, other = (
        Placement(np.tile(ids.ravel(), (world.layers, 1)), ep_size=world.ranks, num_logical=hot + world.ranks * hot)
        for ids in (old, new)
    )
    return one, other
