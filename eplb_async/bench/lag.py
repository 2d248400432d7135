"""How late a user's event loop is: a ticker that wants to wake every millisecond."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

__all__ = ["lags_while"]

_TICK = 0.001


async def lags_while(work: Coroutine[Any, Any, object]) -> list[float]:
    """Await ``work`` beside a ticker of 1 ms on the same loop.

    Returns:
        How late each tick was, in seconds.
    """
    lags = []
    task = asyncio.ensure_future(work)
    while not task.done():
        started = time.perf_counter()
        await asyncio.sleep(_TICK)
        lags.append(time.perf_counter() - started - _TICK)
    await task
    return lags
