"""Loads in, placement out."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from eplb_async.core.placement import Placement
from eplb_async.errors import PlacementError
from eplb_async.policy.arguments import Question, ask
from eplb_async.policy.budget import spend
from eplb_async.policy.division import Division, carried, divide, nearest, rebalanced
from eplb_async.policy.fill import fill, spread
from eplb_async.policy.result import Rebalance, answer, rank_loads
from eplb_async.policy.scratch import pack, replicate
from eplb_async.policy.search import improve
from eplb_async.policy.table import Bools, Floats, Ints, Table, repeated, slot_loads
from eplb_async.policy.trail import Trail

__all__ = ["rebalance_experts"]

_SLACK = 0.0099  # the busiest rank may carry this much more than the published algorithm's
_SLACK_NODES = 0.009  # likewise in hierarchical mode, where single layers may miss it
_EQUAL = 1e-3  # without current, a layer whose second copies on a rank were parted may carry this much more
_NODE = 0.99  # of the target: what a node may carry for each of its ranks, so that its ranks can be packed


def rebalance_experts(
    load: Any,
    num_replicas: int,
    num_groups: int,
    num_nodes: int,
    num_ranks: int,
    *,
    current: Placement | Any | None = None,
    max_moves: int | None = None,
    min_gain: float = 0.001,
    out: Collection[int] | None = None,
) -> Rebalance:
    """Chooses which rank holds which expert, and which experts are held more than once.

    Where the groups divide over the nodes, the experts of a group share a node (hierarchical); otherwise nodes do not
    count (global). Without ``current`` the balance is that of DeepSeek's published EPLB. With ``current`` it is within
    1 % of that (a layer in a hundred may miss it), and few slots change: an expert that stays on its rank stays in its
    slot. Equal arguments give equal results, so every rank may compute for itself.

    Args:
        load: Load of each expert over some time, ``[num_layers, num_logical]``: tokens, in any unit.
        num_replicas: Slots of all ranks together (physical experts).
        num_groups: Groups of experts, all of one size.
        num_nodes: Nodes, all with as many ranks.
        num_ranks: Ranks.
        current: What is held now: a placement or a ``physical_to_logical_map``, -1 for an empty slot.
        max_moves: Most slots, over all layers, that may receive an expert that their rank does not hold.
        min_gain: A gain below this is not worth moving for: the result is ``current``. The gain is the part of the
            busiest ranks' load, summed over the layers, that is saved.
        out: Ranks that get nothing; default those that hold nothing in ``current``. Give ``()`` to fill all ranks.

    Returns:
        The three maps, to be unpacked or by name, and what is known of them. A layer without load keeps its row.

    Raises:
        PlacementError: An argument cannot be, or emptying ranks that are out takes more than ``max_moves``.
    """
    sizes = {"num_replicas": num_replicas, "num_groups": num_groups, "num_nodes": num_nodes, "num_ranks": num_ranks}
    question = ask(load, sizes, current=current, max_moves=max_moves, min_gain=min_gain, out=out)
    if question.current is None:
        return _from_scratch(question)
    return _from_current(question, question.current)


def _from_scratch(question: Question) -> Rebalance:
    division, slots, peaks = _published(question)
    layers = len(peaks)
    by_layer = slots.reshape(layers, -1, *slots.shape[1:])  # a view: nodes of each layer
    again = np.flatnonzero(repeated(slots).reshape(layers, -1).any(axis=1))
    if again.size:
        by_layer[again], worse = _apart(question, division, again, by_layer[again], peaks[again])
        again = again[worse]
    if again.size:
        load, usable = _rows(question, division, again)
        count = replicate(load, usable.sum(axis=1) * question.local, usable.sum(axis=1))
        packed = pack(load, count, usable, question.local, apart=True).reshape(again.size, *by_layer.shape[1:])
        by_layer[again], _ = _apart(question, division, again, packed, peaks[again], by_layer[again])
    placed = division.slots(slots, layers)
    return answer(question, placed, None, moves=int((placed >= 0).sum()), must=True)


def _apart(
    question: Question, division: Division, layers: Ints, slots: Ints, peaks: Floats, otherwise: Ints | None = None
) -> tuple[Ints, Bools]:
    """Slots ``[layers, nodes, ranks, local]`` without second copies on a rank, and which layers carry more for it.

    Where ``otherwise`` carries no more, it stays.
    """
    load, usable = _rows(question, division, layers)
    table = Table(load, slots.reshape(-1, *slots.shape[2:]).copy(), usable)
    spread(table)
    fill(table)
    trail = improve(table, peaks * (1 + _EQUAL), question.nodes, force=0 if otherwise is None else 16, fine=0.0)
    for layer, peak in enumerate(peaks):
        trail.keep(layer, _best(trail, layer, peak))
    found = table.rank_load().reshape(len(layers), -1).max(axis=1)
    result = table.slots.reshape(slots.shape)
    if otherwise is not None:
        old = Table(load, otherwise.reshape(table.slots.shape), usable).rank_load().reshape(len(layers), -1).max(axis=1)
        result = np.where((old <= found)[:, None, None, None], otherwise, result)
    return result, found > peaks * (1 + _EQUAL)


def _rows(question: Question, division: Division, layers: Ints) -> tuple[Floats, Bools]:
    """Loads and usable ranks of the rows of some layers."""
    load = division.load(question.load).reshape(len(question.load), question.nodes, -1)[layers]
    usable = np.tile(question.usable.reshape(question.nodes, -1), (len(layers), 1))
    return load.reshape(len(usable), -1), usable


def _published(question: Question) -> tuple[Division, Ints, Floats]:
    """The published placement, ``[rows, ranks, local]``, and the load of its busiest rank in each layer."""
    layers, experts = question.load.shape
    division = Division(divide(_group_load(question), question.nodes), question.nodes, experts)
    load, usable = _rows(question, division, np.arange(layers))
    count = replicate(load, usable.sum(axis=1) * question.local)
    slots = pack(load, count, usable, question.local, apart=False)
    return division, slots, slot_loads(load / count, slots).reshape(layers, -1).max(axis=1)


def _from_current(question: Question, current: Placement) -> Rebalance:
    slots, idle = question.slots, question.idle
    must = bool((slots[:, ~question.usable] >= 0).any())  # a rank that is out still holds something
    start = rank_loads(question.load, current).max(axis=1)
    published, _, peaks = _published(question)
    target = np.where(idle, np.inf, peaks * (1 + (_SLACK if question.nodes == 1 else _SLACK_NODES)))
    now, held = nearest(slots, question.groups, question.nodes, current.num_logical)
    ranks = question.usable.reshape(question.nodes, -1).sum(axis=1)
    group_load = _group_load(question)
    node_peaks = (carried(published.node_of_group, group_load, question.nodes) / ranks).max(axis=1)
    limit = np.maximum(node_peaks * (1 + 1e-9), target * _NODE)
    ways = [_Way(question, rebalanced(now, held, group_load, ranks, limit), target)]
    chosen = [
        (-1, 0) if idle[layer] and not must else (0, _best(ways[0].trail, layer, aim))
        for layer, aim in enumerate(target)
    ]
    if question.max_moves is not None and _moves(ways, chosen) > question.max_moves:
        if (now != ways[0].division.node_of_group).any():
            ways.append(_Way(question, now, target))
        chosen = _within(question, ways, start, must=must)
    result = slots.copy()
    for index, way in enumerate(ways):
        layers = [layer for layer, (which, _) in enumerate(chosen) if which == index]
        for layer in layers:
            way.trail.keep(layer, chosen[layer][1])
        result[layers] = way.division.slots(way.table.slots, len(slots))[layers]
    return answer(question, result, current, moves=_moves(ways, chosen), must=must)


class _Way:
    """The current placement, changed under one division of the experts over the nodes."""

    def __init__(self, question: Question, node_of_group: Ints, target: Floats) -> None:
        self.division = Division(node_of_group, question.nodes, question.load.shape[1])
        self.table = self.division.table(question.load, question.slots, question.usable)
        fill(self.table)
        self.trail = improve(self.table, target, question.nodes)


def _best(trail: Trail, layer: int, target: float) -> int:
    return int(np.maximum(trail.peaks[layer], target).argmin())


def _within(question: Question, ways: list[_Way], start: Floats, *, must: bool) -> list[tuple[int, int]]:
    """The choice for each layer that ``max_moves`` allows."""
    assert question.max_moves is not None
    layers = range(len(start))
    first = [(-1, 0)] * len(start)
    if must:
        first = [(min(range(len(ways)), key=lambda way: ways[way].trail.moves[layer][0]), 0) for layer in layers]
        needed = _moves(ways, first)
        if needed > question.max_moves:
            raise PlacementError(f"max_moves is {question.max_moves}; to empty the ranks that are out takes {needed}")
    begin = [
        (ways[way].trail.moves[layer][0], ways[way].trail.peaks[layer][0]) if must else (0, float(start[layer]))
        for layer, (way, _) in enumerate(first)
    ]
    options = [
        [] if question.idle[layer] else [(way.trail.moves[layer], way.trail.peaks[layer]) for way in ways]
        for layer in layers
    ]
    spent = spend(options, begin, question.max_moves)
    return [choice if choice[0] >= 0 else first[layer] for layer, choice in enumerate(spent)]


def _moves(ways: list[_Way], chosen: list[tuple[int, int]]) -> int:
    return sum(ways[way].trail.moves[layer][step] for layer, (way, step) in enumerate(chosen) if way >= 0)


def _group_load(question: Question) -> Floats:
    return np.asarray(question.load.reshape(len(question.load), question.groups, -1).sum(axis=2))
