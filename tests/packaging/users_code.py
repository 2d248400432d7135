"""What users write, for type checkers only: the public face, as the wheel ships it, has these types."""

from __future__ import annotations

from typing import assert_type

import numpy as np
import torch

import eplb_async
from eplb_async import (
    AsyncEplbCommunicator,
    AsyncNixlAgent,
    EplbService,
    Forecast,
    Health,
    MigrationInDoubt,
    MigrationReport,
    NixlTransferFailed,
    Placement,
    ServiceSettings,
    Settings,
)
from eplb_async.policy import Rebalance, rebalance_experts
from eplb_async.telemetry import Event, logging_hook


async def serve(rank: int, weights: list[dict[str, torch.Tensor]]) -> int:
    """A rank that serves and migrates."""
    here = Placement([[0, 1, 2, 3]], ep_size=2)
    settings = Settings.from_env(verify="full", secret=b"sixteen bytes or more")
    async with AsyncEplbCommunicator.open(
        rank=rank, ep_size=2, weights=weights, placement=here, rendezvous="tcp://10.0.0.1:29500", settings=settings
    ) as comm:
        assert_type(comm, AsyncEplbCommunicator)
        assert_type(comm.placement, Placement)
        assert_type(comm.health(), Health)
        try:
            report = await comm.migrate(here, timeout=60)
            assert_type(report, MigrationReport)
        except MigrationInDoubt as error:
            return error.committed_layers
        except NixlTransferFailed as error:
            assert_type(error.state, str)
        async with EplbService(comm, settings=ServiceSettings(step_interval=100)) as service:
            assert_type(service, EplbService)
    opened = await AsyncEplbCommunicator.open(
        rank=rank, ep_size=2, weights=weights, placement=here, rendezvous="env://", telemetry=logging_hook()
    )
    assert_type(opened, AsyncEplbCommunicator)
    await opened.aclose()
    return 0


async def move(buffer: torch.Tensor, blob: bytes) -> None:
    """The agent alone."""
    async with AsyncNixlAgent.open("reader") as agent:
        region = await agent.register(buffer, name="kv")
        peer = await agent.add_peer(blob)
        await agent.read(region[0:8], peer.region("kv")[8:16], timeout=5.0)
        await agent.notify(peer, b"done")


def balance(loads: torch.Tensor, here: Placement) -> None:
    """A placement from loads."""
    assert_type(rebalance_experts(loads, 8, 1, 1, 2, current=here), Rebalance)


def tell(event: Event) -> None:
    """A hook of the user's own."""
    print(event.name)


def wrong(placement: Placement, forecast: Forecast) -> None:
    """What a type checker is to find; each would be an unused ``ignore`` if it did not."""
    Settings(verify="of")  # type: ignore[arg-type]
    Settings(max_psot_bytes=1)  # type: ignore[call-arg]
    Placement([[0, 1]])  # type: ignore[call-arg]
    placement.digest(1)  # type: ignore[call-arg]
    eplb_async.Plcement  # type: ignore[attr-defined]  # noqa: B018
    rebalance_experts(np.zeros((1, 4)), "four", 1, 1, 2)  # type: ignore[arg-type]
