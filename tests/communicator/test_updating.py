"""The owner rewrites its weights (C33): epochs end first, none begins inside, and nothing old survives.

``PatternWeights.rewrite`` is the owner: afterwards every byte says which generation it is of.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch

from eplb_async.communicator import AsyncEplbCommunicator, MigrationReport
from eplb_async.core.placement import Placement
from eplb_async.engine import Engine
from eplb_async.errors import (
    CommunicatorBusy,
    CommunicatorClosed,
    IntegrityError,
    MigrationAborted,
    MigrationInDoubt,
    MigrationTimeout,
    WeightsError,
)
from eplb_async.settings import Settings
from eplb_async.testing import FaultPlan, MemoryFabric, run
from eplb_async.testing.cluster import LocalCluster, MemoryRendezvous
from eplb_async.testing.placements import random_placement
from tests.communicator.groups import NEW, OLD, all_report, migrates

# An idle rank may look for messages every two seconds only; until then it counts a JOIN that was taken back.
SETTLED_SECONDS = 2.2


def settings(verify: Any = "full", **more: Any) -> Settings:
    return Settings(secret=b"s" * 16, verify=verify, **more)


async def update(cluster: LocalCluster, rank: int, layers: Iterable[int] | None = None, **more: Any) -> None:
    """Have a rank's owner write the next generation."""
    chosen = None if layers is None else list(layers)
    async with cluster.comms[rank].updating_weights(chosen, **more) as placement:
        assert placement == cluster.comms[rank].placement
        cluster.rows[rank].rewrite(placement, chosen)
        await asyncio.sleep(0.001)


# ------------------------------------------------------------------------------------------------------- C33
@pytest.mark.parametrize("verify", ["off", "identity", "full"])
def test_c33_weights_rewritten_between_migrations(verify: str) -> None:
    """Every replica follows the current placement: the next migrations move the new bytes, whichever the mode."""

    async def main() -> None:
        async with LocalCluster(OLD, settings=settings(verify)) as cluster:
            await migrates(cluster, NEW)
            for generation in (1, 2):
                for rank in (1, 0):
                    await update(cluster, rank)
                assert {comm.health().weight_version for comm in cluster.comms} == {generation}
                assert cluster.wrong_bytes() == 0
                await migrates(cluster, OLD)
                await migrates(cluster, NEW)

    run(main())


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("verify", ["identity", "full"])
def test_c33_weights_rewritten_during_a_migration(first: int, verify: str) -> None:
    """One owner begins in mid-READ, while the other rank still reads from it: what lands is discarded on both."""
    reader = 1 - first
    fabric = MemoryFabric(FaultPlan().hold_read(f"default/{reader}.", nth=1))

    async def main() -> None:
        async with LocalCluster(OLD, fabric=fabric, settings=settings(verify, max_post_descriptors=2)) as cluster:
            running = asyncio.ensure_future(cluster.migrate(NEW))
            while not cluster.comms[reader].health().reads_in_flight:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.1)
            before = cluster.comms[first].placement
            await update(cluster, first)
            fabric.unhold()  # half of what lands now is new
            results = await running
            for result in results:
                assert isinstance(result, MigrationAborted), result
                assert "updating_weights" in result.reason
                assert result.origin == first
            assert {comm.placement for comm in cluster.comms} == {before}
            assert cluster.wrong_bytes() == 0
            await update(cluster, reader)
            await migrates(cluster, NEW)
            await migrates(cluster, OLD)

    run(main())
    assert not fabric.violations


