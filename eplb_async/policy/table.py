"""The slots of every node of every layer, and what each rank carries, while a placement is being made."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["Bools", "Floats", "Ints", "Table", "repeated", "slot_loads"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


class Table:
    """One row per (layer, node); a node is a set of ranks and of experts that share no copy with other nodes.

    In global mode the whole group is one node. Experts are numbered within their row.

    Attributes:
        load: Load of each expert, ``[rows, experts]``.
        slots: Expert in each slot, ``[rows, ranks, local]``, -1 for none.
        usable: Ranks that may hold experts, ``[rows, ranks]``.
        count: Copies of each expert, ``[rows, experts]``.
        held: How many copies a rank has, ``[rows, experts, ranks]``.
        home: Whether the rank held it before anything moved, ``[rows, experts, ranks]``.
    """

    def __init__(self, load: Floats, slots: Ints, usable: Bools, home: Bools | None = None) -> None:
        """Counts what ``slots`` holds; without ``home`` every rank starts with nothing."""
        rows, ranks, _ = slots.shape
        self.load = load
        self.slots = slots
        self.usable = usable
        self.held = np.zeros((rows, load.shape[1], ranks), dtype=np.int16)
        self.count: Ints = np.zeros(load.shape, dtype=np.int64)
        self._count_all()
        self.home = np.zeros(self.held.shape, dtype=np.bool_) if home is None else home

    def share(self, rows: Ints | slice = slice(None)) -> Floats:
        """Load of one copy of each expert, ``[rows, experts]``; the whole load where there is no copy."""
        return self.load[rows] / np.maximum(self.count[rows], 1)

    def rank_load(self, rows: Ints | slice = slice(None)) -> Floats:
        """Load of each rank, ``[rows, ranks]``."""
        return slot_loads(self.share(rows), self.slots[rows])

    def put(self, rows: Ints, ranks: Ints, at: Ints, experts: Ints) -> None:
        """Writes one slot in each of some rows, all different; -1 empties it."""
        old = self.slots[rows, ranks, at]
        was, now = old >= 0, experts >= 0
        self.held[rows[was], old[was], ranks[was]] -= 1
        self.count[rows[was], old[was]] -= 1
        self.held[rows[now], experts[now], ranks[now]] += 1
        self.count[rows[now], experts[now]] += 1
        self.slots[rows, ranks, at] = experts

    def empty(self, slots: Bools) -> None:
        """Empties the marked slots, ``[rows, ranks, local]``."""
        self.slots[slots] = -1
        self.held[:] = 0
        self._count_all()

    def moved(self) -> Ints:
        """Experts that a rank must receive, summed over the ranks of each row, ``[rows]``."""
        row, rank, at = np.nonzero((self.slots >= 0) & ~repeated(self.slots))
        receives = ~self.home[row, self.slots[row, rank, at], rank]
        return np.bincount(row[receives], minlength=len(self.slots))

    def _count_all(self) -> None:
        """Fills ``held`` and ``count``, which are zero or overwritten, from ``slots``."""
        experts = self.load.shape[1]
        row, rank, at = np.nonzero(self.slots >= 0)
        of_row = row * experts + self.slots[row, rank, at]
        self.count[:] = np.bincount(of_row, minlength=self.count.size).reshape(self.count.shape)
        keys, copies = np.unique(of_row * self.slots.shape[1] + rank, return_counts=True)
        self.held.reshape(-1)[keys] = copies


def slot_loads(share: Floats, slots: Ints) -> Floats:
    """Load of each rank, ``[rows, ranks]``, from the load of one copy of each expert, ``[rows, experts]``."""
    padded = np.concatenate([share, np.zeros((len(share), 1))], axis=1)  # -1 looks at the zero
    return np.asarray(padded[np.arange(len(share))[:, None, None], slots].sum(axis=2))


def repeated(slots: Ints) -> Bools:
    """Slots with an expert that an earlier slot of their rank has too, ``[rows, ranks, local]``."""
    same = slots[:, :, :, None] == slots[:, :, None, :]
    earlier = np.tri(slots.shape[2], k=-1, dtype=np.bool_)
    return np.asarray((same & earlier).any(axis=3) & (slots >= 0))
