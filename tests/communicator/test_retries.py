"""READs that fail and are made again from another rank that holds the expert."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_async.communicator import MigrationReport
from eplb_async.core.placement import Placement
from eplb_async.errors import IntegrityError, MigrationAborted, NixlPeerDisconnected, NixlTransferFailed
from eplb_async.settings import Settings
from eplb_async.testing import FaultPlan, MemoryFabric, run
from eplb_async.testing.cluster import LocalCluster
from eplb_async.testing.placements import random_placement
from eplb_async.weights import Copy, Piece
from tests.communicator.groups import all_report

# Experts 0 and 1 are held by ranks 0 and 1; rank 2 wants both.
OLD = Placement([[0, 1, 2, -1, 0, 1, 3, -1, 4, 5, -1, -1]] * 3, ep_size=3)
NEW = Placement([[0, 1, 2, -1, 0, 1, 3, -1, 4, 5, 0, 1]] * 3, ep_size=3)

ROWS = (4096, 1024)  # so large that alignment is not what fills the staging


def with_settings(**chosen: object) -> Settings:
    return Settings(secret=b"s" * 16, **chosen)  # type: ignore[arg-type]


@pytest.mark.parametrize("phase", ["make", "post", "poll"])
@pytest.mark.parametrize("peer", ["default/0.", "default/1."])
def test_a_failed_read_is_made_again_from_the_other_rank(
    phase: str, peer: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Every READ from one source fails, in any phase, and lands all the same: the other one serves."""
    fabric = MemoryFabric(FaultPlan().fail_read("default/2.", peer=peer, nth=None, phase=phase))  # type: ignore[arg-type]
    failing = int(peer[-2])

    async def main() -> None:
        async with LocalCluster(OLD, row_bytes=ROWS, fabric=fabric, settings=with_settings()) as cluster:
            with caplog.at_level(logging.WARNING, "eplb_async.communicator"):
                reports = await cluster.migrate(NEW)
            all_report(reports)
            retries = [report.retries for report in reports if isinstance(report, MigrationReport)]
            assert retries[:2] == [0, 0]
            assert 1 <= retries[2] <= 3, "layers posted before the first failure was known"
            assert cluster.wrong_bytes() == 0
            assert all(comm.placement == NEW for comm in cluster.comms)
            said = [r.getMessage() for r in caplog.records if "instead of" in r.getMessage()]
            assert len(said) == retries[2], "one line for each layer"
            assert f"rank 2: rank {1 - failing} serves experts" in said[0]
            assert f"instead of rank {failing}: NixlTransferFailed: NIXL transfer failed with state=" in said[0]
            degraded = cluster.comms[2].health().degraded
            assert list(degraded) == [failing]
            assert "a READ from it failed" in degraded[failing]
            fabric.faults = FaultPlan()
            for report in await cluster.migrate(OLD):
                assert isinstance(report, MigrationReport), report
                assert report.retries == 0
            assert not cluster.comms[2].health().degraded, "the note outlived the next migration"
            assert cluster.wrong_bytes() == 0

    run(main())
    assert not fabric.violations
    assert fabric.open_handles == 0


def test_i3_what_a_failed_read_may_still_write_is_not_used_for_the_one_instead() -> None:
    """The failed READ lands late, after the vote: what was READ instead is what is applied."""
    fabric = MemoryFabric(
        FaultPlan()
        .fail_read("default/2.", peer="default/0.", nth=0)
        .late_landing("default/2.", peer="default/0.", nth=0, delay=5.0)
    )

    async def main() -> None:
        async with LocalCluster(OLD, row_bytes=ROWS, fabric=fabric, settings=with_settings()) as cluster:
            reports = await cluster.migrate(NEW)
            all_report(reports)
            assert cluster.comms[2].health().quarantined_bytes > 0
            staging = cluster.comms[2]._session._staging
            taken = []
            while (more := staging.try_allocate({"DRAM": 64})) is not None:
                taken += more
            for piece in taken:
                staging.view(piece, 0, 1, piece.nbytes).fill_(0x77)
            await asyncio.sleep(10.0)
            assert all((staging.view(piece, 0, 1, piece.nbytes) == 0x77).all() for piece in taken)
            staging.free(tuple(taken))
            assert cluster.wrong_bytes() == 0
            again = await cluster.migrate(OLD)
            all_report(again)

    run(main())
    assert not fabric.violations


