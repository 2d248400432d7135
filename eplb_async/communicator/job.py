"""What one rank receives in one layer, or again from elsewhere: where it is staged, and its READs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from eplb_async.communicator.members import memory_of
from eplb_async.core.layout import Layout, TensorSpec
from eplb_async.core.plan import Move
from eplb_async.core.schedule import Batch
from eplb_async.errors import NixlTransferFailed
from eplb_async.nixl.transfer import Transfer
from eplb_async.weights import Piece, pack


@dataclass(frozen=True, slots=True)
class Sent:
    """A batch that was posted: its transfer, or the error that NIXL had for it at once."""

    batch: Batch
    transfer: Transfer | None = None
    error: NixlTransferFailed | None = None


def room_for(specs: Sequence[TensorSpec], num_moves: int) -> tuple[list[int], dict[str, int]]:
    """Staging for a number of experts of a layer.

    Returns:
        Where each tensor's rows begin in the piece of its memory type, and the bytes of each piece.
    """
    offsets, sizes = pack([(memory_of(spec.device), spec.row_bytes * num_moves) for spec in specs])
    return offsets, {memory: size for memory, size in sizes.items() if size}


class LayerJob:
    """Moves of one layer on their way: where they are staged, and what is still under way.

    Attributes:
        layer: The layer.
        moves: What is received, by source and its slot: rows that are neighbours there are neighbours in staging,
            and are read as one. Move ``i`` is row ``i`` of each tensor's staged rows.
        source_slots: Slot that each move is read from, int64 ``[num_moves]``.
        kept: Moves that are to be applied; the others are received by a later job of the layer.
        specs: The layer's tensors.
        pieces: Staging by memory type.
        sent: Batches posted so far.
        posted: Set when all have been.
        offsets: Where each tensor's rows begin in the piece of its memory type.
        sizes: Bytes of staging by memory type.
    """

    def __init__(self, layer: int, moves: Iterable[Move], layout: Layout) -> None:
        self.layer = layer
        self.moves = tuple(sorted(moves, key=attrgetter("source", "source_slot")))
        self.source_slots = np.array([move.source_slot for move in self.moves], dtype=np.int64)
        self.kept = list(range(len(self.moves)))
        self.specs = [place.spec for place in layout.layers[layer]]
        self.pieces: dict[str, Piece] = {}
        self.sent: list[Sent] = []
        self.posted = asyncio.Event()
        self.offsets, self.sizes = room_for(self.specs, len(self.moves))

    @property
    def transfers(self) -> list[Transfer]:
        """READs that were posted."""
        return [sent.transfer for sent in self.sent if sent.transfer is not None]

    def landing(self) -> tuple[list[int], list[int]]:
        """Slots that are filled, and for each the staged row that it is filled from."""
        kept = [(i, self.moves[i].targets) for i in self.kept]
        return [slot for _, slots in kept for slot in slots], [i for i, slots in kept for _ in slots]
