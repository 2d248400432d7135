"""The hundredth migration is as the first (C31), and garbage collection in the middle of one changes nothing (C36)."""

from __future__ import annotations

import asyncio
import gc

import numpy as np
import pytest

from eplb_async.communicator import MigrationReport
from eplb_async.core.placement import Placement
from eplb_async.settings import Settings
from eplb_async.testing import MemoryFabric, run
from eplb_async.testing.cluster import LocalCluster
from eplb_async.testing.placements import random_placement


def random_placements(seed: int, count: int) -> list[Placement]:
    rng = np.random.default_rng(seed)
    return [
        random_placement(rng, num_layers=3, num_logical=5, num_local_experts=4, ep_size=2, empty=1)
        for _ in range(count)
    ]


@pytest.mark.parametrize("seed", [1, 2])
def test_the_hundredth_migration_gives_the_bytes_of_the_first(seed: int) -> None:
    """Once from A to B, 98 others, and from A to B again: every byte, and all that was counted, is the same."""
    a, b, *others = random_placements(seed, 98)
    fabric = MemoryFabric()

    async def main() -> None:
        async with LocalCluster(a, fabric=fabric, row_bytes=(640, 24)) as cluster:

            async def step(target: Placement) -> tuple[list[bytes], list[tuple[int, ...]]]:
                reports = await cluster.migrate(target)
                counted = []
                for report in reports:
                    assert isinstance(report, MigrationReport), report
                    counted.append((report.bytes_read, report.bytes_copied, report.reads, report.layers_committed))
                rows = [t.numpy()[slots].tobytes() for rank in cluster.rows for t, slots in _full(rank, target)]
                return rows, counted

            first = await step(b)
            pointers = [rows.pointers() for rows in cluster.rows]
            for other in others:
                await step(other)
                assert cluster.wrong_bytes() == 0
            await step(a)
            await step(b)
            await step(a)
            assert await step(b) == first
            assert [comm.health().epoch for comm in cluster.comms] == [101, 101]
            assert [rows.pointers() for rows in cluster.rows] == pointers
            assert all(comm.health().quarantined_bytes == 0 for comm in cluster.comms)

    run(main())
    assert not fabric.violations
    assert fabric.open_handles == 0


def _full(rows: object, placement: Placement) -> list[tuple[object, np.ndarray]]:
    """Each tensor of a rank with the slots that are not empty; those may hold anything."""
    local = placement.local(rows.rank)  # type: ignore[attr-defined]
    return [(t, np.flatnonzero(local[i] >= 0)) for i, layer in enumerate(rows.layers) for t in layer]  # type: ignore


@pytest.mark.parametrize("loop", ["virtual", "asyncio", "uvloop"])
def test_garbage_collection_in_the_middle_of_a_migration(loop: str) -> None:
    """A collection at each of eight steps: no task, poller or timer of ours is lost."""
    import uvloop

    a, b = random_placements(7, 2)
    fabric = MemoryFabric(latency=0.001, needs_target_progress=True)

    async def main() -> None:
        async with LocalCluster(a, fabric=fabric, settings=Settings(secret=b"s" * 16, staging_layers=1)) as cluster:
            for target in (b, a):
                running = asyncio.ensure_future(cluster.migrate(target, timeout=20.0))
                collections = 0
                while not running.done():
                    if collections < 8:
                        gc.collect()
                    collections += 1
                    await asyncio.sleep(0.0005)
                assert collections > 3
                for report in running.result():
                    assert isinstance(report, MigrationReport), report
                assert cluster.wrong_bytes() == 0

    if loop == "virtual":
        run(main())
    else:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop if loop == "uvloop" else None) as runner:
            runner.run(main())
    assert not fabric.violations
