"""Agents without a communicator, one in each rank's process."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import torch

from eplb_async import AsyncNixlAgent, Settings
from tests.hosts.conftest import SECRET

ROWS, COLUMNS = 64, 1 << 16
_open = AsyncExitStack()


def pattern() -> torch.Tensor:
    """What the source holds, ``[rows, columns]``."""
    return torch.arange(ROWS * COLUMNS, dtype=torch.int32).reshape(ROWS, COLUMNS)


async def serve(_: object) -> bytes:
    """Offer the pattern until :func:`leave`; returns the agent's metadata."""
    agent = await _open.enter_async_context(AsyncNixlAgent.open("source", Settings(secret=SECRET)))
    await agent.register(pattern(), name="pattern")
    await _open.enter_async_context(agent.serving())
    return await agent.metadata()


async def leave(_: object) -> None:
    """End :func:`serve`."""
    await _open.aclose()


async def read(_: object, blob: bytes, times: int) -> list[bool]:
    """Whether several READs at once, each of rows of its own, bring what the source holds."""
    target = torch.zeros(ROWS, COLUMNS, dtype=torch.int32)
    rows = ROWS // times
    async with AsyncNixlAgent.open("reader", Settings(secret=SECRET)) as agent:
        region = await agent.register(target, name="target")
        peer = await agent.add_peer(blob)
        there = peer.region("pattern")
        slices = [slice(n * rows, (n + 1) * rows) for n in range(times)]
        await asyncio.gather(*(agent.read(region[part], there[part], timeout=30.0) for part in slices))
    return [bool(torch.equal(target[part], pattern()[part])) for part in slices]
