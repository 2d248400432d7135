"""The simulation's curves over the number of ranks, its skewed rows, and the bars that it has to meet."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from eplb_async.bench.bars import bar
from eplb_async.bench.simulation.control import coordinator_cost
from eplb_async.bench.simulation.memory import rank_memory
from eplb_async.bench.simulation.run import Outcome, simulate
from eplb_async.bench.simulation.world import World, random_pair, skewed_pair
from eplb_async.core.plan import MigrationPlan, plan
from eplb_async.settings import Settings

__all__ = ["NAME", "measure"]

NAME = "simulation"
RANKS = (8, 16, 32, 64, 128, 256, 512)
QUICK_RANKS = (8, 16, 32)
BAR_RANKS = 64
MAKESPAN_BAR = 1.15
_ALL_LAYERS = 58
_SEEDS = tuple(range(8))
"""Placements that the bar is judged on, of which one is as much as 10 % apart; the curves are of the first."""
_STAGING = (2, 3)
"""Layers of staging: the default, and one more."""


def measure(*, quick: bool, told: Callable[[str], object] = lambda _: None) -> dict[str, Any]:
    """Simulate migrations between random placements, and one that all ranks want the same experts in.

    Args:
        quick: Few ranks, no bar of large groups.
        told: Called with a line about what has been measured.

    Returns:
        ``world``: what is modelled. ``curves``: one record for each number of ranks. ``skewed``: every rank needs
        the same hot experts, which one rank or one in eight holds. ``bars``.
    """
    curves = []
    for ranks in QUICK_RANKS if quick else RANKS:
        curves.append(one := _point(World(ranks=ranks)))
        told(f"{ranks} ranks: {one}")
    skewed = []
    ranks = QUICK_RANKS[-1] if quick else BAR_RANKS
    for what, holders in (("one rank holds them", range(1)), ("one rank in eight holds them", range(0, ranks, 8))):
        world = World(ranks=ranks)
        outcome = simulate(world, *skewed_pair(world, holders))
        skewed.append({"name": f"all ranks need the same experts; {what}", "holders": len(holders)} | _told(outcome))
        told(str(skewed[-1]))
    return {"world": _world(World(ranks=0)), "curves": curves, "skewed": skewed, "bars": _bars(curves)}


def _point(world: World) -> dict[str, Any]:
    """What is simulated and measured for one number of ranks."""
    stagings = _STAGING if world.ranks <= BAR_RANKS else _STAGING[:1]  # a large group takes minutes to simulate
    seeds = _SEEDS if world.ranks == BAR_RANKS else _SEEDS[:1]
    by_staging = {
        layers: [simulate(world, *random_pair(world, seed), settings=Settings(staging_layers=layers)) for seed in seeds]
        for layers in stagings
    }
    whole = World(ranks=world.ranks, layers=_ALL_LAYERS)
    planned, plan_seconds = _plan(whole)
    control = coordinator_cost(world.ranks, _ALL_LAYERS)
    memory = rank_memory(world.ranks, planned)
    return _told(by_staging[_STAGING[0]][0]) | {
        "makespan_over_bound_by_staging": {
            str(layers): [round(outcome.over_bound, 4) for outcome in outcomes]
            for layers, outcomes in by_staging.items()
        },
        "plan_seconds": round(plan_seconds, 4),
        "coordinator_seconds": round(control.seconds_per_layer, 6),
        "coordinator_bytes_per_layer": round(control.bytes_per_layer),
        "begin_seconds": round(control.seconds_to_begin, 6),
        "memory_mib": round(memory.mib, 2),
        "plan_mib": round(memory.plan / (1 << 20), 2),
        "peers_mib": round(memory.peers / (1 << 20), 2),
    }


def _plan(world: World) -> tuple[MigrationPlan, float]:
    old, new = random_pair(world)
    began = time.thread_time()
    planned = plan(old, new)
    return planned, time.thread_time() - began


def _told(outcome: Outcome) -> dict[str, Any]:
    return {
        "ranks": outcome.ranks,
        "reads": outcome.reads,
        "messages_per_rank_layer": round(outcome.messages[0], 4),
        "most_messages_per_rank_layer": round(outcome.messages[1], 4),
        "coordinator_messages_per_layer": round(outcome.coordinator_messages, 2),
        "pings_per_rank": round(outcome.pings, 2),
        "join_seconds": round(outcome.join, 6),
        "makespan_seconds": round(outcome.makespan, 6),
        "bound_seconds": round(outcome.bound, 6),
        "makespan_over_bound": round(outcome.over_bound, 4),
        "open_cpu_seconds": round(outcome.cpu_seconds[0], 2),
        "migrate_cpu_seconds": round(outcome.cpu_seconds[1], 2),
    }


def _world(world: World) -> dict[str, Any]:
    return {
        "layers": world.layers,
        "slots_per_rank": world.slots,
        "expert_bytes": sum(world.row_bytes),
        "nic_bytes_per_second": world.bytes_per_second,
        "latency_seconds": world.latency,
        "message_seconds": world.message_seconds,
    }


def _bars(curves: list[dict[str, Any]]) -> list[dict[str, Any]]:
    layers = World(ranks=0).layers
    limit = 2 + 2 / layers  # a vote and a decision for each layer, and JOIN and BEGIN
    most = max(curve["most_messages_per_rank_layer"] for curve in curves)
    few, many = curves[0]["ranks"], curves[-1]["ranks"]
    bars = [bar(f"most messages of a rank per layer, {few} to {many} ranks", f"<= {limit:g}", most, most <= limit)]
    for curve in curves:
        if curve["ranks"] == BAR_RANKS:
            for staging, over in curve["makespan_over_bound_by_staging"].items():
                middle = statistics.median(over)
                what = (
                    f"makespan over the busiest NIC, {BAR_RANKS} ranks, {staging} layers of staging, "
                    f"median of {len(over)} placements"
                )
                bars.append(bar(what, f"<= {MAKESPAN_BAR}", middle, middle <= MAKESPAN_BAR))
    return bars
