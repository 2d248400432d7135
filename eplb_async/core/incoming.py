"""What one rank receives in a migration, as columns: hundreds of small experts cost little more than a few.

Moves are sorted by layer, source and slot there. Rows that are neighbours on their source are so here too, and in
staging, and then they are read as one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb_async.core.plan import MigrationPlan, Move

__all__ = ["Incoming"]

_Longs = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Incoming:
    """Moves of one reader; every column is int64.

    Attributes:
        reader: The rank that receives.
        layer: Layer of each move, ascending ``[num_moves]``.
        expert: Its logical expert ``[num_moves]``.
        source: Rank whose row is read; the reader for a local copy, -1 for a lost expert ``[num_moves]``.
        source_slot: Slot there, -1 for a lost expert ``[num_moves]``.
        slot: Slots that are filled, by layer and ascending in each ``[num_slots]``.
        slot_layer: Their layers ``[num_slots]``.
        row: The move that each is filled from ``[num_slots]``.
    """

    reader: int
    layer: _Longs
    expert: _Longs
    source: _Longs
    source_slot: _Longs
    slot: _Longs
    slot_layer: _Longs
    row: _Longs

    @classmethod
    def of(cls, plan: MigrationPlan, reader: int) -> Incoming:
        """All that a rank receives in a migration."""
        mine = np.flatnonzero(plan.reader == reader)
        starts = plan.target_offsets[mine].astype(np.int64)
        count = plan.target_offsets[mine + 1] - starts
        nth = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
        columns = (column[mine] for column in (plan.layer, plan.expert, plan.source, plan.source_slot))
        return cls._sorted(reader, columns, plan.targets[np.repeat(starts, count) + nth], count)

    @classmethod
    def of_moves(cls, reader: int, moves: Sequence[tuple[int, Move]]) -> Incoming:
        """Moves of a reader, each with its layer."""
        rows = [(layer, move.expert, move.source, move.source_slot) for layer, move in moves]
        columns = np.array(rows, dtype=np.int64).reshape(-1, 4).T
        slots = [slot for _, move in moves for slot in move.targets]
        count = np.array([len(move.targets) for _, move in moves], dtype=np.int64)
        return cls._sorted(reader, columns, np.array(slots, dtype=np.int64), count)

    @classmethod
    def _sorted(cls, reader: int, columns: Iterable[NDArray[Any]], slots: NDArray[Any], count: _Longs) -> Incoming:
        layer, expert, source, source_slot = (column.astype(np.int64) for column in columns)
        order = np.lexsort((source_slot, source, layer))
        place = np.empty_like(order)
        place[order] = np.arange(order.size)
        row, slot_layer = np.repeat(place, count), np.repeat(layer, count)
        by_slot = np.lexsort((slots, slot_layer))
        return cls(
            reader,
            layer=layer[order],
            expert=expert[order],
            source=source[order],
            source_slot=source_slot[order],
            slot=slots[by_slot].astype(np.int64),
            slot_layer=slot_layer[by_slot],
            row=row[by_slot],
        )

    def __len__(self) -> int:
        """Moves."""
        return self.layer.size

    def part(self, layers: range) -> Incoming:
        """Those of neighbouring layers; moves are numbered anew."""
        ends = (layers.start, layers.stop)
        low, high = np.searchsorted(self.layer, ends).tolist()
        moves, slots = slice(low, high), slice(*np.searchsorted(self.slot_layer, ends).tolist())
        return Incoming(
            self.reader,
            layer=self.layer[moves],
            expert=self.expert[moves],
            source=self.source[moves],
            source_slot=self.source_slot[moves],
            slot=self.slot[slots],
            slot_layer=self.slot_layer[slots],
            row=self.row[slots] - low,
        )

    def move(self, index: int) -> Move:
        """One of them."""
        columns = (self.expert, self.source, self.source_slot)
        expert, source, source_slot = (int(column[index]) for column in columns)
        return Move(self.reader, expert, source, source_slot, tuple(self.slot[self.row == index].tolist()))

    def moves(self) -> Iterator[tuple[int, Move]]:
        """Each of them, with its layer."""
        for index, layer in enumerate(self.layer.tolist()):
            yield layer, self.move(index)

    def landing(self, layers: range, kept: NDArray[np.bool_]) -> tuple[_Longs, _Longs, _Longs]:
        """Where rows go.

        Args:
            layers: Those that are wanted.
            kept: Which moves count, bool ``[num_moves]``.

        Returns:
            Slots that are filled, their layers, and the move that each is filled from; by layer and slot.
        """
        begin, end = np.searchsorted(self.slot_layer, (layers.start, layers.stop)).tolist()
        slot, layer, row = self.slot[begin:end], self.slot_layer[begin:end], self.row[begin:end]
        chosen = kept[row]
        return (slot, layer, row) if chosen.all() else (slot[chosen], layer[chosen], row[chosen])
