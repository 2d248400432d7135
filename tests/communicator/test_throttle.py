"""Pause and limit: this rank's READs wait as its owner says; nothing else does, and every end gets through."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import pytest

from eplb_async.communicator import MigrationReport
from eplb_async.core.placement import Placement
from eplb_async.core.throttle import Throttle
from eplb_async.errors import (
    CommunicatorClosed,
    MigrationAborted,
    MigrationError,
    MigrationTimeout,
)
from eplb_async.settings import Settings
from eplb_async.testing import FaultPlan, MemoryFabric, run
from eplb_async.testing.cluster import LocalCluster
from tests.communicator.groups import NEW, OLD, all_report, posts

TWICE = Placement([[0, 1, 1, 2, 2, 0]] * 2, ep_size=3)
TURNED = Placement([[2, 1, 0, 2, 1, 0]] * 2, ep_size=3)
ROW = 1 << 16


def settings(**more: Any) -> Settings:
    return Settings(secret=b"s" * 16, hot_seconds=0, **more)  # laps without a pause only cost time here


def test_a_paused_rank_posts_no_read_until_it_resumes() -> None:
    """Called between migrations: the next one waits at its first READ; peers go on reading."""

    async def main() -> None:
        async with LocalCluster(OLD, settings=settings()) as cluster:
            comm = cluster.comms[0]
            comm.pause()
            comm.pause()
            running = asyncio.ensure_future(cluster.migrate(NEW))
            await asyncio.sleep(5.0)
            assert posts(cluster.fabric, 0) == 0
            assert posts(cluster.fabric, 1) > 0
            health = comm.health()
            assert (health.phase, health.paused, cluster.comms[1].health().paused) == ("open", True, False)
            assert "paused: posts no READ until resume()" in str(health)
            assert not running.done()
            await comm.resume()
            all_report(await running)
            assert not comm.health().paused
            assert cluster.wrong_bytes() == 0
            all_report(await cluster.migrate(OLD))

    run(main())


def test_reads_in_flight_end_and_local_copies_go_on_while_paused() -> None:
    """Paused in mid-migration: what was posted completes; not one more is posted, however long it lasts."""

    async def main() -> None:
        one_at_a_time = settings(max_requests_in_flight=1)
        many = Placement([[0, 1, 2, 3, 4, 5, 6, 7]] * 3, ep_size=4)
        turned = Placement([[2, 4, 6, 0, 1, 7, 3, 5]] * 3, ep_size=4)
        fabric = MemoryFabric(latency=0.01)
        async with LocalCluster(many, fabric=fabric, settings=one_at_a_time) as cluster:
            comm = cluster.comms[0]
            running = asyncio.ensure_future(cluster.migrate(turned))
            while posts(fabric, 0) < 2:
                await asyncio.sleep(0.001)
            comm.pause()
            before = posts(fabric, 0)
            await asyncio.sleep(5.0)
            assert comm.health().reads_in_flight == 0
            assert posts(fabric, 0) == before
            await comm.resume()
            all_report(await running)
            assert cluster.wrong_bytes() == 0

    run(main())


def test_a_pause_that_outlasts_the_deadline_ends_the_migration_and_says_so() -> None:
    """Both ranks fail, the paused one with what to do; nothing has changed, and after resume it works."""

    async def main() -> None:
        async with LocalCluster(OLD, settings=settings()) as cluster:
            cluster.comms[0].pause()
            ours, theirs = await cluster.migrate(NEW, timeout=2.0)
            assert isinstance(ours, MigrationTimeout | MigrationAborted)
            assert "this rank is paused and posts no READ: await resume()" in str(ours)
            assert isinstance(theirs, MigrationTimeout | MigrationAborted)
            assert cluster.comms[0].placement == cluster.comms[1].placement == OLD
            assert cluster.wrong_bytes() == 0
            await cluster.comms[0].resume()
            all_report(await cluster.migrate(NEW))
            assert cluster.wrong_bytes() == 0

    run(main())


@pytest.mark.parametrize("late", [0, 1])
def test_whoever_is_late_first_the_paused_rank_is_told_of_its_pause(late: int) -> None:
    """Also where another rank's deadline ends the epoch."""

    async def main() -> None:
        async with LocalCluster(OLD, settings=settings()) as cluster:
            cluster.comms[0].pause()
            limits = [3.0, 3.0]
            limits[late] = 1.0
            calls = [comm.migrate(NEW, timeout=limit) for comm, limit in zip(cluster.comms, limits, strict=True)]
            ours, theirs = await asyncio.gather(*calls, return_exceptions=True)
            assert isinstance(ours, MigrationError)
            assert str(ours).count("this rank is paused and posts no READ") == 1
            assert isinstance(theirs, MigrationError)
            assert ("paused" in str(theirs)) == (late == 0)

    run(main())


