"""One test for each invariant of DESIGN §5 that the communicator upholds, named by number.

I-1, I-2, I-4 and I-15 are the agent's: see ``tests/nixl`` and ``tests/test_engine.py``. I-19 and the rest of the
protocol's are checked on ``core.protocol`` itself: see ``tests/core``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

import pytest

from eplb_async.communicator import AsyncEplbCommunicator
from eplb_async.core import messages
from eplb_async.core.placement import Placement
from eplb_async.core.wire import Codec
from eplb_async.engine import LoopEngine
from eplb_async.errors import (
    CommunicatorBusy,
    CommunicatorClosed,
    HandshakeError,
    IntegrityError,
    MigrationAborted,
    NixlTransferFailed,
    NixlTransferTimeout,
    WeightsError,
)
from eplb_async.settings import Settings
from eplb_async.testing import FaultPlan, MemoryFabric, run
from eplb_async.testing.cluster import LocalCluster
from eplb_async.weights import Copy
from tests.communicator.groups import NEW, OLD, all_report, eventually

ONE_LAYER = Settings(secret=b"s" * 16, staging_layers=1)


def test_i3_staging_that_a_read_may_still_write_is_not_handed_out() -> None:
    """Cancelled mid-READ: the bytes land late, into memory that nobody was given meanwhile."""
    fabric = MemoryFabric(FaultPlan().hold_read("default/0.", nth=0))

    async def main() -> None:
        async with LocalCluster(OLD, fabric=fabric) as cluster:
            task = asyncio.ensure_future(cluster.migrate(NEW, ranks=[0]))
            other = asyncio.ensure_future(cluster.migrate(NEW, ranks=[1]))
            await eventually(lambda: cluster.comms[0].health().reads_in_flight > 0)
            task.cancel()
            assert isinstance((await other)[0], MigrationAborted)
            assert cluster.comms[0].health().quarantined_bytes > 0
            session = cluster.comms[0]._session
            sizes = {"DRAM": session._staging.buffers["DRAM"].numel()}
            assert session._staging.try_allocate(sizes) is None, "leased staging was handed out"
            fabric.unhold()
            await eventually(lambda: cluster.comms[0].health().quarantined_bytes == 0)
            assert session._staging.try_allocate(sizes) is not None
            assert cluster.wrong_bytes() == 0
            assert all(comm.placement == OLD for comm in cluster.comms)

    run(main())
    assert not fabric.violations


def test_i3_recycling_frees_staging_that_quarantine_holds() -> None:
    """A READ that never ends holds the only staging: the next migration replaces the agent and works."""
    fabric = MemoryFabric(FaultPlan().hold_read("default/0.10000", nth=0))

    async def main() -> None:
        async with LocalCluster(OLD, fabric=fabric, settings=ONE_LAYER) as cluster:
            first = await cluster.migrate(NEW, timeout=1.0)
            assert isinstance(first[0], NixlTransferTimeout)
            before = cluster.comms[0]._session.endpoint.name
            again = await cluster.migrate(NEW, timeout=30.0)
            all_report(again)
            assert cluster.comms[0].health().recycled == 1
            assert cluster.comms[0].health().quarantined_bytes == 0
            assert cluster.comms[0]._session.endpoint.name != before, "I-13: one name for two incarnations"
            assert cluster.wrong_bytes() == 0

    run(main())
    assert not fabric.violations


def test_i5_an_expert_is_done_only_when_all_its_reads_are_in() -> None:
    """C5: three tensors, the READs end in any order, one is held: nothing is applied before it comes."""
    for held in range(3):
        fabric = MemoryFabric(FaultPlan().hold_read("default/0.", nth=held))

        async def main(fabric: MemoryFabric = fabric) -> None:
            settings = Settings(secret=b"s" * 16, max_post_descriptors=1, verify="off")
            old, new = Placement([[0, 1]], ep_size=2), Placement([[1, 0]], ep_size=2)
            async with LocalCluster(old, row_bytes=(64, 32, 8), fabric=fabric, settings=settings) as cluster:
                tasks = asyncio.ensure_future(cluster.migrate(new))
                await asyncio.sleep(1.0)
                assert all(comm.placement == old for comm in cluster.comms)
                assert cluster.wrong_bytes() == 0
                assert len([entry for entry in fabric.log if "default/0." in entry[0]]) == 3
                fabric.unhold()
                all_report(await tasks)
                assert cluster.wrong_bytes() == 0

        run(main())
        assert not fabric.violations


def test_i6_no_source_row_changes_before_all_have_read_the_layer() -> None:
    """With one READ of layer 1 held, layer 0 changes everywhere and layer 1 nowhere."""
    fabric = MemoryFabric(FaultPlan().hold_read("default/0.", nth=1))

    async def main() -> None:
        async with LocalCluster(
            OLD, fabric=fabric, settings=Settings(secret=b"s" * 16, max_stretch_bytes=0)
        ) as cluster:
            tasks = asyncio.ensure_future(cluster.migrate(NEW))
            await asyncio.sleep(1.0)
            partly = OLD.with_layers(NEW, 1)
            assert [comm.placement for comm in cluster.comms] == [partly, partly]
            assert cluster.wrong_bytes() == 0
            fabric.unhold()
            all_report(await tasks)

    run(main())


def test_i7_a_failed_tensor_keeps_the_whole_layer_old_on_every_rank() -> None:
    """C4: the second tensor's READ fails on one rank; every tensor of every expert stays, on both ranks."""
    settings = Settings(secret=b"s" * 16, max_post_descriptors=1)
    faults = FaultPlan().fail_read("default/1.", nth=1, status="nixlBackendError")

    async def main() -> None:
        async with LocalCluster(OLD, faults=faults, settings=settings) as cluster:
            one, two = await cluster.migrate(NEW)
            assert isinstance(two, NixlTransferFailed)
            assert (two.status, two.rank, two.layer, two.experts) == ("nixlBackendError", 0, 0, (0,))
            assert isinstance(one, MigrationAborted)
            assert (one.origin, one.committed_layers) == (1, 0)
            assert "nixlBackendError" in one.reason
            assert [comm.placement for comm in cluster.comms] == [OLD, OLD]
            assert cluster.wrong_bytes() == 0
            all_report(await cluster.migrate(NEW))

    run(main())


