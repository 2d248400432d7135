"""Which experts belong to which node: groups of experts onto nodes, and the tables that follow from it."""

from __future__ import annotations

import numpy as np

from eplb_async.policy.scratch import pack
from eplb_async.policy.table import Bools, Floats, Ints, Table

__all__ = ["Division", "carried", "divide", "nearest", "rebalanced"]


class Division:
    """Experts by node, and the way between a map of the whole group and a table with a row for each node.

    Attributes:
        node_of_group: ``[layers, groups]``.
        nodes: Nodes.
        experts: Experts of each row, ascending, ``[layers * nodes, experts of a node]``.
    """

    def __init__(self, node_of_group: Ints, nodes: int, num_logical: int) -> None:
        """Every node has as many groups as any other."""
        layers, groups = node_of_group.shape
        size = num_logical // groups
        by_node = np.argsort(node_of_group, axis=1, kind="stable")
        self.node_of_group = node_of_group
        self.nodes = nodes
        self.experts: Ints = (by_node[:, :, None] * size + np.arange(size)).reshape(layers * nodes, -1)

    def load(self, load: Floats) -> Floats:
        """Loads by row, from ``[layers, experts]``."""
        return np.take_along_axis(load, self.experts.reshape(load.shape), axis=1).reshape(self.experts.shape)

    def table(self, load: Floats, slots: Ints, usable: Bools) -> Table:
        """A table without what is on the wrong node or on a rank that is not usable.

        Args:
            load: ``[layers, experts]``.
            slots: Experts now, ``[layers, ranks, local]``, -1 for none.
            usable: ``[ranks]``.
        """
        layers, ranks, local = slots.shape
        rows = layers * self.nodes
        inverse = np.full((rows, load.shape[1] + 1), -1, dtype=np.int64)  # the last column is for -1
        np.put_along_axis(inverse, self.experts, np.arange(self.experts.shape[1])[None, :], axis=1)
        of_node = slots.reshape(rows, -1, local)
        own = np.take_along_axis(inverse, of_node.reshape(rows, -1), axis=1).reshape(of_node.shape)
        home = np.zeros((rows, self.experts.shape[1], ranks // self.nodes), dtype=np.bool_)
        row, rank, at = np.nonzero(own >= 0)
        home[row, own[row, rank, at], rank] = True
        allowed = np.tile(usable.reshape(self.nodes, -1), (layers, 1))
        return Table(self.load(load), np.where(allowed[:, :, None], own, -1), allowed, home)

    def slots(self, slots: Ints, layers: int) -> Ints:
        """The other way: ``[layers, ranks, local]`` of experts of the whole group."""
        padded = np.concatenate([self.experts, np.full((len(self.experts), 1), -1)], axis=1)
        rows, ranks, local = slots.shape
        return np.take_along_axis(padded, slots.reshape(rows, -1), axis=1).reshape(layers, self.nodes * ranks, local)


def divide(group_load: Floats, nodes: int) -> Ints:
    """Groups onto nodes from loads alone, heaviest first, as published: ``[layers, groups]``."""
    layers, groups = group_load.shape
    if groups == nodes:
        return np.tile(np.arange(groups), (layers, 1))
    usable = np.ones((layers, nodes), dtype=np.bool_)
    packs = pack(group_load, np.ones(group_load.shape, dtype=np.int64), usable, groups // nodes, apart=False)
    node_of_group = np.empty((layers, groups), dtype=np.int64)
    np.put_along_axis(
        node_of_group, packs.reshape(layers, -1), np.repeat(np.arange(nodes), groups // nodes)[None], axis=1
    )
    return node_of_group


def nearest(slots: Ints, groups: int, nodes: int, num_logical: int) -> tuple[Ints, Ints]:
    """Groups onto the nodes that hold most of their experts now.

    Args:
        slots: ``[layers, ranks, local]``, -1 for none.
        groups: Groups of experts.
        nodes: Nodes.
        num_logical: Experts.

    Returns:
        ``node_of_group`` ``[layers, groups]``, and experts of each group on each node, ``[layers, groups, nodes]``.
    """
    layers = len(slots)
    of_node = slots.reshape(layers, nodes, -1)
    here = np.zeros((layers, nodes, num_logical + 1), dtype=np.bool_)
    np.put_along_axis(here, of_node, values=True, axis=2)
    held = here[:, :, :-1].reshape(layers, nodes, groups, -1).sum(axis=3).transpose(0, 2, 1)
    return _match(held, groups // nodes), held


def _match(value: Ints, room: int) -> Ints:
    """A node for each thing, best ``[layers, things, nodes]`` first, ``room`` to a node: ``[layers, things]``."""
    layers, things, nodes = value.shape
    left = value.astype(np.float64)
    free = np.full((layers, nodes), room)
    chosen = np.empty((layers, things), dtype=np.int64)
    every = np.arange(layers)
    for _ in range(things):
        thing, node = np.divmod(left.reshape(layers, -1).argmax(axis=1), nodes)
        chosen[every, thing] = node
        free[every, node] -= 1
        left[every, thing] = -np.inf
        left[every, :, node] = np.where((free[every, node] == 0)[:, None], -np.inf, left[every, :, node])
    return chosen


def rebalanced(now: Ints, held: Ints, group_load: Floats, ranks: Ints, limit: Floats) -> Ints:
    """Exchanges groups of the busiest node until no node carries more than the limit for each of its ranks.

    Layers that get there in no way of this kind take the published division, its nodes renamed to what they hold now.

    Args:
        now: ``node_of_group`` ``[layers, groups]``.
        held: Experts of each group on each node now, ``[layers, groups, nodes]``.
        group_load: ``[layers, groups]``.
        ranks: Usable ranks of each node, ``[nodes]``.
        limit: ``[layers]``.
    """
    node_of_group = now.copy()
    nodes = ranks.size
    for _ in range(now.shape[1]):
        loads = carried(node_of_group, group_load, nodes) / ranks
        layers = np.flatnonzero(loads.max(axis=1) > limit)
        if not layers.size:
            return node_of_group
        busy = loads[layers].argmax(axis=1)
        of, load, every = node_of_group[layers], group_load[layers], np.arange(layers.size)
        less = load[:, :, None] - load[:, None, :]  # mine, other
        here = loads[layers, busy][:, None, None] - less / ranks[busy][:, None, None]
        there = np.take_along_axis(loads[layers], of, axis=1)[:, None, :] + less / ranks[of][:, None, :]
        mine = of == busy[:, None]
        value = np.where(mine[:, :, None] & ~mine[:, None, :], np.maximum(here, there), np.inf).reshape(layers.size, -1)
        pick = value.argmin(axis=1)
        better = value[every, pick] < loads[layers, busy] * (1 - 1e-9)
        one, two = (part[better] for part in np.divmod(pick, load.shape[1]))
        at = layers[better]
        node_of_group[at, one], node_of_group[at, two] = node_of_group[at, two], node_of_group[at, one]
        if not at.size:
            break
    published = divide(group_load, nodes)
    sets = np.zeros((len(now), nodes, nodes), dtype=np.int64)
    np.add.at(sets, (np.arange(len(now))[:, None], published), held)
    renamed = np.take_along_axis(_match(sets, 1), published, axis=1)
    peak = [(carried(way, group_load, nodes) / ranks).max(axis=1) for way in (node_of_group, renamed)]
    other = (peak[0] > limit) & (peak[1] < peak[0])
    return np.where(other[:, None], renamed, node_of_group)


def carried(node_of_group: Ints, group_load: Floats, nodes: int) -> Floats:
    """Load of each node, ``[layers, nodes]``."""
    layers = len(group_load)
    key = np.arange(layers)[:, None] * nodes + node_of_group
    total: Floats = np.bincount(key.ravel(), group_load.ravel(), layers * nodes).astype(np.float64)
    return total.reshape(layers, nodes)
