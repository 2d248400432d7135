"""What it costs an engine to record its counts, and the service to look at them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from eplb_async.bench.probes import alone
from eplb_async.core.placement import Placement
from eplb_async.service.counter import AttachedCounter
from eplb_async.service.window import LoadWindow
from eplb_async.testing.placements import random_placement

NAME = "record"
LAYERS, EXPERTS, SLOTS, RANKS = 58, 256, 320, 32
THREADS = 4
_CALLS, _QUICK_CALLS = 4000, 400
_BAR = "record, 58 layers x 320 slots, int64: p50 microseconds"


def measure(*, quick: bool) -> dict[str, Any]:
    """Record, numpy and torch; with four threads at once; while every step has another placement; and the looks."""
    calls = _QUICK_CALLS if quick else _CALLS
    rng = np.random.default_rng(7)
    old, new = (_placement(rng) for _ in range(2))
    window = LoadWindow(old, steps=1000)
    counts = rng.integers(0, 1000, (LAYERS, SLOTS))
    kinds: dict[str, Any] = {name: counts.astype(name) for name in ("int64", "int32", "float32", "float64")}
    kinds |= {f"torch {name}": torch.from_numpy(array) for name, array in kinds.items()}
    found: dict[str, Any] = {
        name: _percentiles(_timed(lambda given=given: window.record(given, old), calls))
        for name, given in kinds.items()
    }
    found["int64, 4 threads"] = _percentiles(_together(lambda: window.record(counts, old), calls))
    migrating = [old.with_layers(new, upto) for upto in range(LAYERS + 1)]
    steps = iter([at for _ in range(calls // LAYERS + 1) for at in migrating[1:]])
    found["int64, a layer changes each step"] = _percentiles(_timed(lambda: window.record(counts, next(steps)), calls))
    looks = {"loads": _percentiles(_timed(window.loads, max(10, calls // 20)))}
    counter = AttachedCounter(counts, lambda: old)
    looks["collect"] = _percentiles(_timed(counter.collect, max(10, calls // 20)))
    turns = iter([(layer, at) for _ in range(calls // LAYERS + 1) for at in (new, old) for layer in range(LAYERS)])
    looks["applied"] = _percentiles(_timed(lambda: counter.applied(*next(turns)), calls))
    return {"record": found, "looks": looks, "bars": [alone.at_most(_BAR, 15.0, found["int64"]["p50_us"])]}


def _placement(rng: np.random.Generator) -> Placement:
    return random_placement(
        rng, num_layers=LAYERS, num_logical=EXPERTS, num_local_experts=SLOTS // RANKS, ep_size=RANKS
    )


def _timed(call: Callable[[], object], calls: int) -> list[int]:
    """Nanoseconds of each call."""
    taken = []
    for _ in range(calls):
        begun = time.perf_counter_ns()
        call()
        taken.append(time.perf_counter_ns() - begun)
    return taken


def _together(call: Callable[[], object], calls: int) -> list[int]:
    taken: list[int] = []
    threads = [threading.Thread(target=lambda: taken.extend(_timed(call, calls))) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return taken


def _percentiles(taken: list[int]) -> dict[str, float]:
    ordered = sorted(taken)
    return {
        name: round(ordered[int(len(ordered) * part)] / 1e3, 1) for name, part in (("p50_us", 0.5), ("p99_us", 0.99))
    }


if __name__ == "__main__":
    alone.main(NAME, measure)
