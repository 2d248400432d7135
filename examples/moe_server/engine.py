"""The engine: one thread on each rank, which runs the steps of the model in lock-step with the others."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch

from eplb_async import ActivationTimeout
from examples.moe_server.batching import Batcher
from examples.moe_server.model import Model
from examples.moe_server.ranks import ExchangeFailed, Kind, Ranks

_log = logging.getLogger("moe_server")
_IDLE_SECONDS = 0.05  # without a request, before the engine says that it is idle
_ADVICE = (
    "this job answers nothing any more: restart it. (A server that can go on without a rank calls "
    "comm.exclude(rank) on the others, and migrates with load_expert, which supplies the experts that only it held)"
)


class Balancer(Protocol):
    """What the engine calls: `EplbService`, or another way of moving experts."""

    def forward(self, number: int) -> AbstractContextManager[Any]:
        """Around each step; as the context it has the ``term`` that exchanges are tagged with."""

    def idle(self, number: int) -> None:
        """There are no more steps for now, on all ranks after this one."""

    def record(self, counts: Any, *, by: str) -> None:
        """The tokens of one step."""


class Engine(threading.Thread):
    """Runs steps until it is closed or a rank is lost.

    Args:
        rank: This rank; 0 decides what comes next.
        model: Its part of the model.
        ranks: The other ranks.
        balancer: Told of steps and counts.
        batcher: Where batches come from, on rank 0.
        rearrange: Moves experts between two steps, on all ranks; for the way that stops the engine.
        ended: Called in this thread at the end.

    Attributes:
        steps: Steps that have run.
        rank_tokens: Tokens times experts that each rank has computed, ``[layers, ranks]``, since the start.
        failed: Why it ended early; empty if it has not.
        lost: The rank to blame for that; ``None`` where it is this one.
    """

    def __init__(
        self,
        rank: int,
        model: Model,
        ranks: Ranks,
        balancer: Balancer,
        *,
        batcher: Batcher | None = None,
        rearrange: Callable[[], object] | None = None,
        ended: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(name=f"engine {rank}", daemon=True)
        self.rank, self.steps, self.failed = rank, 0, ""
        self.lost: int | None = None
        self.rank_tokens = np.zeros((model.config.layers, model.num_physical // model.slots), np.int64)
        self._model, self._ranks, self._balancer = model, ranks, balancer
        self._batcher, self._rearrange, self._ended = batcher, rearrange, ended
        self._to_rearrange = threading.Event()
        self._over = threading.Event()

    def request_rearrange(self) -> None:
        """Have the ranks rearrange before the next step; on rank 0, from any thread."""
        self._to_rearrange.set()

    def request_stop(self) -> None:
        """Have a rank that is told nothing more end by itself."""
        self._over.set()

    def run(self) -> None:
        """The thread: leads or follows."""
        try:
            with torch.inference_mode():
                self._follow() if self._batcher is None else self._lead(self._batcher)
        except Exception as error:
            self.lost = error.rank if isinstance(error, ExchangeFailed) else self.rank
            self.failed = f"after step {self.steps}: {error or type(error).__name__}"
            own = None if isinstance(error, ExchangeFailed) else error
            _log.critical("rank %d has stopped %s; %s", self.rank, self.failed, _ADVICE, exc_info=own)
            if self._batcher is not None:
                self._batcher.close(self.failed, at_once=True)
        finally:
            self._ranks.close(self.lost)
            self._ended()

    def _lead(self, batcher: Batcher) -> None:
        idle = True
        while (batch := batcher.take(_IDLE_SECONDS)) is not None:
            if self._to_rearrange.is_set():
                self._to_rearrange.clear()
                self._ranks.tell(Kind.REARRANGE, self.steps)
                self._stop_and_rearrange()
            if batch:
                idle = False
                x = self._model.trunk.start([one.token for one in batch], torch.stack([one.state for one in batch]))
                self._ranks.tell(Kind.STEP, self.steps + 1, x)
                batcher.advance(batch, self._step(self.steps + 1, x), self._model.trunk)
            elif idle:
                self._ranks.check()
            else:
                idle = True
                self._ranks.tell(Kind.IDLE, self.steps)
                self._balancer.idle(self.steps)
        self._ranks.tell(Kind.STOP, self.steps)

    def _follow(self) -> None:
        while (word := self._ranks.hear(self._over.is_set)) is not None and word.kind is not Kind.STOP:
            if word.kind is Kind.STEP:
                self._step(word.step, word.x)
            elif word.kind is Kind.IDLE:
                self._balancer.idle(word.step)
            else:
                self._stop_and_rearrange()

    def _step(self, number: int, x: torch.Tensor) -> torch.Tensor:
        try:
            return self._forward(number, x)
        except ActivationTimeout as late:  # the step has not begun
            _log.warning("step %d waits: %s", number, late)
            return self._forward(number, x)

    def _forward(self, number: int, x: torch.Tensor) -> torch.Tensor:
        with self._balancer.forward(number) as step:
            term = step.term
            x, counts = self._model.forward(
                x, lambda layer, y: self._ranks.add_up(y, term=term, step=number, layer=layer)
            )
        self.steps = number
        self._balancer.record(self._model.own(counts), by="local")
        self.rank_tokens += counts.reshape(*self.rank_tokens.shape, -1).sum(axis=2)
        return x

    def _stop_and_rearrange(self) -> None:
        if self._rearrange is not None:
            self._rearrange()