@pytest.mark.parametrize("seed", range(60), ids=lambda seed: f"seed{seed}")
def test_c33_at_any_moment(seed: int) -> None:
    """Owners begin at random moments of a migration, each by itself; afterwards every byte is new and in its place."""
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    ranks = rng.randint(2, 4)
    shape: Any = {"num_layers": 3, "num_logical": ranks * 2, "num_local_experts": 3, "ep_size": ranks}
    first = random_placement(numbers, **shape)
    plan = FaultPlan()
    for _ in range(rng.randint(0, 2)):
        plan.late_landing(f"default/{rng.randrange(ranks)}.", nth=rng.randint(0, 5), delay=rng.choice((0.001, 0.05)))
    fabric = MemoryFabric(plan, latency=rng.choice((50e-6, 1e-3)), bytes_per_second=rng.choice((1e5, 1e7)))

    async def owner(cluster: LocalCluster, rank: int) -> None:
        await asyncio.sleep(10 ** rng.uniform(-5, -1))
        await update(cluster, rank)

    async def main() -> None:
        chosen = settings(rng.choice(("off", "identity", "full")), max_post_descriptors=rng.choice((1, 512)))
        async with LocalCluster(first, fabric=fabric, settings=chosen) as cluster:
            for generation in (1, 2):
                owners = [asyncio.ensure_future(owner(cluster, rank)) for rank in range(ranks)]
                results = await cluster.migrate(random_placement(numbers, **shape), timeout=0.5)
                await asyncio.gather(*owners)
                for result in results:  # a reader may notice the next version before it hears of the end
                    assert isinstance(result, MigrationReport | MigrationAborted | CommunicatorBusy | IntegrityError)
                    assert not isinstance(result, IntegrityError) or "updates its weights" in str(result)
                assert len({comm.placement for comm in cluster.comms}) == 1
                assert cluster.wrong_bytes() == 0
                assert {comm.health().weight_version for comm in cluster.comms} == {generation}
            await asyncio.sleep(SETTLED_SECONDS)
            await migrates(cluster, random_placement(numbers, **shape))

    run(main())
    assert not fabric.violations, fabric
    assert fabric.open_handles == 0, fabric


def test_a_rank_that_the_update_has_not_reached_is_named() -> None:
    """Only rank 0 was updated: both refuse before any READ, and say which version is where."""

    async def main() -> None:
        async with LocalCluster(OLD, settings=settings()) as cluster:
            await update(cluster, 0)
            posts = cluster.fabric.posts
            for result in await cluster.migrate(NEW):
                assert isinstance(result, MigrationAborted)
                assert "version 0 on rank 1, version 1 on rank 0" in result.reason
            assert cluster.fabric.posts == posts
            await update(cluster, 1)
            await migrates(cluster, NEW)

    run(main())


def test_a_version_of_the_callers_own_brings_ranks_together() -> None:
    """A retried update counts twice on one rank; a number from the trainer does not."""

    async def main() -> None:
        async with LocalCluster(OLD, settings=settings()) as cluster:
            await update(cluster, 0)
            await update(cluster, 0)
            cluster.rows[1].generations = [1] * 3
            await update(cluster, 1, version=2)
            await migrates(cluster, NEW)
            for rank in (0, 1):
                await update(cluster, rank, version=40)
            async with cluster.comms[0].updating_weights(version=40):
                pass
            await migrates(cluster, OLD)
            assert cluster.comms[0].health().weight_version == 40

    run(main())


# ------------------------------------------------------------------------------------------------ while inside
def test_inside_nothing_else_begins_and_peers_time_out_naming_this_rank() -> None:
    """CommunicatorBusy here, MigrationTimeout there; afterwards all works."""

    async def main() -> None:
        async with LocalCluster(OLD, settings=settings()) as cluster:
            comm = cluster.comms[0]
            async with comm.updating_weights():
                for call in (lambda: comm.migrate(NEW), comm.rebind, comm.suspend, comm.resume):
                    with pytest.raises(CommunicatorBusy, match="update of weights"):
                        await call()
                with pytest.raises(CommunicatorBusy, match="update of weights"):
                    async with comm.updating_weights():
                        pass
                (result,) = await cluster.migrate(NEW, ranks=[1], timeout=0.5)
                assert isinstance(result, MigrationTimeout)
                assert "waiting for ranks [0]" in result.reason
            async with cluster.comms[1].updating_weights():
                pass
            await migrates(cluster, NEW)

    run(main())


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ([3], "0 to 2"),
        ([-1], "0 to 2"),
        ([], "at least one"),
        ([True], "nothing else"),
        (2, "sequence"),
        (["a"], "seq"),
    ],
)
def test_layers_that_are_none_are_refused_before_anything(layers: Any, said: str) -> None:
    """Out of range, empty, no numbers: a running migration is not touched."""

    async def main() -> None:
        async with LocalCluster(OLD, settings=settings()) as cluster:
            running = asyncio.ensure_future(cluster.migrate(NEW))
            await asyncio.sleep(0)
            with pytest.raises(ValueError, match=said):
                async with cluster.comms[0].updating_weights(layers):
                    raise AssertionError("entered")
            all_report(await running)
            assert cluster.comms[0].health().weight_version == 0

    run(main())