def test_i8_stale_duplicate_and_forged_messages_are_counted_and_dropped() -> None:
    """Garbage, a wrong key, another incarnation, duplicates: never raised, never acted on."""
    faults = FaultPlan().duplicate_notif(nth=None)

    async def main() -> None:
        async with LocalCluster(OLD, faults=faults) as cluster:
            driver = cluster.comms[0]._session.driver
            before = driver.protocol.snapshot()
            forged = Codec(b"f" * 32, ep_size=2, num_layers=3)
            join = messages.Join(term=0, attempt=9, sender=1, digests=(b"x" * 16,) * 3, last_epoch=0)
            stale = messages.Leave(sender=1, sender_incarnation=7, receiver_incarnation=driver.identity.incarnation)
            for data in (b"", b"garbage", forged.encode(join), driver._codec.encode(stale)):
                driver.notification("somebody", data)
            assert driver.protocol.snapshot() == before
            assert sum(driver.dropped.values()) == 4, driver.dropped
            for placement in (NEW, OLD):
                all_report(await cluster.migrate(placement))
            assert cluster.wrong_bytes() == 0
            assert sum(cluster.comms[0].health().dropped.values()) > 4

    run(main())


def test_i9_after_every_kind_of_failure_the_communicator_is_idle_and_usable() -> None:
    """A failed READ, a timeout, a cancel, unequal placements: idle at once or soon, and the next one works."""
    faults = FaultPlan().fail_read("default/1.", nth=0)

    async def main() -> None:
        async with LocalCluster(OLD, faults=faults) as cluster:
            await cluster.migrate(NEW)
            await cluster.migrate(NEW, ranks=[0], timeout=0.5)
            other = Placement([[3, 1, 0, 2]] * 3, ep_size=2)
            await asyncio.gather(
                cluster.migrate(NEW, ranks=[0]), cluster.migrate(other, ranks=[1]), return_exceptions=True
            )
            await eventually(lambda: all(comm.health().phase == "idle" for comm in cluster.comms))
            all_report(await cluster.migrate(NEW))
            assert cluster.wrong_bytes() == 0

    run(main())


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377])
def test_i10_cancellation_always_gets_through(turns: int) -> None:
    """Cancelled after any number of turns: the task ends cancelled, ranks end equal, the next one works."""

    async def main() -> None:
        async with LocalCluster(OLD) as cluster:
            other = asyncio.ensure_future(cluster.migrate(NEW, ranks=[1], timeout=20.0))
            task = asyncio.ensure_future(cluster.comms[0].migrate(NEW, timeout=20.0))
            for _ in range(turns):
                await asyncio.sleep(0)
            if task.done():
                await other
                return
            task.cancel()
            await asyncio.wait([task], timeout=0.001)
            assert task.cancelled()
            await other
            await eventually(lambda: all(comm.health().phase == "idle" for comm in cluster.comms))
            assert len({comm.placement for comm in cluster.comms}) == 1
            assert cluster.wrong_bytes() == 0
            reports = await cluster.migrate(OLD)
            all_report(reports)
            assert cluster.wrong_bytes() == 0
        assert not cluster.fabric.violations

    run(main())


