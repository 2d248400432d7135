"""What the reference work is compared with, run inside the rank processes: the same bytes by plainer means."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from itertools import pairwise
from typing import Any

import numpy as np

from eplb_async.nixl.native import State
from eplb_async.weights import ENTRY_NAME


async def copy_twice(comm: Any, nbytes: int, chunk: int) -> float:
    """The memcpy ceiling: the same bytes copied twice by this process; returns seconds."""
    pages: list[np.ndarray[Any, Any]] = comm.__dict__.setdefault(
        "_ceiling", [np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)]
    )

    def copy() -> float:
        started = time.perf_counter()
        for source, target in pairwise(pages):
            for at in range(0, nbytes, chunk):
                target[at : at + chunk] = source[at : at + chunk]
        return time.perf_counter() - started

    return await asyncio.to_thread(copy)


async def raw_reads(comm: Any, peer: int) -> float:
    """Raw NIXL, batched and busy-polled, then the copy into place, layer by layer; returns seconds."""
    session = comm._session

    async def run() -> float:
        endpoint, native = session.endpoint, session.endpoint.native
        member = session._roster.get(peer)
        buffer = session._staging.buffers["DRAM"]
        started = time.perf_counter()
        for layer, places in enumerate(member.layout.layers):
            base, targets = buffer.data_ptr(), []
            for tensor, place in enumerate(places):
                spec = place.spec
                if spec.name == ENTRY_NAME:  # the entries must go on saying what the rows are
                    continue
                rows = spec.num_rows
                per_post = max(1, endpoint.settings.max_post_bytes // max(1, spec.row_bytes))
                for first in range(0, rows, per_post):
                    numbers = np.arange(first, min(rows, first + per_post), dtype=np.uint64)
                    local = np.zeros((len(numbers), 3), np.uint64)
                    remote = np.zeros_like(local)
                    local[:, 0] = base + numbers * np.uint64(spec.row_bytes)
                    remote[:, 0] = place.address + numbers * np.uint64(spec.row_stride)
                    local[:, 1] = remote[:, 1] = spec.row_bytes
                    handle = native.make_read(local, "DRAM", remote, "DRAM", member.peer.name)
                    state = native.post(handle)
                    while state is State.PROC:
                        state = native.check(handle)
                    native.release(handle)
                at = base - buffer.data_ptr()
                targets.append((session.weights.rows(layer, tensor).numpy(), at, rows, spec.row_bytes))
                base += rows * spec.row_bytes
            for target, at, rows, row_bytes in targets:
                staged = buffer[at : at + rows * row_bytes].numpy().reshape(rows, row_bytes)
                for row in range(rows):
                    target[row] = staged[row]
        return time.perf_counter() - started

    result: float = await comm._engine.run(run)
    return result


async def lag_of_migrate(comm: Any, placement: Any) -> list[float]:
    """Lags of a 1 ms ticker on the user's loop while it migrates, in seconds."""
    return await _lags_while(comm.migrate(placement, timeout=60.0))


async def lag_of_copies(comm: Any, nbytes: int, chunk: int, times: int) -> list[float]:
    """The same ticker while two threads copy as many bytes as a READ and an apply do, without NIXL."""
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)

    def copy() -> None:
        for _ in range(times):
            for at in range(0, nbytes, chunk):
                target[at : at + chunk] = source[at : at + chunk]

    async def both() -> None:
        await asyncio.gather(asyncio.to_thread(copy), asyncio.to_thread(copy))

    return await _lags_while(both())


async def _lags_while(work: Coroutine[Any, Any, object]) -> list[float]:
    lags = []
    task = asyncio.ensure_future(work)
    while not task.done():
        started = time.perf_counter()
        await asyncio.sleep(0.001)
        lags.append(time.perf_counter() - started - 0.001)
    await task
    return lags


async def met_seconds(comm: Any) -> dict[int, float]:
    """Seconds until each peer had been met, from the start of the exchange."""
    return dict(comm._session.met_seconds)
