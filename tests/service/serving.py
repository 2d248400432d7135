"""A service inside each rank's process, and the engine that it balances."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from eplb_async.communicator import AsyncEplbCommunicator
from eplb_async.core.placement import Placement
from eplb_async.service import EplbService, ServiceSettings
from tests.real.stepping import BEGUN, STOP, Board
from tests.service.cluster import skewed

_services: dict[int, EplbService] = {}
_engines: dict[int, _Engine] = {}


class _Engine(threading.Thread):
    """Steps in lock-step with the others, and counts what arrives at its own slots; the skew moves on all the time."""

    def __init__(self, service: EplbService, path: str, rank: int, ranks: int) -> None:
        super().__init__(daemon=True)
        self.service, self.rank, self.board = service, rank, Board(path, ranks)
        self.error: BaseException | None = None
        self.costs: list[tuple[float, float]] = []
        self._random = random.Random(rank)

    def run(self) -> None:
        try:
            while not 0 < self.board.words[STOP, self.rank] <= self.service.comm.health().step:
                self.step()
        except BaseException as error:
            self.error = error

    def step(self) -> None:
        words, service = self.board.words, self.service
        time.sleep(self._random.choice([0.0, 0.0005, 0.002]))
        begin = time.perf_counter()
        with service.forward() as step:
            entered = time.perf_counter() - begin
            placement = service.comm.placement
            words[BEGUN, self.rank] = step.number
            while (words[BEGUN] < step.number).any():
                time.sleep(0.0002)
            assert service.comm.placement == placement, f"step {step.number} saw two placements"
            self.board.seen[self.rank, step.number] = int.from_bytes(placement.digest()[:7]) + 1
        counts = local_counts(placement, self.rank, hot=step.number // 150)
        begin = time.perf_counter()
        service.record(counts, by="local")
        self.costs.append((entered, time.perf_counter() - begin))


def local_counts(placement: Placement, rank: int, *, hot: int) -> np.ndarray[Any, Any]:
    """What arrives at a rank's slots in a step, `[layers, num_local_experts]`: copies of an expert share its load."""
    local = placement.local(rank).astype(int)
    share = skewed(placement, hot) / placement.logical_replica_count
    counts: np.ndarray[Any, Any] = np.where(local >= 0, np.take_along_axis(share, np.maximum(local, 0), axis=1), 0.0)
    return counts


async def serve(comm: AsyncEplbCommunicator, rank: int, gate: str = "", **settings: Any) -> None:
    """Open the service; with a gate the policy waits for that file, and says that it does by one beside it."""

    def wait(loads: Any, placement: Placement) -> Placement:
        from eplb_async.policy import rebalance_experts

        Path(gate + ".waits").touch()
        while not Path(gate).exists():
            time.sleep(0.005)
        members = set(comm.view.members)
        out = [other for other in range(placement.ep_size) if other not in members]
        chosen = (placement.num_physical, 1, 1, placement.ep_size)
        return rebalance_experts(loads, *chosen, current=placement, min_gain=0.0, out=out).placement

    policy = wait if gate else None
    _services[rank] = await EplbService(comm, policy=policy, settings=ServiceSettings(**settings)).__aenter__()


async def step(comm: AsyncEplbCommunicator, path: str, rank: int, ranks: int) -> None:
    """Have this rank's engine step."""
    _engines[rank] = _Engine(_services[rank], path, rank, ranks)
    _engines[rank].start()


async def stop(comm: AsyncEplbCommunicator, rank: int) -> tuple[float, float, float]:
    """Wait for the engine to stop, then idle; answers medians: entering forward(), record(), and steps run."""
    engine = _engines.pop(rank)
    async with asyncio.timeout(60):
        while engine.is_alive():
            await asyncio.sleep(0.01)
    if engine.error is not None:
        raise engine.error
    _services[rank].idle()
    entered, recorded = np.median(np.array(engine.costs), axis=0)
    return float(entered), float(recorded), float(len(engine.costs))


async def record(comm: AsyncEplbCommunicator, rank: int, steps: int) -> None:
    """Count some steps of an engine that is not in lock-step."""
    for _ in range(steps):
        _services[rank].record(local_counts(comm.placement, rank, hot=0), by="local")
        await asyncio.sleep(0)


async def rebalance(comm: AsyncEplbCommunicator, rank: int, force: bool = False) -> dict[str, Any]:
    report = asdict(await _services[rank].rebalance(force=force))
    report.pop("migration")
    return report


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


async def close(comm: AsyncEplbCommunicator, rank: int) -> None:
    with contextlib.suppress(KeyError):
        await _services.pop(rank).aclose()
