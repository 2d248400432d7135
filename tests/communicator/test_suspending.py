"""Sleep mode: a suspended rank has no memory that anyone could read or write, and is taken for alive all the same."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest
import torch

from eplb_async.communicator import AsyncEplbCommunicator
from eplb_async.core.placement import Placement
from eplb_async.engine import LoopEngine
from eplb_async.errors import (
    CommunicatorBusy,
    CommunicatorClosed,
    IntegrityError,
    MigrationAborted,
    MigrationInDoubt,
    MigrationTimeout,
    NixlTransferFailed,
    WeightsError,
)
from eplb_async.settings import Settings
from eplb_async.testing import FaultPlan, Life, MemoryFabric, run
from eplb_async.testing.cluster import LocalCluster
from tests.communicator.groups import NEW, OLD, all_report, migrates

THREE = Placement([[0, 1, 2, 3, 0, 1]] * 2, ep_size=3)
OTHER = Placement([[2, 3, 0, 1, 2, 3]] * 2, ep_size=3)


def settings(**more: Any) -> Settings:
    return Settings(secret=b"s" * 16, **({"verify": "full"} | more))


def registered(fabric: MemoryFabric, rank: int) -> int:
    """Bytes that living agents of a rank have registered."""
    blocks = [
        block
        for agent in fabric.agents.values()
        if agent.name.startswith(f"default/{rank}.") and not agent.destroyed
        for block in agent._registered.values()
    ]
    return sum(length for _, length in blocks)


def alive(fabric: MemoryFabric) -> list[str]:
    return sorted(name.split(".")[0] for name in fabric.agents if fabric.life(name) is not Life.DEAD)


def free(cluster: LocalCluster, rank: int) -> None:
    """Free a rank's weights, as an engine that goes to sleep does."""
    for tensors in cluster.rows[rank].layers:
        for tensor in tensors:
            tensor.data = torch.empty(0, dtype=torch.uint8)


def wake(cluster: LocalCluster, rank: int) -> None:
    """Allocate a rank's weights elsewhere, and fill them."""
    rows = cluster.rows[rank]
    placement = cluster.comms[rank].placement
    for tensors in rows.layers:
        for tensor, nbytes in zip(tensors, rows.row_bytes, strict=True):
            tensor.data = torch.zeros(placement.num_local_experts, nbytes, dtype=torch.uint8)
    rows.fill(placement)


@pytest.mark.parametrize("verify", ["off", "identity", "full"])
@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)])
def test_memory_is_let_go_of_and_comes_back_elsewhere(ranks: tuple[int, ...], verify: str) -> None:
    """Weights and staging are neither registered nor kept alive; after resume the next migration works."""

    async def main() -> None:
        async with LocalCluster(OLD, settings=settings(verify=verify)) as cluster:
            await migrates(cluster, NEW)
            before = [registered(cluster.fabric, rank) for rank in (0, 1)]
            stores = [weakref.ref(t.untyped_storage()) for t in cluster.rows[ranks[0]].layers[1]]
            staging = weakref.ref(cluster.comms[ranks[0]]._session._staging.buffers["DRAM"])
            await asyncio.gather(*(cluster.comms[rank].suspend() for rank in ranks))
            for rank in ranks:
                assert registered(cluster.fabric, rank) == 0
                assert cluster.comms[rank].health().phase == "suspended"
                free(cluster, rank)
            gc.collect()
            assert [store() for store in stores] == [None, None]
            assert staging() is None
            await asyncio.sleep(2.0)
            for rank in ranks:
                wake(cluster, rank)
            await asyncio.gather(*(cluster.comms[rank].resume() for rank in ranks))
            assert [registered(cluster.fabric, rank) for rank in (0, 1)] == before
            for comm in cluster.comms:
                assert comm.health().phase == "idle"
                assert not comm.health().degraded
                assert comm.health().members == (0, 1)
            await migrates(cluster, OLD)
            await migrates(cluster, NEW)
            assert alive(cluster.fabric) == ["default/0", "default/1"]
        assert not cluster.fabric.violations
        assert cluster.fabric.open_handles == 0

    run(main())


