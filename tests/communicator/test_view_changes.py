"""A migration that finds the view changed: it goes on in the new one where that is possible, and says so where not."""

from __future__ import annotations

import asyncio

import pytest

from eplb_async.core.placement import Placement
from eplb_async.errors import MigrationAborted, PlacementError
from eplb_async.testing import run
from eplb_async.testing.cluster import LocalCluster
from tests.communicator.groups import all_report

OLD = Placement([[0, 1, 3, 2, 3, 0, 2, 0, 1]] * 3, ep_size=3)
NEW = Placement([[2, 3, 0, 1, 0, 2, 0, 1, 3]] * 3, ep_size=3)
WITHOUT_2 = Placement([[2, 3, 0, 1, 0, 2, -1, -1, -1]] * 3, ep_size=3)
WITHOUT_0 = Placement([[-1, -1, -1, 1, 0, 2, 0, 1, 3]] * 3, ep_size=3)


@pytest.mark.parametrize(("dead", "target"), [(2, WITHOUT_2), (0, WITHOUT_0)])
@pytest.mark.parametrize("known", [False, True])
def test_a_migration_without_a_rank_is_what_finds_its_death(dead: int, target: Placement, known: bool) -> None:
    """Nobody has noticed yet, or one rank has: the first migration without the dead rank succeeds (I-9)."""

    async def main() -> None:
        async with LocalCluster(OLD) as cluster:
            others = [rank for rank in range(3) if rank != dead]
            cluster.kill(dead)
            if known:
                await cluster.comms[others[1]].exclude(dead)
            reports = await cluster.migrate(target, ranks=others)
            all_report(reports)
            assert [cluster.comms[rank].placement for rank in others] == [target] * 2
            assert cluster.wrong_bytes(others) == 0
            assert [cluster.comms[rank].health().members for rank in others] == [tuple(others)] * 2

    run(main())


def test_a_placement_that_needs_a_dead_rank_ends_and_says_why() -> None:
    """It cannot go on in the new view: MigrationAborted, and what does not fit any more is its cause."""

    async def main() -> None:
        async with LocalCluster(OLD) as cluster:
            cluster.kill(2)
            for error in await cluster.migrate(NEW, ranks=(0, 1)):
                assert type(error) is MigrationAborted
                assert "the view changed" in str(error)
                assert isinstance(error.__cause__, PlacementError)
                assert "ranks that are not members (members are ranks 0, 1): rank 2" in str(error.__cause__)
            reports = await cluster.migrate(WITHOUT_2, ranks=(0, 1))
            all_report(reports)

    run(main())


def test_a_rank_that_closes_while_the_others_join_is_gone_on_without() -> None:
    """The view changes under a migration that nobody has begun: it is made again in the new one."""

    async def main() -> None:
        async with LocalCluster(OLD) as cluster:
            migrating = asyncio.ensure_future(cluster.migrate(WITHOUT_2, ranks=(0, 1)))
            while cluster.comms[0].health().phase != "joined":
                await asyncio.sleep(0.001)
            await cluster.comms[2].aclose()
            reports = await migrating
            all_report(reports)
            assert cluster.wrong_bytes((0, 1)) == 0

    run(main())


def test_the_deadline_is_that_of_the_call_not_of_each_try() -> None:
    """A rank that does not come along after the view changed is waited for until the caller's deadline only."""

    async def main() -> None:
        async with LocalCluster(OLD) as cluster:
            loop = asyncio.get_running_loop()
            cluster.kill(2)
            started = loop.time()
            (error,) = await cluster.migrate(WITHOUT_2, ranks=(0,), timeout=5.0)
            assert isinstance(error, TimeoutError)
            assert loop.time() - started == pytest.approx(5.0, abs=0.1)

    run(main())


def test_without_a_majority_the_error_says_so_each_time() -> None:
    """I-11: the survivor of two is told to exclude the dead one, also by a migration that begins after the death."""

    async def main() -> None:
        old, new = Placement([[0, 1]] * 3, ep_size=2), Placement([[1, 0]] * 3, ep_size=2)
        async with LocalCluster(old) as cluster:
            cluster.kill(1)
            for _ in range(3):
                (error,) = await cluster.migrate(new, ranks=(0,), timeout=5.0)
                assert isinstance(error, MigrationAborted)
                assert "exclude(" in str(error), error

    run(main())


def test_a_majority_that_is_lost_within_a_view_change_is_said_too() -> None:
    """I-11: the second rank is lost while a view without the first is being made, as where a link is cut."""

    async def main() -> None:
        old, new = Placement([[0, 1, 2]] * 3, ep_size=3), Placement([[1, 2, 0]] * 3, ep_size=3)
        async with LocalCluster(old) as cluster:
            cluster.stop(2)
            cluster.kill(1)
            (error,) = await cluster.migrate(new, ranks=(0,), timeout=5.0)
            assert isinstance(error, MigrationAborted)
            cluster.kill(2)
            for _ in range(2):
                (error,) = await cluster.migrate(new, ranks=(0,), timeout=5.0)
                assert isinstance(error, MigrationAborted)
                assert "without ranks [1, 2] there is no majority" in str(error), error

    run(main())