@pytest.mark.parametrize("version", [0, -1, True, 1.0, 1 << 63])
def test_a_version_that_is_no_number_or_older_is_refused(version: Any) -> None:
    """The present one is 1."""

    async def main() -> None:
        async with LocalCluster(OLD, settings=settings()) as cluster:
            await update(cluster, 0)
            with pytest.raises(ValueError, match="from 1, the present"):
                await update(cluster, 0, version=version)

    run(main())


# -------------------------------------------------------------------------------------- ends that are not good
@pytest.mark.parametrize("how", ["raises", "is cancelled"])
def test_a_body_that_does_not_end_well_leaves_its_layers_unusable_until_written_again(how: str) -> None:
    """What the rows hold is not known: the version stays, migrations are refused, an update of them mends it."""

    async def main() -> None:
        async with LocalCluster(OLD, settings=settings()) as cluster:
            comm = cluster.comms[0]

            async def half() -> None:
                async with comm.updating_weights([0, 2]):
                    cluster.rows[0].layers[0][0].fill_(1)
                    if how == "raises":
                        raise OSError("no more disk")
                    await asyncio.sleep(100)

            task = asyncio.ensure_future(half())
            await asyncio.sleep(1.0)
            task.cancel()
            with pytest.raises(OSError if how == "raises" else asyncio.CancelledError):
                await task
            health = comm.health()
            assert (health.weight_version, health.half_written) == (0, (0, 2))
            with pytest.raises(WeightsError, match=r"layers \[0, 2\].*updating_weights"):
                await comm.migrate(NEW)
            await update(cluster, 0, [2])
            with pytest.raises(WeightsError, match=r"layers \[0\]"):
                await comm.migrate(NEW)
            await update(cluster, 0, [0], version=1)
            await update(cluster, 1, [0, 2])
            assert comm.health().half_written == ()
            await migrates(cluster, NEW)

    run(main())


@pytest.mark.parametrize("turns", [*range(12), 20, 40, 80, 160])
def test_an_entry_that_is_cancelled_changes_nothing(turns: int) -> None:
    """Cancelled while it waits for a migration to end, or right when it is let in: the next ones work."""

    async def main() -> None:
        async with LocalCluster(OLD, settings=settings()) as cluster:
            entered = []

            async def enter() -> None:
                async with cluster.comms[0].updating_weights():
                    entered.append(True)
                    await asyncio.sleep(100)

            running = asyncio.ensure_future(cluster.migrate(NEW))
            await asyncio.sleep(0.0003)
            task = asyncio.ensure_future(enter())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            await running
            if entered:
                assert cluster.comms[0].health().half_written == (0, 1, 2)
                await update(cluster, 0)
                await update(cluster, 1)
            await asyncio.sleep(SETTLED_SECONDS)
            await migrates(cluster, NEW)
            await migrates(cluster, OLD)

    run(main())


