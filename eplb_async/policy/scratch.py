"""A placement from loads alone: copies for the heaviest, then each copy onto the lightest rank.

The two greedy steps are those of DeepSeek's published EPLB (github.com/deepseek-ai/EPLB), made for all rows at once.
"""

from __future__ import annotations

import numpy as np

from eplb_async.policy.table import Bools, Floats, Ints

__all__ = ["pack", "replicate"]


def replicate(load: Floats, total: Ints, most: Ints | None = None) -> Ints:
    """Gives one copy to each expert, and each further one to the expert whose copies carry most.

    Args:
        load: ``[rows, experts]``.
        total: Copies to give in each row, ``[rows]``, at least one an expert.
        most: Most copies of one expert, ``[rows]``, as long as others have fewer; default no limit.

    Returns:
        Copies, ``[rows, experts]``.
    """
    rows, experts = load.shape
    count = np.ones((rows, experts), dtype=np.int64)
    share = load.copy()
    limit = np.full(rows, np.iinfo(np.int64).max) if most is None else np.maximum(most, -(-total // experts))
    every = np.arange(rows)
    for given in range(experts, int(total.max())):
        row = every[total > given]
        expert = share[row].argmax(axis=1)
        count[row, expert] += 1
        now = count[row, expert]
        share[row, expert] = np.where(now < limit[row], load[row, expert] / now, -1.0)
    return count


def pack(load: Floats, count: Ints, usable: Bools, local: int, *, apart: bool) -> Ints:
    """Puts the heaviest copy left onto the lightest rank with a free slot, again and again.

    Args:
        load: ``[rows, experts]``.
        count: Copies of each expert, ``[rows, experts]``, as many in a row as its usable ranks have slots.
        usable: Ranks to fill, ``[rows, ranks]``.
        local: Slots of a rank.
        apart: Pass over ranks that have a copy of the expert already, where there is another with a free slot.

    Returns:
        Slots ``[rows, ranks, local]``, -1 on ranks that are not usable.
    """
    rows, ranks = usable.shape
    share = load / count
    total = count.sum(axis=1)
    items = np.full((rows, int(total.max())), -1, dtype=np.int64)
    experts = load.shape[1]
    items[:, :experts] = np.arange(experts)  # further copies last: of equal weights, two of one expert stay apart
    further = np.arange(experts, items.shape[1])
    items[:, experts:][further < total[:, None]] = np.repeat(np.tile(np.arange(experts), rows), (count - 1).ravel())
    weights = np.where(items >= 0, np.take_along_axis(share, np.maximum(items, 0), axis=1), -1.0)
    order = np.argsort(-weights, axis=1, kind="stable")
    items, weights = np.take_along_axis(items, order, axis=1), np.take_along_axis(weights, order, axis=1)
    slots = np.full((rows, ranks, local), -1, dtype=np.int64)
    used = np.zeros((rows, ranks), dtype=np.int64)
    carried = np.where(usable, 0.0, np.inf)
    held = np.zeros((rows, load.shape[1], ranks), dtype=np.bool_) if apart else None
    every = np.arange(rows)
    even = bool((total == total[0]).all())
    for column in range(items.shape[1]):
        row = every if even else every[total > column]
        item = items[row, column]
        rank = carried[row].argmin(axis=1)
        if held is not None:
            rank = _lightest_without(carried[row], held[row, item], rank)
            held[row, item, rank] = True
        at = used[row, rank]
        slots[row, rank, at] = item
        used[row, rank] = at + 1
        carried[row, rank] = np.where(at + 1 < local, carried[row, rank] + weights[row, column], np.inf)
    return slots


def _lightest_without(carried: Floats, holds: Bools, otherwise: Ints) -> Ints:
    """The lightest rank that holds no copy and is not full, ``[rows]``; ``otherwise`` where there is none."""
    masked = np.where(holds, np.inf, carried)
    rank = masked.argmin(axis=1)
    return np.where(np.isfinite(masked[np.arange(len(rank)), rank]), rank, otherwise)
