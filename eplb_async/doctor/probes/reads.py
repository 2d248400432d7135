"""READs between two processes of this machine, by the library's own agent: how fast, and by UCX's word by what."""

from __future__ import annotations

import asyncio
import base64
import importlib
import os
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from eplb_async.doctor.child import Child
from eplb_async.nixl import AsyncNixlAgent, bindings
from eplb_async.nixl.agent import Region
from eplb_async.nixl.peers import Peer
from eplb_async.settings import Settings

__all__ = ["Memory", "measure", "read", "serve"]

_LARGE, _SMALL = "doctor-large", "doctor-small"
_ROWS, _ROW_BYTES, _SMALL_BYTES = 64, 1 << 20, 4096
_REPEATS, _SMALL_REPEATS, _SMALL_SECONDS = 5, 100, 1.0
_CLOSE_SECONDS = 1.0


class Memory:
    """What is read from and into: 64 MiB and 4 KiB, registered with an agent.

    Args:
        where: ``"cpu"``, or a CUDA device such as ``"cuda:0"``.
        filled: Whether it holds what a reader expects; otherwise zeros.
    """

    def __init__(self, where: str, *, filled: bool) -> None:
        shapes = {_LARGE: (_ROWS, _ROW_BYTES), _SMALL: (1, _SMALL_BYTES)}
        self._arrays: dict[str, Any] = {
            name: _expected(shape) if filled else np.zeros(shape, np.uint8) for name, shape in shapes.items()
        }
        if where != "cpu":
            torch: Any = importlib.import_module("torch")
            self._arrays = {name: torch.from_numpy(array).to(where) for name, array in self._arrays.items()}
        self._filled = filled
        self.regions: dict[str, Region] = {}

    async def register(self, agent: AsyncNixlAgent) -> None:
        """Register both; by their names peers read them, so only what is filled has these."""
        for name, array in self._arrays.items():
            self.regions[name] = await agent.register(array, name if self._filled else f"{name}-into")

    def wrong_bytes(self) -> int:
        """How many of the large one's bytes are not what a reader expects."""
        array = self._arrays[_LARGE]
        found = array if isinstance(array, np.ndarray) else array.cpu().numpy()
        return int((found != _expected(found.shape)).sum())


def _expected(shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    every = (np.arange(256) * 7 + 1).astype(np.uint8)
    return np.tile(every, shape[0] * shape[1] // len(every)).reshape(shape)


async def measure(agent: AsyncNixlAgent, memory: Memory, peer: Peer, *, seconds: float) -> dict[str, Any]:
    """Read a peer's memory, the first small READ, then large ones, then small ones.

    Cancelled: a READ may still be in flight; close the agent before the memory goes.

    Args:
        agent: Ours.
        memory: Ours, registered with it.
        peer: Whose memory to read.
        seconds: When to be done; the first READs may take as long, of the others fewer are made.

    Returns:
        ``gb_per_s`` of the fastest large READ, ``p50_us`` of the small ones, ``first_ms`` and ``wrong_bytes``.

    Raises:
        NixlTransferFailed: A READ failed or did not end in time.
    """
    deadline = time.monotonic() + seconds

    async def one(name: str, rows: int) -> float:
        local, remote = memory.regions[name], peer.region(name)
        begun = time.perf_counter()
        await agent.read(local[0:rows], remote[0:rows], timeout=max(0.001, deadline - time.monotonic()))
        return time.perf_counter() - begun

    first = await one(_SMALL, 1)
    fastest, repeats = await one(_LARGE, _ROWS), 1
    while repeats < _REPEATS and time.monotonic() + 2 * fastest < deadline:
        fastest, repeats = min(fastest, await one(_LARGE, _ROWS)), repeats + 1
    smalls = [await one(_SMALL, 1)]
    until = min(deadline - _SMALL_SECONDS / 10, time.monotonic() + _SMALL_SECONDS)
    while len(smalls) < _SMALL_REPEATS and time.monotonic() < until:
        smalls.append(await one(_SMALL, 1))
    return {
        "gb_per_s": round(_ROWS * _ROW_BYTES / fastest / 1e9, 3),
        "p50_us": round(statistics.median(smalls) * 1e6, 1),
        "first_ms": round(first * 1e3, 2),
        "wrong_bytes": memory.wrong_bytes(),
    }


def read(memory: str, seconds: float) -> Iterator[dict[str, Any]]:
    """Start a source, and read from it; besides what :func:`measure` tells, ``fds_per_peer`` and ``fds``."""
    deadline = time.monotonic() + seconds
    with Child("reads.serve", {"memory": memory}) as source:
        bindings.load()  # meanwhile
        answer = source.receive(seconds)
        if answer.problem:
            raise RuntimeError(f"the process to read from: {answer.problem}")
        card = base64.b64decode(answer.found["card"])
        yield asyncio.run(_read(card, memory, deadline))


async def _read(card: bytes, where: str, deadline: float) -> dict[str, Any]:
    memory = Memory(where, filled=False)
    async with AsyncNixlAgent.open(f"doctor-reader-{os.getpid()}", Settings()) as agent:
        await memory.register(agent)
        before = _descriptors()
        peer = await agent.add_peer(card)
        found = await measure(agent, memory, peer, seconds=max(0.1, deadline - time.monotonic()))
        return {**found, "fds": before, "fds_per_peer": _descriptors() - before}


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def serve(memory: str) -> Iterator[dict[str, Any]]:
    """Be read from until killed, or until standard input ends."""
    with asyncio.Runner() as runner:
        agent, card = runner.run(_open(memory))
        yield {"card": base64.b64encode(card).decode()}
        runner.run(_serve(agent))


async def _open(where: str) -> tuple[AsyncNixlAgent, bytes]:
    memory = Memory(where, filled=True)
    agent = await AsyncNixlAgent.open(f"doctor-source-{os.getpid()}", Settings())
    await memory.register(agent)
    return agent, await agent.metadata()


async def _serve(agent: AsyncNixlAgent) -> None:
    async with agent.serving():
        await asyncio.to_thread(sys.stdin.read)
    await agent.aclose(_CLOSE_SECONDS)
