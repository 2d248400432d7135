"""Members are greeted also while nothing happens: a death is noticed, silence is named, and it costs little."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from eplb_async.bench.simulation.control import START, Sink, coordinator
from eplb_async.core import messages
from eplb_async.core.placement import Placement
from eplb_async.core.wire import KEY_SIZE, Codec, kind_of
from eplb_async.errors import CommunicatorClosed
from eplb_async.settings import Settings
from eplb_async.testing import MemoryFabric, run
from eplb_async.testing.cluster import LocalCluster
from tests.communicator.groups import all_report

OLD = Placement([[0, 1, 2, 3, 4, 5]] * 2, ep_size=3)
NEW = Placement([[2, 3, 4, 5, 0, 1]] * 2, ep_size=3)
SECRET = b"the cluster's secret"


class Counting(MemoryFabric):
    """A fabric that counts notifications by sender and kind."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[tuple[str, str]] = Counter()

    def begin_message(self, sender: str, receiver: str, message: bytes) -> float:
        self.sent[sender, kind_of(message)] += 1
        return super().begin_message(sender, receiver, message)


async def until(condition: Callable[[], bool], seconds: float) -> float:
    """Wait for it; returns how long that took."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)
    return loop.time() - began


def watch(cluster: LocalCluster, seconds: float) -> None:
    for comm in cluster.comms:
        comm.watch(seconds)


def degraded(cluster: LocalCluster, rank: int) -> dict[int, str]:
    return dict(cluster.comms[rank].health().degraded)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_death_while_idle_is_noticed_within_the_interval(victim: int) -> None:
    """Rank 0 coordinates: it may be it, too. Without the watch nobody notices."""

    async def main() -> None:
        async with LocalCluster(OLD) as cluster:
            left = [rank for rank in range(3) if rank != victim]
            cluster.comms[victim].watch(0)
            await asyncio.sleep(100.0)
            for rank in left:
                cluster.comms[rank].watch(5.0)
            await asyncio.sleep(32.0)
            cluster.kill(victim)
            took = await until(lambda: all(cluster.comms[r].view.members == tuple(left) for r in left), 60.0)
            assert took < 5.0 + 1.0
            assert [degraded(cluster, rank) for rank in left] == [{victim: "disconnected"}] * 2

    run(main())


def test_nobody_notices_a_death_without_the_watch() -> None:
    async def main() -> None:
        async with LocalCluster(OLD) as cluster:
            watch(cluster, 5.0)
            watch(cluster, 0)
            await asyncio.sleep(10.0)
            cluster.kill(2)
            await asyncio.sleep(600.0)
            assert cluster.comms[0].view.members == (0, 1, 2)
            assert degraded(cluster, 0) == {}

    run(main())


def test_a_stopped_member_is_named_until_it_is_heard(caplog: pytest.LogCaptureFixture) -> None:
    """Silence is no proof: the view stays. Two intervals and two idle ticks; one line in the log of each rank."""

    async def main() -> None:
        async with LocalCluster(OLD) as cluster:
            watch(cluster, 2.0)
            await asyncio.sleep(60.0)
            assert [degraded(cluster, rank) for rank in range(3)] == [{}] * 3
            cluster.stop(2)
            took = await until(lambda: all(2 in degraded(cluster, rank) for rank in (0, 1)), 60.0)
            assert 6.0 < took <= 10.0
            await asyncio.sleep(100.0)
            assert degraded(cluster, 0)[2] == "not heard for 8.0 s or more"
            assert cluster.comms[0].view.members == (0, 1, 2)
            assert len([r for r in caplog.records if "rank 2: not heard for 8.0 s or more." in r.getMessage()]) == 2
            assert "exclude(rank) says that a rank is dead" in caplog.text
            cluster.resume(2)
            await until(lambda: not any(degraded(cluster, rank) for rank in range(3)), 10.0)
            all_report(await cluster.migrate(NEW))

    run(main())


def test_a_member_that_is_degraded_for_another_reason_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """What is worse stays; what is silent is said when that is over."""

    async def main() -> None:
        async with LocalCluster(OLD) as cluster:
            watch(cluster, 2.0)
            noted = cluster.comms[0]._session.driver.degraded
            noted[2] = "a READ from it failed"
            cluster.stop(2)
            await asyncio.sleep(60.0)
            assert noted == {2: "a READ from it failed"}
            del noted[2]
            await asyncio.sleep(3.0)
            assert noted[2] == "not heard for 8.0 s or more"
            cluster.resume(2)
            await asyncio.sleep(5.0)
            assert noted == {}

    run(main())
    assert len([r for r in caplog.records if "rank 2: not heard for 8.0 s or more." in r.getMessage()]) == 2


def test_one_that_does_not_watch_is_pinged_and_not_named() -> None:
    """Only rank 0 watches: the others answer, every second time, and are never silent for long."""
    fabric = Counting()

    async def main() -> None:
        async with LocalCluster(OLD, fabric=fabric) as cluster:
            cluster.comms[0].watch(2.0)
            fabric.sent.clear()
            await asyncio.sleep(200.0)
            assert degraded(cluster, 0) == {}
            kinds = Counter(kind for _, kind in fabric.sent.elements())
            assert set(kinds) == {"Ping", "Pong"}
            assert kinds["Ping"] == pytest.approx(100, abs=6)

    run(main())


def test_a_rank_that_stood_still_itself_takes_nobody_for_silent() -> None:
    """Silence is counted in rounds: a minute in which this process did not run is none of the others'."""

    async def main() -> None:
        async with LocalCluster(OLD) as cluster:
            watch(cluster, 2.0)
            await asyncio.sleep(20.0)
            loop: Any = asyncio.get_running_loop()
            loop._now += 60.0
            for _ in range(1000):
                await asyncio.sleep(0.01)
                assert degraded(cluster, 0) == {}

    run(main())


