"""The best small change that relieves one rank of each row.

Three kinds, and what they cost in experts that a rank must receive: exchange two experts of two ranks (2), give another
rank a copy in place of a spare one (1), put another expert in place of a spare copy on the busy rank itself (1). A rank
that gets back what it held at first receives nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from eplb_async.policy.table import Bools, Floats, Ints, Table

__all__ = ["Change", "best_changes", "excess"]

_FREE = 0.5  # what a change without cost counts as, in slots
_NEAR, _NEARLY = 0.1, 0.03  # load within a tenth below the target counts a little: it is over with the next drift
_LARGER = 1e-3  # of equally good exchanges the one that changes more: its two ranks stay fine for longer
_LEAST = 1e-5  # of the target: less is not worth a change


@dataclass(slots=True)
class Change:
    """One change in each row; arrays ``[rows]``. The second slot is -1 where only one changes.

    Attributes:
        found: Whether there is one.
        rank: Rank of the first slot, ``at`` its number there, ``expert`` what it gets.
        rank2: Rank of the second slot, with ``at2`` and ``expert2``.
    """

    found: Bools
    rank: Ints
    at: Ints
    expert: Ints
    rank2: Ints
    at2: Ints
    expert2: Ints

    def where_found(self) -> Change:
        """The rows that have a change, alone."""
        return Change(*(getattr(self, part.name)[self.found] for part in fields(self)))


def excess(load: Floats, target: Floats, fine: Floats) -> Floats:
    """Load above the target, with ``fine`` a little for load near it, and for each rank above it ``fine`` more.

    With ``fine``, a change that mends a rank is worth more than one that makes it less bad. Without it this is convex:
    effects of one change on one rank are together no worse than their sum.
    """
    over = load - target
    if not fine.any():
        return np.maximum(over, 0.0, out=over)
    near = np.maximum(over + _NEAR * target, 0.0)
    near *= np.where(fine > 0, _NEARLY, 0.0)
    np.add(over, fine, out=over, where=over > 0)
    return np.add(np.maximum(over, 0.0, out=over), near, out=over)


def best_changes(
    table: Table, rows: Ints, busy: Ints, load: Floats, target: Floats, fine: Floats, locked: Bools
) -> Change:
    """Finds for each row the change that takes away most excess for each expert received.

    Args:
        table: Where the experts are.
        rows: The rows to look at.
        busy: The rank to relieve, ``[rows]``.
        load: Load of each rank, ``[rows, ranks]``.
        target: What a rank may carry, ``[rows]``.
        fine: What a rank above it counts for, beside its load above it, ``[rows]``.
        locked: Experts that must not lose a copy, ``[rows, experts]``.
    """
    look = _Look(table, rows, busy, load, target, fine, locked)
    kinds = [_best(look.exchanges()), _best(look.copies()), _best(look.replacements())]
    scores = np.stack([score for score, _, _ in kinds])
    kind = scores.argmax(axis=0)
    mine, other = (np.stack([kinds[k][part] for k in range(3)])[kind, look.every] for part in (1, 2))
    local = table.slots.shape[2]
    here = kind == 2
    slot = np.where(here, 0, other)
    expert = look.mine[look.every, mine]
    return Change(
        found=scores.max(axis=0) > _LEAST * target,
        rank=np.where(here, busy, slot // local),
        at=np.where(here, mine, slot % local),
        expert=np.where(here, other, expert),
        rank2=np.where(kind == 0, busy, -1),
        at2=mine,
        expert2=look.flat[look.every, slot],
    )


_WORTH = 1 / (np.array([0, 1, 2, -2, -1]).clip(0) + _FREE)  # by cost; the last two are the negative ones


def _best(score: Floats) -> tuple[Floats, Ints, Ints]:
    """Value and both indices of the best of ``[rows, mine, others]``."""
    flat = score.reshape(len(score), -1)
    pick = flat.argmax(axis=1)
    mine, other = np.divmod(pick, score.shape[2])
    return flat[np.arange(len(pick)), pick], mine, other


class _Look:
    """What the three kinds need, gathered once. Axes: rows, slots of the busy rank (mine), all slots or all experts."""

    def __init__(
        self, table: Table, rows: Ints, busy: Ints, load: Floats, target: Floats, fine: Floats, locked: Bools
    ) -> None:
        count, ranks = load.shape
        self.local = table.slots.shape[2]
        self.table, self.rows, self.busy = table, rows, busy
        self.every = np.arange(count)
        self.of = self.every[:, None]
        self.flat = table.slots[rows].reshape(count, -1)
        self.mine = self.flat.reshape(count, ranks, self.local)[self.every, busy]
        self.on = np.repeat(np.arange(ranks), self.local)
        self.target, self.target3 = target[:, None], target[:, None, None]
        self.limit, self.limit3 = (self.target, fine[:, None]), (self.target3, fine[:, None, None])
        self.load_on = load[:, self.on]
        self.load_busy = load[self.every, busy][:, None]
        self.bad_on = excess(self.load_on, *self.limit)
        self.bad_busy = excess(self.load_busy, *self.limit)
        copies = table.count[rows]
        whole = table.load[rows]
        self.share = whole / np.maximum(copies, 1)
        self.shrunk = whole / (copies + 1)  # of one copy, with one more
        grown = np.where((copies > 1) & ~locked, whole / np.maximum(copies - 1, 1), np.inf)  # with one fewer
        self.spare = np.isfinite(grown)
        self.grown = np.where(self.spare, grown, self.share)
        self.weight = np.where(self.flat >= 0, self.share[self.of, self.flat], 0.0)
        self.weight_mine = self.share[self.of, self.mine]
        self.blocked = (self.flat < 0) | (self.on == busy[:, None])
        row = rows[:, None]
        self.mine_there = np.repeat(table.held[row, self.mine] > 0, self.local, axis=2)
        home = table.home
        self.home_mine_there = np.repeat(home[row, self.mine].view(np.int8), self.local, axis=2)
        self.home_mine_here = home[row, self.mine, busy[:, None]].view(np.int8)
        self.home_there = home[row, self.flat, self.on].view(np.int8)

        # change of excess: of each slot's rank with one copy fewer, of all holders likewise, of all with one more
        self.rise = excess(self.load_on + (self.grown - self.share)[self.of, self.flat], *self.limit) - self.bad_on
        self.over_holders = self._over_holders(self.rise)
        drop = (self.share - self.shrunk)[self.of, self.flat]
        self.relief = self._over_holders(excess(self.load_on - drop, *self.limit) - self.bad_on)

    def exchanges(self) -> Floats:
        """My expert there, that expert here: ``[rows, mine, slots]``."""
        less = self.weight_mine[:, :, None] - self.weight[:, None, :]
        change = excess(self.load_busy[:, :, None] - less, *self.limit3) - self.bad_busy[:, :, None]
        change += excess(self.load_on[:, None, :] + less, *self.limit3) - self.bad_on[:, None, :]
        row, busy = self.rows[:, None], self.busy[:, None]
        held = (self.table.held[row, self.flat, busy] > 0) | self.blocked
        home_here = self.table.home[row, self.flat, busy].view(np.int8)
        cost = self.home_mine_here[:, :, None] - self.home_mine_there + (self.home_there - home_here)[:, None, :]
        score = _score(change, cost, self.mine_there | held[:, None, :])
        np.abs(less, out=less)
        less *= _LARGER
        return np.add(score, less, out=score, where=score > _LEAST * self.target3)

    def copies(self) -> Floats:
        """A further copy of my expert in place of a spare one on another rank: ``[rows, mine, slots]``."""
        others = self.over_holders[self.of, self.flat] - self.rise
        new = self.shrunk[self.of, self.mine][:, :, None]
        there = excess((self.load_on - self.weight)[:, None, :] + new, *self.limit3) - self.bad_on[:, None, :]
        change = there
        change += self.relief[self.of, self.mine][:, :, None]
        change += others[:, None, :]
        cost = self.home_there[:, None, :] - self.home_mine_there
        kept = self.blocked | ~self.spare[self.of, self.flat]
        return _score(change, cost, self.mine_there | kept[:, None, :])

    def replacements(self) -> Floats:
        """Another expert in place of my spare copy: ``[rows, mine, experts]``."""
        mine_rise = (self.grown - self.share)[self.of, self.mine]
        here = excess(self.load_busy + mine_rise, *self.limit) - self.bad_busy
        others = self.over_holders[self.of, self.mine] - here
        rest = (self.load_busy - self.weight_mine)[:, :, None]
        change = excess(rest + self.shrunk[:, None, :], *self.limit3) - self.bad_busy[:, :, None]
        change += self.relief[:, None, :]
        change += others[:, :, None]
        held = self.table.held[self.rows, :, self.busy] > 0
        home = self.table.home[self.rows, :, self.busy].view(np.int8)
        cost = self.home_mine_here[:, :, None] - home[:, None, :]
        return _score(change, cost, held[:, None, :] | ~self.spare[self.of, self.mine][:, :, None])

    def _over_holders(self, value: Floats) -> Floats:
        """Sums a value of each slot over the slots of each expert, ``[rows, experts]``."""
        rows, experts = self.share.shape
        key = self.of * (experts + 1) + np.where(self.flat < 0, experts, self.flat)
        total: Floats = np.bincount(key.ravel(), value.ravel(), rows * (experts + 1)).astype(np.float64)
        return total.reshape(rows, -1)[:, :experts]


def _score(change: Floats, cost: NDArray[np.int8], barred: Bools) -> Floats:
    np.negative(change, out=change)
    change *= _WORTH[cost]
    change[barred] = -np.inf
    return change
