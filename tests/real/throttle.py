"""What ranks are told to do to their own READs while they migrate: hold them, slow them down, and look."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from eplb_async.communicator import AsyncEplbCommunicator
from eplb_async.core.placement import Placement


async def limited(comm: AsyncEplbCommunicator, placement: Placement, bytes_per_second: int) -> tuple[int, float]:
    """Migrate under a limit; answers bytes read, and seconds from BEGIN to the last COMMIT."""
    comm.limit(bytes_per_second)
    report = await comm.migrate(placement, timeout=60.0)
    comm.limit(0)
    return report.bytes_read, report.seconds["move"]


async def paused(comm: AsyncEplbCommunicator, placement: Placement, seconds: float) -> dict[str, Any]:
    """Migrate, and pause for a while once a READ was posted."""
    session: Any = comm._session
    comm.limit(32 << 20)  # so that it is not over before the pause
    running = asyncio.ensure_future(comm.migrate(placement, timeout=60.0))
    while session.driver.attempt is None or session.driver.attempt.run is None or not posted(session):
        await asyncio.sleep(0)
    comm.pause()
    await asyncio.sleep(0.1)  # what was being posted at that moment is posted
    before, cpu, wall = posted(session), time.process_time(), time.monotonic()
    await asyncio.sleep(seconds)
    found = {
        "posted": posted(session) - before,
        "cpu": (time.process_time() - cpu) / (time.monotonic() - wall),
        "in flight": comm.health().reads_in_flight,
        "phase": comm.health().phase,
        "paused": comm.health().paused,
    }
    comm.limit(0)
    await comm.resume()
    await running
    return found


def posted(session: Any) -> int:
    """READs that the running migration has posted."""
    count: int = session.driver.attempt.run.traffic.reads
    return count
