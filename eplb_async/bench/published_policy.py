"""DeepSeek's published EPLB, layer by layer: the yardstick that the policy is measured against.

Written from the published description (github.com/deepseek-ai/EPLB) in plain numpy, with one pass over the items of
each layer in Python. It knows nothing of the placement before. ``as_vllm_loops`` gives the same placement and does per
item what vLLM's numpy version does, to compare times with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["as_vllm_loops", "published_rebalance"]

_Pack = Callable[[NDArray[Any], int], NDArray[Any]]


def published_rebalance(load: Any, num_replicas: int, num_groups: int, num_nodes: int, num_ranks: int) -> NDArray[Any]:
    """The published placement.

    Args:
        load: ``[num_layers, num_logical]``.
        num_replicas: Slots of all ranks together.
        num_groups: Groups of experts.
        num_nodes: Nodes; hierarchical if they divide the groups, else the nodes do not count.
        num_ranks: Ranks.

    Returns:
        ``physical_to_logical_map`` ``[num_layers, num_replicas]``.
    """
    return _rebalance(load, num_replicas, num_groups, num_nodes, num_ranks, _pack)


def as_vllm_loops(load: Any, num_replicas: int, num_groups: int, num_nodes: int, num_ranks: int) -> NDArray[Any]:
    """The same placement, packed with the loops of vLLM's numpy version; arguments of ``published_rebalance``."""
    return _rebalance(load, num_replicas, num_groups, num_nodes, num_ranks, _pack_by_index)


def _rebalance(
    load: Any, num_replicas: int, num_groups: int, num_nodes: int, num_ranks: int, pack: _Pack
) -> NDArray[Any]:
    weight = np.asarray(load, dtype=np.float64)
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    num_layers, num_logical = weight.shape
    size = num_logical // num_groups
    group_weight = weight.reshape(num_layers, num_groups, size).sum(axis=2)
    groups = pack(group_weight, num_nodes)  # [num_layers, nodes, groups of one]
    experts = (groups[..., None] * size + np.arange(size)).reshape(num_layers * num_nodes, -1)
    layer = np.repeat(np.arange(num_layers), num_nodes)[:, None]
    node_weight = weight[layer, experts]
    copies, count = _replicate(node_weight, num_replicas // num_nodes)
    slots = pack(np.take_along_axis(node_weight / count, copies, axis=1), num_ranks // num_nodes)
    held = np.take_along_axis(copies, slots.reshape(len(copies), -1), axis=1)
    return np.take_along_axis(experts, held, axis=1).reshape(num_layers, num_replicas)


def _pack(weight: NDArray[Any], num_packs: int) -> NDArray[Any]:
    """Items of each pack, ``[rows, num_packs, items of one]``: heaviest first, to the lightest that has room."""
    rows, items = weight.shape
    size = items // num_packs
    if size == 1:
        return np.broadcast_to(np.arange(items)[:, None], (rows, items, 1))
    packs = np.empty((rows, num_packs, size), dtype=np.int64)
    order = np.argsort(-weight, axis=1, kind="stable")
    for row in range(rows):
        carried, filled, row_weight, pack_of = np.zeros(num_packs), [0] * num_packs, weight[row], packs[row]
        for item in order[row]:
            pack = int(carried.argmin())
            pack_of[pack, filled[pack]] = item
            filled[pack] += 1
            carried[pack] = carried[pack] + row_weight[item] if filled[pack] < size else np.inf
    return packs


def _pack_by_index(weight: NDArray[Any], num_packs: int) -> NDArray[Any]:
    """Like ``_pack``, item by item into arrays of all rows: pack and place of each item, then turned round."""
    rows, items = weight.shape
    size = items // num_packs
    if size == 1:
        return np.broadcast_to(np.arange(items)[:, None], (rows, items, 1))
    pack_of, place_of = np.empty((2, rows, items), dtype=np.int64)
    carried, filled = np.zeros((rows, num_packs)), np.zeros((rows, num_packs), dtype=np.int64)
    order = np.argsort(-weight, axis=1, kind="stable")
    for row in range(rows):
        row_carried, row_filled = carried[row], filled[row]
        for item in order[row]:
            lightest = int(np.argmin(row_carried))
            pack_of[row, item] = lightest
            place_of[row, item] = row_filled[lightest]
            row_carried[lightest] += weight[row, item]
            row_filled[lightest] += 1
            if row_filled[lightest] == size:
                row_carried[lightest] = np.inf
    slots = np.empty((rows, items), dtype=np.int64)
    np.put_along_axis(slots, pack_of * size + place_of, np.arange(items)[None], axis=1)
    return slots.reshape(rows, num_packs, size)


def _replicate(weight: NDArray[Any], total: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """The expert of each copy ``[rows, total]``, and copies of each expert ``[rows, experts]``."""
    rows, experts = weight.shape
    copies = np.empty((rows, total), dtype=np.int64)
    copies[:, :experts] = np.arange(experts)
    count = np.ones((rows, experts), dtype=np.int64)
    every = np.arange(rows)
    for at in range(experts, total):
        heaviest = (weight / count).argmax(axis=1)
        copies[:, at] = heaviest
        count[every, heaviest] += 1
    return copies, count