def test_a_suspended_rank_refuses_and_its_peers_time_out_naming_it() -> None:
    """CommunicatorBusy here, MigrationTimeout there; nobody takes it for dead."""

    async def main() -> None:
        async with LocalCluster(THREE, settings=settings()) as cluster:
            comm = cluster.comms[0]  # the coordinator
            await comm.suspend()
            for call in (lambda: comm.migrate(OTHER), comm.rebind):
                with pytest.raises(CommunicatorBusy, match=r"suspended; await resume\(\) first"):
                    await call()
            for result in await cluster.migrate(OTHER, ranks=[1, 2], timeout=3.0):
                assert isinstance(result, MigrationTimeout)
                assert "waiting for ranks [0]" in result.reason
            assert [comm.health().members for comm in cluster.comms] == [(0, 1, 2)] * 3
            assert not any(comm.health().degraded for comm in cluster.comms)
            await comm.resume()
            await migrates(cluster, OTHER)

    run(main())


def test_a_suspended_rank_takes_part_in_a_view_change() -> None:
    """Another rank dies meanwhile: the suspended one promises and installs like any other."""
    without = Placement([[0, 1, 2, 3, -1, -1]] * 2, ep_size=3)

    async def main() -> None:
        async with LocalCluster(THREE, settings=settings()) as cluster:
            await cluster.comms[1].suspend()
            cluster.kill(2)
            (result,) = await cluster.migrate(without, ranks=[0], timeout=1.0)
            assert isinstance(result, MigrationAborted)
            async with asyncio.timeout(5.0):
                while cluster.comms[1].health().members != (0, 1):
                    await asyncio.sleep(0.01)
            await cluster.comms[1].resume()
            reports = await cluster.migrate(without, ranks=[0, 1])
            all_report(reports)
            assert cluster.wrong_bytes([0, 1]) == 0

    run(main())


@pytest.mark.parametrize("victim", [0, 1])
def test_suspending_ends_the_migration_that_runs(victim: int) -> None:
    """READs that never end, of this rank and of its peer, go with the agent: nothing lands in freed memory."""
    plan = FaultPlan().hold_read("default/0.10000", nth=1).hold_read("default/1.10000", nth=1)
    fabric = MemoryFabric(plan)

    async def main() -> None:
        chosen = settings(max_post_descriptors=2, staging_layers=1)
        async with LocalCluster(OLD, fabric=fabric, settings=chosen) as cluster:
            running = asyncio.ensure_future(cluster.migrate(NEW))
            await asyncio.sleep(0.1)
            await cluster.comms[victim].suspend(timeout=1.0)
            free(cluster, victim)
            assert registered(fabric, victim) == 0
            for result in await running:
                assert isinstance(result, MigrationAborted)
                assert "being suspended" in result.reason
            fabric.unhold()
            await asyncio.sleep(0.5)
            wake(cluster, victim)
            await cluster.comms[victim].resume()
            assert len({comm.placement for comm in cluster.comms}) == 1
            assert cluster.wrong_bytes() == 0
            await migrates(cluster, NEW)
            await migrates(cluster, OLD)

    run(main())
    assert not fabric.violations
    assert fabric.open_handles == 0


@pytest.mark.parametrize("after", [0.001 * n for n in range(1, 30, 2)])
def test_a_reader_says_that_its_source_is_suspended(after: float) -> None:
    """BEGIN overtaken by the source's new agent without memory: the error is one of a transfer, and names the rank."""

    async def main() -> None:
        async with LocalCluster(THREE, settings=settings(), fabric=MemoryFabric(latency=0.01)) as cluster:
            migrating = asyncio.ensure_future(cluster.migrate(OTHER, timeout=3.0))
            await asyncio.sleep(after)
            suspending = asyncio.ensure_future(cluster.comms[2].suspend())
            for result in await migrating:
                assert isinstance(result, MigrationAborted | NixlTransferFailed | CommunicatorBusy), result
            await suspending
            await cluster.comms[2].resume()
            await migrates(cluster, OTHER)

    run(main())


