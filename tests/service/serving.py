"""A service inside each rank's process, and the engine that it balances."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eplb_async.communicator import AsyncEplbCommunicator
from eplb_async.core.placement import Placement
from eplb_async.errors import RebalanceTimeout
from eplb_async.service import EplbService, ServiceSettings
from eplb_async.testing.patterns import PatternWeights
from tests.service.engine import ROWS, Engine, local_counts
from tests.service.metrics import hook, scrape, watch

_services: dict[int, EplbService] = {}
_engines: dict[int, Engine] = {}


async def serve(
    comm: AsyncEplbCommunicator, rank: int, settings: dict[str, Any], gate: str, loads: bool, metrics: bool
) -> None:
    """Open the service.

    Args:
        comm: The communicator.
        rank: This rank.
        settings: Of the service.
        gate: The policy waits for this file, and says that it does by one beside it; empty: it does not.
        loads: Whether the service supplies experts that are lost.
        metrics: Whether its events go to the metrics of `tests.service.metrics`.
    """

    def wait(loads: Any, placement: Placement) -> Placement:
        from eplb_async.policy import rebalance_experts

        Path(gate + ".waits").touch()
        while not Path(gate).exists():
            time.sleep(0.005)
        members = set(comm.view.members)
        out = [other for other in range(placement.ep_size) if other not in members]
        chosen = (placement.num_physical, 1, 1, placement.ep_size)
        return rebalance_experts(loads, *chosen, current=placement, min_gain=0.0, out=out).placement

    service = EplbService(
        comm,
        policy=wait if gate else None,
        settings=ServiceSettings(**settings),
        load_expert=PatternWeights(comm.placement, rank, ROWS).load if loads else None,
        telemetry=hook(rank) if metrics else None,
    )
    if metrics:
        watch(service)
    _services[rank] = await service.__aenter__()


async def step(comm: AsyncEplbCommunicator, rank: int, path: str, ranks: int, how: dict[str, int]) -> None:
    """Have this rank's engine step; where ``how`` has a ``base``, that is the last step that was run on all ranks."""
    if "base" in how:
        _services[rank].idle(how["base"])
    _engines[rank] = Engine(_services[rank], path, rank, ranks, **({"base": comm.health().step} | how))
    _engines[rank].start()


async def stop(comm: AsyncEplbCommunicator, rank: int, timeout: float = 60.0) -> dict[str, Any]:
    """Wait for the engine to stop, idle, and wait until no round runs; answers what it saw."""
    engine = _engines.pop(rank)
    async with asyncio.timeout(timeout):
        while engine.is_alive():
            await asyncio.sleep(0.01)
    if engine.error is not None:
        raise engine.error
    _services[rank].idle()
    await settled(comm, rank)
    engine.forget()
    return asdict(engine.seen)


async def record(comm: AsyncEplbCommunicator, rank: int, steps: int) -> None:
    """Count some steps of an engine that is not in lock-step."""
    for _ in range(steps):
        _services[rank].record(local_counts(comm.placement, rank, hot=0), by="local")
        await asyncio.sleep(0)


async def rebalance(comm: AsyncEplbCommunicator, rank: int, force: bool = False) -> dict[str, Any]:
    report = asdict(await _services[rank].rebalance(force=force))
    report.pop("migration")
    return report


async def ask(comm: AsyncEplbCommunicator, rank: int, force: bool, seconds: float) -> str:
    """Ask for a round, and wait for so long; answers how it ended, or that it goes on."""
    try:
        return (await _services[rank].rebalance(force=force, timeout=seconds)).outcome
    except RebalanceTimeout:
        return "goes on"


async def pause(comm: AsyncEplbCommunicator, rank: int, seconds: float) -> None:
    """Pause for so long."""
    _services[rank].pause()
    await asyncio.sleep(seconds)
    _services[rank].resume()


async def moving(comm: AsyncEplbCommunicator, rank: int) -> None:
    """Answer as soon as this rank moves."""
    while _services[rank].health().phase != "moving":
        await asyncio.sleep(0)


async def held(comm: AsyncEplbCommunicator, rank: int) -> dict[str, int]:
    """What the service holds, at rest."""
    service = _services[rank]
    buckets = list(service._window._buckets)
    arrays = [array for bucket in buckets for array in (bucket.slots, bucket.experts) if array is not None]
    return {
        "window": sum(array.nbytes for array in arrays),
        "buckets": len(buckets),
        "waiters": len(service._waiters),
        "round_tasks": len(service._runner._tasks),
        "series": scrape(),
    }


async def health(comm: AsyncEplbCommunicator, rank: int) -> dict[str, Any]:
    return asdict(_services[rank].health())


async def settled(comm: AsyncEplbCommunicator, rank: int) -> None:
    """Answer when no round runs here."""
    while _services[rank].health().phase != "idle":
        await asyncio.sleep(0.005)


async def emptied(comm: AsyncEplbCommunicator, dead: int) -> None:
    """Answer when a rank holds nothing any more."""
    while (comm.placement.local(dead) >= 0).any():
        await asyncio.sleep(0.01)


async def filled(comm: AsyncEplbCommunicator, back: int) -> None:
    """Answer when a rank holds something again."""
    while (comm.placement.local(back) < 0).all():
        await asyncio.sleep(0.01)


async def close(comm: AsyncEplbCommunicator, rank: int) -> None:
    with contextlib.suppress(KeyError):
        await _services.pop(rank).aclose()
