"""Replacing the agent: nobody takes it for a death, and ranks may do it at once."""

from __future__ import annotations

import asyncio

import pytest

from eplb_async.core.placement import Placement
from eplb_async.errors import NixlTransferFailed
from eplb_async.settings import Settings
from eplb_async.testing import FaultPlan, MemoryFabric, run
from eplb_async.testing.cluster import LocalCluster
from tests.communicator.groups import all_report

OLD = Placement([[0, 1, 2, 3, 4, 5]] * 2, ep_size=3)
NEW = Placement([[2, 3, 4, 5, 0, 1]] * 2, ep_size=3)


@pytest.mark.parametrize("ranks", [(0,), (2,), (0, 1), (1, 2), (0, 1, 2)])
def test_any_ranks_may_recycle_at_once(ranks: tuple[int, ...]) -> None:
    """READs that never end on some ranks: all of those recycle for the next migration, which works for all."""
    plan = FaultPlan()
    for rank in ranks:
        plan.hold_read(f"default/{rank}.10000", nth=None)
    fabric = MemoryFabric(plan, latency=0.002)

    async def main() -> None:
        settings = Settings(secret=b"s" * 16, staging_layers=1)
        async with LocalCluster(OLD, fabric=fabric, settings=settings) as cluster:
            failed = await cluster.migrate(NEW, timeout=1.0)
            assert any(isinstance(result, NixlTransferFailed) for result in failed)
            for target in (NEW, OLD):
                reports = await cluster.migrate(target, timeout=20.0)
                all_report(reports)
                assert cluster.wrong_bytes() == 0
            healths = [comm.health() for comm in cluster.comms]
            assert [health.recycled for health in healths] == [int(rank in ranks) for rank in range(3)]
            assert all(health.members == (0, 1, 2) for health in healths)
            assert not any(health.degraded for health in healths)

    run(main())
    assert not fabric.violations


@pytest.mark.parametrize("turns", [0, 1, 2, 4, 8, 16, 64, 256])
def test_a_cancel_during_recycling_does_not_leave_two_agents(turns: int) -> None:
    """Cancelled while the agent is being replaced: that goes on, and the next migration finds one agent."""
    fabric = MemoryFabric(FaultPlan().hold_read("default/0.10000", nth=None), latency=0.002)

    async def main() -> None:
        settings = Settings(secret=b"s" * 16, staging_layers=1)
        async with LocalCluster(OLD, fabric=fabric, settings=settings) as cluster:
            await cluster.migrate(NEW, timeout=1.0)
            session = cluster.comms[0]._session
            task = asyncio.ensure_future(cluster.comms[0].migrate(NEW, timeout=20.0))
            while session._agents.retiring is None and not task.done():
                await asyncio.sleep(0)
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            reports = await cluster.migrate(NEW, timeout=20.0)
            all_report(reports)
            assert session._agents.retiring is None
            assert cluster.comms[0].health().recycled == 1
            assert cluster.wrong_bytes() == 0

    run(main())
    assert not fabric.violations
    assert fabric.open_handles == 0


def test_a_peer_that_recycled_is_forgotten_when_reads_from_its_old_agent_have_ended() -> None:
    """Both quarantine a READ from the other, one recycles: the other forgets its old agent, but not before."""
    fabric = MemoryFabric(FaultPlan().hold_read("default/", nth=None), latency=0.002)
    old, new = Placement([[0, 1, 2, 3]], ep_size=2), Placement([[2, 1, 0, 3]], ep_size=2)

    async def main() -> None:
        async with LocalCluster(old, fabric=fabric, settings=Settings(secret=b"s" * 16)) as cluster:
            await cluster.migrate(new, timeout=1.0)
            reader, source = (comm._session for comm in cluster.comms)
            assert reader.endpoint.transfers
            await source._agents.recycle("for the test")
            await asyncio.sleep(1.0)
            assert not reader.endpoint.transfers
            assert len(reader.endpoint.peers) == 1
            fabric.faults = FaultPlan()
            reports = await cluster.migrate(new, timeout=20.0)
            all_report(reports)

    run(main())
    assert not fabric.violations
