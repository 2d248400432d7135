"""Closing and recycling when something else happens half-way: one agent at most is left, and none after aclose."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from eplb_async.core import events
from eplb_async.core.placement import Placement
from eplb_async.errors import CommunicatorClosed, EplbError, MigrationAborted, WeightsError
from eplb_async.settings import Settings
from eplb_async.testing import FaultPlan, Life, MemoryFabric, run
from eplb_async.testing.cluster import LocalCluster
from eplb_async.weights import Copy
from tests.communicator.groups import NEW, OLD, all_report

ONE_LAYER = Settings(secret=b"s" * 16, staging_layers=1)


def alive(fabric: MemoryFabric, rank: int) -> list[str]:
    """Agents of a rank that were not destroyed."""
    return [name for name in fabric.agents if f"default/{rank}." in name and fabric.life(name) is not Life.DEAD]


@pytest.mark.parametrize("call", ["metadata", "add_remote", "connect", "register"])
def test_a_recycle_that_fails_half_way_can_be_tried_again(call: str) -> None:
    """A native call of the successor fails: the old agent lives on alone, and the next migration recycles."""
    plan = FaultPlan().hold_read("default/0.10000", nth=None).fail_call(call, agent="default/0.10001")
    fabric = MemoryFabric(plan)

    async def main() -> None:
        async with LocalCluster(OLD, fabric=fabric, settings=ONE_LAYER) as cluster:
            await cluster.migrate(NEW, timeout=1.0)
            failed = await cluster.migrate(NEW, timeout=2.0)
            assert isinstance(failed[0], EplbError), failed
            assert len(alive(fabric, 0)) == 1
            reports = await cluster.migrate(NEW, timeout=20.0)
            all_report(reports)
            assert cluster.wrong_bytes() == 0
        assert not alive(fabric, 0)

    run(main())
    assert not fabric.violations


@pytest.mark.parametrize("delay", [0.0, 0.1, 0.3, 0.499, 0.5, 0.501, 0.6])
def test_closing_while_a_recycle_is_due_or_running_leaves_no_agent(delay: float) -> None:
    """``aclose`` at any moment of a migration that must recycle first: nothing native is left."""
    fabric = MemoryFabric(FaultPlan().hold_read("default/0.10000", nth=None), latency=0.002)

    async def main() -> None:
        async with LocalCluster(OLD, fabric=fabric, settings=ONE_LAYER) as cluster:
            await cluster.migrate(NEW, timeout=1.0)
            task = asyncio.ensure_future(cluster.comms[0].migrate(NEW, timeout=20.0))
            await asyncio.sleep(delay)
            await cluster.comms[0].aclose()
            await asyncio.wait([task], timeout=5.0)
            assert task.done()
            assert isinstance(task.exception(), EplbError)
            assert not alive(fabric, 0)

    run(main())
    assert not fabric.violations


async def _joined(cluster: LocalCluster) -> list[asyncio.Future[Any]]:
    return await _when(cluster, [0], lambda: cluster.comms[0].health().phase == "joined")


async def _reading(cluster: LocalCluster) -> list[asyncio.Future[Any]]:
    return await _when(cluster, [0, 1], lambda: cluster.comms[0].health().reads_in_flight > 0)


async def _voted(cluster: LocalCluster) -> list[asyncio.Future[Any]]:
    cluster.fabric.faults = FaultPlan().hold_read("default/1.", nth=None)  # so its layers are never committed
    return await _when(cluster, [0, 1], lambda: cluster.comms[0].health().prepared > 0)


async def _committing(cluster: LocalCluster) -> list[asyncio.Future[Any]]:
    return await _when(cluster, [0, 1], lambda: cluster.comms[0].health().committed > 0)


async def _settling(cluster: LocalCluster) -> list[asyncio.Future[Any]]:
    tasks = await _reading(cluster)
    tasks[0].cancel()
    return tasks


async def _quarantined(cluster: LocalCluster) -> list[asyncio.Future[Any]]:
    cluster.fabric.faults = FaultPlan().hold_read("default/0.", nth=None)
    return await _when(cluster, [0, 1], lambda: cluster.comms[0].health().quarantined_bytes > 0, timeout=0.5)


async def _recycling(cluster: LocalCluster) -> list[asyncio.Future[Any]]:
    await asyncio.wait(await _quarantined(cluster))
    return await _when(cluster, [0, 1], lambda: cluster.comms[0]._session._agents.retiring is not None)


async def _rebinding(cluster: LocalCluster) -> list[asyncio.Future[Any]]:
    task = asyncio.ensure_future(cluster.comms[0].rebind())
    while cluster.comms[0]._session._agents.retiring is None:
        await asyncio.sleep(0)
    return [task]


async def _view_change(cluster: LocalCluster) -> list[asyncio.Future[Any]]:
    tasks = await _reading(cluster)
    cluster.kill(1)
    await cluster.comms[0].exclude(1)
    return tasks


async def _when(
    cluster: LocalCluster, ranks: list[int], condition: Callable[[], bool], timeout: float = 20.0
) -> list[asyncio.Future[Any]]:
    tasks = [asyncio.ensure_future(cluster.comms[rank].migrate(NEW, timeout=timeout)) for rank in ranks]
    while not condition():
        assert not all(task.done() for task in tasks), "it ended before"
        await asyncio.sleep(0)
    return tasks


PHASES = [_joined, _reading, _voted, _committing, _settling, _quarantined, _recycling, _rebinding, _view_change]


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.__name__.strip("_"))
@pytest.mark.parametrize(
    ("timeout", "turns"), [(None, None), (None, 0), (None, 30), (0.0, None), (0.0, 2), (0.02, None)]
)
def test_closing_in_any_phase(
    phase: Callable[[LocalCluster], Awaitable[list[asyncio.Future[Any]]]], timeout: float | None, turns: int | None
) -> None:
    """I-4, C7: bounded, also when the first call is cancelled and a second one waits; nothing native is left."""
    fabric = MemoryFabric(latency=0.002, needs_target_progress=True)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with LocalCluster(OLD, fabric=fabric, settings=replace(ONE_LAYER, hot_seconds=0.0)) as cluster:
            tasks = await phase(cluster)
            comm, started = cluster.comms[0], loop.time()
            closing = asyncio.ensure_future(comm.aclose(timeout))
            if turns is not None:
                for _ in range(turns):
                    await asyncio.sleep(0)
                if not closing.done():
                    closing.cancel()
                    await asyncio.wait([closing])
                    assert closing.cancelled()
            left = await comm.aclose(timeout)
            assert loop.time() - started < (ONE_LAYER.close_timeout if timeout is None else timeout) + 0.5
            assert timeout is not None or fabric.faults._reads or left == (), "what could have ended was not waited for"
            assert not alive(fabric, 0)
            assert not comm._engine._closers
            assert not comm._engine.immortal
            _, pending = await asyncio.wait(tasks, timeout=30.0)
            assert not pending
            for task in tasks:
                assert task.cancelled() or isinstance(task.exception(), EplbError | None)
            before = cluster.rows[0].wrong_bytes(comm.placement)
            await asyncio.sleep(1.0)
            assert before == cluster.rows[0].wrong_bytes(comm.placement) == 0
        await asyncio.sleep(0.01)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main())
    assert not fabric.violations
    assert fabric.open_handles == 0
    assert fabric.open_registrations == 0


def test_two_closes_at_once_end_together() -> None:
    """The second call waits for the first one's end, also when the first is cancelled."""
    fabric = MemoryFabric(FaultPlan().hold_read("default/0.", nth=None))

    async def main() -> None:
        async with LocalCluster(OLD, fabric=fabric) as cluster:
            await cluster.migrate(NEW, timeout=1.0)
            first = asyncio.ensure_future(cluster.comms[0].aclose(2.0))
            await asyncio.sleep(0.01)
            first.cancel()
            left = await cluster.comms[0].aclose()
            assert left
            assert not alive(fabric, 0)
            assert await cluster.comms[0].aclose() == left
            with pytest.raises(CommunicatorClosed):
                await cluster.comms[0].migrate(NEW)

    run(main())


