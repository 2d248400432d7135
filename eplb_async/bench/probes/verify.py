"""What each mode of ``verify`` costs on the reference work (DESIGN §6): three groups side by side, taking turns."""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from itertools import permutations
from typing import Any

import numpy as np

from eplb_async.bench.probes import alone
from eplb_async.bench.probes.group import started, transports
from eplb_async.core.placement import Placement
from eplb_async.testing.processes import RankProcesses

NAME = "verify"
MODES = ("off", "identity", "full")
MIB = 1 << 20
_LAYERS, _EXPERTS, _ROUNDS = 4, 16, 6


def measure(*, quick: bool) -> dict[str, Any]:
    """Each mode's seconds over those of ``off``, on each transport."""
    return {
        "transports": {transport: costs(transport, quick=quick) for transport in transports(quick=quick)},
        "bars": [],
    }


def costs(transport: str, *, quick: bool) -> dict[str, Any]:
    """Migrate three groups of two ranks, one for each mode, and check their bytes at the end.

    Args:
        transport: ``"auto"`` or ``"tcp"``.
        quick: A quarter of the layers and experts, and two rounds.
    """
    rounds, layers, experts = (2, 1, 4) if quick else (_ROUNDS, _LAYERS, _EXPERTS)
    row = np.arange(2 * experts)
    one, two = (Placement(np.stack([np.roll(row, by)] * layers), ep_size=2) for by in (0, experts))
    with ExitStack() as stack:
        groups = {
            mode: stack.enter_context(
                started(2, transport, placement=one, row_bytes=(2 * MIB, MIB), settings={"verify": mode})
            )
            for mode in MODES
        }
        seconds = _in_turns(groups, one, two, rounds)
        wrong = sum(sum(group.all("check")) for group in groups.values())
    ratios = {
        mode: [ours / off for ours, off in zip(each, seconds["off"], strict=True)] for mode, each in seconds.items()
    }
    return {
        "rounds": rounds,
        "bytes": 2 * layers * experts * 3 * MIB,
        "seconds": {mode: round(statistics.median(each), 5) for mode, each in seconds.items()},
        "ratio_over_off": {mode: round(statistics.median(each), 3) for mode, each in ratios.items()},
        "ratios": {mode: [round(ratio, 3) for ratio in each] for mode, each in ratios.items()},
        "wrong_bytes": wrong,
    }


def _in_turns(groups: dict[str, RankProcesses], one: Placement, two: Placement, rounds: int) -> dict[str, list[float]]:
    """Migrate every group once a round; seconds of each round, of the slower rank.

    Each round has another order, so that nobody always follows the same one: what a group still does after its turn
    costs the next one.
    """
    seconds: dict[str, list[float]] = {mode: [] for mode in groups}
    orders = list(permutations(groups))
    for number in range(rounds + 1):
        target = one if number % 2 else two
        for mode in orders[number % len(orders)]:
            reports = groups[mode].all("migrate", target, 60.0)
            if number:  # the first one connects
                seconds[mode].append(max(report["seconds"]["total"] for report in reports))
    return seconds


if __name__ == "__main__":
    alone.main(NAME, measure)
