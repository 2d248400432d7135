"""What waiting for a stopped process costs over tcp, and how soon a cancel of that wait is delivered.

Once a READ waits for its source, once a migration waits for a rank to join.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from eplb_async.bench.probes import alone
from eplb_async.bench.probes.group import run, started
from eplb_async.bench.probes.source import REGION
from eplb_async.nixl import AsyncNixlAgent
from eplb_async.settings import Settings

NAME = "stopped"
CPU_BAR, POLLS_BAR, TURNS_BAR = 0.05, 4999, 1
SECONDS, QUICK_SECONDS = 2.0, 0.5
_ROWS, _ROW_BYTES = 64, 1 << 20
_LIMIT = 30.0
_HERE, _SOURCE = "eplb_async.bench.probes.stopped", "eplb_async.bench.probes.source"


def measure(*, quick: bool) -> dict[str, Any]:
    """Wait on a stopped peer, with a READ and with a migration."""
    seconds = QUICK_SECONDS if quick else SECONDS
    found = {"a READ": _read(seconds), "a migration": _migration(seconds)}
    bars = []
    for what, told in found.items():
        scaled = told["polls"] * SECONDS / told["seconds"]
        bars += [
            alone.at_most(f"{what} waiting on a stopped peer: share of a core", CPU_BAR, told["share_of_a_core"]),
            alone.at_most(f"{what} waiting on a stopped peer: polls in {SECONDS:g} s", POLLS_BAR, scaled),
            alone.at_most(f"{what} waiting on a stopped peer: turns to cancel", TURNS_BAR, told["cancel_turns"]),
        ]
    return {"waiting": found, "bars": bars}


def _read(seconds: float) -> dict[str, float]:
    with started(2, "tcp", open_now=False) as group:
        card = run(group, 1, _SOURCE, "serve", _ROWS, _ROW_BYTES)
        run(group, 0, _HERE, "connect", card)
        group.stop(1)
        try:
            told: dict[str, float] = run(group, 0, _HERE, "wait_for_read", seconds)
        finally:
            group.resume(1)
        run(group, 0, _HERE, "disconnect")  # while the source is there: its answers must still be taken
        run(group, 1, _SOURCE, "end")
    return told


def _migration(seconds: float) -> dict[str, float]:
    with started(2, "tcp") as group:
        group.all("migrate", group.spec.placement, _LIMIT)  # connects
        group.stop(1)
        try:
            told: dict[str, float] = run(group, 0, _HERE, "wait_for_migration", seconds)
        finally:
            group.resume(1)
    return told


@dataclass(frozen=True)
class _Reader:
    agent: AsyncNixlAgent
    local: Any
    remote: Any
    close: AsyncExitStack


_readers: list[_Reader] = []


async def connect(_: object, card: bytes) -> None:
    """Open the reader's agent, and read once."""
    stack = AsyncExitStack()
    agent = await stack.enter_async_context(AsyncNixlAgent.open(f"reader-{os.getpid()}", Settings()))
    local = await agent.register(np.zeros((_ROWS, _ROW_BYTES), np.uint8), "target")
    reader = _Reader(agent, local, (await agent.add_peer(card)).region(REGION), stack)
    _readers.append(reader)
    await agent.read(local[0], reader.remote[0])


async def disconnect(_: object) -> None:
    """Wait until nothing lands any more, and close."""
    reader = _readers.pop()
    await reader.local.released(timeout=_LIMIT)
    await reader.close.aclose()


async def wait_for_read(_: object, seconds: float) -> dict[str, float]:
    """Read everything from the stopped source, wait, and cancel."""
    reader = _readers[0]
    reading = asyncio.ensure_future(reader.agent.read(reader.local[:], reader.remote[:], timeout=_LIMIT))

    async def polls() -> int:
        return (await reader.agent.stats()).polls

    return await _waiting(reading, polls, seconds)


async def wait_for_migration(comm: Any, seconds: float) -> dict[str, float]:
    """Migrate without the stopped rank, wait, and cancel."""
    migrating = asyncio.ensure_future(comm.migrate(comm.placement, timeout=_LIMIT))

    async def polls() -> int:
        return int(comm._session.endpoint.native.polls)

    return await _waiting(migrating, polls, seconds)


async def _waiting(task: asyncio.Future[Any], polls: Any, seconds: float) -> dict[str, float]:
    """What ``seconds`` of a wait cost, from when it has begun; then cancel it."""
    await asyncio.sleep(0.1)
    before, cpu, wall = await polls(), time.process_time(), time.perf_counter()
    await asyncio.sleep(seconds)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    polled = await polls() - before
    assert not task.done(), "it did not wait for the stopped peer"
    task.cancel()
    turns, cancelled = 0, time.perf_counter()
    while not task.done():
        turns += 1
        await asyncio.sleep(0)
    return {
        "seconds": round(wall, 3),
        "share_of_a_core": round(cpu / wall, 5),
        "polls": polled,
        "cancel_turns": turns,
        "cancel_ms": round((time.perf_counter() - cancelled) * 1e3, 3),
    }


if __name__ == "__main__":
    alone.main(NAME, measure)