def test_nothing_is_written_after_a_close_without_patience() -> None:
    """``aclose(0)`` during an apply: the copy that runs is waited for, and no further layer is applied."""

    class Slow:
        def __init__(self, inner: object) -> None:
            self.inner = inner
            self.running = 0

        async def fence(self) -> None:
            """Nothing is queued."""

        async def copy(self, copies: Sequence[Copy]) -> None:
            self.running += 1
            await asyncio.sleep(0.5)
            await self.inner.copy(copies)  # type: ignore[attr-defined]
            self.running -= 1

    async def main() -> None:
        async with LocalCluster(OLD) as cluster:
            session = cluster.comms[0]._session
            slow = session.copier = Slow(session.copier)
            tasks = asyncio.ensure_future(cluster.migrate(NEW))
            while not slow.running:
                await asyncio.sleep(0.001)
            await cluster.comms[0].aclose(0.0)
            assert slow.running == 0
            before = [tensor.clone() for layer in cluster.rows[0].layers for tensor in layer]
            await tasks
            await asyncio.sleep(5.0)
            after = [tensor for layer in cluster.rows[0].layers for tensor in layer]
            assert all((a == b).all() for a, b in zip(before, after, strict=True))
            assert cluster.wrong_bytes([0]) == 0

    run(main())