@pytest.mark.parametrize("limit", [0.05, 0.3, 5.0])
@pytest.mark.parametrize("wait", [0.0, 0.0001, 0.001, 0.2, 0.51, 0.7])
def test_suspending_while_a_migration_makes_room(wait: float, limit: float) -> None:
    """It is about to replace the agent: that ends first, and the memory is not registered again behind our back."""
    fabric = MemoryFabric(FaultPlan().hold_read("default/0.10000", nth=None), latency=0.002)

    async def main() -> None:
        async with LocalCluster(OLD, fabric=fabric, settings=settings(staging_layers=1)) as cluster:
            await cluster.migrate(NEW, timeout=1.0)
            running = asyncio.ensure_future(cluster.migrate(NEW, ranks=[0], timeout=20.0))
            await asyncio.sleep(wait)
            try:
                await cluster.comms[0].suspend(timeout=limit)
            except MigrationTimeout:
                assert limit < 0.5
                assert registered(fabric, 0) > 0
                await cluster.comms[0].suspend(timeout=5.0)
            await asyncio.sleep(2.0)
            assert registered(fabric, 0) == 0
            free(cluster, 0)
            wake(cluster, 0)
            await cluster.comms[0].resume()
            assert isinstance((await running)[0], MigrationAborted | CommunicatorBusy)
            await migrates(cluster, NEW)

    run(main())
    assert not fabric.violations


@pytest.mark.parametrize("turns", [*range(10), 16, 30, 60, 100, 200, 400])
@pytest.mark.parametrize("again", ["suspend", "resume"])
def test_a_cancelled_suspend_goes_on_or_was_never_there(turns: int, again: str) -> None:
    """After any turn: called again it ends suspended; resumed it is as before; one agent is left."""

    async def main() -> None:
        async with LocalCluster(OLD, settings=settings()) as cluster:
            comm = cluster.comms[0]
            task = asyncio.ensure_future(comm.suspend())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            if again == "suspend":
                await comm.suspend()
                assert registered(cluster.fabric, 0) == 0
                free(cluster, 0)
                wake(cluster, 0)
            await comm.resume()
            assert comm.health().phase == "idle"
            assert alive(cluster.fabric) == ["default/0", "default/1"]
            await migrates(cluster, NEW)
            await migrates(cluster, OLD)
        assert not cluster.fabric.violations

    run(main())


@pytest.mark.parametrize("turns", [*range(10), 16, 30, 60, 100, 200, 400])
def test_a_cancelled_resume_goes_on(turns: int) -> None:
    """Called again it waits for the first; the next migrations work."""

    async def main() -> None:
        async with LocalCluster(OLD, settings=settings()) as cluster:
            comm = cluster.comms[0]
            await comm.suspend()
            free(cluster, 0)
            wake(cluster, 0)
            task = asyncio.ensure_future(comm.resume())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            await comm.resume()
            assert alive(cluster.fabric) == ["default/0", "default/1"]
            await migrates(cluster, NEW)
            await migrates(cluster, OLD)
        assert not cluster.fabric.violations

    run(main())


def test_both_may_be_called_again_and_at_once() -> None:
    """Suspended twice, resumed twice, resumed unsuspended: no-ops. Two at once: the second is busy."""

    async def main() -> None:
        async with LocalCluster(OLD, settings=settings()) as cluster:
            comm = cluster.comms[1]
            await comm.resume()
            results = await asyncio.gather(comm.suspend(), comm.suspend(), return_exceptions=True)
            assert [type(result) for result in results] == [type(None), CommunicatorBusy]
            await comm.suspend()
            assert comm.health().recycled == 1
            results = await asyncio.gather(comm.resume(), comm.resume(), return_exceptions=True)
            assert [type(result) for result in results] == [type(None), CommunicatorBusy]
            await comm.resume()
            assert comm.health().recycled == 2
            await migrates(cluster, NEW)

    run(main())


