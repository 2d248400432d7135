"""The service beside all else that happens to its communicator: restarts, its owner's turns, closes, deaths."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from eplb_async.core.placement import Placement
from eplb_async.errors import CommunicatorClosed, MigrationAborted, MigrationError, RebalanceFailed
from eplb_async.service import RebalanceReport
from eplb_async.testing import run
from tests.service.cluster import MANUAL, Services

FULL = Placement(np.tile(np.arange(8), (3, 3)), ep_size=3)
"""Every rank holds every expert."""


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_a_service_that_is_opened_again_is_heard() -> None:
    """Its wishes are new ones to the coordinator, which knows those of the service before."""

    async def main() -> None:
        async with Services() as group:
            group.record()
            for _ in range(3):
                assert isinstance(await group.rebalance(1, force=True), RebalanceReport)
            await group.services[1].aclose()
            await group.start(1)
            assert isinstance(answer := await group.rebalance(1, force=True), RebalanceReport), answer

    run(main())


@pytest.mark.parametrize("back", [0, 2])
def test_a_rank_that_comes_back_with_nothing_is_filled_at_once(back: int) -> None:
    """Also the coordinator, whose service has seen no change of the members; and where the others are even already."""

    async def main() -> None:
        chosen = replace(MANUAL, step_interval=100_000, watch_interval=0.5)
        async with Services(FULL, settings=chosen) as group:
            cluster = group.cluster

            def holds() -> bool:
                return bool((cluster.comms[1].placement.local(back) >= 0).any())

            for service in group.services.values():
                service.record(np.ones((3, 8)), by="experts")
            cluster.kill(back)
            await until(lambda: not holds())
            empty = FULL.physical_to_logical_map.copy()
            empty[:, back * 8 : back * 8 + 8] = -1
            opening = asyncio.ensure_future(cluster.restart(back, Placement(empty, ep_size=3)))
            assert await cluster.reconnect(back) == [None, None]
            await opening
            service = await group.start(back)
            loads, steps = service.loads()
            assert (loads.shape, loads.any(), steps) == ((3, 8), False, 0)
            await until(holds)
            await group.idle()
            assert cluster.wrong_bytes() == 0

    run(main())


@pytest.mark.parametrize("what", ["updates", "suspends"])
@pytest.mark.parametrize("after", [0, 2, 9, 30])
def test_the_owners_turn_in_a_round_holds_nobody_up(what: str, after: int) -> None:
    """Also where it comes while the migration is prepared: the others wait for a rank that will not join."""

    async def main() -> None:
        async with Services() as group:
            group.record()
            asked = asyncio.ensure_future(group.rebalance(0))
            while group.services[1].health().phase != "moving":
                await asyncio.sleep(0)
            await turns(after)
            begun = asyncio.get_running_loop().time()
            comm = group.cluster.comms[1]
            if what == "updates":
                async with comm.updating_weights():
                    answer = await asked
                    assert isinstance(await group.rebalance(2, force=True), RebalanceReport | RebalanceFailed)
            else:
                await comm.suspend()
                answer = await asked
                await comm.resume()
            await group.idle()
            assert asyncio.get_running_loop().time() - begun < 5, answer
            assert isinstance(answer, RebalanceReport | RebalanceFailed | MigrationError)

    run(main())


def test_why_a_migration_was_stopped_is_known_to_all() -> None:
    """Also to a rank that learns of it by the end of the epoch alone."""

    async def main() -> None:
        async with Services() as group:
            group.record()
            asked = [asyncio.ensure_future(group.rebalance(rank)) for rank in (0, 1)]
            while group.cluster.comms[2].health().phase != "open":
                await asyncio.sleep(0)
            group.cluster.comms[2].mail.send = lambda *_: None  # type: ignore[method-assign]
            await group.services[2].aclose()
            for answer in await asyncio.gather(*asked):
                assert isinstance(answer, MigrationAborted)
                assert answer.reason == "cancelled by its caller: its service closes"

    run(main())


def test_a_service_leaves_the_communicator_as_it_was() -> None:
    """Watch and limit; not if somebody else has set them meanwhile."""

    async def main() -> None:
        chosen = replace(MANUAL, watch_interval=0.5, max_bytes_per_second=12345)
        async with Services(without=(0, 1, 2)) as group:
            comm = group.cluster.comms[0]
            watch = comm._session.driver.watch
            comm.limit(777)
            comm.watch(2.0)
            for limit in (777, 888):
                service = await group.start(0, settings=chosen)
                await asyncio.sleep(0.1)
                assert (comm.health().max_bytes_per_second, watch._seconds) == (12345, 0.5)
                if limit == 888:
                    comm.limit(limit)
                await service.aclose()
                await asyncio.sleep(0.1)
                assert (comm.health().max_bytes_per_second, watch._seconds) == (limit, 2.0)

    run(main())


@pytest.mark.parametrize("closes", [0, 1])
@pytest.mark.parametrize("after", [0, 9, 18, 36, 60])
def test_a_service_that_closes_in_a_round_leaves_nothing(
    closes: int, after: int, caplog: pytest.LogCaptureFixture
) -> None:
    """In each phase: no task, no error in the log, nobody who waits."""

    async def main() -> None:
        troubles: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: troubles.append(context))
        async with Services(settings=replace(MANUAL, round_timeout=1.0)) as group:
            group.record()
            asked = [asyncio.ensure_future(group.rebalance(rank)) for rank in range(3)]
            await turns(after)
            await group.services[closes].aclose()
            assert not group.services[closes]._runner._tasks
            for answer in await asyncio.gather(*asked):
                assert isinstance(answer, RebalanceReport | RebalanceFailed | CommunicatorClosed | MigrationError)
            assert asyncio.get_running_loop().time() < 5
            await until(lambda: all(s.health().phase in ("idle", "closed") for s in group.services.values()))
        gc.collect()
        assert not troubles

    with caplog.at_level(logging.ERROR):
        run(main())
    assert not caplog.records, caplog.text


def test_a_service_that_cannot_start_is_not_in_the_way_of_the_next() -> None:
    async def main() -> None:
        async with Services(without=(0,)) as group:
            comm = group.cluster.comms[0]
            there, comm._calls._loop = comm._calls._loop, object()  # type: ignore[assignment]
            with pytest.raises(RuntimeError, match="bound to the event loop"):
                await group.start(0)
            comm._calls._loop = there
            await group.start(0)

    run(main())


def test_a_service_that_is_over_takes_no_counter() -> None:
    async def main() -> None:
        async with Services() as group:
            await group.services[0].aclose()
            with pytest.raises(CommunicatorClosed):
                group.services[0].attach(np.zeros((4, 12), dtype=np.int64), by="experts")
            assert len(group.cluster.comms[0]._listeners) == 0

    run(main())


@pytest.mark.parametrize("after", [8, 16, 24, 32, 48])
def test_the_coordinator_dies_in_a_round(after: int) -> None:
    """Who asked gets an answer, long before any deadline, and the next round is that of the next rank."""

    async def main() -> None:
        async with Services(FULL, settings=replace(MANUAL, watch_interval=0.5)) as group:
            group.record()
            asked = [asyncio.ensure_future(group.rebalance(rank, force=True)) for rank in (1, 2)]
            await turns(after)
            group.cluster.kill(0)
            begun = asyncio.get_running_loop().time()
            for answer in await asyncio.gather(*asked):
                assert isinstance(answer, RebalanceReport | RebalanceFailed | MigrationError)
            assert asyncio.get_running_loop().time() - begun < 5
            again = await group.rebalance(2, force=True)
            assert isinstance(again, RebalanceReport), again
            assert group.cluster.wrong_bytes(ranks=(1, 2)) == 0

    run(main())


def test_what_a_pause_puts_off_is_done_after_it() -> None:
    """A rank dies while another is paused: the round that empties it comes soon after the pause, whatever the steps."""

    async def main() -> None:
        async with Services(FULL, settings=replace(MANUAL, step_interval=100_000, watch_interval=0.5)) as group:
            group.record()
            group.services[1].pause()
            group.cluster.kill(2)
            await asyncio.sleep(20)
            health = group.services[0].health()
            assert (health.members, health.steps_left) == ((0, 1), 0)
            assert 1 <= health.rounds["paused"] <= 4
            group.services[1].resume()
            await until(lambda: bool((group.cluster.comms[0].placement.local(2) < 0).all()))

    run(main())
