"""Waiting for what CUDA streams have queued, before peers may read rows, or READs may write into the buffer (I-18)."""

from __future__ import annotations

import time
from typing import Any

import torch

from eplb_async.errors import NixlTransferTimeout

__all__ = ["wait_for_streams"]

_FIRST_PAUSE, _LONGEST_PAUSE = 0.00005, 0.001


def wait_for_streams(device: torch.device, given: Any, *, deadline: float) -> None:
    """Wait for what the current stream of this thread, and a stream given, have queued; returns at once on a CPU.

    The events are looked at, not synchronised with, so that the wait has an end.

    Args:
        device: Where the weights are.
        given: A further stream, or ``None``.
        deadline: In ``time.monotonic()``.

    Raises:
        NixlTransferTimeout: The deadline passed before.
    """
    if device.type != "cuda":
        return
    streams = [torch.cuda.current_stream(device), *([] if given is None else [given])]
    events = [stream.record_event() for stream in streams]
    pause = _FIRST_PAUSE
    while not all(event.query() for event in events):
        if time.monotonic() >= deadline:
            raise NixlTransferTimeout(f"what was queued on {device} before the call has not ended", phase="make")
        time.sleep(pause)
        pause = min(_LONGEST_PAUSE, 2 * pause)
