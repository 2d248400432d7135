"""One control message is lost, wherever: ranks end equal, and the next migrations work."""

from __future__ import annotations

import asyncio

import pytest

from eplb_async.communicator import MigrationReport
from eplb_async.settings import Settings
from eplb_async.testing import FaultPlan, run
from eplb_async.testing.cluster import LocalCluster
from tests.communicator.groups import NEW, OLD

SETTINGS = Settings(secret=b"s" * 16, settle_timeout=2.0)


@pytest.mark.parametrize("sender", [0, 1])
@pytest.mark.parametrize("nth", range(1, 12))
def test_one_lost_message_costs_one_migration_at_most(sender: int, nth: int) -> None:
    """JOIN, BEGIN, PREPARED, COMMIT, END: any one of them; no rank is left in doubt for good (I-9)."""
    faults = FaultPlan().drop_notif(f"default/{sender}.", nth=nth)

    async def main() -> None:
        async with LocalCluster(OLD, faults=faults, settings=SETTINGS) as cluster:
            failed = []
            for placement in (NEW, OLD, NEW, OLD):
                reports = await cluster.migrate(placement, timeout=3.0)
                failed += [reports] * any(not isinstance(report, MigrationReport) for report in reports)
                await asyncio.sleep(5.0)
                assert [comm.health().phase for comm in cluster.comms] == ["idle", "idle"]
                assert len({comm.placement for comm in cluster.comms}) == 1
                assert cluster.wrong_bytes() == 0
            assert len(failed) <= 1, failed

    run(main())
