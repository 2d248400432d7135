"""Weights whose every byte says which layer, tensor and expert it belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from eplb_async.core.placement import Placement


class PatternWeights:
    """Weights ``[layers][tensors]`` uint8 ``[slots, row_bytes]`` whose rows can be checked against a placement.

    Attributes:
        generations: For each layer, how often its owner has written it anew; other bytes for each.
    """

    def __init__(self, placement: Placement, rank: int, row_bytes: Sequence[int]) -> None:
        self.rank = rank
        self.row_bytes = tuple(row_bytes)
        shape = placement.num_layers, placement.num_local_experts
        self.layers = [
            [torch.zeros(shape[1], nbytes, dtype=torch.uint8) for nbytes in row_bytes] for _ in range(shape[0])
        ]
        self.generations = [0] * shape[0]
        self.fill(placement)

    def fill(self, placement: Placement) -> None:
        """Write into every row what a placement says."""
        for layer, tensor, slot, expert in self._slots(placement):
            self.layers[layer][tensor][slot] = torch.from_numpy(self.expected(layer, tensor, expert))

    def rewrite(self, placement: Placement, layers: Iterable[int] | None = None) -> None:
        """Write layers anew, as their owner does: the bytes of the next generation, by a placement; default all."""
        for layer in range(len(self.layers)) if layers is None else layers:
            self.generations[layer] += 1
        self.fill(placement)

    def expected(self, layer: int, tensor: int, expert: int) -> np.ndarray[Any, Any]:
        """The bytes of one row, uint8 ``[row_bytes]``."""
        number = ((self.generations[layer] * 4099 + layer) * 1009 + tensor) * 1_000_003 + expert + 1
        start = np.uint64(number * 0x9E3779B97F4A7C15 % (1 << 64))
        words = -(-self.row_bytes[tensor] // 8)
        values = (np.arange(words, dtype=np.uint64) + start) * np.uint64(0xBF58476D1CE4E5B9)
        return (values ^ (values >> np.uint64(29))).view(np.uint8)[: self.row_bytes[tensor]]

    def load(self, layer: int, expert: int) -> list[torch.Tensor]:
        """An expert's tensors, as ``load_expert`` gives them."""
        return [torch.from_numpy(self.expected(layer, tensor, expert)) for tensor in range(len(self.row_bytes))]

    def wrong_bytes(self, placement: Placement) -> int:
        """Bytes that differ from what the placement says; empty slots may hold anything."""
        return sum(
            int((self.layers[layer][tensor][slot].numpy() != self.expected(layer, tensor, expert)).sum())
            for layer, tensor, slot, expert in self._slots(placement)
        )

    def pointers(self) -> list[int]:
        """Storage addresses of all tensors."""
        return [tensor.data_ptr() for layer in self.layers for tensor in layer]

    def _slots(self, placement: Placement) -> Iterable[tuple[int, int, int, int]]:
        for layer, slots in enumerate(placement.local(self.rank).tolist()):
            for slot, expert in enumerate(slots):
                if expert >= 0:
                    for tensor in range(len(self.row_bytes)):
                        yield layer, tensor, slot, expert
