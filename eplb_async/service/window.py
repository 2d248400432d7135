"""The loads of the last steps."""

from __future__ import annotations

import copy
import threading
from collections import deque
from typing import Any

import numpy as np

from eplb_async.core.placement import Placement
from eplb_async.service.counts import By, Floats, as_counts, as_experts, infer

__all__ = ["LoadWindow"]


class _Bucket:
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

    def copy(self) -> _Bucket:
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


class LoadWindow:
    """Counts of the last steps, by logical expert. Any thread may call anything.

    What a count is, is up to the caller, as long as over all ranks each token counts once per expert that it goes to:
    either each rank counts the tokens that arrive at its own slots (``by="local"``), or each counts the tokens that it
    sends (``"slots"`` or ``"experts"``). Padding must not be in the counts, and for a dummy step :meth:`record` is not
    called: it would count as a step.

    The window is kept in buckets and forgets a bucket at a time, so it covers between ``steps * (1 - 1 / buckets)`` and
    ``steps`` steps once it is full. A bucket is two arrays, ``[num_layers, num_physical]`` and
    ``[num_layers, num_logical]`` of float64, however often the placement changes: where a layer changes, what was
    counted in its slots goes to the experts that were in them.

    Args:
        placement: Gives the sizes, and where experts are until :meth:`record` says otherwise.
        steps: Steps that the window covers, at least 1.
        buckets: Parts in which it forgets, at least 1.
        rank: This rank, for counts of its own slots (``by="local"``).

    Raises:
        ValueError: ``steps`` or ``buckets`` is below 1, or there is no such rank.
    """

    def __init__(self, placement: Placement, *, steps: int, buckets: int = 8, rank: int | None = None) -> None:
        if steps < 1 or buckets < 1:
            raise ValueError(f"a window of {steps} steps in {buckets} buckets; both must be 1 or more")
        if rank is not None and not 0 <= rank < placement.ep_size:
            raise ValueError(f"rank {rank} is outside [0, {placement.ep_size})")
        self._sizes = placement
        self._rank = rank
        self._steps = steps
        self._bucket_steps = -(-steps // buckets)
        self._kinds: dict[tuple[tuple[int, ...], str | None], tuple[By, slice]] = {}
        self._lock = threading.Lock()  # microseconds
        self._reading = threading.Lock()  # one loads() at a time; it alone touches buckets that are not the last
        self._buckets = deque([_Bucket(placement)])
        self._covered = 0
        self._recorded = 0
        self._dropped = 0.0

    def record(self, counts: Any, placement: Placement, by: str | None = None) -> None:
        """Count one step; takes microseconds.

        Args:
            counts: Tokens of the step, 2**53 at most in one place: integers, float32 or float64, numpy or torch in CPU
                memory. They are copied.
            placement: Where the experts were in this step. Give the same object as long as it is the same: it is
                looked at only when it is another.
            by: What the columns are: ``"slots"`` ``[num_layers, num_physical]``, ``"experts"``
                ``[num_layers, num_logical]`` or ``"local"`` ``[num_layers, num_local_experts]``, the slots of this
                rank. ``None`` goes by the width. Counts on empty slots are of no expert: they are dropped, and
                :attr:`dropped` has their sum.

        Raises:
            ValueError: Counts of another shape, dtype or device, NaN, negative or infinite ones, or a width that fits
                several kinds without ``by``. Nothing was counted.
            PlacementError: The placement is of other sizes. Nothing was counted.
        """
        floats = as_counts(counts)
        kind, columns = self._kind(floats.shape, by)
        if placement is not self._buckets[-1].placement:
            self._sizes.require_same_sizes(placement)
        with self._lock:
            bucket = self._room(1)
            target = bucket.experts if kind is By.EXPERTS else bucket.slots_of(placement)
            if kind is By.LOCAL:
                target = target[:, columns]
            np.add(target, floats, out=target)

    def add(self, loads: Any, steps: int) -> None:
        """Count several steps at once that are by expert already, such as :meth:`AttachedCounter.collect` gives.

        They are forgotten together. More than a bucket's steps at once make a bucket of their own.

        Args:
            loads: ``[num_layers, num_logical]``, as for :meth:`record`.
            steps: How many they are of; 0 adds loads to the latest steps.

        Raises:
            ValueError: As :meth:`record`; or ``steps`` is negative.
        """
        floats = as_counts(loads)
        self._kind(floats.shape, By.EXPERTS)
        if steps < 0:
            raise ValueError(f"steps is {steps}; it must be 0 or more")
        with self._lock:
            self._room(steps).experts += floats

    def loads(self) -> tuple[Floats, int]:
        """What the window holds; takes about a millisecond.

        Returns:
            float64 ``[num_layers, num_logical]``, the caller's own; and the steps that it covers.
        """
        with self._reading:
            with self._lock:
                *closed, last = self._buckets
                last, covered = last.copy(), self._covered
            for bucket in (*closed, last):
                bucket.fold()
            for bucket in closed:
                last.experts += bucket.experts
            self._dropped = last.dropped + sum(bucket.dropped for bucket in closed)
            return last.experts, covered

    @property
    def recorded(self) -> int:
        """All steps ever counted."""
        return self._recorded

    @property
    def dropped(self) -> float:
        """Counts in the window that are on empty slots, when :meth:`loads` was last called; an engine has none."""
        return self._dropped

    def _kind(self, shape: tuple[int, ...], by: str | None) -> tuple[By, slice]:
        """What the columns are, and where in the slots."""
        found = self._kinds.get((shape, by))
        if found is None:
            found = self._kinds[shape, by] = infer(shape, self._sizes, by, self._rank)
        return found

    def _room(self, steps: int) -> _Bucket:
        """The bucket in which so many more steps are counted; forgets what is over."""
        last = self._buckets[-1]
        if last.steps and last.steps + steps > self._bucket_steps:
            last = _Bucket(last.placement)
            self._buckets.append(last)
        last.steps += steps
        self._recorded += steps
        self._covered += steps
        while self._covered > self._steps and len(self._buckets) > 1:
            self._covered -= self._buckets.popleft().steps
        return last