def test_what_is_sent_is_one_message_for_each_pair_and_direction() -> None:
    """64 members that all greet: 63 messages a rank and interval. Those that fall silent are pinged instead."""

    async def main() -> None:
        sink, codec = Sink(), Codec(bytes(KEY_SIZE), ep_size=64, num_layers=1)
        driver = coordinator(64, 1, sink)
        driver.start()
        greetings = [
            codec.encode(messages.Pong(sender=rank, sender_incarnation=START, receiver_incarnation=START))
            for rank in range(1, 64)
        ]
        driver.watch_every(2.0)
        for _ in range(10):
            await asyncio.sleep(1.0)
            for data in greetings:
                assert driver.notification("", data)
            await asyncio.sleep(0.99)
        assert sink.messages == 10 * 63
        assert not driver.degraded
        await asyncio.sleep(11.0)
        assert sink.messages == 16 * 63
        assert len(driver.degraded) == 63
        driver.stop()
        assert not driver.degraded

    run(main())


def test_a_rank_that_comes_back_is_watched_again() -> None:
    async def main() -> None:
        async with LocalCluster(OLD) as cluster:
            for rank in (0, 1):
                cluster.comms[rank].watch(1.0)
            cluster.kill(2)
            await until(lambda: all(cluster.comms[rank].view.members == (0, 1) for rank in (0, 1)), 10.0)
            back = asyncio.ensure_future(cluster.reconnect(2))
            await cluster.restart(2)
            assert await back == [None, None]
            assert degraded(cluster, 0) == {}
            cluster.stop(2)
            await until(lambda: all(2 in degraded(cluster, rank) for rank in (0, 1)), 20.0)
            cluster.kill(2)
            await until(lambda: all(cluster.comms[rank].view.members == (0, 1) for rank in (0, 1)), 10.0)
            assert degraded(cluster, 0) == {2: "disconnected"}

    run(main())


def test_a_rank_that_is_suspended_or_excluded_is_seen_as_what_it_is() -> None:
    async def main() -> None:
        async with LocalCluster(OLD) as cluster:
            watch(cluster, 1.0)
            await cluster.comms[2].suspend()
            await asyncio.sleep(30.0)
            assert degraded(cluster, 0) == {}
            cluster.stop(2)
            await until(lambda: 2 in degraded(cluster, 0), 20.0)
            await cluster.comms[0].exclude(2)
            await until(lambda: cluster.comms[0].view.members == (0, 1), 20.0)
            await asyncio.sleep(5.0)
            assert degraded(cluster, 0)[2].startswith("excluded by the caller (not heard for ")
            cluster.resume(2)
            await asyncio.sleep(30.0)
            assert cluster.comms[2].health().phase == "fenced"

    run(main())


def test_a_watch_that_makes_no_sense_is_refused_and_one_ends_with_the_communicator() -> None:
    fabric = Counting()

    async def main() -> None:
        async with LocalCluster(OLD, fabric=fabric) as cluster:
            for seconds in (-1, 0.04, 3601, float("nan"), True, "2"):
                with pytest.raises(ValueError, match="watch interval"):
                    cluster.comms[0].watch(seconds)  # type: ignore[arg-type]
            watch(cluster, 0.05)
            await asyncio.sleep(1.0)
        comm = cluster.comms[0]
        assert comm._session.driver.watch._timer is None
        with pytest.raises(CommunicatorClosed):
            comm.watch(1.0)
        fabric.sent.clear()
        await asyncio.sleep(10.0)
        assert not fabric.sent

    run(main())


def test_greetings_do_not_depend_on_how_often_a_waiting_rank_pings() -> None:
    """``ping_interval`` spares answers to those who ask often; a greeting is none."""
    fabric = Counting()

    async def main() -> None:
        settings = Settings(secret=SECRET, ping_interval=3600.0)
        async with LocalCluster(OLD, settings=settings, fabric=fabric) as cluster:
            watch(cluster, 1.0)
            await asyncio.sleep(10.0)
            fabric.sent.clear()
            await asyncio.sleep(20.0)
            assert {kind for _, kind in fabric.sent} == {"Pong"}
            assert not any(degraded(cluster, rank) for rank in range(3))
            cluster.kill(2)
            await until(lambda: 2 in degraded(cluster, 0), 2.0)

    run(main())


def test_greetings_leave_the_protocol_and_the_steps_alone() -> None:
    """A greeting says where the sender's engine stands, as an answer does, and moves nothing else."""

    async def main() -> None:
        async with LocalCluster(OLD, settings=Settings(secret=SECRET, activation="step")) as cluster:
            with cluster.comms[1].step(7):
                pass
            before = [comm._session.driver.protocol.snapshot() for comm in cluster.comms]
            watch(cluster, 1.0)
            await asyncio.sleep(10.0)
            assert [comm._session.driver.protocol.snapshot() for comm in cluster.comms] == before
            assert cluster.comms[0]._session.driver.strides.heard == {1: 15, 2: 1}

    run(main())
