"""Collects the campaign's table, and prints it when the run is over."""

from __future__ import annotations

from typing import Any

import pytest

from tests.faults.campaign import Outcome, table

_OUTCOMES = pytest.StashKey[list[Outcome]]()


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Any:
    """Adds a row to the table."""
    return request.config.stash.setdefault(_OUTCOMES, []).append


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    outcomes = config.stash.get(_OUTCOMES, [])
    if outcomes:
        aborted = sum(len(outcome.aborted) for outcome in outcomes)
        terminalreporter.section("fault campaign")
        for line in table(outcomes):
            terminalreporter.write_line(line)
        slow = sum(outcome.tries > 1 for outcome in outcomes)
        terminalreporter.write_line(
            f"{len(outcomes)} cases; UCX aborted {aborted} ranks (docs/decisions/0002);"
            f" {slow} took more than one try to reach the phase"
        )
