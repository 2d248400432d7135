"""The fault campaign: kill or stop, in each phase, in each role. ``pytest -m faults`` runs it and prints its table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.campaign import Campaign, Outcome, TooSlow
from tests.faults.cases import Case, cases

pytestmark = pytest.mark.faults


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_whatever_dies_or_stops_nothing_is_lost(case: Case, tmp_path: Path, record: Callable[[Outcome], None]) -> None:
    """One set of layers on all who go on, a typed error or a right success, one more migration, nothing left over."""
    for tries, patience in enumerate((2.0, 6.0, 18.0), 1):
        directory = tmp_path / str(tries)
        directory.mkdir()
        try:
            outcome = Campaign(case, directory, patience).run()
        except TooSlow as slow:
            print(f"{case}: not reached within {patience} s: {slow}")
        else:
            outcome.tries = tries
            record(outcome)
            return
    pytest.fail("the phase was never reached")
