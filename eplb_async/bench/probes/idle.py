"""CPU that a connected rank burns while nothing goes on, as a share of a core; and with NIXL's progress thread."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from typing import Any

from eplb_async.bench.probes import alone
from eplb_async.bench.probes.group import answer, started, transports
from eplb_async.testing.processes import RankProcesses

NAME = "idle"
BAR = 0.01
_SETTLE_SECONDS, _SECONDS = 4.5, 8.0  # the idle pause doubles up to two seconds
_QUICK_SECONDS, _THREAD_SECONDS = 0.5, 1.0
_HERE = "eplb_async.bench.probes.idle"


def measure(*, quick: bool) -> dict[str, Any]:
    """Two ranks on each transport, all at once, then two with the progress thread; quick: on one transport."""
    settle, seconds = (_QUICK_SECONDS,) * 2 if quick else (_SETTLE_SECONDS, _SECONDS)
    with ExitStack() as stack:
        groups = {transport: stack.enter_context(started(2, transport)) for transport in transports(quick=quick)}
        for group in groups.values():
            _begin(group, settle, seconds)
        idle = {transport: _worst(group, settle + seconds) for transport, group in groups.items()}
    with started(2, "auto", settings={"progress_thread": True}) as group:
        _begin(group, _QUICK_SECONDS, _THREAD_SECONDS)
        thread = _worst(group, _QUICK_SECONDS + _THREAD_SECONDS)
    return {
        "settle_seconds": settle,
        "seconds": seconds,
        "share_of_a_core": idle,
        "with_progress_thread": thread,
        "bars": [
            alone.at_most(f"CPU of a connected, idle rank, {transport}: share of a core", BAR, share)
            for transport, share in idle.items()
        ],
    }


async def share_of_a_core(_: object, settle: float, seconds: float) -> float:
    """Do nothing, then measure the CPU that this process burns at that; runs in a rank's process."""
    await asyncio.sleep(settle)
    cpu, wall = time.process_time(), time.perf_counter()
    await asyncio.sleep(seconds)
    return (time.process_time() - cpu) / (time.perf_counter() - wall)


def _begin(group: RankProcesses, settle: float, seconds: float) -> None:
    for rank in range(2):
        group.send(rank, "run", _HERE, "share_of_a_core", settle, seconds)


def _worst(group: RankProcesses, seconds: float) -> float:
    shares: list[float] = [answer(group, rank, seconds + 60.0) for rank in range(2)]
    return round(max(shares), 5)


if __name__ == "__main__":
    alone.main(NAME, measure)
