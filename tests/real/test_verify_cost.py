"""What each mode of ``verify`` costs, measured by the bench's probe."""

from __future__ import annotations

import pytest

from eplb_async.bench.probes.verify import costs

pytestmark = pytest.mark.faults  # minutes of real processes: run by `pytest -m faults`, not by default


def test_what_each_mode_costs(transport: str) -> None:
    """Medians against ``off``, printed; digesting a row costs less than moving it, so ``full`` is no multiple."""
    found = costs(transport, quick=True)
    print(transport, found)
    assert found["wrong_bytes"] == 0
    assert found["ratio_over_off"]["identity"] < 2.0, found
    assert found["ratio_over_off"]["full"] < 3.0, found
