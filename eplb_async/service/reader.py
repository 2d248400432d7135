"""Copies of a tensor that others write to, in host memory; on CUDA nobody's stream is held up by them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["TensorReader"]

_LOOK_SECONDS = 0.0005


class TensorReader:
    """Reads an integer tensor ``[n, width]`` in place.

    Args:
        tensor: int32 or int64, torch on CPU or CUDA, or numpy.

    Attributes:
        shape: Of the tensor.

    Raises:
        ValueError: Another dtype or kind of tensor.
    """

    def __init__(self, tensor: Any) -> None:
        self._tensor = _checked(tensor)
        self._stays = self._identity()
        self.shape = tuple(self._tensor.shape)
        self._device = self._tensor.device if self._tensor.device.type == "cuda" else None
        self._all: torch.Tensor | None = None
        self._spare: list[torch.Tensor] = []
        self._stream: Any = None

    def start(self) -> None:
        """Allocate what is needed, since allocating pinned memory may wait for the device."""
        self._all = self._host_memory(*self.shape)
        self._spare += self._host_memory(1 if self._device is None else self.shape[0], self.shape[1])
        if self._device is not None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(self._device))  # which makes the tensor, perhaps

    @property
    def moved(self) -> bool:
        """Whether the tensor is no longer where, or what, it was."""
        return self._identity() != self._stays

    def row(self, index: int) -> tuple[torch.Tensor, Any]:
        """Copy a row, on CUDA on the current stream; waits for nothing.

        Returns:
            The copy, ``[width]``, to be given to :meth:`give_back` after use; and the event behind it, ``None`` if it
            is there already.
        """
        row = self._spare.pop() if self._spare else self._host_memory(self.shape[1])
        row.copy_(self._tensor[index], non_blocking=True)
        return row, None if self._device is None else torch.cuda.current_stream(self._device).record_event()

    def give_back(self, row: torch.Tensor) -> None:
        """The copy is not needed any more, and its event has completed."""
        self._spare.append(row)

    def whole(self, behind: Iterable[Any], timeout: float) -> NDArray[Any]:
        """Copy the tensor as it is now, on CUDA on a stream of its own, and wait for that. One call at a time.

        Args:
            behind: Events after which it is to be copied.
            timeout: Seconds to wait for the device.

        Returns:
            ``[n, width]``, valid until the next call.

        Raises:
            TimeoutError: The device did not copy in time.
        """
        assert self._all is not None  # start() was called
        if self._device is None:
            self._all.copy_(self._tensor)
        else:
            for event in behind:
                self._stream.wait_event(event)
            with torch.cuda.stream(self._stream):
                self._all.copy_(self._tensor, non_blocking=True)
            event = self._stream.record_event()
            deadline = time.monotonic() + timeout
            while not event.query():
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"{self._device} has not copied the counter within {timeout:g} s; call it again")
                time.sleep(_LOOK_SECONDS)
        return np.asarray(self._all.numpy())

    def _host_memory(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._tensor.dtype, pin_memory=self._device is not None)

    def _identity(self) -> tuple[Any, ...]:
        return self._tensor.data_ptr(), self._tensor.shape, self._tensor.stride()


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