def test_an_expert_moves_as_a_whole_from_the_rank_instead() -> None:
    """One tensor's READ fails: all its tensors, and its entry, come from the other; other experts stay."""
    settings = with_settings(max_post_descriptors=1)
    fabric = MemoryFabric(FaultPlan().fail_read("default/2.", peer="default/0.", nth=1))
    old, new = (Placement(p.physical_to_logical_map[:1], ep_size=3) for p in (OLD, NEW))

    async def main() -> None:
        async with LocalCluster(old, fabric=fabric, settings=settings) as cluster:
            reports = await cluster.migrate(new)
            all_report(reports)
            assert reports[2].retries == 1  # type: ignore[union-attr]
            # Three READs for each of two experts in the layer, and three more for the one that failed.
            assert len(fabric.log) == 3 * 2 + 3
            assert cluster.wrong_bytes() == 0

    run(main())


def test_each_source_is_tried_once_and_then_the_layer_is_given_up() -> None:
    """All READs fail: one from each rank that holds the expert, the first failure's successor is raised."""
    fabric = MemoryFabric(FaultPlan().fail_read("default/2.", nth=None))

    async def main() -> None:
        async with LocalCluster(OLD, row_bytes=ROWS, fabric=fabric, settings=with_settings()) as cluster:
            one, two, three = await cluster.migrate(NEW)
            assert isinstance(three, NixlTransferFailed)
            assert isinstance(one, MigrationAborted)
            assert isinstance(two, MigrationAborted)
            asked = [peer.split(".")[0] for reader, peer, _ in fabric.log if reader.startswith("default/2.")]
            assert set(asked) == {"default/0", "default/1"}
            assert len(asked) <= 3 * 2 + 2 * 3, "an expert was tried twice from one rank"
            assert all(comm.placement == OLD for comm in cluster.comms)
            fabric.faults = FaultPlan()
            again = await cluster.migrate(NEW)
            all_report(again)
            assert cluster.wrong_bytes() == 0

    run(main())
    assert not fabric.violations


@pytest.mark.parametrize("held", [False, True], ids=["moving", "slow"])
def test_later_layers_give_back_their_staging_for_it(held: bool) -> None:
    """Two layers fill the staging: the second is taken back, READ again later, and every byte is right."""
    # All of rank 2's slots change in every layer, so that two layers fill the staging of two.
    old = Placement([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7]] * 4, ep_size=4)
    new = Placement([[4, 5, 6, 7, 0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]] * 4, ep_size=4)
    faults = FaultPlan().fail_read("default/2.", peer="default/0.", nth=0)
    if held:  # a READ of the layer that is taken back is still on its way then
        faults.late_landing("default/2.", peer="default/1.", nth=1, delay=0.5)
    fabric = MemoryFabric(faults)

    async def main() -> None:
        async with LocalCluster(
            old, row_bytes=ROWS, fabric=fabric, settings=with_settings(staging_layers=2)
        ) as cluster:
            reports = await cluster.migrate(new)
            all_report(reports)
            assert reports[2].retries == 2  # type: ignore[union-attr]
            asked = [nbytes for reader, _, nbytes in fabric.log if reader.startswith("default/2.")]
            # Layers 0 and 1 from both, layer 0 again, then layer 1 once more and the others from rank 1 alone.
            assert len(asked) == 2 + 2 + 1 + 1 + 2
            assert cluster.wrong_bytes() == 0

    run(main())
    assert not fabric.violations
    assert fabric.open_handles == 0


def test_i3_a_migration_that_ends_while_layers_are_taken_back_waits_for_their_copies() -> None:
    """A local copy of a later layer is on its way: its staging is not given back before that has ended."""
    old = Placement([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7]] * 4, ep_size=4)
    new = Placement([[0, 1, 2, 3, 0, 1, 2, 3, 5, 4, 1, 0, 4, 5, 6, 7]] * 4, ep_size=4)
    fabric = MemoryFabric(FaultPlan().fail_read("default/2.", peer="default/0.", nth=0))
    writing: list[float] = []
    freed: list[int] = []

    async def main() -> None:
        async with LocalCluster(
            old, row_bytes=ROWS, fabric=fabric, settings=with_settings(staging_layers=2)
        ) as cluster:
            session = cluster.comms[2]._session
            copier, staging = session.copier, session._staging
            copy, free = copier.copy, staging.free
            slowness = iter([0.1, 1.0])  # of layer 0, and of layer 1

            async def slow(copies: Sequence[Copy]) -> None:
                async def thread(seconds: float) -> None:  # nobody can cancel one
                    writing.append(seconds)
                    await asyncio.sleep(seconds)
                    await copy(copies)
                    writing.remove(seconds)

                await asyncio.shield(asyncio.ensure_future(thread(next(slowness))))

            def watched(pieces: tuple[Piece, ...]) -> None:
                freed.append(len(writing))
                free(pieces)

            copier.copy, staging.free = slow, watched  # type: ignore[method-assign]
            others = asyncio.ensure_future(cluster.migrate(new, ranks=[0, 1, 3]))
            moving = asyncio.ensure_future(cluster.comms[2].migrate(new, timeout=30.0))
            await asyncio.sleep(0.5)
            assert writing == [1.0]
            moving.cancel()
            await asyncio.gather(moving, return_exceptions=True)
            await others
            await asyncio.sleep(3.0)
            copier.copy = copy  # type: ignore[method-assign]

    run(main())
    assert freed
    assert not any(freed), "staging was given back under a copy"


