"""How long planning takes, all layers at once, and what one rank then does with the plan."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

from eplb_async.bench.probes import alone
from eplb_async.core.incoming import Incoming
from eplb_async.core.placement import Placement
from eplb_async.core.plan import MigrationPlan, plan
from eplb_async.core.schedule import pieces
from eplb_async.settings import DEFAULTS
from eplb_async.testing.placements import random_placement

NAME = "planner"
LAYERS, EXPERTS = 58, 256
SHAPES = ((320, 32, 0.050), (512, 256, 0.150))
"""Physical slots of a layer, ranks, and the bar in seconds."""
_ROW_BYTES = (4096 * 7168, 7168 * 2048)  # w13 and w2 of an expert of 44 MB, one byte a weight
_REPEATS, _QUICK_REPEATS = 7, 3


def measure(*, quick: bool) -> dict[str, Any]:
    """Plan from random placements to random ones; medians. On a busy machine only the CPU seconds say much."""
    shapes, bars = [], []
    for slots, ranks, bar in SHAPES:
        rng = np.random.default_rng(slots)
        planning, cpu, cutting, reads = [], [], [], 0
        for _ in range(_QUICK_REPEATS if quick else _REPEATS):
            old, new = (_random(rng, slots, ranks) for _ in range(2))
            begun, cpu_begun = time.perf_counter(), time.thread_time()
            made = plan(old, new)
            planned = time.perf_counter()
            cpu.append(time.thread_time() - cpu_begun)
            batches = _cut(made)
            planning.append(planned - begun)
            cutting.append(time.perf_counter() - planned)
            reads = made.num_reads
        seconds = statistics.median(planning)
        shapes.append(
            {
                "layers": LAYERS,
                "slots": slots,
                "ranks": ranks,
                "reads": reads,
                "plan_seconds": round(seconds, 5),
                "plan_cpu_seconds": round(statistics.median(cpu), 5),
                "rank_seconds": round(statistics.median(cutting), 5),
                "rank_batches": batches,
            }
        )
        bars.append(alone.at_most(f"plan, {LAYERS} layers x {slots} slots x {ranks} ranks: seconds", bar, seconds))
    return {"shapes": shapes, "bars": bars}


def _random(rng: np.random.Generator, slots: int, ranks: int) -> Placement:
    return random_placement(
        rng, num_layers=LAYERS, num_logical=EXPERTS, num_local_experts=slots // ranks, ep_size=ranks
    )


def _cut(made: MigrationPlan) -> int:
    """What rank 0 makes of a plan: its moves of each layer, cut into batches; returns how many."""
    moves = Incoming.of(made, 0)
    return sum(
        len(
            pieces(
                moves.part(range(layer, layer + 1)).source,
                _ROW_BYTES,
                max_bytes=DEFAULTS.max_post_bytes,
                max_descriptors=DEFAULTS.max_post_descriptors,
                rank=0,
                ep_size=made.new.ep_size,
            )
        )
        for layer in range(LAYERS)
    )


if __name__ == "__main__":
    alone.main(NAME, measure)