def test_suspending_waits_no_longer_than_it_may() -> None:
    """In doubt, it may not give its rows away: it stays as it was."""

    async def main() -> None:
        async with LocalCluster(OLD, settings=settings(settle_timeout=0.5)) as cluster:
            running = asyncio.ensure_future(cluster.migrate(NEW))
            while not cluster.comms[1].health().prepared:
                await asyncio.sleep(0)
            cluster.stop(0)
            with pytest.raises(MigrationTimeout, match="not begun"):
                await cluster.comms[1].suspend(timeout=0.1)
            with pytest.raises(MigrationInDoubt):
                await cluster.comms[1].suspend(timeout=2.0)
            with pytest.raises(MigrationInDoubt, match="rebind not begun"):
                await cluster.comms[1].rebind(timeout=2.0)
            assert registered(cluster.fabric, 1) > 0
            cluster.resume(0)
            await running
            assert cluster.wrong_bytes() == 0
            await migrates(cluster, OLD)
            await migrates(cluster, NEW)

    run(main())


def test_a_suspended_communicator_can_be_closed_and_then_says_so() -> None:
    """Close is a LEAVE as ever; suspend and resume afterwards raise CommunicatorClosed."""

    async def main() -> None:
        async with LocalCluster(THREE, settings=settings()) as cluster:
            comm = cluster.comms[1]
            await comm.suspend()
            free(cluster, 1)
            assert await comm.aclose() == ()
            for call in (comm.suspend, comm.resume):
                with pytest.raises(CommunicatorClosed):
                    await call()
            async with asyncio.timeout(5.0):
                while cluster.comms[0].health().members != (0, 2):
                    await asyncio.sleep(0.01)
            assert alive(cluster.fabric) == ["default/0", "default/2"]
        assert not cluster.fabric.violations

    run(main())


@pytest.mark.parametrize("turns", [0, 1, 3, 10, 30, 100, 300])
@pytest.mark.parametrize("what", ["suspend", "resume"])
def test_closing_while_it_suspends_or_resumes_leaves_no_agent(turns: int, what: str) -> None:
    """Whatever the moment: the close ends, and so does the other call, well or with CommunicatorClosed."""

    async def main() -> None:
        async with LocalCluster(OLD, settings=settings(close_timeout=3.0)) as cluster:
            comm = cluster.comms[0]
            if what == "resume":
                await comm.suspend()
            task = asyncio.ensure_future(getattr(comm, what)())
            for _ in range(turns):
                await asyncio.sleep(0)
            await comm.aclose()
            await asyncio.wait([task], timeout=5.0)
            assert task.done()
            assert task.exception() is None or isinstance(task.exception(), CommunicatorClosed)
        assert alive(cluster.fabric) == []
        assert not cluster.fabric.violations

    run(main())


def test_weights_rewritten_in_sleep_are_digested_when_awake() -> None:
    """Update, then resume; or resume, then update: either way the new bytes move, and the version is the new one."""

    async def main() -> None:
        async with LocalCluster(OLD, settings=settings()) as cluster:
            for rank, comm in enumerate(cluster.comms):
                await comm.suspend()
                free(cluster, rank)
                if rank:
                    async with comm.updating_weights() as placement:
                        wake(cluster, rank)
                        cluster.rows[rank].rewrite(placement)
                    await comm.resume()
                else:
                    wake(cluster, rank)
                    await comm.resume()
                    async with comm.updating_weights() as placement:
                        cluster.rows[rank].rewrite(placement)
            assert [comm.health().weight_version for comm in cluster.comms] == [1, 1]
            await migrates(cluster, NEW)
            await migrates(cluster, OLD)

    run(main())


def test_other_bytes_after_sleep_are_found_by_their_digests() -> None:
    """Woken with other weights, and nobody said so: IntegrityError, no layer changes."""

    async def main() -> None:
        async with LocalCluster(OLD, settings=settings()) as cluster:
            await cluster.comms[0].suspend()
            free(cluster, 0)
            wake(cluster, 0)
            for tensors in cluster.rows[0].layers:
                tensors[0].fill_(7)
            await cluster.comms[0].resume()
            results = await cluster.migrate(NEW)
            assert any(isinstance(result, IntegrityError) for result in results), results
            assert [comm.placement for comm in cluster.comms] == [OLD, OLD]

    run(main())


