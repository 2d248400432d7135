"""Run inside rank processes: mail that a rank sends, and what came to it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from eplb_async.communicator import AsyncEplbCommunicator
from eplb_async.errors import CommunicatorBusy

TOPIC = 40_000
_came: dict[int, list[int]] = {}
_flood: dict[str, Any] = {}


async def subscribe(comm: AsyncEplbCommunicator) -> None:
    """Keep the sizes of what comes, by sender; a byte that is not the sender's would show as a size of -1."""
    _came.clear()
    _came.update({rank: [] for rank in range(3)})

    def take(sender: int, payload: bytes) -> None:
        _came[sender].append(len(payload) if payload == bytes([sender]) * len(payload) else -1)

    comm.mail.subscribe(TOPIC, take)


async def watch(comm: AsyncEplbCommunicator, seconds: float) -> None:
    comm.watch(seconds)


async def send_to(comm: AsyncEplbCommunicator, receiver: int, sizes: list[int]) -> None:
    """Send messages of this rank's number, from another thread."""
    me = comm.health().rank

    def send() -> None:
        for size in sizes:
            comm.mail.send(receiver, TOPIC, bytes([me]) * size)

    await asyncio.to_thread(send)


async def send_all(comm: AsyncEplbCommunicator, sizes: list[int]) -> None:
    """Send to all three, this rank included."""
    for receiver in range(3):
        await send_to(comm, receiver, sizes)


async def received(comm: AsyncEplbCommunicator, count: int) -> list[list[int]]:
    """Answer when that many have come: their sizes, by sender."""
    async with asyncio.timeout(60):
        while sum(map(len, _came.values())) < count:
            await asyncio.sleep(0.01)
    return [_came[rank] for rank in range(3)]


async def degraded(comm: AsyncEplbCommunicator, rank: int) -> None:
    """Answer when a rank is named."""
    while rank not in comm.health().degraded:
        await asyncio.sleep(0.01)


async def well(comm: AsyncEplbCommunicator) -> None:
    """Answer when nobody is named."""
    while comm.health().degraded:
        await asyncio.sleep(0.01)


async def begin_flood(comm: AsyncEplbCommunicator, receivers: list[int]) -> None:
    """Send as much as is taken until :func:`end_flood`."""
    me = comm.health().rank
    message = bytes([me]) * 300_000

    async def flood() -> None:
        while True:
            for receiver in receivers:
                with contextlib.suppress(CommunicatorBusy):
                    comm.mail.send(receiver, TOPIC, message)
                    _flood["sent"] += 1
            await asyncio.sleep(0.001)

    _flood.update(sent=0, task=asyncio.ensure_future(flood()))


async def end_flood(comm: AsyncEplbCommunicator) -> int:
    """End it; answers how many messages were taken."""
    _flood["task"].cancel()
    return int(_flood["sent"])