def test_an_error_that_cannot_say_what_it_is_still_ends_the_epoch() -> None:
    """``str()`` of a failure raises: the epoch ends at once on both ranks all the same."""

    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError("no words")

    class Broken:
        async def fence(self) -> None:
            """Nothing is queued."""

        async def copy(self, copies: Sequence[Copy]) -> None:
            raise Mute

    async def main() -> None:
        async with LocalCluster(Placement([[0, 1, 2, 3]], ep_size=2)) as cluster:
            cluster.comms[1]._session.copier = Broken()
            swap = Placement([[0, 1, 3, 2]], ep_size=2)  # a local copy into staging fails before any vote
            started = asyncio.get_running_loop().time()
            one, two = await cluster.migrate(swap, timeout=30.0)
            assert asyncio.get_running_loop().time() - started < 1.0
            assert isinstance(two, Mute)
            assert isinstance(one, EplbError)

    run(main())


@pytest.mark.parametrize("rank", [True, 1.0, "1", -1, 0, 2])
def test_excluding_what_is_no_other_rank_is_refused_and_changes_nothing(rank: int) -> None:
    """``True`` is not rank 1; nor is this rank itself, nor one that the group does not have."""

    async def main() -> None:
        async with LocalCluster(OLD) as cluster:
            with pytest.raises(ValueError, match="not another rank"):
                await cluster.comms[0].exclude(rank)
            reports = await cluster.migrate(NEW)
            all_report(reports)

    run(main())


@pytest.mark.parametrize("turns", range(16))
def test_a_cancelled_rebind_is_done_or_is_still_to_be_done(turns: int) -> None:
    """Cut off after any turn: peers never read the memory that was left, or ``migrate`` says to ``rebind()``."""

    async def main() -> None:
        async with LocalCluster(OLD) as cluster:
            left = [tensor.data for layer in cluster.rows[0].layers for tensor in layer]
            for layer in cluster.rows[0].layers:
                for tensor in layer:
                    tensor.data = tensor.data.clone()
            task = asyncio.ensure_future(cluster.comms[0].rebind())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            for memory in left:
                memory.fill_(0x77)
            results = await cluster.migrate(NEW, timeout=10.0)
            if isinstance(results[0], WeightsError):
                await cluster.comms[0].rebind()
                results = await cluster.migrate(NEW, timeout=10.0)
            all_report(results)
            assert cluster.wrong_bytes() == 0
            assert all((memory == 0x77).all() for memory in left)

    run(main())


@pytest.mark.parametrize("turns", range(4))
def test_a_migration_that_has_not_begun_when_a_close_waits_for_a_view_says_closed(turns: int) -> None:
    """The view that lets it leave cannot come: two of four are dead, and who would open it is stopped."""
    placement = Placement([[0, 1, 2, 3]] * 2, ep_size=4)

    async def main() -> None:
        async with LocalCluster(placement, settings=replace(ONE_LAYER, close_timeout=1.0)) as cluster:
            comm = cluster.comms[3]
            cluster.stop(0)
            for dead in (1, 2):
                cluster.kill(dead)
                comm._session.driver.feed(events.Suspect(dead))
            await asyncio.sleep(2.0)
            migrating = asyncio.ensure_future(comm.migrate(placement, timeout=5.0))
            for _ in range(turns):
                await asyncio.sleep(0)
            await comm.aclose()
            with pytest.raises((CommunicatorClosed, MigrationAborted)):
                await migrating
            cluster.resume(0)

    run(main())
