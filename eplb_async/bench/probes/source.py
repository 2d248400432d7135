"""An agent that others read from, in a process of a probe."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from eplb_async.nixl import AsyncNixlAgent
from eplb_async.nixl.bindings import NixlNative
from eplb_async.nixl.card import seal
from eplb_async.nixl.regions import extent_of
from eplb_async.settings import Settings

REGION = "rows"
PLAIN_PAUSE = 0.0001
"""Seconds."""
_serving: list[contextlib.AsyncExitStack] = []


async def serve(_: object, rows: int, nbytes: int) -> bytes:
    """Open an agent with ``rows`` rows of ``nbytes`` and serve until :func:`end`; returns its card."""
    stack = contextlib.AsyncExitStack()
    _serving.append(stack)
    name = f"source-{os.getpid()}-{len(_serving)}"
    agent = await stack.enter_async_context(AsyncNixlAgent.open(name, Settings()))
    await agent.register(_memory(rows, nbytes), REGION)
    await stack.enter_async_context(agent.serving())
    return await agent.metadata()


async def serve_plainly(_: object, rows: int, nbytes: int) -> bytes:
    """As :func:`serve`, by plain NIXL: a thread that polls every 0.1 ms, as one would write it by hand."""
    stack = contextlib.AsyncExitStack()
    _serving.append(stack)
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[bytes] = loop.create_future()
    over = threading.Event()

    def told(card: bytes) -> None:
        loop.call_soon_threadsafe(ready.set_result, card)

    thread = asyncio.create_task(asyncio.to_thread(_poll, f"plain-source-{os.getpid()}", rows, nbytes, told, over))
    stack.push_async_callback(asyncio.wait_for, thread, 30.0)
    stack.callback(over.set)
    return await asyncio.wait_for(ready, 30.0)


def _poll(name: str, rows: int, nbytes: int, told: Callable[[bytes], object], over: threading.Event) -> None:
    native = NixlNative(name)
    memory = _memory(rows, nbytes)
    extent = extent_of(memory, REGION)
    token = native.register([extent])
    told(seal(name, native.metadata(), [extent], b""))
    while not over.is_set():
        native.notifications()
        time.sleep(PLAIN_PAUSE)
    native.deregister(token)
    native.destroy()


def _memory(rows: int, nbytes: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, 256, (rows, nbytes), np.uint8)


async def end(_: object) -> None:
    """Close the agents of this process that serve."""
    while _serving:
        await _serving.pop().aclose()