def test_i11_what_runs_out_says_phase_and_whom_it_waited_for() -> None:
    """A rank whose peer never migrates: a bounded wait, and an error that names the peer."""

    async def main() -> None:
        async with LocalCluster(OLD) as cluster:
            started = asyncio.get_running_loop().time()
            (error,) = await cluster.migrate(NEW, ranks=[0], timeout=0.5)
            assert isinstance(error, MigrationAborted)
            assert "joined" in error.reason
            assert "[1]" in error.reason
            assert asyncio.get_running_loop().time() - started < 1.0

    run(main())


def test_i14_a_damaged_blob_never_reaches_nixl() -> None:
    """C13 at the rendezvous: damaged and forged introductions are refused by name before NIXL sees them."""
    fabric = MemoryFabric()

    async def main() -> None:
        cluster = LocalCluster(OLD, fabric=fabric)
        original = cluster.rendezvous.get

        def tampered(key: str) -> bytes | None:
            value = original(key)
            return value[:-10] if value is not None and "blob/1" in key else value

        cluster.rendezvous.get = tampered  # type: ignore[method-assign]
        added: list[bytes] = []

        class Spy:
            def __init__(self, inner: object) -> None:
                self.__dict__["inner"] = inner

            def __getattr__(self, name: str) -> object:
                if name == "add_remote":
                    added.append(b"")
                return getattr(self.inner, name)

            def __setattr__(self, name: str, value: object) -> None:
                setattr(self.inner, name, value)

        make = fabric.native
        fabric.native = lambda name, s: Spy(make(name, s)) if "/0." in name else make(name, s)  # type: ignore
        results = await asyncio.gather(cluster._open(0), cluster._open(1), return_exceptions=True)
        assert isinstance(results[0], HandshakeError)
        assert "rank 1" in str(results[0])
        assert "truncated" in str(results[0])
        assert not added
        for result in results:
            if isinstance(result, AsyncEplbCommunicator):
                await result.aclose()

    run(main())


@pytest.mark.parametrize("verify", ["identity", "full"])
def test_i16_a_source_that_changed_since_the_plan_is_caught(verify: Literal["identity", "full"]) -> None:
    """C4: the source's slot holds another expert than the plan says; NIXL says DONE, we say IntegrityError.

    Rows whose bytes changed, with ``verify="full"``: see ``test_updating``.
    """

    async def main() -> None:
        async with LocalCluster(OLD, settings=Settings(secret=b"s" * 16, verify=verify)) as cluster:
            cluster.comms[0]._session.weights.write_entries(1, [3, 1], 0)
            one, two = await cluster.migrate(NEW)
            assert isinstance(two, IntegrityError)
            assert "expert 0" in str(two)
            assert "expert 3" in str(two)
            assert "layer 1" in str(two)
            assert isinstance(one, MigrationAborted)
            assert {comm.placement for comm in cluster.comms} <= {OLD, OLD.with_layers(NEW, 1)}
            assert len({comm.placement for comm in cluster.comms}) == 1

    run(main())


def test_i17_a_rank_with_nothing_to_do_serves_until_the_end() -> None:
    """Sources that only progress when they poll: idle ranks keep polling until nobody reads from them."""
    old = Placement([[0, 1, 2, 3]] * 4, ep_size=4)
    fabric = MemoryFabric(needs_target_progress=True)

    async def main() -> None:
        async with LocalCluster(old, fabric=fabric) as cluster:
            target = Placement([[1, 0, 2, 3]] * 4, ep_size=4)
            reports = await cluster.migrate(target, timeout=5.0)
            all_report(reports)
            assert cluster.wrong_bytes() == 0

    run(main())