def test_a_resume_that_fails_stays_suspended_and_can_be_tried_again() -> None:
    """Weights still asleep, of another kind, or refused by NIXL: nothing is registered, then it works."""
    fabric = MemoryFabric()

    async def main() -> None:
        async with LocalCluster(OLD, fabric=fabric, settings=settings()) as cluster:
            comm = cluster.comms[0]
            await comm.suspend()
            free(cluster, 0)
            with pytest.raises(WeightsError):
                await comm.resume()
            wake(cluster, 0)
            fabric.faults = FaultPlan().fail_call("register", "default/0.", nth=1)
            with pytest.raises(NixlTransferFailed):
                await comm.resume()
            assert comm.health().phase == "suspended"
            assert registered(fabric, 0) == 0
            assert comm._session._staging.buffers == {}
            with pytest.raises(CommunicatorBusy, match="suspended"):
                await comm.migrate(NEW)
            await comm.resume()
            await migrates(cluster, NEW)
            assert alive(fabric) == ["default/0", "default/1"]

    run(main())
    assert not fabric.violations


def test_a_suspend_that_fails_changes_nothing() -> None:
    """NIXL makes no successor: still awake, and the next migration works."""
    fabric = MemoryFabric()

    async def main() -> None:
        async with LocalCluster(OLD, fabric=fabric, settings=settings()) as cluster:
            fabric.faults = FaultPlan().fail_call("add_remote", "default/0.")
            with pytest.raises(Exception, match="NIXL"):
                await cluster.comms[0].suspend()
            assert cluster.comms[0].health().phase == "idle"
            await migrates(cluster, NEW)

    run(main())


def test_the_callers_own_staging_is_used_again() -> None:
    """It stays the caller's: unregistered while suspended, and the same memory afterwards."""

    async def main() -> None:
        cluster = LocalCluster(OLD)
        own = torch.zeros(100_000, dtype=torch.uint8)

        async def opened(rank: int) -> AsyncEplbCommunicator:
            return await AsyncEplbCommunicator.open(
                rank=rank,
                ep_size=2,
                weights=cluster.rows[rank].layers,
                placement=OLD,
                rendezvous=cluster.rendezvous,
                staging=own if rank == 0 else None,
                settings=settings(),
                engine=LoopEngine(asyncio.get_running_loop()),
                native=cluster.fabric.native,
            )

        cluster.comms = list(await asyncio.gather(opened(0), opened(1)))
        try:
            await cluster.comms[0].suspend()
            assert registered(cluster.fabric, 0) == 0
            await cluster.comms[0].resume()
            assert cluster.comms[0]._session._staging.buffers["DRAM"].data_ptr() == own.data_ptr()
            await migrates(cluster, NEW)
        finally:
            await asyncio.gather(*(comm.aclose() for comm in cluster.comms))

    run(main())


@pytest.mark.parametrize("who", ["recycles", "suspends too"])
def test_a_peer_that_replaces_its_agent_meanwhile_is_met(who: str) -> None:
    """Introductions reach the suspended rank, and its own reaches those who were replaced."""
    fabric = MemoryFabric(latency=0.002)

    async def main() -> None:
        async with LocalCluster(THREE, fabric=fabric, settings=settings()) as cluster:
            await cluster.comms[0].suspend()
            if who == "recycles":
                await cluster.comms[1].rebind()
                await cluster.comms[0].resume()
            else:
                await asyncio.gather(cluster.comms[1].suspend(), cluster.comms[2].suspend())
                await asyncio.gather(*(comm.resume() for comm in cluster.comms))
            assert not any(comm.health().degraded for comm in cluster.comms)
            await migrates(cluster, OTHER)
            await migrates(cluster, THREE)

    run(main())
    assert not fabric.violations
