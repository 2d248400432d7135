"""Users of the layers inside each rank's process: threads and tasks that look at the rows while migrations run."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from typing import Any

import numpy as np
import torch

from eplb_async.communicator import AsyncEplbCommunicator
from eplb_async.core.placement import Placement
from eplb_async.testing.patterns import PatternWeights


class _Users:
    """Two threads and two tasks of one rank."""

    def __init__(self, comm: AsyncEplbCommunicator, rank: int, row_bytes: tuple[int, ...]) -> None:
        self.comm, self.rank = comm, rank
        self.over = False
        self.looks = 0
        self.changes = 0
        self.wrong: list[str] = []
        self._wanted = PatternWeights(comm.placement, rank, row_bytes)
        self._known: dict[tuple[int, int, int], Any] = {}
        self._last: dict[int, list[int]] = {}
        self._threads = [threading.Thread(target=self._run, args=(seed,), daemon=True) for seed in range(2)]
        self._tasks = [asyncio.ensure_future(self._arun(seed)) for seed in range(2, 4)]
        for thread in self._threads:
            thread.start()

    def _run(self, seed: int) -> None:
        rng = random.Random(seed * 100 + self.rank)
        try:
            while not self.over:
                layer = rng.randrange(self.comm.placement.num_layers)
                with self.comm.using(layer) as placement:
                    self._look(layer, placement)
                    time.sleep(rng.choice([0.0, 0.0002, 0.002]))
                    self._look(layer, placement)
        except BaseException as error:
            self.wrong.append(repr(error))

    async def _arun(self, seed: int) -> None:
        rng = random.Random(seed * 100 + self.rank)
        try:
            while not self.over:
                layer = rng.randrange(self.comm.placement.num_layers)
                async with self.comm.using(layer) as placement:
                    self._look(layer, placement)
                    await asyncio.sleep(rng.choice([0.0, 0.001]))
                    self._look(layer, placement)
                await asyncio.sleep(0)
        except Exception as error:
            self.wrong.append(repr(error))

    def _look(self, layer: int, placement: Placement) -> None:
        """The rows of the layer hold what the placement says, and it is what the communicator says."""
        experts = placement.local(self.rank)[layer].tolist()
        if self.comm.placement.local(self.rank)[layer].tolist() != experts:
            self.wrong.append(f"layer {layer}: another placement")
        tensors = self._tensors(layer)
        for slot, expert in enumerate(experts):
            for tensor, rows in enumerate(tensors if expert >= 0 else ()):
                if not np.array_equal(rows[slot].numpy(), self._expected(layer, tensor, expert)):
                    self.wrong.append(f"layer {layer}, tensor {tensor}, slot {slot}: not expert {expert}")
        self.looks += 1
        if self._last.setdefault(layer, experts) != experts:
            self._last[layer] = experts
            self.changes += 1

    def _tensors(self, layer: int) -> list[torch.Tensor]:
        return list(self.comm._weights.layers[layer].values())[: len(self._wanted.row_bytes)]

    def _expected(self, layer: int, tensor: int, expert: int) -> Any:
        key = (layer, tensor, expert)
        if key not in self._known:
            self._known[key] = self._wanted.expected(*key)
        return self._known[key]

    async def end(self) -> tuple[int, int, list[str]]:
        self.over = True
        for thread in self._threads:
            await asyncio.to_thread(thread.join, 30)
        await asyncio.gather(*self._tasks)
        return self.looks, self.changes, self.wrong[:5]


_users: list[_Users] = []


async def begin(comm: AsyncEplbCommunicator, rank: int, row_bytes: tuple[int, ...]) -> None:
    """Have this rank's layers used."""
    _users.append(_Users(comm, rank, row_bytes))


async def end(comm: AsyncEplbCommunicator) -> tuple[int, int, list[str]]:
    """Stop; answers how often they looked, how often a layer had changed, and what was wrong."""
    return await _users.pop().end()
