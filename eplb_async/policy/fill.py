"""Makes a table whole: every expert somewhere, every slot used, no rank with two copies of one expert."""

from __future__ import annotations

import numpy as np

from eplb_async.policy.table import Bools, Ints, Table, repeated

__all__ = ["fill", "spread"]


def fill(table: Table) -> None:
    """Fills every free slot of a usable rank; second copies on a rank count as free.

    Experts without a copy come first, heaviest first, then whichever has the heaviest copies. Always the lightest rank
    with a free slot is served. Where experts without a copy find no free slot, copies of the lightest make room.

    Args:
        table: Changed in place. Its usable ranks have at least as many slots as it has experts.
    """
    second = repeated(table.slots)
    if second.any() and table.load.shape[1] >= table.slots.shape[2]:
        table.empty(second)
    _make_room(table)
    rows = np.arange(len(table.slots))
    while True:
        free = (table.slots[rows] < 0) & table.usable[rows][:, :, None]
        some = free.any(axis=(1, 2))
        rows, free = rows[some], free[some]
        if not rows.size:
            return
        ranks = np.where(free.any(axis=2), table.rank_load(rows), np.inf).argmin(axis=1)
        at = free[np.arange(rows.size), ranks].argmax(axis=1)
        table.put(rows, ranks, at, _wanted(table, rows, ranks))


def spread(table: Table) -> None:
    """Exchanges second copies on a rank with experts of other ranks, each where the busier of the two carries least.

    Args:
        table: Changed in place. What no exchange can part stays.
    """
    _, ranks, local = table.slots.shape
    on = np.repeat(np.arange(ranks), local)
    second = repeated(table.slots)
    while True:
        rows = np.flatnonzero(second.any(axis=(1, 2)))
        if not rows.size:
            return
        every, of = np.arange(rows.size), rows[:, None]
        slot = second[rows].reshape(rows.size, -1).argmax(axis=1)
        rank = on[slot]
        flat = table.slots[rows].reshape(rows.size, -1)
        expert, share, load = flat[every, slot], table.share(rows), table.rank_load(rows)
        less = share[every, expert][:, None] - share[every[:, None], flat]
        busier = np.maximum(load[every, rank][:, None] - less, load[:, on] + less)
        barred = (flat < 0) | (table.held[of, flat, rank[:, None]] > 0) | (table.held[rows, expert][:, on] > 0)
        busier[barred] = np.inf
        other = busier.argmin(axis=1)
        second[rows, rank, slot % local] = False
        rows, rank, slot, other, expert, flat, ok = (
            part[np.isfinite(busier[every, other])] for part in (rows, rank, slot, other, expert, flat, every)
        )
        table.put(rows, rank, slot % local, flat[np.arange(ok.size), other])
        table.put(rows, on[other], other % local, expert)
        second[rows, on[other], other % local] = False


def _wanted(table: Table, rows: Ints, ranks: Ints) -> Ints:
    """The expert that each of these ranks should take next."""
    value = table.share(rows)
    absent = table.count[rows] == 0
    value[absent] += 2 * value.max() + 1  # before everything else
    value[table.held[rows, :, ranks] > 0] -= 4 * value.max() + 4  # after everything else
    return np.asarray(value.argmax(axis=1))


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
