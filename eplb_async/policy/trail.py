"""What a search did, step by step, so that its end can be undone."""

from __future__ import annotations

import numpy as np

from eplb_async.policy.changes import Change
from eplb_async.policy.table import Floats, Ints, Table

__all__ = ["Trail"]


class Trail:
    """What a search did to each layer, so that its end can be undone.

    Attributes:
        moves: For each layer, experts to receive after each step; entry 0 is before the first.
        peaks: For each layer, load of the busiest rank, likewise.
    """

    def __init__(self, table: Table, nodes: int) -> None:
        """Starts at what the table holds; ``nodes`` rows make a layer."""
        self._table = table
        self._nodes = nodes
        self.moves = [[int(moved)] for moved in table.moved().reshape(-1, nodes).sum(axis=1)]
        self.peaks = [[float(peak)] for peak in table.rank_load().reshape(len(self.moves), -1).max(axis=1)]
        self._undo: list[list[tuple[int, int, int, int]]] = [[] for _ in self.moves]
        self._ends: list[list[int]] = [[0] for _ in self.moves]

    def apply(self, rows: Ints, change: Change) -> None:
        """Makes a change in each of some rows, of different layers."""
        one, two = np.arange(rows.size), np.flatnonzero(change.rank2 >= 0)
        parts = [(one, change.rank, change.at, change.expert), (two, change.rank2, change.at2, change.expert2)]
        for which, ranks, at, experts in parts:
            row, rank, slot, expert = rows[which], ranks[which], at[which], experts[which]
            old = self._table.slots[row, rank, slot]
            cost = self._put(row, rank, slot, expert)
            layers = row // self._nodes
            undos = zip(row.tolist(), rank.tolist(), slot.tolist(), old.tolist(), strict=True)
            for layer, paid, undo in zip(layers.tolist(), cost.tolist(), undos, strict=True):
                self._undo[layer].append(undo)
                if which is one:
                    self.moves[layer].append(self.moves[layer][-1] + paid)
                else:
                    self.moves[layer][-1] += paid

    def close(self, rows: Ints, peaks: Floats) -> None:
        """Ends a step: notes the load of the busiest rank of the layers of ``rows``."""
        for layer, peak in zip((rows // self._nodes).tolist(), peaks.tolist(), strict=True):
            self.peaks[layer].append(peak)
            self._ends[layer].append(len(self._undo[layer]))

    def keep(self, layer: int, steps: int) -> None:
        """Undoes all but the first steps of a layer."""
        end = self._ends[layer][steps]
        for row, rank, at, old in reversed(self._undo[layer][end:]):
            self._table.put(*(np.array([value]) for value in (row, rank, at, old)))
        del self._undo[layer][end:], self._ends[layer][steps + 1 :]
        del self.moves[layer][steps + 1 :], self.peaks[layer][steps + 1 :]

    def _put(self, rows: Ints, ranks: Ints, at: Ints, experts: Ints) -> Ints:
        """Writes slots; returns by how much each grew the number of experts to receive."""
        home, held = self._table.home, self._table.held
        old = self._table.slots[rows, ranks, at]
        self._table.put(rows, ranks, at, experts)
        gone = (old >= 0) & (held[rows, old, ranks] == 0) & ~home[rows, old, ranks]
        come = (held[rows, experts, ranks] == 1) & ~home[rows, experts, ranks]
        return np.asarray(come.astype(np.int64) - gone)
