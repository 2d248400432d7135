"""Another way to move experts, to compare with: the engine stops between two steps until every layer has moved.

As vLLM does it: layer after layer, every expert a READ of its own, polled with pauses, a barrier, the copy into the
rows. The transfer is that of the benchmark; the placements are those of the same policy.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from eplb_async import Placement
from eplb_async.bench.contenders.vllm_way import VllmWay
from eplb_async.bench.work import Fetch
from eplb_async.core.plan import plan
from eplb_async.policy import rebalance_experts
from eplb_async.service import RebalanceReport
from examples.moe_server.model import Model
from examples.moe_server.ranks import Ranks

_REARRANGE_SECONDS = 60.0


class StopTheWorld(VllmWay):
    """Moves experts between two steps. The engine calls it as it calls the service.

    Attributes:
        placement: Where the experts are.
        request: Set on rank 0 to what has the engine rearrange.
    """

    def __init__(self, rank: int, model: Model, ranks: Ranks, placement: Placement) -> None:
        peers = [Fetch(rank, peer, 0, 0) for peer in range(placement.ep_size) if peer != rank]
        rows = [tensor.shape[1] * tensor.shape[2] * 4 for tensor in model.weights[0]]
        super().__init__(
            SimpleNamespace(  # type: ignore[arg-type]
                rank=rank,
                rows=SimpleNamespace(layers=model.weights),
                group=SimpleNamespace(
                    barrier=lambda: ranks.gather(b""),
                    gather=lambda value: [json.loads(one) for one in ranks.gather(json.dumps(value).encode())],
                ),
                incoming=lambda _: peers,
                buffers=lambda: [torch.zeros(model.slots, nbytes, dtype=torch.uint8) for nbytes in rows],
            )
        )
        self.placement = placement
        self.request: Callable[[], object] = lambda: None
        self._rank, self._model, self._ranks = rank, model, ranks
        self._loads = np.zeros((placement.num_layers, placement.num_logical))
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[RebalanceReport]]] = []

    def forward(self, number: int) -> contextlib.nullcontext[Any]:
        """Nothing happens inside of a step."""
        return contextlib.nullcontext(SimpleNamespace(term=0, number=number))

    def idle(self, number: int) -> None:
        """Nor outside, unless it is asked for."""

    def record(self, counts: np.ndarray, *, by: str) -> None:
        """Add a step's tokens, ``[layers, local slots]``."""
        assert by == "local"
        layers = np.arange(len(counts))[:, None]
        np.add.at(self._loads, (layers, self.placement.local(self._rank)), counts)

    async def rebalance(self, *, force: bool) -> RebalanceReport:
        """Rearrange before the next step; on rank 0."""
        loop = asyncio.get_running_loop()
        self._waiting.append((loop, future := loop.create_future()))
        self.request()
        return await asyncio.wait_for(future, _REARRANGE_SECONDS)

    def rearrange(self) -> None:
        """On all ranks, in the engine's thread."""
        started, old = time.perf_counter(), self.placement
        given = self._ranks.gather(self._loads.tobytes())
        loads = sum((np.frombuffer(one).reshape(self._loads.shape) for one in given), np.zeros_like(self._loads))
        found = rebalance_experts(loads, old.num_physical, 1, 1, old.ep_size, current=old)
        moves = plan(old, found.placement)
        for layer in range(old.num_layers):
            own = moves.moves(layer, self._rank)
            reads = [
                self._post(layer, number, Fetch(self._rank, move.source, move.source_slot, number))
                for number, move in enumerate(own)
                if move.is_read
            ]
            self._wait(reads)
            self._ranks.gather(b"")
            self._release(reads)
            for tensor, buffer in zip(self._model.weights[layer], self._buffers, strict=True):
                rows = tensor.view(self._model.slots, -1).view(torch.uint8)
                for number, move in enumerate(own):
                    if move.is_local:
                        buffer[number] = rows[move.source_slot]
                for number, move in enumerate(own):
                    rows[list(move.targets)] = buffer[number]
            self._model.routing.refresh(layer, found.placement)
        self._ranks.gather(b"")
        self.placement = found.placement
        self._loads[:] = 0
        report = RebalanceReport(
            outcome="moved" if found.worth_it else "not_worth_it" if loads.any() else "no_load",
            balancedness_before=None if found.balancedness_before is None else float(found.balancedness_before.mean()),
            balancedness_after=float(found.balancedness.mean()),
            num_moves=found.moves if found.worth_it else 0,
            seconds=time.perf_counter() - started,
        )
        while self._waiting:
            loop, future = self._waiting.pop()
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_settle, future, report)


def _settle(future: asyncio.Future[RebalanceReport], report: RebalanceReport) -> None:
    if not future.done():
        future.set_result(report)
