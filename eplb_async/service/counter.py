"""A counter that the engine's kernels add to, read now and then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from eplb_async.core.placement import Placement
from eplb_async.service.counts import Floats

__all__ = ["AttachedCounter"]


class AttachedCounter:
    """Reads a tensor of counts that only grow, such as kernels in a CUDA graph make, and says what has come since.

    ``remove = comm.on_applied(counter.applied)`` after making it: when a layer is applied, its row is copied before a
    step runs with the new placement, so every token counts for the expert that was in its slot. What has to be counted
    is said in :class:`LoadWindow`. Counts before it was attached are no load.

    On CUDA the row is copied on the current stream and everything else on a stream of its own: the engine's stream is
    never waited for by the host. Attach before or after a graph is captured, not meanwhile.

    Args:
        tensor: int32 or int64 counts, torch on CPU or CUDA, or numpy: ``[num_layers, width]``. It is read in place and
            must stay where it is. It may wrap around, and may be set to zero: what a row held then and was not
            collected is lost.
        where: Says where the experts are, as ``lambda: comm.placement`` does. Asked on the calling thread of
            :meth:`collect`, so that a change that no apply tells of (a rank that came back) is seen.
        by: What the columns are, as in :meth:`LoadWindow.record`.
        rank: This rank, for counts of its own slots.

    Raises:
        ValueError: Another shape, dtype or kind of tensor, or a width that fits several kinds without ``by``.
    """

    def __init__(
        self, tensor: Any, where: Callable[[], Placement], *, by: str | None = None, rank: int | None = None
    ) -> None:
        raise NotImplementedError

    def applied(self, layer: int, placement: Placement) -> None:
        """Close a layer's row: what it holds was counted with the placement before this one. Takes microseconds.

        Args:
            layer: The layer that was applied.
            placement: Where the experts are now.
        """
        raise NotImplementedError

    def collect(self, *, timeout: float = 10.0) -> Floats:
        """What was counted since the last call. Takes milliseconds and may wait for the device: call it off the loops.

        A layer that is applied meanwhile keeps its latest counts for the next call. Calls at once go one after the other.

        Args:
            timeout: Seconds to wait for the device.

        Returns:
            float64 ``[num_layers, num_logical]``, the caller's own.

        Raises:
            TimeoutError: The device did not copy in time. Nothing is lost: the next call returns it.
            ValueError: The tensor is no longer where it was; attach it again.
        """
        raise NotImplementedError

    @property
    def resets(self) -> int:
        """How often a row was found below what it was before."""
        raise NotImplementedError

    @property
    def dropped(self) -> float:
        """Sum of all counts on empty slots, which are of no expert."""
        raise NotImplementedError
