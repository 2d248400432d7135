"""One rank of the demonstration: its own process, weights, user loop and communicator."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from eplb_async.communicator import AsyncEplbCommunicator
from eplb_async.core.placement import Placement
from eplb_async.rendezvous import TcpRendezvous
from eplb_async.settings import Settings
from eplb_async.testing.placements import random_placement

_SETTLE_SECONDS, _IDLE_SECONDS = 4.5, 8.0  # the idle pause doubles up to two seconds
_TICK = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What the demonstration does.

    Attributes:
        ranks: Processes.
        layers: Layers.
        experts: Slots of each rank.
        mib: MiB of one expert.
        rounds: Migrations.
        transport: ``"auto"`` or ``"tcp"``.
        loop: ``"uvloop"`` or ``"asyncio"``, for the user's loop and the engine's.
        seed: Seed of the placements.
    """

    ranks: int
    layers: int
    experts: int
    mib: float
    rounds: int
    transport: str
    loop: str
    seed: int

    @property
    def num_logical(self) -> int:
        """Logical experts: one slot of each rank is spare where there is room for it."""
        return max(1, self.ranks * (self.experts - 1))

    def placements(self) -> list[Placement]:
        """The first placement and one for each round, the same on every rank."""
        rng = np.random.default_rng(self.seed)
        return [
            random_placement(
                rng,
                num_layers=self.layers,
                num_logical=self.num_logical,
                num_local_experts=self.experts,
                ep_size=self.ranks,
            )
            for _ in range(self.rounds + 1)
        ]


class Rows:
    """Weights whose every byte says which layer, tensor and expert it belongs to."""

    def __init__(self, work: Work, rank: int) -> None:
        words = max(3, int(work.mib * (1 << 20)) // 8)
        self._rank = rank
        self._bases = [
            torch.from_numpy(np.random.default_rng(i).integers(-(1 << 62), 1 << 62, size))
            for i, size in enumerate((words * 2 // 3, words - words * 2 // 3))
        ]
        self.layers = [
            {
                name: torch.zeros(work.experts, len(base), dtype=torch.int64)
                for name, base in zip(("w13", "w2"), self._bases, strict=True)
            }
            for _ in range(work.layers)
        ]

    def fill(self, placement: Placement) -> None:
        """Write what each slot must hold."""
        for layer, tensor, slot, expert in self._slots(placement):
            self._row(layer, tensor, slot).copy_(self._expected(layer, tensor, expert))

    def wrong_bytes(self, placement: Placement) -> int:
        """Bytes that differ from what the placement says."""
        wrong = 0
        for layer, tensor, slot, expert in self._slots(placement):
            found = self._row(layer, tensor, slot).view(torch.uint8)
            wrong += int((found != self._expected(layer, tensor, expert).view(torch.uint8)).sum())
        return wrong

    def _slots(self, placement: Placement) -> list[tuple[int, int, int, int]]:
        local = placement.local(self._rank)
        return [
            (layer, tensor, slot, int(expert))
            for layer in range(len(self.layers))
            for slot, expert in enumerate(local[layer])
            if expert >= 0
            for tensor in range(len(self._bases))
        ]

    def _row(self, layer: int, tensor: int, slot: int) -> torch.Tensor:
        return list(self.layers[layer].values())[tensor][slot]

    def _expected(self, layer: int, tensor: int, expert: int) -> torch.Tensor:
        key = ((layer * 1009 + tensor) * 1_000_003 + expert + 1) * 0x9E3779B97F4A7C15 % (1 << 62)
        return self._bases[tensor] + key  # int64 wraps; every expert differs in most bytes of every word


def main(rank: int, work: Work, pipe: Connection) -> None:
    """Entry point of a rank's process."""
    os.dup2(2, 1)  # NIXL and UCX log to stdout, which belongs to the parent's results
    if work.transport == "tcp":
        os.environ["UCX_TLS"] = "tcp,self"
    torch.set_num_threads(1)
    try:
        if work.loop == "uvloop":
            import uvloop

            uvloop.run(_run(rank, work, pipe))
        else:
            asyncio.run(_run(rank, work, pipe))
    except (EOFError, BrokenPipeError):
        raise SystemExit("the demonstration's parent process is gone") from None


async def _run(rank: int, work: Work, pipe: Connection) -> None:
    placements = work.placements()
    rows = Rows(work, rank)
    rows.fill(placements[0])
    rendezvous: Any
    if rank == 0:
        rendezvous = TcpRendezvous.host("127.0.0.1", 0, timeout=60.0, secret=None)
        pipe.send(rendezvous.url)
    else:
        rendezvous = await _told(pipe)
    async with AsyncEplbCommunicator.open(
        rank=rank,
        ep_size=work.ranks,
        weights=rows.layers,
        placement=placements[0],
        rendezvous=rendezvous,
        settings=Settings.from_env(use_uvloop=work.loop == "uvloop"),
    ) as comm:
        pipe.send("opened")
        for placement in placements[1:]:
            await _told(pipe)
            pipe.send(await _round(comm, rows, placement))
        await _told(pipe)
        await asyncio.sleep(_SETTLE_SECONDS)
        cpu, wall = time.process_time(), time.perf_counter()
        await asyncio.sleep(_IDLE_SECONDS)
        pipe.send((time.process_time() - cpu) / (time.perf_counter() - wall))
        await _told(pipe)


async def _round(comm: AsyncEplbCommunicator, rows: Rows, placement: Placement) -> dict[str, Any]:
    lags: list[float] = []
    ticker = asyncio.create_task(_tick(lags))
    started = time.perf_counter()
    report = await comm.migrate(placement, timeout=120.0)
    seconds = time.perf_counter() - started
    ticker.cancel()
    await asyncio.gather(ticker, return_exceptions=True)
    wrong = await asyncio.to_thread(rows.wrong_bytes, placement)
    return {
        "wrong": wrong + (comm.placement != placement),
        "bytes": report.bytes_read,
        "seconds": seconds,
        "lags": lags,
        "phases": dict(report.seconds),
    }


async def _tick(lags: list[float]) -> None:
    while True:
        started = time.perf_counter()
        await asyncio.sleep(_TICK)
        lags.append(time.perf_counter() - started - _TICK)


async def _told(pipe: Connection) -> Any:
    return await asyncio.to_thread(pipe.recv)