def test_the_watchdog_says_paused(caplog: pytest.LogCaptureFixture) -> None:
    """One line at half of the deadline: what to do on this rank, and whom the other waits for."""
    caplog.set_level(logging.WARNING, "eplb_async.watchdog")

    async def main() -> None:
        async with LocalCluster(OLD, settings=settings()) as cluster:
            cluster.comms[0].pause()
            running = asyncio.ensure_future(cluster.migrate(NEW, timeout=10.0))
            await asyncio.sleep(6.0)
            await cluster.comms[0].resume()
            all_report(await running)

    run(main())
    ours, theirs = sorted(r.getMessage() for r in caplog.records if r.name == "eplb_async.watchdog")
    assert "paused: posts no READ until resume()" in ours
    assert "Next: await resume() on this rank: it is paused" in ours
    assert "waiting for ranks 0" in theirs


@pytest.mark.parametrize("limited", [False, True])
def test_cancel_gets_through_while_reads_wait(limited: bool) -> None:
    """Paused, or waiting for the limit: the call ends in one turn, the epoch on all ranks, and the next one works."""

    async def main() -> None:
        async with LocalCluster(OLD, row_bytes=(ROW,), settings=settings(max_post_bytes=ROW)) as cluster:
            comm = cluster.comms[0]
            comm.limit(ROW // 100) if limited else comm.pause()
            calls = [asyncio.ensure_future(each.migrate(NEW)) for each in cluster.comms]
            await asyncio.sleep(1.0)
            calls[0].cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert calls[0].cancelled()
            with pytest.raises(MigrationAborted):
                await asyncio.wait_for(calls[1], 1.0)
            comm.limit(0)
            await comm.resume()
            all_report(await cluster.migrate(NEW))
            assert cluster.wrong_bytes() == 0
        assert not cluster.fabric.violations

    run(main())


@pytest.mark.parametrize("limited", [False, True])
def test_closing_gets_through_while_reads_wait(limited: bool) -> None:
    """aclose() ends the migration of all and leaves at once."""

    async def main() -> None:
        async with LocalCluster(OLD, row_bytes=(ROW,), settings=settings(max_post_bytes=ROW)) as cluster:
            comm = cluster.comms[0]
            comm.limit(ROW // 100) if limited else comm.pause()
            running = asyncio.ensure_future(cluster.migrate(NEW))
            await asyncio.sleep(1.0)
            assert await asyncio.wait_for(comm.aclose(), 2.0) == ()
            assert not all(isinstance(result, MigrationReport) for result in await running)
            for call in (comm.pause, lambda: comm.limit(0)):
                with pytest.raises(CommunicatorClosed):
                    call()
            with pytest.raises(CommunicatorClosed):
                await comm.resume()
        assert not cluster.fabric.violations

    run(main())


@pytest.mark.parametrize("dead", [1, 2])
def test_a_rank_is_excluded_or_dies_while_another_is_paused(dead: int) -> None:
    """The view changes, the epoch ends; the pause lasts into the next one, and ends when it is told to."""
    without = {1: [[2, 1, -1, -1, 0, 1]] * 2, 2: [[2, 1, 0, 1, -1, -1]] * 2}

    async def main() -> None:
        async with LocalCluster(TWICE, settings=settings(settle_timeout=1.0)) as cluster:
            comm = cluster.comms[0]
            comm.pause()
            running = asyncio.ensure_future(cluster.migrate(TURNED, timeout=3.0))
            await asyncio.sleep(1.0)
            cluster.kill(dead)
            if dead == 1:
                await comm.exclude(1)
            left = 3 - dead
            members = tuple(sorted({0, left}))
            async with asyncio.timeout(3.0):
                while cluster.comms[left].health().members != members:
                    await asyncio.sleep(0.01)
            results = await running
            assert isinstance(results[0], MigrationAborted), results
            assert comm.health().paused
            target = Placement(without[dead], ep_size=3)
            again = asyncio.ensure_future(cluster.migrate(target, ranks=[0, left]))
            await asyncio.sleep(1.0)
            assert not again.done()
            await comm.resume()
            all_report(await again)
            assert cluster.wrong_bytes(members) == 0

    run(main())


def test_resume_ends_a_pause_and_a_suspension() -> None:
    """Paused, then suspended: one resume ends both; paused only, it neither waits nor registers anything anew."""

    async def main() -> None:
        async with LocalCluster(OLD, settings=settings()) as cluster:
            comm = cluster.comms[0]
            comm.pause()
            await comm.resume()
            assert comm.health().recycled == 0
            comm.pause()
            await comm.suspend()
            health = comm.health()
            assert (health.phase, health.paused) == ("suspended", True)
            comm.pause()
            await comm.resume()
            health = comm.health()
            assert (health.phase, health.paused) == ("idle", False)
            all_report(await cluster.migrate(NEW))
            assert cluster.wrong_bytes() == 0

    run(main())


def test_a_read_that_is_made_again_waits_for_resume_too() -> None:
    """A READ fails after the pause began: its experts are READ from elsewhere, but not before resume."""
    old, new = Placement([[0, 1, 0, 2, 3, 1]], ep_size=3), Placement([[0, 1, 0, 2, 3, 0]], ep_size=3)
    faults = FaultPlan().fail_read("default/2.", nth=0, phase="poll")

    async def main() -> None:
        async with LocalCluster(old, fabric=MemoryFabric(faults, latency=0.5), settings=settings()) as cluster:
            comm = cluster.comms[2]
            running = asyncio.ensure_future(cluster.migrate(new))
            while not posts(cluster.fabric, 2):
                await asyncio.sleep(0.01)
            comm.pause()
            await asyncio.sleep(5.0)
            assert posts(cluster.fabric, 2) == 1
            await comm.resume()
            results = await running
            all_report(results)
            assert results[2].retries == 1
            assert cluster.wrong_bytes() == 0

    run(main())


# ------------------------------------------------------------------------------------------------- limit
@pytest.mark.parametrize("rate", [ROW * 3, ROW * 60])
def test_a_limit_is_kept_within_a_tenth(rate: int) -> None:
    """Above and far below 20 whole posts a second: what a second brings is what was set."""
    old = Placement([list(range(8))] * 60, ep_size=2)
    new = Placement([[4, 5, 6, 7, 0, 1, 2, 3]] * 60, ep_size=2)
    limited = settings(max_bytes_per_second=rate, max_post_bytes=ROW, max_pause=0.02, verify="off")

    async def main() -> list[int]:
        brought: list[int] = []
        async with LocalCluster(old, row_bytes=(ROW,), settings=limited) as cluster:
            running = asyncio.ensure_future(cluster.migrate(new, timeout=1000.0))
            while not posts(cluster.fabric, 0):
                await asyncio.sleep(0)
            for _ in range(3):
                seen = 0 if not brought else len(cluster.fabric.log)
                await asyncio.sleep(1.0)
                sent = cluster.fabric.log[seen:]
                brought.append(sum(size for reader, _, size in sent if reader.startswith("default/0.")))
            assert cluster.comms[0].health().max_bytes_per_second == rate
            running.cancel()
            await asyncio.wait([running])
        return brought

    assert [0.9 <= nbytes / rate <= 1.1 for nbytes in run(main())] == [True] * 3


def test_the_limit_can_be_changed_while_a_migration_waits_for_it() -> None:
    """Hours at the first limit; lifted, it is over at once. Local copies do not count."""

    async def main() -> None:
        slow = settings(max_bytes_per_second=10)
        async with LocalCluster(OLD, row_bytes=(ROW,), settings=slow) as cluster:
            running = asyncio.ensure_future(cluster.migrate(NEW))
            await asyncio.sleep(10.0)
            assert "limited to 10 bytes a second" in str(cluster.comms[0].health())
            started = asyncio.get_running_loop().time()
            for comm in cluster.comms:
                comm.limit(0)
            all_report(await running)
            assert asyncio.get_running_loop().time() - started < 1.0
            assert cluster.wrong_bytes() == 0
            cluster.comms[0].limit(1000)
            all_report(await cluster.migrate(cluster.comms[0].placement))  # nothing to READ

    run(main())


def test_a_limit_that_a_deadline_cannot_bear_is_named() -> None:
    """The error says which setting holds the READs back."""

    async def main() -> None:
        slow = settings(max_bytes_per_second=10)
        async with LocalCluster(OLD, row_bytes=(ROW,), settings=slow) as cluster:
            for result in await cluster.migrate(NEW, timeout=2.0):
                assert isinstance(result, MigrationTimeout | MigrationAborted)
                assert "at most 10 bytes a second (max_bytes_per_second, limit()): raise that" in str(result)

    run(main())


@pytest.mark.parametrize("wrong", [-1, 1.5, True, None, 1 << 41])
def test_a_limit_that_is_none_is_refused(wrong: Any) -> None:
    """Named, with the range; nothing has changed."""

    async def main() -> None:
        async with LocalCluster(OLD, settings=settings()) as cluster:
            with pytest.raises(ValueError, match=r"max_bytes_per_second=.* is not a whole number from 0 to"):
                cluster.comms[0].limit(wrong)
            assert cluster.comms[0].health().max_bytes_per_second == 0

    run(main())


def test_pause_and_limit_are_bound_to_the_loop_that_opened() -> None:
    """Another thread gets the same clear error as from every other method."""

    async def main() -> None:
        async with LocalCluster(OLD, settings=settings()) as cluster:
            comm = cluster.comms[0]
            caught: list[BaseException] = []

            def elsewhere() -> None:
                for call in (comm.pause, lambda: comm.limit(5)):
                    try:
                        call()
                    except RuntimeError as error:
                        caught.append(error)

            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            assert ["event loop" in str(error) for error in caught] == [True, True]
            assert not comm.health().paused

    run(main())


def test_lateness_is_made_good_and_bursts_are_one_post() -> None:
    """Posts that go 5 ms late every time keep the rate; after an hour of quiet two posts never go together."""
    throttle, now, sent = Throttle(1000), 0.0, 0
    while now < 10.0:
        assert throttle.delay(now) == 0
        throttle.spend(20, now)
        sent += 20
        now += throttle.delay(now) + 0.005
    assert 0.99 * 10_000 <= sent <= 1.01 * 10_000
    now += 3600.0
    throttle.spend(100, now)
    assert throttle.delay(now) == pytest.approx(0.08)
    throttle.limit(0, now)
    assert throttle.delay(now) == 0
    throttle.paused = True
    assert throttle.delay(now) == float("inf")
