"""The process's switch interval: shortened meanwhile, and put back."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from eplb_async.core.placement import Placement
from eplb_async.settings import Settings
from eplb_async.switching import shorter
from eplb_async.testing import run
from eplb_async.testing.cluster import LocalCluster
from eplb_async.testing.faults import FaultPlan


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


def interval() -> float:
    return round(sys.getswitchinterval(), 5)  # Python cuts to whole microseconds


def test_the_shortest_counts_and_the_processes_own_comes_back() -> None:
    sys.setswitchinterval(0.004)
    with shorter(0.001):
        assert interval() == 0.001
        with shorter(0.0005), shorter(0.002):
            assert interval() == 0.0005
        assert interval() == 0.001
    assert interval() == 0.004


def test_it_is_never_made_longer() -> None:
    sys.setswitchinterval(0.0001)
    with shorter(0.001):
        assert interval() == 0.0001
    assert interval() == 0.0001


def test_nothing_is_asked_for_with_zero() -> None:
    sys.setswitchinterval(0.004)
    with shorter(0):
        assert interval() == 0.004
        sys.setswitchinterval(0.003)
    assert interval() == 0.003


def test_what_somebody_else_sets_meanwhile_stays() -> None:
    sys.setswitchinterval(0.004)
    with shorter(0.001):
        sys.setswitchinterval(0.003)
    assert interval() == 0.003


@pytest.mark.parametrize("fails", [False, True], ids=["done", "aborted"])
def test_a_migration_shortens_it_and_puts_it_back(fails: bool) -> None:
    """However it ends."""
    old, new = Placement([[0, 1]], ep_size=2), Placement([[1, 0]], ep_size=2)
    seen: list[float] = []
    sys.setswitchinterval(0.004)

    async def main() -> None:
        faults = FaultPlan().fail_read("default/0.", nth=0, status="nixlBackendError") if fails else None
        settings = Settings(secret=b"s" * 16, switch_interval=0.002, retry_reads=False)
        async with LocalCluster(
            old, faults=faults, settings=settings, on_layer_applied=lambda rank: lambda *_: seen.append(interval())
        ) as cluster:
            assert interval() == 0.004
            results = await cluster.migrate(new)
            assert all(isinstance(result, Exception) is fails for result in results)
            assert interval() == 0.004

    run(main())
    assert seen == ([] if fails else [0.002, 0.002])
