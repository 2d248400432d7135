"""The loads of the last steps."""

from __future__ import annotations

from typing import Any

from eplb_async.core.placement import Placement
from eplb_async.service.counts import Floats

__all__ = ["LoadWindow"]


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
        raise NotImplementedError

    def record(self, counts: Any, placement: Placement, by: str | None = None) -> None:
        """Count one step; takes microseconds.

        Args:
            counts: Tokens of the step: integers, float32 or float64, numpy or torch in CPU memory; for ``by`` see below.
                They are copied.
            placement: Where the experts were in this step. Give the same object as long as it is the same: it is
                looked at only when it is another.
            by: What the columns are: ``"slots"`` ``[num_layers, num_physical]``, ``"experts"``
                ``[num_layers, num_logical]`` or ``"local"`` ``[num_layers, num_local_experts]``, the slots of this rank.
                ``None`` goes by the width. Counts on empty slots are of no expert: they are dropped, and :attr:`dropped`
                has their sum.

        Raises:
            ValueError: Counts of another shape, dtype or device, NaN, negative or infinite ones, or a width that fits
                several kinds without ``by``. Nothing was counted.
            PlacementError: The placement is of other sizes. Nothing was counted.
        """
        raise NotImplementedError

    def add(self, loads: Any, steps: int) -> None:
        """Count several steps at once that are by expert already, such as :meth:`AttachedCounter.collect` gives.

        They are forgotten together. More than a bucket's steps at once make a bucket of their own.

        Args:
            loads: ``[num_layers, num_logical]``, as for :meth:`record`.
            steps: How many they are of; 0 adds loads to the latest steps.

        Raises:
            ValueError: As :meth:`record`; or ``steps`` is negative.
        """
        raise NotImplementedError

    def loads(self) -> tuple[Floats, int]:
        """What the window holds; takes about a millisecond.

        Returns:
            float64 ``[num_layers, num_logical]``, the caller's own; and the steps that it covers.
        """
        raise NotImplementedError

    @property
    def recorded(self) -> int:
        """All steps ever counted."""
        raise NotImplementedError

    @property
    def dropped(self) -> float:
        """Sum of all counts on empty slots, as far as :meth:`loads` has seen them."""
        raise NotImplementedError
