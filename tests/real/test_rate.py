"""The reference work (DESIGN §6) against the same bytes by plainer means, in one run, alternating."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from eplb_async.bench.launch import launch
from eplb_async.bench.scenario import SCENARIOS

ROUNDS, BATCHES = 7, 3
ENOUGH = 0.4
REFERENCE = replace(SCENARIOS["reference"], contenders=("ours", "raw", "copy_twice", "copies"))


def missed(found: dict[str, Any]) -> list[str]:
    """What a run falls short of: ≥ 0.4 of the memcpy ceiling, and a ticker on the user's loop.

    Its p99, worst rank: ≤ 5 ms, or ≤ 1.5 × what the same copies cause without NIXL.
    """
    ceiling = found["ratios"]["copy_twice"]["median"]
    worst, same = (found["contenders"][name]["lag_ms"]["p99"] for name in ("ours", "copies"))
    print(f"of memcpy ceiling: {ceiling:.2f}; of raw READ + copy: {found['ratios']['raw']['median']:.2f}")
    print(f"p99 {worst:.1f} ms, under the same copies {same:.1f} ms")
    short = []
    if ceiling < ENOUGH:
        short.append(f"rate: {ceiling:.2f} of the memcpy ceiling, {found['ratios']}")
    if worst > max(5.0, 1.5 * same):
        short.append(f"lag: p99 {worst:.1f} ms, under the same copies {same:.1f} ms")
    return short


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_the_reference_work_keeps_up_with_memcpy_and_lags_no_more_than_copies() -> None:
    """2 ranks × 4 layers × 16 experts of 2 + 1 MiB, all exchanged; every byte verified first."""
    short: dict[str, str] = {}
    for batch in range(BATCHES):
        found = launch(REFERENCE, rounds=ROUNDS)
        assert found["contenders"]["ours"]["verified"]
        now = {text.split(":")[0]: text for text in missed(found)}
        short = now if batch == 0 else {what: now[what] for what in short if what in now}
        if not short:
            return  # each was met once; a noisy neighbour earns another batch
    pytest.fail("; ".join(short.values()))
