"""An engine in lock-step under a service: forward passes, pauses, idle phases, skewed counts; what it saw and paid."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eplb_async.communicator.steps import Steps
from eplb_async.core.placement import Placement
from eplb_async.core.steps import NEVER
from eplb_async.service import EplbService
from eplb_async.testing.patterns import PatternWeights
from tests.real.stepping import BEGUN, STOP, TERM, Board
from tests.service.cluster import skewed

ROWS = (50_000, 333)
STEP_SECONDS = 60.0


@dataclass
class Seen:
    """What one rank's engine has seen.

    Attributes:
        quiet: Seconds of entering and leaving ``forward()`` in each step that nothing was due in.
        busy: The same, of steps that something was due in.
        recorded: Seconds of each ``record()``.
        applied: Layer, last step begun, and digest of the placement, of each apply.
    """

    quiet: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    recorded: list[float] = field(default_factory=list)
    applied: list[tuple[int, int, str]] = field(default_factory=list)


class Engine(threading.Thread):
    """Steps until the board says stop. Works, pauses and idles at random, idles after the same steps on all ranks.

    It waits in each step for the members of the view, and looks at one row of its weights. Some steps are dummies,
    which are not counted.

    Args:
        service: The service.
        path: The board's file; its columns begin with the step after ``base``.
        rank: This rank.
        ranks: All of them.
        seed: What happens; the same on all ranks.
        period: Steps after which other experts are hot.
        base: Steps that were run before.
    """

    def __init__(
        self, service: EplbService, path: str, rank: int, ranks: int, *, seed: int = 0, period: int = 150, base: int = 0
    ) -> None:
        super().__init__(daemon=True)
        self.error: BaseException | None = None
        self.seen = Seen()
        self._service, self._comm = service, service.comm
        self._board = Board(path, ranks)
        self._rank, self._period, self._base = rank, period, base
        self._own, self._common = random.Random(seed * 1000 + rank), random.Random(seed)
        self._steps = self._comm.step()  # the same object for every step
        self._rows = PatternWeights(self._comm.placement, rank, ROWS)
        self.forget = self._comm.on_applied(self._applied)

    def run(self) -> None:
        try:
            while not 0 < self._board.words[STOP, self._rank] <= self._steps.number:
                self.step()
        except BaseException as error:
            self.error = error

    def step(self) -> None:
        if self._own.random() < 0.3:
            time.sleep(self._own.choice([0.0, 0.001, 0.005]))
        elif self._own.random() < 0.002:
            time.sleep(0.3)
        quiet = self._steps.gate == NEVER
        begin = time.perf_counter()
        with self._service.forward() as step:
            entered = time.perf_counter() - begin
            placement = self._comm.placement
            self._meet(step)
            self._look(placement)
            assert self._comm.placement == placement, f"step {step.number} saw two placements"
            self._board.seen[self._rank, step.number - self._base] = int.from_bytes(placement.digest()[:7]) + 1
            begin = time.perf_counter()
        (self.seen.quiet if quiet else self.seen.busy).append(entered + time.perf_counter() - begin)
        if self._common.random() < 0.95:
            counts = local_counts(placement, self._rank, hot=step.number // self._period)
            begin = time.perf_counter()
            self._service.record(counts, by="local")
            self.seen.recorded.append(time.perf_counter() - begin)
        if self._common.random() < 0.01:
            self._service.idle()
            time.sleep(self._common.uniform(0.0, 0.2))

    def _meet(self, step: Steps) -> None:
        """Wait until every member has begun the step, in the same view: what a collective that is tagged does."""
        words, deadline = self._board.words, time.monotonic() + STEP_SECONDS
        words[BEGUN, self._rank] = step.number
        while True:
            words[TERM, self._rank] = term = step.term
            late = [m for m in self._comm.view.members if words[BEGUN, m] < step.number or words[TERM, m] != term]
            if not late and self._comm.view.term == term:
                return
            phase = self._comm.health().phase
            assert time.monotonic() < deadline, f"ranks {late} do not come to step {step.number} in term {term}"
            assert phase not in ("fenced", "closed"), f"in step {step.number} of term {term} this rank is {phase}"
            time.sleep(0.0002)

    def _look(self, placement: Placement) -> None:
        """One row holds the expert that is said to be there."""
        local = placement.local(self._rank)
        layer, slot = self._own.randrange(local.shape[0]), self._own.randrange(local.shape[1])
        tensor, expert = self._own.randrange(len(ROWS)), int(local[layer, slot])
        if expert >= 0:
            row = list(self._comm._weights.layers[layer].values())[tensor][slot].numpy()
            same = np.array_equal(row, self._rows.expected(layer, tensor, expert))
            assert same, f"layer {layer}, tensor {tensor}, slot {slot} is not expert {expert}"

    def _applied(self, layer: int, placement: Placement) -> None:
        self.seen.applied.append((layer, self._steps.number, placement.digest().hex()))


def local_counts(placement: Placement, rank: int, *, hot: int) -> np.ndarray[Any, Any]:
    """What arrives at a rank's slots in a step, `[layers, num_local_experts]`: copies of an expert share its load."""
    local = placement.local(rank).astype(int)
    share = skewed(placement, hot) / np.maximum(placement.logical_replica_count, 1)
    counts: np.ndarray[Any, Any] = np.where(local >= 0, np.take_along_axis(share, np.maximum(local, 0), axis=1), 0.0)
    return counts
