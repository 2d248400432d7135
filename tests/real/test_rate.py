"""The reference work (DESIGN §6) against the same bytes by plainer means, in one run, alternating."""

from __future__ import annotations

import statistics

import numpy as np

from eplb_async.core.placement import Placement
from tests.real.conftest import Start

MIB = 1 << 20
EXPERTS, LAYERS, ROUNDS = 16, 4, 7


def test_the_reference_work_keeps_up_with_raw_nixl_and_memcpy(start: Start) -> None:
    """2 ranks × 4 layers × 16 experts of 2 + 1 MiB, all exchanged: ≥ 0.4 of the memcpy ceiling."""
    row = np.arange(2 * EXPERTS)
    one = Placement(np.stack([row] * LAYERS), ep_size=2)
    two = Placement(np.stack([np.roll(row, EXPERTS)] * LAYERS), ep_size=2)
    ranks = start(one, row_bytes=(2 * MIB, MIB), loop="uvloop", timeout=120.0)
    nbytes = LAYERS * EXPERTS * 3 * MIB
    to_ceiling, to_raw = [], []
    for number in range(ROUNDS + 1):
        target = two if number % 2 == 0 else one
        ours = max(report["seconds"]["total"] for report in ranks.all("migrate", target, 60.0))
        assert ranks.all("check", target) == [0, 0]
        ceiling = max(ranks.all("run", "tests.real.rate", "copy_twice", nbytes, 3 * MIB))
        for rank in range(2):
            ranks.send(rank, "run", "tests.real.rate", "raw_reads", 1 - rank)
        raw = max(ranks.receive(rank) for rank in range(2))
        # The raw copy exchanged the rows of both ranks without telling anyone: exchange them back.
        for rank in range(2):
            ranks.call(rank, "refill")
        if number:
            to_ceiling.append(ceiling / ours)
            to_raw.append(raw / ours)
    figures = (
        f"of memcpy ceiling: {statistics.median(to_ceiling):.2f} {[round(x, 2) for x in to_ceiling]}; "
        f"of raw READ + copy: {statistics.median(to_raw):.2f} {[round(x, 2) for x in to_raw]}"
    )
    print(figures)
    assert statistics.median(to_ceiling) >= 0.4, figures