class SlowCopier:
    """A copier whose bytes are there only when an event has completed, as on CUDA (I-18)."""

    def __init__(self, inner: Callable[[Sequence[Copy]], Awaitable[None]]) -> None:
        self._inner = inner
        self.event = asyncio.Event()
        self.waiting = 0

    async def fence(self) -> None:
        """Nothing is queued."""

    async def copy(self, copies: Sequence[Copy]) -> None:
        """Wait for the event, then copy."""
        self.waiting += 1
        await self.event.wait()
        await self._inner(copies)
        self.waiting -= 1


def test_i18_a_layer_counts_as_applied_only_when_its_event_has_completed() -> None:
    """Until then its staging is not reused, its placement not switched, and the next JOIN not sent."""

    async def main() -> None:
        async with LocalCluster(OLD, settings=ONE_LAYER) as cluster:
            session = cluster.comms[0]._session
            slow = SlowCopier(session.copier.copy)
            session.copier = slow
            tasks = asyncio.ensure_future(cluster.migrate(NEW))
            await eventually(lambda: slow.waiting > 0)
            await asyncio.sleep(1.0)
            assert cluster.comms[0].placement == OLD
            assert cluster.comms[0].health().committed == 1, "staging of one layer was reused before its event"
            slow.event.set()
            all_report(await tasks)
            slow.event.clear()
            tasks = asyncio.ensure_future(cluster.migrate(OLD))
            await eventually(lambda: slow.waiting > 0)
            with pytest.raises(CommunicatorBusy):
                await cluster.comms[0].migrate(NEW)
            slow.event.set()
            await tasks
            assert cluster.wrong_bytes() == 0

    run(main())


def test_i7_a_rank_that_cannot_apply_is_out_and_says_so() -> None:
    """Rows that are neither old nor new must not be used: that rank closes itself, the others go on without it."""
    old = Placement([[0, 1, 2, 0, 1, 2]] * 2, ep_size=3)
    new = Placement([[2, 1, 0, 2, 1, 0]] * 2, ep_size=3)
    without = Placement([[0, 1, 2, 0, -1, -1]] * 2, ep_size=3)

    class Broken:
        async def fence(self) -> None:
            """Nothing is queued."""

        async def copy(self, copies: Sequence[Copy]) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    async def main() -> None:
        async with LocalCluster(old) as cluster:
            cluster.comms[2]._session.copier = Broken()
            results = await cluster.migrate(new)
            assert isinstance(results[2], RuntimeError)
            with pytest.raises(CommunicatorClosed, match="broken"):
                await cluster.comms[2].migrate(new)
            await eventually(lambda: cluster.comms[0].health().members == (0, 1))
            assert cluster.comms[0].placement == cluster.comms[1].placement
            again = await cluster.migrate(without, ranks=[0, 1])
            all_report(again)
            assert cluster.wrong_bytes([0, 1]) == 0

    run(main())


@pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf"), True, "5"])
def test_i11_an_endless_or_senseless_timeout_is_refused(timeout: float) -> None:
    """Every wait has a finite deadline: what is none is refused by name, and nothing was begun."""

    async def main() -> None:
        async with LocalCluster(OLD) as cluster:
            with pytest.raises(ValueError, match="timeout="):
                await cluster.comms[0].migrate(NEW, timeout=timeout)
            all_report(await cluster.migrate(NEW))

    run(main())


def test_staging_that_is_the_weights_own_memory_is_refused() -> None:
    """A READ into it would overwrite rows before COMMIT."""

    async def main() -> None:
        cluster = LocalCluster(OLD, row_bytes=(4096,))
        with pytest.raises(WeightsError, match="shares memory"):
            await AsyncEplbCommunicator.open(
                rank=0,
                ep_size=2,
                weights=cluster.rows[0].layers,
                placement=OLD,
                rendezvous=cluster.rendezvous,
                staging=cluster.rows[0].layers[0][0].view(-1),
                settings=Settings(verify="off", secret=b"s" * 16),
                engine=LoopEngine(asyncio.get_running_loop()),
                native=cluster.fabric.native,
            )

    run(main())
