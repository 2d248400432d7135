"""A counter that the engine's kernels add to, read now and then."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from eplb_async.core.placement import Placement
from eplb_async.service.counts import By, Floats, as_experts, infer

__all__ = ["AttachedCounter"]

_log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.0005


@dataclass(frozen=True, slots=True, eq=False)
class _Closing:
    """A layer's row at the moment when the layer was applied.

    Attributes:
        layer: The layer.
        row: Host memory of the row, ``[width]``; on CUDA it is there when ``event`` has completed.
        slots: The expert in each slot until then, ``[width]``.
        event: The end of the copy on its stream; ``None`` if it is done.
    """

    layer: int
    row: torch.Tensor
    slots: NDArray[np.int32]
    event: Any


class AttachedCounter:
    """Reads a tensor of counts that only grow, such as kernels in a CUDA graph make, and says what has come since.

    ``remove = comm.on_applied(counter.applied)`` after making it: when a layer is applied, its row is copied before a
    step runs with the new placement, so every token counts for the expert that was in its slot. What has to be counted
    is said in :class:`LoadWindow`. Counts before it was attached are no load.

    On CUDA the row is copied on the current stream and everything else on a stream of its own: no thread waits for the
    engine's stream, and that waits for none. Attach before or after a graph is captured, not meanwhile.

    Args:
        tensor: int32 or int64 counts, torch on CPU or CUDA, or numpy: ``[num_layers, width]``. It is read in place and
            must stay where it is. It may wrap around, and may be set to zero: what had come to a row since the last
            :meth:`collect` is then lost, and :attr:`resets` counts it.
        where: Says where the experts are, as ``lambda: comm.placement`` does. :meth:`collect` asks it, so that a change
            that no apply tells of (a rank that came back) is noticed by the second call after it.
        by: What the columns are, as in :meth:`LoadWindow.record`.
        rank: This rank, for counts of its own slots.

    Raises:
        ValueError: Another shape, dtype or kind of tensor, or a width that fits several kinds without ``by``.
    """

    def __init__(
        self, tensor: Any, where: Callable[[], Placement], *, by: str | None = None, rank: int | None = None
    ) -> None:
        self._tensor = _checked(tensor)
        self._stays = _identity(self._tensor)
        self._where = where
        placement = where()
        self._kind, self._columns = infer(self._tensor.shape, placement, by, rank)
        self._seen = self._slots_of(placement)
        self._slots = self._seen.copy()
        self._differed = np.zeros(placement.num_layers, dtype=bool)
        self._num_logical = placement.num_logical
        self._lock = threading.Lock()  # microseconds; what follows is changed under it
        self._collecting = threading.Lock()  # one collect() at a time; it alone uses the snapshot
        self._closings: deque[_Closing] = deque()
        self._times_closed = np.zeros(placement.num_layers, dtype=np.int64)
        self._pending: Floats = np.zeros((placement.num_layers, placement.num_logical))
        self._resets = 0
        self._dropped = 0.0
        self._device = self._tensor.device if self._tensor.device.type == "cuda" else None
        self._snapshot = self._host_memory(*self._tensor.shape)
        rows = 1 if self._device is None else placement.num_layers  # allocating pinned memory may wait for the device
        self._spare = list(self._host_memory(rows, self._tensor.shape[1]))
        self._stream: Any = None
        if self._device is not None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(self._device))  # which makes the tensor, perhaps
        self._base = self._copy_all((), timeout=60).copy()

    def applied(self, layer: int, placement: Placement) -> None:
        """Close a layer's row: what it holds was counted with the placement before this one. Takes microseconds.

        Call it where no step runs with the layer, on CUDA with the stream current on which the layer was applied.

        Args:
            layer: The layer that was applied.
            placement: Where the experts are now.
        """
        if self._kind is By.EXPERTS:
            return
        now = self._slots_of(placement)[layer]
        with self._lock:
            if _identity(self._tensor) != self._stays:
                return  # collect() says so
            self._fold()
            before = self._slots[layer]
            if np.array_equal(before, now):
                return
            row = self._spare.pop() if self._spare else self._host_memory(self._tensor.shape[1])
            row.copy_(self._tensor[layer], non_blocking=True)
            event = None if self._device is None else torch.cuda.current_stream(self._device).record_event()
            self._closings.append(_Closing(layer, row, before.copy(), event))
            self._times_closed[layer] += 1
            self._slots[layer] = now

    def collect(self, *, timeout: float = 10.0) -> Floats:
        """What was counted since the last call. Takes milliseconds and may wait for the device: call it off the loops.

        A layer that is applied meanwhile keeps its latest counts for the next call. Calls at once go one after another.

        Args:
            timeout: Seconds to wait for the device, and for another call.

        Returns:
            float64 ``[num_layers, num_logical]``, the caller's own.

        Raises:
            TimeoutError: The device did not copy in time. Nothing is lost: the next call returns it.
            ValueError: The tensor is no longer where it was; attach it again.
        """
        deadline = time.monotonic() + timeout
        if not self._collecting.acquire(timeout=timeout):
            raise TimeoutError(f"another collect() has not ended within {timeout:g} s")
        try:
            with self._lock:
                if _identity(self._tensor) != self._stays:
                    raise ValueError(
                        "the counter's memory or shape is another than when it was attached; attach it again"
                    )
                times_closed, behind = self._times_closed.copy(), tuple(self._closings)
            now = self._copy_all(behind, timeout=max(0.0, deadline - time.monotonic()))
            seen = self._slots_of(self._where())
            with self._lock:
                self._fold()
                # The snapshot of a layer that was closed after it was begun may have counts of both placements.
                self._count(np.flatnonzero(self._times_closed == times_closed), now)
                self._follow(seen, self._times_closed == times_closed)
                pending, self._pending = self._pending, np.zeros_like(self._pending)
                return pending
        finally:
            self._collecting.release()

    @property
    def resets(self) -> int:
        """How often a row was found below what it was before."""
        return self._resets

    @property
    def dropped(self) -> float:
        """Sum of all counts on empty slots, which are of no expert; an engine has none."""
        return self._dropped

    # ------------------------------------------------------------------------------------------- under the lock
    def _fold(self) -> None:
        """Count the closings whose copy is done, in order."""
        while self._closings and (self._closings[0].event is None or self._closings[0].event.query()):
            closing = self._closings.popleft()
            layers = np.array([closing.layer])
            self._add(layers, closing.row.numpy()[None], closing.slots[None])
            self._spare.append(closing.row)

    def _count(self, layers: NDArray[np.intp], now: NDArray[Any]) -> None:
        self._add(layers, now[layers], self._slots[layers])

    def _add(self, layers: NDArray[np.intp], now: NDArray[Any], slots: NDArray[np.int32]) -> None:
        """Count what has come to some layers since the last look: rows ``now``, of the experts in ``slots``."""
        come, reset = _come(self._base[layers], now)
        self._base[layers] = now
        if reset:
            if not self._resets:
                _log.warning(
                    "attached counter: layer %d went down, so it was set to zero; counts since the last look are lost",
                    layers[reset[0]],
                )
            self._resets += len(reset)
        if self._kind is By.EXPERTS:
            self._pending[layers] += come
        else:
            found, dropped = as_experts(come, slots, self._num_logical)
            self._pending[layers] += found
            self._dropped += dropped

    def _follow(self, seen: NDArray[np.int32], same: NDArray[np.bool_]) -> None:
        """Take over where experts are, in layers that have differed twice: no apply tells of those any more."""
        differs = (seen != self._slots).any(axis=1) & same
        known = differs & self._differed & (seen == self._seen).all(axis=1)
        self._slots[known] = seen[known]
        self._differed, self._seen = differs & ~known, seen

    # ---------------------------------------------------------------------------------------------------- memory
    def _copy_all(self, behind: tuple[_Closing, ...], *, timeout: float) -> NDArray[Any]:
        """The tensor as it is now, behind these closings."""
        if self._device is None:
            self._snapshot.copy_(self._tensor)
        else:
            for closing in behind:
                self._stream.wait_event(closing.event)
            with torch.cuda.stream(self._stream):
                self._snapshot.copy_(self._tensor, non_blocking=True)
            event = self._stream.record_event()
            deadline = time.monotonic() + timeout
            while not event.query():
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"{self._device} has not copied the counter within {timeout:g} s; call it again")
                time.sleep(_LOOK_SECONDS)
        return np.asarray(self._snapshot.numpy())

    def _host_memory(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._tensor.dtype, pin_memory=self._device is not None)

    def _slots_of(self, placement: Placement) -> NDArray[np.int32]:
        """The experts in the slots that are counted, ``[num_layers, width]``; of counts by expert, no slot at all."""
        return placement.physical_to_logical_map[:, self._columns]


def _checked(tensor: Any) -> torch.Tensor:
    if isinstance(tensor, np.ndarray):
        if tensor.dtype not in (np.int32, np.int64) or not tensor.flags.writeable:
            what = f"an array of {tensor.dtype}" if tensor.flags.writeable else "a read-only array"
            raise ValueError(f"the counter is {what}; it must be int32 or int64, and writable")
        tensor = torch.from_numpy(tensor)
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"the counter is {type(tensor).__name__}; it must be a torch tensor or a numpy array")
    if tensor.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"the counter has dtype {tensor.dtype}; it must be int32 or int64")
    if tensor.layout is not torch.strided or tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"the counter is a {tensor.layout} tensor on {tensor.device}; it must be dense, on CPU or CUDA"
        )
    return tensor


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _come(before: NDArray[Any], now: NDArray[Any]) -> tuple[Floats, list[int]]:
    """How much has come, ``[n, width]``, and the rows that were set to zero.

    Differences are those of integers that wrap around. One of a quarter of their range or more is none: the row went
    down.
    """
    unsigned = np.dtype(f"u{now.dtype.itemsize}")
    most = 1 << (8 * now.dtype.itemsize - 2)
    now = now.view(unsigned)
    come = now - before.view(unsigned)
    reset = np.flatnonzero((come >= most).any(axis=1))
    come[reset] = np.where(now[reset] < most, now[reset], 0)
    return come.astype(np.float64), reset.tolist()
