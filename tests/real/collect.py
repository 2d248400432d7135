"""Run inside rank processes: migrations with garbage collections in the middle."""

from __future__ import annotations

import asyncio
import gc
from typing import Any


async def migrate(comm: Any, placement: Any) -> int:
    """Migrate, collecting meanwhile; returns how many collections that were."""
    running = asyncio.ensure_future(comm.migrate(placement, timeout=60))
    collections = 0
    while not running.done() and collections < 5:  # each stops the whole interpreter, the engine's thread too
        gc.collect()
        collections += 1
        await asyncio.sleep(0)
    await running
    return collections
