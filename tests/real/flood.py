"""Run inside rank processes: a rank that sends without end, and what another one feels of it."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from typing import Any

from eplb_async.errors import NixlTransferFailed

_felt: dict[str, Any] = {}


async def flood(comm: Any, count: int, nbytes: int) -> float:
    """Send ``count`` notifications of garbage to each member that is known; returns seconds."""
    session = comm._session

    async def run() -> float:
        endpoint, message = session.endpoint, bytes(nbytes)
        peers = [member.peer for member in session._roster]
        started = time.perf_counter()
        for i in range(count):
            for peer in peers:
                with contextlib.suppress(NixlTransferFailed):
                    endpoint.notify(peer, message)
            if i % 64 == 0:
                await asyncio.sleep(0)
        return time.perf_counter() - started

    return float(await comm._engine.run(run))


async def feel(comm: Any) -> None:
    """Begin to tick every millisecond on the user's loop."""
    late: list[float] = []

    async def tick() -> None:
        due = time.perf_counter() + 0.001
        while True:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            now = time.perf_counter()
            late.append(now - due)
            due = now + 0.001

    _felt.update(late=late, task=asyncio.ensure_future(tick()), started=time.perf_counter(), rss=_rss())


async def felt(comm: Any) -> dict[str, float]:
    """End :func:`feel`: ticks a second, lag, growth of the process in bytes, notifications dropped."""
    _felt["task"].cancel()
    late = sorted(_felt["late"])
    return {
        "ticks": len(late) / (time.perf_counter() - _felt["started"]),
        "p99": late[len(late) * 99 // 100],
        "worst": late[-1],
        "grown": _rss() - _felt["rss"],
        "dropped": sum(comm.health().dropped.values()),
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _rss() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