def test_a_read_that_is_made_again_waits_for_no_source_but_its_own() -> None:
    """Rank 2 waits for rank 0, of which it reads one row at a time: what it is to read from rank 1 instead goes now."""
    old = Placement([[0, 1, 6, 7, 2, 3, 6, 7, 4, 5, 6, 7, 2, 3, 6, 7]] * 2, ep_size=4)
    ids = old.physical_to_logical_map.copy()
    ids[0, 8:10], ids[1, 8] = (0, 1), 2
    ids[:, 2:4] = (4, 5)
    new = Placement(ids, ep_size=4)
    fabric = MemoryFabric(FaultPlan().hold_read("default/2.", peer="default/0.", nth=0))
    apart = {"max_peer_requests_in_flight": 1, "max_post_descriptors": 1, "max_stretch_bytes": 0}
    chosen = with_settings(verify="full", staging_layers=4, **apart)

    async def main() -> None:
        async with LocalCluster(old, fabric=fabric, settings=chosen) as cluster:
            cluster.rows[3].layers[1][0][0, 7] ^= 0xFF
            moving = asyncio.ensure_future(cluster.migrate(new))
            await asyncio.sleep(1.0)
            asked = [peer.split(".")[0] for reader, peer, _ in fabric.log if reader.startswith("default/2.")]
            assert asked.count("default/0") == 1
            assert asked.count("default/3") == 3
            assert asked.count("default/1") == 3, "it waits for rank 0"
            fabric.unhold()
            reports = await moving
            all_report(reports)
            assert cluster.wrong_bytes([0, 1, 2]) == 0

    run(main())


@pytest.mark.parametrize("why", ["setting", "timeout", "disconnect", "staging"])
def test_when_a_read_is_not_made_again(why: str) -> None:
    """Switched off; its deadline, which is the migration's; a peer that is gone; no staging to READ into."""
    faults, timeout = FaultPlan().fail_read("default/2.", peer="default/0.", nth=None), 30.0
    if why == "timeout":
        faults, timeout = FaultPlan().hold_read("default/2.", peer="default/0.", nth=None), 1.0
    elif why == "disconnect":
        faults = FaultPlan().hold_read("default/2.", peer="default/0.", nth=None)
    staging = 3 if why != "staging" else 1
    fabric = MemoryFabric(faults)
    chosen = Settings(secret=b"s" * 16, retry_reads=why != "setting", staging_layers=staging)
    # All of rank 2's slots change, so that one layer fills the staging of one.
    old = Placement([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7]], ep_size=4)
    new = Placement([[4, 5, 6, 7, 0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]], ep_size=4)

    async def main() -> None:
        async with LocalCluster(old, fabric=fabric, settings=chosen) as cluster:
            moving = asyncio.ensure_future(cluster.migrate(new, timeout=timeout))
            if why == "disconnect":
                await asyncio.sleep(0.5)
                cluster.kill(0)
            three = (await moving)[2]
            assert isinstance(three, NixlTransferFailed), three
            assert isinstance(three, NixlPeerDisconnected) == (why == "disconnect")
            if why == "staging":
                assert three.__notes__ == ["not read again from another rank: no staging was free for it"]
            assert cluster.comms[2].placement == old
            assert cluster.wrong_bytes([2]) == 0

    run(main())
    assert not fabric.violations


