"""One clear line when a phase outlives a fraction of its deadline; health that says what an engineer asks."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from dataclasses import fields

import pytest

from eplb_async.communicator import AsyncEplbCommunicator, Health
from eplb_async.communicator.chatter import Chatter
from eplb_async.core import messages
from eplb_async.errors import EplbError
from eplb_async.settings import Settings
from eplb_async.testing import FaultPlan, MemoryFabric, VirtualClockLoop, run
from eplb_async.testing.cluster import LocalCluster
from tests.communicator.groups import NEW, OLD, THREE, THREE_NEW, all_report, eventually

SETTINGS = Settings(secret=b"s" * 16, settle_timeout=4.0, max_stretch_bytes=0)


@pytest.fixture
def barks(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, "eplb_async.watchdog")
    return caplog


def lines(barks: pytest.LogCaptureFixture, rank: int | None = None) -> list[str]:
    said = [r.getMessage() for r in barks.records if r.name == "eplb_async.watchdog"]
    return [line for line in said if rank is None or line.startswith(f"rank {rank}:")]


def test_fast_migrations_and_idling_say_nothing_and_leave_no_timer(barks: pytest.LogCaptureFixture) -> None:
    """Twenty migrations, then an hour of nothing: no line, and no timer of the watchdog."""

    async def main() -> None:
        async with LocalCluster(OLD, settings=SETTINGS) as cluster:
            for i in range(20):
                reports = await cluster.migrate((NEW, OLD)[i % 2])
                all_report(reports)
            await asyncio.sleep(3600)
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualClockLoop)
            pending = [handle for handle in loop._scheduled if not handle.cancelled()]  # type: ignore[attr-defined]
            assert not [handle for handle in pending if "Watchdog" in repr(handle)]

    run(main())
    assert lines(barks) == []


def test_joined_names_who_is_waited_for(barks: pytest.LogCaptureFixture) -> None:
    """Rank 1 never migrates: one line at half of the deadline, with whom to look at and what to do."""

    async def main() -> None:
        async with LocalCluster(OLD, settings=SETTINGS) as cluster:
            running = asyncio.ensure_future(cluster.migrate(NEW, ranks=[0], timeout=10.0))
            await asyncio.sleep(4.9)
            assert lines(barks) == []
            await asyncio.sleep(0.2)
            assert len(lines(barks)) == 1
            await running

    run(main())
    (line,) = lines(barks)
    assert line.startswith("rank 0: joined for 5.0 s (5.0 s left); term 0 of ranks 0, 1, epoch 0; ")
    assert "waiting for ranks 1." in line
    assert "Next: see whether those ranks live and have called migrate()" in line
    assert line.isprintable()


def test_open_names_the_oldest_read(barks: pytest.LogCaptureFixture) -> None:
    """A READ that does not end: rank, agent, bytes, layer and age, once on each rank; not again at the deadline."""
    fabric = MemoryFabric(FaultPlan().hold_read("default/0.", nth=1))

    async def main() -> None:
        async with LocalCluster(OLD, fabric=fabric, settings=SETTINGS) as cluster:
            running = asyncio.ensure_future(cluster.migrate(NEW, timeout=20.0))
            await asyncio.sleep(15.0)
            health = cluster.comms[0].health()
            assert (health.phase, health.oldest_read_rank, health.oldest_read_layer, health.layer) == ("open", 1, 1, 1)
            assert health.oldest_read_bytes > 0
            assert health.seconds_in_phase == pytest.approx(15.0, abs=0.1)
            assert health.seconds_left == pytest.approx(5.0, abs=0.1)
            for result in await running:
                assert isinstance(result, EplbError)
            await asyncio.sleep(1.0)

    run(main())
    (reader,), (source,) = lines(barks, 0), lines(barks, 1)
    assert "rank 0: open for 10.0 s (10.0 s left)" in reader
    assert "layer 1 of 3" in reader
    assert "bytes from rank 1 (default/1." in reader
    assert "for layer 1, 10.0 s old" in reader
    assert "exclude(rank)" in reader
    assert "waiting for ranks 0" in source


def test_doubt_and_a_stuck_view_are_told_again_at_doubling(barks: pytest.LogCaptureFixture) -> None:
    """In doubt lasts until somebody decides: lines at 2, about 4, 8, 16 and 32 seconds, then exclude() ends it."""

    async def main() -> None:
        async with LocalCluster(OLD, settings=SETTINGS, faults=FaultPlan().hold_read("default/0.", nth=1)) as cluster:
            running = asyncio.ensure_future(cluster.migrate(NEW, timeout=10.0))
            while cluster.comms[1].health().prepared < 3:
                await asyncio.sleep(0.01)
            cluster.kill(0)
            comm = cluster.comms[1]
            while comm.health().phase != "in_doubt":
                await asyncio.sleep(0.01)
            barks.clear()
            await asyncio.sleep(40.0)
            said = lines(barks, 1)
            assert len(said) == 5, said
            assert all("in_doubt" in line and "exclude(rank)" in line for line in said)
            assert "degraded: rank 0 (disconnected)" in said[0]
            await comm.exclude(0)
            assert comm.health().phase == "idle"
            barks.clear()
            await asyncio.sleep(1000)
            assert lines(barks, 1) == []
            await running

    run(main())


def test_a_view_that_does_not_come_about_is_told(barks: pytest.LogCaptureFixture) -> None:
    """Nobody migrates, one rank is dead and one stopped: the view waits for the stopped one, and says so."""

    async def main() -> None:
        settings = Settings(secret=b"s" * 16, settle_timeout=4.0, majority_rule=False)
        async with LocalCluster(THREE, settings=settings) as cluster:
            cluster.stop(1)
            await cluster.comms[0].exclude(2)
            assert cluster.comms[0].health().phase == "view_change"
            assert cluster.comms[0].health().waiting_for == (1,)
            await asyncio.sleep(3.0)
            assert len(lines(barks, 0)) == 1
            cluster.resume(1)
            await asyncio.sleep(2.0)
            assert cluster.comms[0].health().members == (0, 1)

    run(main())
    assert "rank 0: view_change for 2.0 s" in lines(barks, 0)[0]
    assert "waiting for ranks 1" in lines(barks, 0)[0]


def test_closing_is_told_when_it_lasts(barks: pytest.LogCaptureFixture) -> None:
    """``aclose`` that waits for a stopped rank: one line, and none after it has ended."""

    async def main() -> None:
        async with LocalCluster(OLD, settings=SETTINGS) as cluster:
            cluster.stop(1)
            await cluster.comms[0].aclose(timeout=6.0)
            assert cluster.comms[0].health().phase == "closed"
            await asyncio.sleep(100)
            assert len(lines(barks, 0)) == 1
            cluster.resume(1)

    run(main())
    assert lines(barks, 0)[0].startswith("rank 0: closing for 3.0 s (3.0 s left)")


def test_zero_switches_it_off(barks: pytest.LogCaptureFixture) -> None:
    """``watchdog_fraction=0``: never a line."""

    async def main() -> None:
        async with LocalCluster(OLD, settings=Settings(secret=b"s" * 16, watchdog_fraction=0)) as cluster:
            await cluster.migrate(NEW, ranks=[0], timeout=10.0)

    run(main())
    assert lines(barks) == []


def test_pings_to_a_silent_rank_become_rare_and_answers_to_an_eager_one_too() -> None:
    """N-42: what piles up at a stopped peer is bounded in its rate; the first word from it makes it as before."""
    chatter = Chatter(0.25)
    ping, pong, leave = messages.Ping(), messages.Pong(), messages.Leave()
    sent = [chatter.is_due(1, ping, 0.25 * i) for i in range(14_400)]  # an hour
    assert all(sent[:64])
    assert sum(sent) == 64 + 14_400 // 64 - 1
    assert all(chatter.is_due(1, leave, 0.0) for _ in range(1000)), "everything else always goes"
    chatter.heard(1)
    assert chatter.is_due(1, ping, 0.0)
    assert [chatter.is_due(2, pong, 0.01 * i) for i in range(8)] == [True, False, False, False, True] + [False] * 3


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_health_never_raises_while_everything_changes(loop: str) -> None:
    """Two threads ask without pause while ranks open, migrate, abort, lose a member, view, recycle and close."""
    import uvloop

    fabric = MemoryFabric(clock=time.monotonic, latency=0.0002)
    seen: set[str] = set()
    errors: list[BaseException] = []
    stop = threading.Event()

    def hammer(comms: list[AsyncEplbCommunicator]) -> None:
        while not stop.is_set():
            for comm in comms:
                try:
                    health = comm.health()
                    seen.add(health.phase)
                    assert str(health).isprintable()
                    assert comm.placement.num_layers == 3
                except BaseException as error:
                    errors.append(error)
                    return

    async def main() -> None:
        settings = Settings(secret=b"s" * 16, settle_timeout=1.0, ping_interval=0.02)
        async with LocalCluster(THREE, fabric=fabric, settings=settings) as cluster:
            threads = [threading.Thread(target=hammer, args=(cluster.comms,)) for _ in range(2)]
            for thread in threads:
                thread.start()
            try:
                for i in range(12):
                    await cluster.migrate((THREE_NEW, THREE)[i % 2], timeout=20.0)
                    if i % 10 == 5:
                        await cluster.migrate(THREE, ranks=[i // 10], timeout=0.05)
                    if i % 10 == 7:
                        await cluster.comms[1].rebind()
                await cluster.migrate(THREE, timeout=20.0)
                running = asyncio.ensure_future(cluster.migrate(THREE_NEW, timeout=5.0))
                await asyncio.sleep(0.001)
                cluster.kill(2)
                await asyncio.wait([running])
                await asyncio.gather(*(comm.aclose(2.0) for comm in cluster.comms[:2]))
                await eventually(lambda: bool(errors) or "closed" in seen)  # the threads may get their turn late
            finally:
                stop.set()
                for thread in threads:
                    thread.join(30)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop if loop == "uvloop" else None) as runner:
            runner.run(main())
    finally:
        sys.setswitchinterval(before)
    assert not errors, errors
    assert {"idle", "joined", "open", "closed"} <= seen, seen


def test_health_says_all_that_is_asked() -> None:
    """The fields that the engineer on call is promised, and one line of them that is short enough to read."""
    names = {field.name for field in fields(Health)}
    assert {
        "phase",
        "epoch",
        "layer",
        "oldest_read_seconds",
        "oldest_read_peer",
        "oldest_read_rank",
        "quarantined_bytes",
        "degraded",
        "last_error",
        "waiting_for",
        "seconds_in_phase",
        "seconds_left",
    } <= names

    async def main() -> None:
        async with LocalCluster(OLD) as cluster:
            line = str(cluster.comms[0].health())
            assert line.startswith("rank 0: idle for ")
            assert len(line) < 200

    run(main())
