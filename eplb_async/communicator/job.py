"""What one rank receives in neighbouring layers, or again from elsewhere: where it is staged, and its READs."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from eplb_async.core.incoming import Incoming
from eplb_async.core.layout import Layout, TensorSpec
from eplb_async.core.schedule import Batch
from eplb_async.errors import NixlTransferFailed
from eplb_async.nixl.devices import memory_of
from eplb_async.nixl.transfer import Transfer
from eplb_async.weights import ENTRY_NAME, Copy, ExpertWeights, Piece, Staging, pack


@dataclass(frozen=True, slots=True)
class Sent:
    """A batch that was posted: its transfer, or the error that NIXL had for it at once."""

    batch: Batch
    transfer: Transfer | None = None
    error: NixlTransferFailed | None = None


def room_for(specs: Sequence[TensorSpec], num_moves: int) -> tuple[list[int], dict[str, int]]:
    """Staging for a number of experts of like layers.

    Returns:
        Where each tensor's rows begin in the piece of its memory type, and the bytes of each piece.
    """
    offsets, sizes = pack([(memory_of(spec.device), spec.row_bytes * num_moves) for spec in specs])
    return offsets, {memory: size for memory, size in sizes.items() if size}


class Job:
    """Moves of one layer, or of several small ones that are alike, on their way.

    Attributes:
        layers: The layers.
        moves: What is received. Move ``i`` is row ``i`` of each tensor's staged rows, whatever its layer.
        kept: Moves that are to be applied, bool ``[num_moves]``; the others are received by a later job.
        specs: The tensors of each of the layers.
        pieces: Staging by memory type.
        sent: Batches posted so far.
        posted: Set when all have been.
        offsets: Where each tensor's rows begin in the piece of its memory type, int64 ``[num_tensors]``.
        row_bytes: Bytes of a row of each tensor, int64 ``[num_tensors]``.
        sizes: Bytes of staging by memory type.
    """

    def __init__(self, layers: range, moves: Incoming, layout: Layout) -> None:
        self.layers = layers
        self.moves = moves
        self.kept: NDArray[np.bool_] = np.ones(len(moves), dtype=np.bool_)
        self.specs = [place.spec for place in layout.layers[layers.start]]
        self.pieces: dict[str, Piece] = {}
        self.sent: list[Sent] = []
        self.posted = asyncio.Event()
        offsets, self.sizes = room_for(self.specs, len(moves))
        self.offsets = np.array(offsets, dtype=np.int64)
        self.row_bytes = np.array([spec.row_bytes for spec in self.specs], dtype=np.int64)
        self._rows: dict[int, torch.Tensor] = {}

    @property
    def transfers(self) -> list[Transfer]:
        """READs that were posted."""
        return [sent.transfer for sent in self.sent if sent.transfer is not None]

    def rows(self, tensor: int, staging: Staging) -> torch.Tensor:
        """The staged rows of a tensor, uint8 ``[num_moves, row_bytes]``."""
        found = self._rows.get(tensor)
        if found is None:
            spec = self.specs[tensor]
            piece = self.pieces[memory_of(spec.device)]
            found = staging.view(piece, int(self.offsets[tensor]), len(self.moves), spec.row_bytes)
            self._rows[tensor] = found
        return found

    def landing(self, layers: range, weights: ExpertWeights, staging: Staging) -> Iterator[Copy]:
        """The copies that apply what it brought of these layers; entries are one copy for all of them."""
        slot, layer, row = self.moves.landing(layers, self.kept)
        if not slot.size:
            return
        ends = np.searchsorted(layer, np.arange(layers.start, layers.stop + 1)).tolist()
        for tensor, spec in enumerate(self.specs):
            if spec.name == ENTRY_NAME and weights.entries is not None:
                entry = layer * weights.num_local_experts + slot
                yield Copy(target=weights.entries, to=entry, source=self.rows(tensor, staging), frm=row)
            elif spec.row_bytes:
                source = self.rows(tensor, staging)
                for at, (low, high) in zip(layers, itertools.pairwise(ends), strict=True):
                    if low < high:
                        target = weights.rows(at, tensor)
                        yield Copy(target=target, to=slot[low:high], source=source, frm=row[low:high])