def test_i16_a_source_that_holds_something_else_is_passed_over() -> None:
    """Its rows are not what its placement says: the other rank's are taken, and the log says who is wrong."""

    async def main() -> None:
        async with LocalCluster(OLD, settings=with_settings()) as cluster:
            for rank in (0, 1):
                cluster.comms[rank]._session.weights.write_entries(1, [3, 1, 2, -1] if rank == 0 else [0, 1, 3, -1], 0)
            reports = await cluster.migrate(NEW)
            all_report(reports)
            assert reports[2].retries <= 1  # type: ignore[union-attr]
            assert cluster.wrong_bytes() == 0
            cluster.comms[1]._session.weights.write_entries(1, [3, 3, 3, -1], 0)
            cluster.comms[0]._session.weights.write_entries(1, [3, 3, 3, -1], 0)
            swap = Placement([[0, 1, 2, -1, 0, 1, 3, -1, 0, 5, 4, 2]] * 3, ep_size=3)
            results = await cluster.migrate(swap)
            assert isinstance(results[2], IntegrityError)
            assert len({comm.placement for comm in cluster.comms}) == 1

    run(main())


def test_i16_rows_that_were_scribbled_on_are_passed_over_in_full_mode() -> None:
    """The entry is right and the bytes are not: the other rank's are taken; with no other, the layer stays old."""

    async def main() -> None:
        async with LocalCluster(OLD, row_bytes=ROWS, settings=with_settings(verify="full")) as cluster:
            for expert in (0, 1):
                cluster.rows[0].layers[1][0][expert, 7] ^= 0xFF
            reports = await cluster.migrate(NEW)
            all_report(reports)
            assert reports[2].retries == 1  # type: ignore[union-attr]
            assert "IntegrityError" in cluster.comms[2].health().degraded[0]
            assert cluster.wrong_bytes([1, 2]) == 0
            for rank in (1, 2):
                cluster.rows[rank].layers[1][0][:, 7] ^= 0xFF
            spread = Placement([[0, 1, 2, 5, 0, 1, 3, 4, 4, 5, 0, 1]] * 3, ep_size=3)
            results = await cluster.migrate(spread)
            assert any(isinstance(result, IntegrityError) for result in results), results
            assert {comm.placement for comm in cluster.comms} <= {NEW, NEW.with_layers(spread, 1)}
            assert len({comm.placement for comm in cluster.comms}) == 1

    run(main())


@given(
    seed=st.integers(0, 2**32 - 1),
    failing=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12)), min_size=1, max_size=6),
    lands=st.booleans(),
    descriptors=st.sampled_from([1, 3, 512]),
    layers=st.integers(1, 3),
    late=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12)), max_size=3),
    cut=st.none() | st.floats(-5, -2),
    verify=st.sampled_from(["off", "identity", "full"]),
)
@settings(max_examples=60, deadline=None)
def test_whatever_fails_all_ranks_end_at_one_layer_with_the_right_bytes(
    seed: int,
    failing: list[tuple[int, int]],
    lands: bool,
    descriptors: int,
    layers: int,
    late: list[tuple[int, int]],
    cut: float | None,
    verify: str,
) -> None:
    """I-3, I-7, I-9, I-10: READs fail, land late, a rank cancels (after 10**cut seconds): equal, and on it goes."""
    rng = np.random.default_rng(seed)
    shape = {"num_layers": 3, "num_logical": 5, "num_local_experts": 4, "ep_size": 4, "empty": 1}
    first, second, third = (random_placement(rng, **shape) for _ in range(3))
    faults = FaultPlan()
    for rank, nth in failing:
        faults.fail_read(f"default/{rank}.", nth=nth, lands=lands)
    for rank, nth in late:
        faults.late_landing(f"default/{rank}.", nth=nth, delay=0.3)
    fabric = MemoryFabric(faults)
    chosen = Settings(
        secret=b"s" * 16,
        staging_layers=layers,
        max_post_descriptors=descriptors,
        verify=verify,  # type: ignore[arg-type]
        max_pause=0.03,  # laps are what this test costs
        hot_seconds=0.0002,
    )

    async def main() -> None:
        async with LocalCluster(first, fabric=fabric, settings=chosen) as cluster:
            for placement in (second, third):
                others = asyncio.ensure_future(cluster.migrate(placement, ranks=range(3)))
                task = asyncio.ensure_future(cluster.comms[3].migrate(placement, timeout=30.0))
                if cut is not None:
                    await asyncio.sleep(10**cut)
                    task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                results = await others
                async with asyncio.timeout(10.0):
                    while any(comm.health().phase != "idle" for comm in cluster.comms):
                        await asyncio.sleep(0.01)
                await asyncio.sleep(0.3)  # an idle rank looks for messages now and then
                assert len({comm.placement for comm in cluster.comms}) == 1, results
                assert cluster.wrong_bytes() == 0
            fabric.faults = FaultPlan()
            again = await cluster.migrate(first)
            all_report(again)
            assert cluster.wrong_bytes() == 0

    run(main())
    assert not fabric.violations
    assert fabric.open_handles == 0
