"""Digests of experts: xxh3-128 over an expert's rows in all tensors of a layer (I-16, ``verify="full"``).

They find accidents, not attackers: xxh3 is no cryptographic hash.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from eplb_async.engine import LoopEngine
from eplb_async.errors import EplbError

_SLICE = 16 << 20  # bytes of a device's row that are on the host at a time


def load_xxhash() -> Any:
    """The package xxhash.

    Raises:
        EplbError: It is not installed; names the extra that brings it.
    """
    try:
        import xxhash
    except ImportError as error:
        raise EplbError(
            "verify='full' needs the package xxhash, which is not installed here: pip install 'eplb-async[verify]', "
            "or set verify='identity' on all ranks"
        ) from error
    return xxhash


class Digester:
    """Digests rows on the engine's worker thread, expert by expert, with the GIL let go of in each.

    Args:
        engine: The engine loop.

    Raises:
        EplbError: The package xxhash is not installed.
    """

    def __init__(self, engine: LoopEngine) -> None:
        self._engine = engine
        self._new = load_xxhash().xxh3_128
        self._stream: Any = None

    async def digests(self, layer: int, tensors: Sequence[torch.Tensor], rows: Sequence[int]) -> list[bytes]:
        """Digests of experts, 16 bytes each; the layer's number is in them.

        Cancelled: the worker stops after the row it is at, and only then this ends: nothing reads the tensors'
        memory afterwards.

        Args:
            layer: The layer.
            tensors: Its byte rows, uint8 ``[n, row_bytes]`` each, in an order that is the same on all ranks.
            rows: Rows to digest.
        """
        stop = threading.Event()
        work = self._engine.loop.create_task(
            self._engine.offload(lambda: self._digest(layer, tensors, rows, stop)), name=f"digests of layer {layer}"
        )
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            stop.set()
            await asyncio.wait([work])
            raise

    def _digest(
        self, layer: int, tensors: Sequence[torch.Tensor], rows: Sequence[int], stop: threading.Event
    ) -> list[bytes]:
        found: list[bytes] = []
        given = [rows if rows.is_cuda else rows.numpy() for rows in tensors]
        with self._aside(tensors):
            for row in rows:
                if stop.is_set():
                    break
                digest = self._new(seed=layer)
                for values in given:
                    for part in _on_host(values[row]):
                        digest.update(part)
                found.append(digest.digest())
                time.sleep(0)  # xxhash keeps the GIL over buffers below 100 KiB; the loops want it
        return found

    def _aside(self, tensors: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[object]:
        """A stream of our own for device rows, so as not to wait behind the server's kernels."""
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        if device is None:
            return contextlib.nullcontext()
        if self._stream is None:
            make: Any = torch.cuda.Stream
            self._stream = make(device)
        return torch.cuda.stream(self._stream)


def _on_host(row: torch.Tensor | NDArray[np.uint8]) -> Iterator[NDArray[np.uint8]]:
    """A row's bytes; those of a device come in slices."""
    if isinstance(row, np.ndarray):
        yield row
        return
    for start in range(0, row.numel(), _SLICE):
        yield row[start : start + _SLICE].cpu().numpy()
