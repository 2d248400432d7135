"""``comm.plan()``: says beforehand what ``migrate`` then reports, at any time, and does nothing."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_async.communicator import MigrationReport
from eplb_async.core.forecast import Forecast
from eplb_async.core.placement import Placement
from eplb_async.errors import PlacementError
from eplb_async.settings import Settings
from eplb_async.testing import run
from eplb_async.testing.cluster import LocalCluster
from eplb_async.testing.memory import MemoryNative
from eplb_async.testing.placements import random_placement
from tests.communicator.groups import all_report
from tests.communicator.test_placements import shapes

OLD = Placement([[0, 1, 3, 2, 3, 0, 2, 0, 1]] * 4, ep_size=3)
NEW = Placement([[2, 3, 0, 1, 0, 2, 0, 1, 3]] * 4, ep_size=3)
WITHOUT_2 = Placement([[2, 3, 0, 1, 0, 2, -1, -1, -1]] * 4, ep_size=3)


@given(shapes(), st.integers(0, 2**32 - 1), st.sampled_from(["identity", "off"]))
@settings(max_examples=25, deadline=None)
def test_it_says_what_migrate_reports(shape: dict[str, int], seed: int, verify: Any) -> None:
    """Bytes that each rank READs and copies, entries included; every rank says the same."""
    rng = np.random.default_rng(seed)
    first, second = (random_placement(rng, **shape) for _ in range(2))

    async def main() -> None:
        chosen = Settings(verify=verify, secret=b"s" * 16)
        async with LocalCluster(first, row_bytes=(40, 24), settings=chosen) as cluster:
            forecasts = [comm.plan(second) for comm in cluster.comms]
            reports = await cluster.migrate(second)
            for rank, report in enumerate(reports):
                assert isinstance(report, MigrationReport), report
                assert report.bytes_read == forecasts[0].bytes_in[rank]
                assert report.bytes_copied == forecasts[0].bytes_copied[rank]
            assert all(forecast.to_dict() == forecasts[0].to_dict() for forecast in forecasts)
            assert forecasts[0].bytes_per_expert[0] == 64 + (32 if verify == "identity" else 0)
            assert all(cluster.comms[0].plan(second).bytes_copied == 0)

    run(main())


def test_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No native call but clocks, no READ, no message, no change of health or placement."""
    calls: Counter[str] = Counter()

    def counted(name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return original(*args, **kwargs)

        return call

    async def main() -> None:
        async with LocalCluster(OLD) as cluster:
            await asyncio.sleep(5)
            for name in ("post", "make_read", "notify", "register", "add_remote"):
                monkeypatch.setattr(MemoryNative, name, counted(name, getattr(MemoryNative, name)))
            log, health = list(cluster.fabric.log), [comm.health() for comm in cluster.comms]
            for comm in cluster.comms:
                assert comm.plan(NEW).bytes_in.sum() > 0
            assert [comm.health() for comm in cluster.comms] == health
            await asyncio.sleep(5)
            assert not calls
            assert cluster.fabric.log == log
            assert [comm.placement for comm in cluster.comms] == [OLD] * 3

    run(main())


def test_it_refuses_what_migrate_refuses() -> None:
    """The same errors, in the same words."""

    async def main() -> None:
        async with LocalCluster(OLD) as cluster:
            comm = cluster.comms[0]
            for wrong in ([[0, 1]], Placement(OLD.physical_to_logical_map[:2], ep_size=3)):
                with pytest.raises(PlacementError) as planned:
                    comm.plan(wrong)  # type: ignore[arg-type]
                with pytest.raises(PlacementError) as migrated:
                    await comm.migrate(wrong)  # type: ignore[arg-type]
                assert str(planned.value) == str(migrated.value)
            with pytest.raises(ValueError, match="gbps is 0"):
                comm.plan(NEW, gbps=0)

    run(main())


def test_after_a_rank_was_excluded_it_counts_without() -> None:
    """Not a source, not a reader; a placement that needs it is refused."""

    async def main() -> None:
        async with LocalCluster(OLD) as cluster:
            cluster.kill(2)
            await cluster.comms[0].exclude(2)
            while cluster.comms[1].health().members != (0, 1):
                await asyncio.sleep(0.01)
            with pytest.raises(PlacementError, match="rank 2"):
                cluster.comms[0].plan(NEW)
            forecasts = [comm.plan(WITHOUT_2) for comm in cluster.comms[:2]]
            reports = await cluster.migrate(WITHOUT_2, ranks=(0, 1))
            for rank, report in enumerate(reports):
                assert isinstance(report, MigrationReport), report
                assert report.bytes_read == forecasts[1 - rank].bytes_in[rank]
                assert report.bytes_copied == forecasts[1 - rank].bytes_copied[rank]
            assert forecasts[0].plan.members == (0, 1)
            assert (forecasts[0].bytes_in[2], forecasts[0].bytes_out[2]) == (0, 0)
            assert forecasts[0].emptied_slots == 12

    run(main())


def test_experts_that_died_with_their_rank_are_said_to_be_lost() -> None:
    """As moves that load; ``migrate`` with ``load_expert`` loads just these."""
    old = Placement([[0, 1, 2, 0, 3, 1]] * 2, ep_size=3)
    target = Placement([[0, 1, 2, 3, -1, -1], [0, 3, 2, 1, -1, -1]], ep_size=3)

    async def main() -> None:
        async with LocalCluster(old) as cluster:
            cluster.kill(2)
            await cluster.comms[0].exclude(2)
            while cluster.comms[1].health().members != (0, 1):
                await asyncio.sleep(0.01)
            forecast = cluster.comms[0].plan(target)
            assert forecast.lost == {0: (3,), 1: (3,)}
            assert forecast.loads.experts == 2
            reports = await cluster.migrate(target, ranks=(0, 1), load_expert=cluster.rows[0].load)
            for rank, report in enumerate(reports):
                assert isinstance(report, MigrationReport), report
                assert report.bytes_copied == forecast.bytes_copied[rank]
            assert sum(report.loads for report in reports if isinstance(report, MigrationReport)) == 2

    run(main())


def test_while_a_migration_runs_it_counts_the_layers_that_are_left() -> None:
    """Layer by layer, and back: to where they come from, only those that were applied."""

    async def main() -> None:
        async with LocalCluster(OLD, settings=Settings(secret=b"s" * 16, staging_layers=1)) as cluster:
            comm = cluster.comms[0]
            seen = set()
            migrating = asyncio.ensure_future(cluster.migrate(NEW))
            while not migrating.done():
                applied = int((comm.placement.physical_to_logical_map == NEW.physical_to_logical_map).all(axis=1).sum())
                assert comm.plan(NEW).layers_touched == tuple(range(applied, 4))
                assert comm.plan(OLD).layers_touched == tuple(range(applied))
                seen.add((comm.health().phase, applied))
                await asyncio.sleep(0)
            all_report(migrating.result())
            assert any(phase == "open" and 0 < applied < 4 for phase, applied in seen), seen
            assert comm.plan(NEW).layers_touched == ()

    run(main())


def test_suspended_and_closed_it_still_answers() -> None:
    """Of the last view and placement."""

    async def main() -> None:
        async with LocalCluster(OLD) as cluster:
            comm = cluster.comms[2]
            before = comm.plan(NEW, gbps=400.0).to_dict()
            await comm.suspend()
            assert comm.plan(NEW, gbps=400.0).to_dict() == before
            await comm.resume()
            await comm.aclose()
            assert comm.plan(NEW, gbps=400.0).to_dict() == before

    run(main())


def test_any_thread_may_ask() -> None:
    """As with health() and placement."""

    async def main() -> None:
        async with LocalCluster(OLD) as cluster:
            found: list[Forecast] = []
            thread = threading.Thread(target=lambda: found.append(cluster.comms[0].plan(NEW)))
            thread.start()
            thread.join(10)
            assert found[0].to_dict() == cluster.comms[0].plan(NEW).to_dict()

    run(main())