def test_an_entry_waits_no_longer_than_it_may_and_nothing_is_written() -> None:
    """This rank voted and its coordinator is stopped: it cannot know how the epoch ends, so nobody may write."""

    async def main() -> None:
        chosen = settings(settle_timeout=0.5)
        async with LocalCluster(OLD, settings=chosen) as cluster:
            running = asyncio.ensure_future(cluster.migrate(NEW))
            while not cluster.comms[1].health().prepared:
                await asyncio.sleep(0)
            cluster.stop(0)
            with pytest.raises(MigrationTimeout, match="not begun"):
                await update(cluster, 1, timeout=0.1)
            with pytest.raises(MigrationInDoubt, match="updating_weights"):
                await update(cluster, 1, timeout=2.0)
            assert cluster.comms[1].health().half_written == ()
            cluster.resume(0)
            await running
            assert cluster.wrong_bytes() == 0
            for rank in (0, 1):
                await update(cluster, rank)
            await migrates(cluster, OLD)
            await migrates(cluster, NEW)

    run(main())


def test_a_communicator_that_closes_meanwhile_says_so() -> None:
    """Leaving the update of a closed communicator raises; the error of the body is never masked."""

    async def main() -> None:
        async with LocalCluster(OLD, settings=settings()) as cluster:
            with pytest.raises(CommunicatorClosed):
                async with cluster.comms[0].updating_weights():
                    await cluster.comms[0].aclose()
            with pytest.raises(OSError, match="own"):  # noqa: PT012
                async with cluster.comms[1].updating_weights():
                    await cluster.comms[1].aclose()
                    raise OSError("own")
            with pytest.raises(CommunicatorClosed):
                await update(cluster, 0)

    run(main())


def test_storage_that_moved_in_an_update_is_registered_anew() -> None:
    """A reload allocates: leaving the update does what ``rebind`` does, before it digests anything."""

    async def main() -> None:
        async with LocalCluster(OLD, settings=settings()) as cluster:
            for rank, comm in enumerate(cluster.comms):
                async with comm.updating_weights() as placement:
                    for tensors in cluster.rows[rank].layers:
                        tensors[0].data = tensors[0].data.clone()
                    cluster.rows[rank].rewrite(placement)
            assert [comm.health().recycled for comm in cluster.comms] == [1, 1]
            await migrates(cluster, NEW)

    run(main())


@pytest.mark.parametrize("turns", range(12))
def test_version_and_half_written_layers_go_together_whenever_leaving_is_cancelled(turns: int) -> None:
    """Either it had ended well when the cancel came, or the version stays: an update done again counts once."""

    async def main() -> None:
        async with LocalCluster(OLD, settings=settings("identity")) as cluster:
            comm, left = cluster.comms[0], asyncio.Event()

            async def write() -> None:
                async with comm.updating_weights():
                    left.set()

            task = asyncio.ensure_future(write())
            await left.wait()
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            await asyncio.sleep(0.1)
            said = comm.health().weight_version, comm.health().half_written
            assert said in ((0, (0, 1, 2)), (1, ()))

    run(main())


@pytest.mark.asyncio
async def test_storage_that_moved_is_registered_though_leaving_is_cancelled() -> None:
    """The cancel overtakes it on the engine loop: else the next update takes it for registered, and peers read dust."""
    engine, fabric = Engine("test updating"), MemoryFabric(clock=time.monotonic)
    weights = [[torch.zeros(4, 64, dtype=torch.uint8)]]
    leaving: asyncio.Task[None]
    moved = False

    def source() -> list[list[torch.Tensor]]:
        if moved and not leaving.cancelling():
            engine.post(lambda: time.sleep(0.1))
            leaving.cancel()
        return weights

    async def move() -> None:
        nonlocal moved
        async with comm.updating_weights():
            weights[0][0] = weights[0][0].clone()
            moved = True

    comm = await AsyncEplbCommunicator.open(
        rank=0,
        ep_size=1,
        weights=source,
        placement=Placement([[0, 1, 2, 3]], ep_size=1),
        rendezvous=MemoryRendezvous(),
        settings=settings(),
        engine=engine,
        native=fabric.native,
    )
    leaving = asyncio.create_task(move())
    await asyncio.wait([leaving])
    assert leaving.cancelled()
    async with comm.updating_weights():
        pass
    (agent,) = (agent for agent in fabric.agents.values() if not agent.destroyed)
    assert weights[0][0].data_ptr() in {address for address, _ in agent._registered.values()}
    await comm.aclose()
    await engine.astop()


