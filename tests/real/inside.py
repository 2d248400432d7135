"""What ranks are told to do to themselves: cut a migration off, and count what their process holds."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
from pathlib import Path

from eplb_async.communicator import AsyncEplbCommunicator
from eplb_async.core.placement import Placement
from eplb_async.errors import EplbError


async def cut(comm: AsyncEplbCommunicator, placement: Placement, timeout: float, seconds: float) -> str:
    """Migrate, cancelled after ``seconds``; answers ``"cancelled"``, or how it ended before."""
    task = asyncio.ensure_future(comm.migrate(placement, timeout=timeout))
    await asyncio.sleep(seconds)
    if not task.done():
        task.cancel()
        for _ in range(2):
            await asyncio.sleep(0)
        assert task.cancelled(), "I-10: a cancelled call did not end at once"
        return "cancelled"
    error = task.exception()
    assert error is None or isinstance(error, EplbError), repr(error)
    return type(error).__name__ if error else "done"


async def quiet(comm: AsyncEplbCommunicator) -> Placement:
    """Wait until nothing is under way on this rank, quarantine included; answers its placement."""
    async with asyncio.timeout(30):
        while comm.health().phase != "idle" or comm.health().reads_in_flight:
            await asyncio.sleep(0.01)
    return comm.placement


async def counts(comm: AsyncEplbCommunicator) -> dict[str, int]:
    """What this process holds: by the kernel's count, by NIXL's objects, and by Python's."""
    gc.collect()
    # glibc keeps what closed agents and their staging gave back, tens of MiB after many of them: not ours any more.
    kept = _rss_kib()
    ctypes.CDLL(None).malloc_trim(0)
    session, engine = comm._session, comm._engine
    endpoint, staging = session.endpoint, session._staging
    maps = _maps()
    return {
        "pid": os.getpid(),
        "kept_kib": kept - _rss_kib(),
        "rss_kib": _rss_kib(),
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "maps": len(maps),
        "shm": sum("/dev/shm/" in line or "/SYSV" in line for line in maps),
        "handles": len(endpoint.transfers),
        "leases": len(endpoint.leases),
        "registrations": len(endpoint._memory._registered),
        "peers": len(endpoint.peers),
        "staging": staging.reclaim() + sum(piece.nbytes for piece in staging._used),
        "calls": len(engine._submissions),
        "tasks": len(engine._tasks) + len(asyncio.all_tasks()),
        "objects": len(gc.get_objects()),
    }


def _maps() -> list[str]:
    return Path("/proc/self/maps").read_text().splitlines()


def _rss_kib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024
