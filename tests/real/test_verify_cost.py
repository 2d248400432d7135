"""What each mode of ``verify`` costs on the reference work (DESIGN §6): three groups side by side, taking turns."""

from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np
import pytest

from eplb_async.core.placement import Placement
from eplb_async.testing.processes import RankProcesses
from tests.real.conftest import Start

pytestmark = pytest.mark.faults  # minutes of real processes: run by `pytest -m faults`, not by default

MIB = 1 << 20
EXPERTS, LAYERS, ROUNDS = 16, 4, 7
MODES = ("off", "identity", "full")


def cost_ratios(
    groups: dict[str, RankProcesses], one: Placement, two: Placement, rounds: int
) -> dict[str, list[float]]:
    """Migrate every group once a round, in turns; of each round, each mode's seconds over those of ``off``."""
    ratios: dict[str, list[float]] = {mode: [] for mode in groups}
    for number in range(rounds + 1):
        target = two if number % 2 == 0 else one
        order = list(groups)[number % len(groups) :] + list(groups)[: number % len(groups)]
        took = {}
        for mode in order:
            reports = groups[mode].all("migrate", target, 60.0)
            took[mode] = max(report["seconds"]["total"] for report in reports)
        if number:  # the first one connects
            for mode, seconds in took.items():
                ratios[mode].append(seconds / took["off"])
    return ratios


def test_what_each_mode_costs(start: Start, transport: str, tmp_path: Path) -> None:
    """Medians against ``off``, printed; digesting a row costs less than moving it, so ``full`` is no multiple."""
    row = np.arange(2 * EXPERTS)
    one = Placement(np.stack([row] * LAYERS), ep_size=2)
    two = Placement(np.stack([np.roll(row, EXPERTS)] * LAYERS), ep_size=2)
    groups = {
        mode: start(
            one,
            rendezvous=f"file://{tmp_path}/{mode}",
            row_bytes=(2 * MIB, MIB),
            loop="uvloop",
            transport=transport,
            settings={"verify": mode},
        )
        for mode in MODES
    }
    ratios = cost_ratios(groups, one, two, ROUNDS)
    medians = {mode: round(statistics.median(values), 2) for mode, values in ratios.items()}
    print(f"{transport}: seconds over those of off, medians of {ROUNDS}: {medians}", ratios)
    for group in groups.values():
        assert group.all("check") == [0, 0]
    assert medians["identity"] < 2.0, ratios
    assert medians["full"] < 3.0, ratios
