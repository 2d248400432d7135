"""Ranks with any tensors, in one loop on virtual time: what ``LocalCluster`` is for patterned ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import torch

from eplb_async.communicator import AsyncEplbCommunicator
from eplb_async.core.placement import Placement
from eplb_async.engine import LoopEngine
from eplb_async.settings import Settings
from eplb_async.testing import MemoryFabric
from eplb_async.testing.cluster import MemoryRendezvous

SETTINGS = Settings(secret=b"the ranks' secret")


async def open_ranks(
    placement: Placement,
    weights: Sequence[Any],
    *,
    fabric: MemoryFabric | None = None,
    staging: Sequence[Any] | None = None,
    **options: Any,
) -> list[AsyncEplbCommunicator | BaseException]:
    """Open a rank for each element of ``weights``, all at once; a failure takes the place of its communicator."""
    rendezvous, native = MemoryRendezvous(), (fabric or MemoryFabric()).native
    chosen: dict[str, Any] = {"settings": SETTINGS, "timeout": 5.0} | options

    async def one(rank: int) -> AsyncEplbCommunicator:
        return await AsyncEplbCommunicator.open(
            rank=rank,
            ep_size=placement.ep_size,
            weights=weights[rank],
            placement=placement,
            staging=staging[rank] if staging else None,
            rendezvous=rendezvous,
            engine=LoopEngine(asyncio.get_running_loop()),
            native=native,
            **chosen,
        )

    return list(await asyncio.gather(*map(one, range(placement.ep_size)), return_exceptions=True))


@asynccontextmanager
async def opened(
    placement: Placement, weights: Sequence[Any], **options: Any
) -> AsyncIterator[list[AsyncEplbCommunicator]]:
    """Ranks that must open, closed at the end."""
    comms: list[AsyncEplbCommunicator] = []
    for comm in await open_ranks(placement, weights, **options):
        assert isinstance(comm, AsyncEplbCommunicator), comm
        comms.append(comm)
    yield comms
    await asyncio.gather(*(comm.aclose() for comm in comms))


async def migrate(comms: Sequence[AsyncEplbCommunicator], placement: Placement) -> list[Any]:
    """Have all ranks migrate; their reports."""
    return list(await asyncio.gather(*(comm.migrate(placement, timeout=30.0) for comm in comms)))


def fill(tensor: torch.Tensor, experts: Sequence[int], row: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """Write ``row(expert)`` into each row; returns the tensor."""
    for slot, expert in enumerate(experts):
        tensor[slot] = row(expert)
    return tensor
