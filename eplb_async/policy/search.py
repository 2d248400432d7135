"""Relieves the busiest rank of every layer, one small change at a time, until it carries no more than asked."""

from __future__ import annotations

import numpy as np

from eplb_async.policy.changes import Change, best_changes
from eplb_async.policy.table import Bools, Floats, Table
from eplb_async.policy.trail import Trail

__all__ = ["improve"]

_FORCED = 128  # changes against the slope, of each layer
_FINE = 0.2  # of the target for each slot of a rank: what mending it counts for, beside the load taken away
_LIGHTER = 0.95  # a copy makes room only if what is left of its expert stays below this, times the one it is for


def improve(table: Table, target: Floats, nodes: int, *, force: int = _FORCED, fine: float = _FINE) -> Trail:
    """Changes slots until no rank of a layer carries more than the target, or nothing helps.

    Where no change helps, one is forced: the heaviest expert of the busiest rank gets another copy all the same, and
    keeps it.

    Args:
        table: Changed in place; it has no free slot.
        target: What a rank may carry, ``[layers]``.
        nodes: Rows of each layer.
        force: How often to force a change, in each layer.
        fine: What mending a rank counts for, in targets for each slot of a rank.

    Returns:
        The trail. Its last step is not always its best.
    """
    trail = Trail(table, nodes)
    load = table.rank_load()
    locked = np.zeros(table.load.shape, dtype=np.bool_)
    forced = np.zeros(len(target), dtype=np.int64)
    layers = np.arange(len(target))
    steps = np.zeros(len(target), dtype=np.int64)
    patience = 2 * table.slots[0].size * nodes  # then only what takes load away counts, which always comes to an end
    while True:
        carried = load.reshape(len(target), -1)[layers]
        over = carried.max(axis=1) > target[layers]
        layers = layers[over]
        if not layers.size:
            return trail
        node, busy = np.divmod(carried[over].argmax(axis=1), load.shape[1])
        rows = layers * nodes + node
        mended = np.where(steps[layers] < patience, fine / table.slots.shape[2] * target[layers], 0.0)
        change = best_changes(table, rows, busy, load[rows], target[layers], mended, locked[rows])
        steps[layers] += 1
        for index in np.flatnonzero(~change.found & (forced[layers] < force)).tolist():
            forced[layers[index]] += 1
            _force(table, int(rows[index]), int(busy[index]), load[rows[index]], locked, change, index)
        layers, rows = layers[change.found], rows[change.found]
        trail.apply(rows, change.where_found())
        load[rows] = table.rank_load(rows)
        trail.close(rows, load.reshape(len(target), -1)[layers].max(axis=1))


def _force(table: Table, row: int, busy: int, load: Floats, locked: Bools, change: Change, index: int) -> None:
    """Writes into ``change`` a further copy of the heaviest expert that can have one, where it weighs least."""
    slots, copies, whole = table.slots[row], table.count[row], table.load[row]
    share = whole / np.maximum(copies, 1)
    grown = np.where((copies > 1) & ~locked[row], whole / np.maximum(copies - 1, 1), np.inf)
    mine = slots[busy]
    for expert in mine[np.argsort(-share[mine], kind="stable")].tolist():
        open_to = (slots >= 0) & (grown[slots] < _LIGHTER * share[expert]) & (table.held[row, expert] == 0)[:, None]
        if open_to.any():
            rank, at = np.divmod(np.where(open_to, load[:, None] - share[slots], np.inf).argmin(), slots.shape[1])
            change.found[index], change.rank2[index] = True, -1
            change.rank[index], change.at[index], change.expert[index] = rank, at, expert
            locked[row, expert] = True
            return
