"""What one rank receives in one layer, or again from elsewhere: where it is staged, and its READs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from eplb_async.communicator.members import memory_of
from eplb_async.core.layout import Layout
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


class LayerJob:
    """Moves of one layer on their way: where they are staged, and what is still under way.

    Attributes:
        layer: The layer.
        moves: What is received; move ``i`` is row ``i`` of each tensor's staged rows.
        kept: Moves that are to be applied; the others are received by a later job of the layer.
        specs: The layer's tensors.
        pieces: Staging by memory type.
        sent: Batches posted so far.
        posted: Set when all have been.
        offsets: Where each tensor's rows begin in the piece of its memory type.
        sizes: Bytes of staging by memory type.
    """

    def __init__(self, layer: int, moves: tuple[Move, ...], layout: Layout) -> None:
        self.layer = layer
        self.moves = moves
        self.kept = list(range(len(moves)))
        self.specs = [place.spec for place in layout.layers[layer]]
        self.pieces: dict[str, Piece] = {}
        self.sent: list[Sent] = []
        self.posted = asyncio.Event()
        self.offsets, sizes = pack([(memory_of(s.device), s.row_bytes * len(moves)) for s in self.specs])
        self.sizes = {memory: size for memory, size in sizes.items() if size and moves}

    @property
    def transfers(self) -> list[Transfer]:
        """READs that were posted."""
        return [sent.transfer for sent in self.sent if sent.transfer is not None]
