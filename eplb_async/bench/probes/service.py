"""What one round of the service brings on skewed loads, and what it costs: balance, bytes, seconds, and each step."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb_async.bench.probes import alone
from eplb_async.bench.probes.group import answer, run, started, transports
from eplb_async.communicator import AsyncEplbCommunicator
from eplb_async.core.placement import Placement
from eplb_async.policy import rebalance_experts
from eplb_async.service import EplbService, ServiceSettings
from eplb_async.testing.processes import RankProcesses

NAME = "service"
RANKS, LAYERS, EXPERTS, REDUNDANT = 3, 8, 48, 6
MIB = 1 << 20
_STEPS, _QUICK_STEPS = 2000, 200
_BAR = "service.forward(), nothing due, entered and left: p50 microseconds"


def measure(*, quick: bool) -> dict[str, Any]:
    """One round on each transport; of the first one, the figures that a line has room for."""
    found = {transport: balance(transport, quick=quick) for transport in transports(quick=quick)}
    one = next(iter(found.values()))
    brief = ("balancedness_before", "balancedness_after", "gigabytes", "seconds", "ask", "policy", "migrate")
    return {
        **{name: one[name] for name in brief},
        "transports": found,
        "bars": [alone.at_most(_BAR, 2.0, max(each["forward_us"]["p50"] for each in found.values()))],
    }


def balance(transport: str, *, quick: bool) -> dict[str, Any]:
    """Step under the same skew before and after a round, and see how even the ranks' counts are.

    Args:
        transport: ``"auto"`` or ``"tcp"``.
        quick: Fewer layers and experts, smaller ones, fewer steps.
    """
    layers, experts, rows = (2, 12, (64 << 10, 32 << 10)) if quick else (LAYERS, EXPERTS, (MIB, MIB // 2))
    steps = _QUICK_STEPS if quick else _STEPS
    placement = Placement.initial(layers, experts, ep_size=RANKS, num_redundant=REDUNDANT)
    settings = {"activation": "step"}
    with started(RANKS, transport, placement=placement, row_bytes=rows, settings=settings) as group:
        _everywhere(group, "serve")
        before = _everywhere(group, "step", steps)
        split = run(group, 0, __name__, "rebalance")
        moved = _everywhere(group, "moved")
        after = _everywhere(group, "step", steps)
        wrong = sum(group.all("check"))
        _everywhere(group, "close")
    return {
        "balancedness_before": _balancedness(before),
        "balancedness_after": _balancedness(after),
        "predicted_after": round(moved[0]["balancedness_after"], 4),
        "slots_moved": moved[0]["num_moves"],
        "gigabytes": round(sum(report["migration"]["bytes_read"] for report in moved) / 1e9, 6),
        **split,
        "forward_us": _percentiles(before, "forward"),
        "record_us": _percentiles(before, "record"),
        "wrong_bytes": wrong,
    }


def _everywhere(group: RankProcesses, function: str, *args: Any) -> list[Any]:
    for rank in range(RANKS):
        group.send(rank, "run", __name__, function, *args)
    return [answer(group, rank, 120.0) for rank in range(RANKS)]


def _balancedness(ranks: list[dict[str, Any]]) -> float:
    """Mean over the layers of mean over maximum of what the ranks have counted."""
    counted = np.array([each["counted"] for each in ranks])
    return round(float((counted.mean(axis=0) / counted.max(axis=0)).mean()), 4)


def _percentiles(ranks: list[dict[str, Any]], name: str) -> dict[str, float]:
    taken = np.concatenate([each[name] for each in ranks]) * 1e6
    return {f"p{part}": round(float(np.percentile(taken, part)), 2) for part in (50, 99)}


# ------------------------------------------------------------------------------------- in the process of a rank
class _Rank:
    """A rank's service, its skewed counts, and when its policy ran."""

    def __init__(self, comm: AsyncEplbCommunicator) -> None:
        self.comm, self.rank = comm, comm.health().rank
        settings = ServiceSettings(step_interval=0, min_interval=0.0)
        self.service = EplbService(comm, policy=self._policy, settings=settings)
        self.decided = (0.0, 0.0)
        layers, experts = comm.placement.num_layers, comm.placement.num_logical
        popular = 1e4 / (1 + np.arange(experts))
        rng = np.random.default_rng(3)
        self._loads = np.stack([rng.permutation(popular) for _ in range(layers)])

    def _policy(self, loads: NDArray[np.float64], placement: Placement) -> Placement:
        begun = time.perf_counter()
        sizes = (placement.num_physical, 1, 1, placement.ep_size)
        found = rebalance_experts(loads, *sizes, current=placement, min_gain=0.0).placement
        self.decided = (begun, time.perf_counter())
        return found

    def steps(self, count: int) -> dict[str, Any]:
        """Run forward passes in which nothing is due; seconds of each, and what arrived at this rank by layer."""
        placement = self.comm.placement
        local = placement.local(self.rank).astype(np.intp)
        share = self._loads / placement.logical_replica_count
        counts = np.take_along_axis(share, local, axis=1)
        forward, record = [], []
        for _ in range(count):
            begun = time.perf_counter()
            with self.service.forward():
                pass
            left = time.perf_counter()
            self.service.record(counts, by="local")
            forward.append(left - begun)
            record.append(time.perf_counter() - left)
        self.service.idle()
        return {"forward": forward, "record": record, "counted": counts.sum(axis=1).tolist()}


_ranks: list[_Rank] = []


async def serve(comm: AsyncEplbCommunicator) -> None:
    """Open the service."""
    _ranks.append(_Rank(comm))
    await _ranks[0].service.__aenter__()


async def step(comm: AsyncEplbCommunicator, count: int) -> dict[str, Any]:
    """Step, in a thread as engines do."""
    return await asyncio.to_thread(_ranks[0].steps, count)


async def rebalance(comm: AsyncEplbCommunicator) -> dict[str, float]:
    """A round, asked for by the coordinator; seconds of it, and of its parts."""
    begun = time.perf_counter()
    await _ranks[0].service.rebalance(force=True)
    asked, decided = _ranks[0].decided
    ended = time.perf_counter()
    parts = {"seconds": ended - begun, "ask": asked - begun, "policy": decided - asked, "migrate": ended - decided}
    return {name: round(seconds, 5) for name, seconds in parts.items()}


async def moved(comm: AsyncEplbCommunicator) -> dict[str, Any]:
    """How the round ended here."""
    async with asyncio.timeout(60):
        while (report := _ranks[0].service.health().last_report) is None:
            await asyncio.sleep(0.005)
    if report.outcome != "moved":
        raise RuntimeError(f"the round ended {report.outcome}: {report.reason}")
    return asdict(report)


async def close(comm: AsyncEplbCommunicator) -> None:
    """Close the service."""
    await _ranks.pop().service.aclose()


if __name__ == "__main__":
    alone.main(NAME, measure)
