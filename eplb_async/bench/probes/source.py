"""An agent that others read from, in a process of a probe."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import numpy as np

from eplb_async.nixl import AsyncNixlAgent
from eplb_async.settings import Settings

REGION = "rows"
_serving: list[contextlib.AsyncExitStack] = []


async def serve(_: object, rows: int, nbytes: int, settings: dict[str, Any]) -> bytes:
    """Open an agent with ``rows`` rows of ``nbytes`` and serve until :func:`end`; returns its card."""
    memory = np.random.default_rng(0).integers(0, 256, (rows, nbytes), np.uint8)
    stack = contextlib.AsyncExitStack()
    _serving.append(stack)
    name = f"source-{os.getpid()}-{len(_serving)}"
    agent = await stack.enter_async_context(AsyncNixlAgent.open(name, Settings(**settings)))
    await agent.register(memory, REGION)
    await stack.enter_async_context(agent.serving())
    return await agent.metadata()


async def end(_: object) -> None:
    """Close the agents of this process that serve."""
    while _serving:
        await _serving.pop().aclose()