# ------------------------------------------------------------------------------------------------------- digests
@pytest.mark.parametrize("local", [False, True], ids=["read", "local copy"])
def test_i16_a_row_that_was_scribbled_on_is_caught(local: bool) -> None:
    """One byte written outside an update: the layer is wholly old on all ranks, the error says where and what to do."""
    old, new = Placement([[0, 1, 2, 3]] * 3, ep_size=2), Placement([[2, 0, 1, 3]] * 3, ep_size=2)

    async def main() -> None:
        async with LocalCluster(old, row_bytes=(64, 0, 24), settings=settings()) as cluster:
            cluster.rows[0].layers[1][2][0, 23] ^= 1
            results = await cluster.migrate(new)
            reader, other = (0, 1) if local else (1, 0)
            if not local:  # expert 1 of rank 0 goes to rank 1; expert 0 stays there
                cluster.rows[0].layers[1][2][0, 23] ^= 1
                cluster.rows[0].layers[1][2][1, 0] ^= 1
                assert any(isinstance(result, IntegrityError) for result in results)
                results = await cluster.migrate(new)
            error = results[reader]
            assert isinstance(error, IntegrityError), results
            assert (error.layer, error.expert, error.rank, error.slot) == (1, int(not local), 0, int(not local))
            assert "updating_weights" in str(error)
            assert isinstance(results[other], MigrationAborted)
            placement = cluster.comms[0].placement
            assert placement == cluster.comms[1].placement
            assert placement in (old, old.with_layers(new, 1))
            assert cluster.wrong_bytes() == 1
            await update(cluster, 0, [1])
            await update(cluster, 1, [1])
            await migrates(cluster, new)

    run(main())


def test_i16_bytes_that_were_damaged_on_the_way_are_caught() -> None:
    """NIXL says DONE, the source is right: caught, and the next migration works."""
    fabric = MemoryFabric(FaultPlan().damage_read("default/1.", nth=0))

    async def main() -> None:
        async with LocalCluster(OLD, fabric=fabric, settings=settings()) as cluster:
            one, two = await cluster.migrate(NEW)
            assert isinstance(two, IntegrityError)
            assert isinstance(one, MigrationAborted)
            assert [comm.placement for comm in cluster.comms] == [OLD, OLD]
            assert cluster.wrong_bytes() == 0
            await migrates(cluster, NEW)

    run(main())


def test_digests_move_along_with_the_rows() -> None:
    """Several slots of one expert, empty slots, copies here and READs there: checked again and again."""
    rng = np.random.default_rng(5)
    shape: Any = {"num_layers": 2, "num_logical": 4, "num_local_experts": 3, "ep_size": 3, "empty": 2}
    placements = [random_placement(rng, **shape) for _ in range(8)]

    async def main() -> None:
        async with LocalCluster(placements[0], row_bytes=(64, 0, 24), settings=settings()) as cluster:
            for placement in placements[1:]:
                await migrates(cluster, placement)

    run(main())


def test_only_the_layers_that_were_named_are_digested_anew() -> None:
    """A row of another layer that was written all the same is caught: its digest is the old one."""

    async def main() -> None:
        async with LocalCluster(OLD, settings=settings()) as cluster:
            for rank in (0, 1):
                async with cluster.comms[rank].updating_weights([0]):
                    cluster.rows[rank].rewrite(OLD, [0, 2])
            results = await cluster.migrate(NEW)
            assert any(isinstance(result, IntegrityError) and result.layer == 2 for result in results), results
            assert cluster.wrong_bytes() == 0

    run(main())
