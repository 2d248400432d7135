"""Makes a table whole: every expert somewhere, every slot used, no rank with two copies of one expert."""

from __future__ import annotations

import numpy as np

from eplb_async.policy.table import Bools, Ints, Table

__all__ = ["fill"]


def fill(table: Table) -> None:
    """Fills every free slot of a usable rank; second copies on a rank count as free.

    Experts without a copy come first, heaviest first, then whichever has the heaviest copies. Always the lightest rank
    with a free slot is served. Where experts without a copy find no free slot, copies of the lightest make room.

    Args:
        table: Changed in place. Its usable ranks have at least as many slots as it has experts.
    """
    _drop_second_copies(table)
    _make_room(table)
    while True:
        free = (table.slots < 0) & table.usable[:, :, None]
        rows = np.flatnonzero(free.any(axis=(1, 2)))
        if not rows.size:
            return
        ranks = np.where(free[rows].any(axis=2), table.rank_load(rows), np.inf).argmin(axis=1)
        at = free[rows, ranks].argmax(axis=1)
        table.put(rows, ranks, at, _wanted(table, rows, ranks))


def _wanted(table: Table, rows: Ints, ranks: Ints) -> Ints:
    """The expert that each of these ranks should take next."""
    value = table.share(rows)
    absent = table.count[rows] == 0
    value[absent] += 2 * value.max() + 1  # before everything else
    value[table.held[rows, :, ranks] > 0] -= 4 * value.max() + 4  # after everything else
    return np.asarray(value.argmax(axis=1))


def _drop_second_copies(table: Table) -> None:
    """Empties slots that repeat an expert of their rank, where another expert could be there."""
    if table.load.shape[1] < table.slots.shape[2]:
        return
    while True:
        rows, experts, ranks = np.nonzero(table.held > 1)
        if not rows.size:
            return
        rows, first = np.unique(rows, return_index=True)
        experts, ranks = experts[first], ranks[first]
        same = table.slots[rows, ranks] == experts[:, None]
        at = same.shape[1] - 1 - same[:, ::-1].argmax(axis=1)  # the first copy stays
        table.put(rows, ranks, at, np.full(rows.size, -1))


def _make_room(table: Table) -> None:
    """Empties slots with the copies that are missed least, until all experts without one have a place."""
    while True:
        free = ((table.slots < 0) & table.usable[:, :, None]).sum(axis=(1, 2))
        rows = np.flatnonzero(free < (table.count == 0).sum(axis=1))
        if not rows.size:
            return
        left = np.where(table.count[rows] > 1, table.load[rows] / np.maximum(table.count[rows] - 1, 1), np.inf)
        experts = left.argmin(axis=1)
        holders: Bools = table.held[rows, experts] > 0
        ranks = np.where(holders, table.rank_load(rows), -np.inf).argmax(axis=1)
        at = (table.slots[rows, ranks] == experts[:, None]).argmax(axis=1)
        table.put(rows, ranks, at, np.full(rows.size, -1))
