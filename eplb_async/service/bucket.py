"""Counts of some steps, as they are kept for a while."""

from __future__ import annotations

import copy

import numpy as np

from eplb_async.core.placement import Placement
from eplb_async.service.counts import Floats, as_experts

__all__ = ["Bucket"]


class Bucket:
    """Counts of some steps; those in ``slots`` belong to the experts that ``placement`` has there.

    Attributes:
        slots: ``[num_layers, num_physical]``; ``None`` when all of them are in ``experts``.
        experts: ``[num_layers, num_logical]``.
        placement: Where the experts are that ``slots`` counts.
        steps: How many steps.
        dropped: Counts that were on empty slots.
    """

    __slots__ = ("dropped", "experts", "placement", "slots", "steps")

    def __init__(self, placement: Placement) -> None:
        self.slots: Floats | None = np.zeros((placement.num_layers, placement.num_physical))
        self.experts: Floats = np.zeros((placement.num_layers, placement.num_logical))
        self.placement = placement
        self.steps = 0
        self.dropped = 0.0

    def copy(self) -> Bucket:
        """Another with the same counts."""
        twin = copy.copy(self)
        twin.slots = None if self.slots is None else self.slots.copy()
        twin.experts = self.experts.copy()
        return twin

    def slots_of(self, placement: Placement) -> Floats:
        """The slots, to count in with this placement; where a layer is another now, what it has goes to experts."""
        assert self.slots is not None  # it is the current bucket
        if placement is not self.placement:
            old, new = self.placement.physical_to_logical_map, placement.physical_to_logical_map
            changed = np.flatnonzero((old != new).any(axis=1))
            if changed.size:
                found, dropped = as_experts(self.slots[changed], old[changed], placement.num_logical)
                self.experts[changed] += found
                self.slots[changed] = 0
                self.dropped += dropped
            self.placement = placement
        return self.slots

    def fold(self) -> None:
        """Everything goes to experts; nothing can be counted in slots any more."""
        if self.slots is not None:
            at = self.placement
            found, dropped = as_experts(self.slots, at.physical_to_logical_map, at.num_logical)
            self.experts += found
            self.dropped += dropped
            self.slots = None
