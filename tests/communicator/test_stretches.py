"""Small layers that go together: how many, and that each is still a layer of its own whatever goes wrong."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from eplb_async.communicator.stretch import Stretches
from eplb_async.core.incoming import Incoming
from eplb_async.core.layout import Layout, TensorPlace, TensorSpec
from eplb_async.core.messages import Commit
from eplb_async.core.placement import Placement
from eplb_async.core.plan import plan
from eplb_async.errors import MigrationAborted, NixlTransferFailed
from eplb_async.settings import Settings
from eplb_async.testing import FaultPlan, MemoryFabric, run
from eplb_async.testing.cluster import LocalCluster
from eplb_async.testing.placements import random_placement
from tests.communicator.groups import all_report, posts

LAYERS = 16
OLD = Placement([[0, 1, 2, 3]] * LAYERS, ep_size=2)
NEW = Placement([[2, 3, 0, 1]] * LAYERS, ep_size=2)
ROWS = (4096, 1024)  # so large that alignment is not what fills the staging


def chosen(**more: object) -> Settings:
    """Settings of a cluster; its staging holds all layers, so that a quarter of them go together."""
    return Settings(secret=b"s" * 16, **more)  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------- how many together
def layout(*row_bytes: int) -> Layout:
    """Layers of one tensor, each with rows of its own size."""
    return Layout(
        tuple(
            (TensorPlace(TensorSpec("w", size, size, 2, (size,), (1,), "uint8", "cpu"), 4096 * (layer + 1)),)
            for layer, size in enumerate(row_bytes)
        )
    )


def together(old: list[list[int]], new: list[list[int]], *row_bytes: int, staging: int, max_bytes: int) -> list[range]:
    """The stretches of rank 0."""
    moves = Incoming.of(plan(Placement(old, ep_size=2), Placement(new, ep_size=2)), 0)
    stretches = Stretches(moves, layout(*row_bytes), staging={"DRAM": staging}, max_bytes=max_bytes)
    found: list[range] = []
    while not found or found[-1].stop < len(old):
        found.append(stretches.widest(found[-1].stop if found else 0))
    return found


@pytest.mark.parametrize(
    ("staging", "max_bytes", "counts"),
    [
        (8000, 1 << 20, [6]),  # a quarter of the staging holds 20 rows, of which 12 come
        (8000, 800, [4, 2]),
        (1600, 800, [2, 2, 2]),
        (1600, 399, [1] * 6),
        (1599, 800, [1] * 6),
        (100, 800, [1] * 6),
        (8000, 0, [1] * 6),
    ],
)
def test_as_many_go_together_as_the_setting_and_a_quarter_of_the_staging_hold(
    staging: int, max_bytes: int, counts: list[int]
) -> None:
    """Six layers of two rows of 100 bytes."""
    found = together([[0, 1, 2, 3]] * 6, [[2, 3, 0, 1]] * 6, *[100] * 6, staging=staging, max_bytes=max_bytes)
    assert [len(layers) for layers in found] == counts


def test_layers_that_are_unlike_stay_apart_and_those_without_moves_join() -> None:
    """Rows of another size begin another stretch; a layer that does not change costs nothing."""
    old, swapped = [0, 1, 2, 3], [2, 3, 0, 1]
    new = [swapped, old, old, swapped, swapped, old]
    found = together([old] * 6, new, 100, 100, 100, 100, 50, 50, staging=1600, max_bytes=1 << 20)
    assert found == [range(4), range(4, 6)]


# ----------------------------------------------------------------------------------------------- they are one
def test_small_layers_share_posts_votes_and_copies_and_are_told_one_by_one() -> None:
    """16 layers in four READs a rank; ``on_layer_applied`` hears of each in turn, with a placement that has it."""
    fabric = MemoryFabric()
    told: list[list[int]] = [[], []]

    def teller(rank: int) -> Callable[[int, Placement], object]:
        def tell(layer: int, placement: Placement) -> None:
            told[rank].append(layer)
            row = placement.physical_to_logical_map[layer]
            assert row.tolist() == NEW.physical_to_logical_map[layer].tolist()

        return tell

    async def main() -> None:
        async with LocalCluster(
            OLD, row_bytes=ROWS, fabric=fabric, settings=chosen(), on_layer_applied=teller
        ) as cluster:
            copies = 0
            copier = cluster.comms[1]._session.copier
            copy = copier.copy

            async def counted(wanted: object) -> None:
                nonlocal copies
                copies += 1
                await copy(wanted)  # type: ignore[arg-type]

            copier.copy = counted  # type: ignore[method-assign, assignment]
            reports = await cluster.migrate(NEW)
            all_report(reports)
            assert [report.reads for report in reports] == [4, 4]  # type: ignore[union-attr]
            assert copies == 4
            assert cluster.wrong_bytes() == 0

    run(main())
    assert told == [list(range(LAYERS))] * 2
    assert (posts(fabric, 0), posts(fabric, 1)) == (4, 4)


def test_ranks_need_not_take_the_same_layers_together() -> None:
    """One takes layers one by one, one three at a time: COMMIT falls in the middle of a stretch, and all is right."""
    settings = [chosen(max_stretch_bytes=0), chosen(max_stretch_bytes=3 * 2 * (4096 + 1024 + 32))]
    fabric = MemoryFabric()

    async def main() -> None:
        async with LocalCluster(OLD, row_bytes=ROWS, fabric=fabric, settings=settings) as cluster:
            for placement in (NEW, OLD):
                reports = await cluster.migrate(placement)
                all_report(reports)
                assert [report.reads for report in reports] == [16, 6]  # type: ignore[union-attr]
                assert cluster.wrong_bytes() == 0

    run(main())
    assert not fabric.violations


@pytest.mark.parametrize("layers", [1, 2])
def test_staging_for_few_layers_is_enough(layers: int) -> None:
    """Then each goes by itself."""
    fabric = MemoryFabric()

    async def main() -> None:
        async with LocalCluster(OLD, row_bytes=ROWS, fabric=fabric, settings=chosen(staging_layers=layers)) as cluster:
            reports = await cluster.migrate(NEW)
            assert [report.reads for report in reports] == [16, 16]  # type: ignore[union-attr]
            assert cluster.wrong_bytes() == 0

    run(main())


def test_layers_that_lie_one_behind_the_other_are_read_each_by_itself() -> None:
    """Views of one tensor ``[layers, slots, ...]``: rows of two layers that touch are of two registered regions."""
    fabric = MemoryFabric()
    new = Placement([[3, 1, 2, 0] if layer % 2 == 0 else [2, 1, 0, 3] for layer in range(LAYERS)], ep_size=2)

    async def main() -> None:
        cluster = LocalCluster(OLD, row_bytes=ROWS, fabric=fabric, settings=chosen())
        for weights in cluster.rows:
            whole = [torch.stack(list(tensors)) for tensors in zip(*weights.layers, strict=True)]
            weights.layers = [[tensor[layer] for tensor in whole] for layer in range(LAYERS)]
        async with cluster:
            for placement in (new, OLD):
                reports = await cluster.migrate(placement)
                all_report(reports)
                assert cluster.wrong_bytes() == 0

    run(main())
    assert not fabric.violations


# ----------------------------------------------------------------------------------------------- what goes wrong
# Experts 0 and 1 are held by ranks 0 and 1; rank 2 wants both, in every layer.
SPARE = Placement([[0, 1, 2, -1, 0, 1, 3, -1, 4, 5, -1, -1]] * LAYERS, ep_size=3)
WANTED = Placement([[0, 1, 2, -1, 0, 1, 3, -1, 4, 5, 0, 1]] * LAYERS, ep_size=3)


def test_a_read_that_fails_in_the_middle_of_a_stretch_is_made_again_alone(caplog: pytest.LogCaptureFixture) -> None:
    """One descriptor a post, one of which fails: its expert comes from the other rank, the rest is kept."""
    fabric = MemoryFabric(FaultPlan().fail_read("default/2.", peer="default/0.", nth=7))

    async def main() -> None:
        settings = chosen(max_post_descriptors=1)
        async with LocalCluster(SPARE, row_bytes=ROWS, fabric=fabric, settings=settings) as cluster:
            with caplog.at_level(logging.WARNING, "eplb_async.communicator"):
                reports = await cluster.migrate(WANTED)
            all_report(reports)
            assert reports[2].retries == 1  # type: ignore[union-attr]
            assert posts(fabric, 2) == 3 * 2 * LAYERS + 3
            assert cluster.wrong_bytes() == 0
            said = [r.getMessage() for r in caplog.records if "instead of" in r.getMessage()]
            assert len(said) == 1, said
            assert "of layer 2 instead of rank 0" in said[0]  # READs 6, 7 and 8 from rank 0 are of layer 2

    run(main())
    assert not fabric.violations
    assert fabric.open_handles == 0


def test_a_post_of_several_layers_that_fails_is_told_layer_by_layer(caplog: pytest.LogCaptureFixture) -> None:
    """Every expert that it was to bring is read again, one line for each layer."""
    fabric = MemoryFabric(FaultPlan().fail_read("default/2.", peer="default/0.", nth=1))

    async def main() -> None:
        async with LocalCluster(SPARE, row_bytes=ROWS, fabric=fabric, settings=chosen()) as cluster:
            with caplog.at_level(logging.WARNING, "eplb_async.communicator"):
                reports = await cluster.migrate(WANTED)
            all_report(reports)
            said = [r.getMessage() for r in caplog.records if "instead of" in r.getMessage()]
            assert len(said) == reports[2].retries == 8  # type: ignore[union-attr]
            assert [f"of layer {layer} instead of rank 0" in line for layer, line in enumerate(said, 8)] == [True] * 8
            assert cluster.wrong_bytes() == 0

    run(main())
    assert not fabric.violations


def test_the_error_names_the_layer_and_the_expert_that_no_source_is_left_for() -> None:
    """A post of four layers fails and nobody else holds its experts: none of the four is applied, those before are."""
    fabric = MemoryFabric(FaultPlan().fail_read("default/1.", nth=2))

    async def main() -> None:
        async with LocalCluster(OLD, row_bytes=ROWS, fabric=fabric, settings=chosen()) as cluster:
            zero, one = await cluster.migrate(NEW)
            assert isinstance(one, NixlTransferFailed), one
            assert (one.rank, one.layer, one.experts) == (0, 8, (0,))
            assert isinstance(zero, MigrationAborted), zero
            assert zero.committed_layers in (0, 4, 8)  # a vote may be on its way
            ended = OLD.with_layers(NEW, zero.committed_layers)
            assert [comm.placement for comm in cluster.comms] == [ended, ended]
            assert cluster.wrong_bytes() == 0
            again = await cluster.migrate(NEW)
            all_report(again)
            assert cluster.wrong_bytes() == 0

    run(main())
    assert not fabric.violations


def test_later_stretches_give_back_their_staging_for_a_read_that_is_made_again() -> None:
    """Stretches of two layers fill the staging of eight: those after the failed one are READ once more."""
    old = Placement([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7]] * LAYERS, ep_size=4)
    new = Placement([[4, 5, 6, 7, 0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]] * LAYERS, ep_size=4)
    fabric = MemoryFabric(FaultPlan().fail_read("default/2.", peer="default/0.", nth=0))

    async def main() -> None:
        settings = chosen(staging_layers=8)
        async with LocalCluster(old, row_bytes=ROWS, fabric=fabric, settings=settings) as cluster:
            reports = await cluster.migrate(new)
            all_report(reports)
            assert reports[2].retries == 2 * 2  # type: ignore[union-attr]
            assert cluster.wrong_bytes() == 0

    run(main())
    assert not fabric.violations
    assert fabric.open_handles == 0


def test_a_stretch_is_applied_as_far_as_nobody_uses_its_layers() -> None:
    """Layer 2 of a stretch of four is in use: those before change, it and those after wait."""

    async def main() -> None:
        fabric = MemoryFabric()
        async with LocalCluster(OLD, row_bytes=ROWS, fabric=fabric, settings=chosen()) as cluster:
            comm = cluster.comms[0]
            async with comm.using(2) as placement:
                moving = asyncio.ensure_future(cluster.migrate(NEW))
                await asyncio.sleep(1.0)
                assert comm.placement == OLD.with_layers(NEW, 2)
                assert cluster.comms[1].placement == NEW
                assert comm.health().in_use == {2: 1}
                assert (placement.physical_to_logical_map[2] == OLD.physical_to_logical_map[2]).all()
                async with comm.using(3), comm.using(1), comm.using(0):  # its door is not shut, theirs are open again
                    assert comm.placement == OLD.with_layers(NEW, 2)
                assert cluster.wrong_bytes() == 0
            all_report(await moving)
            async with comm.using(2), comm.using(3):
                assert comm.placement == NEW
            assert cluster.wrong_bytes() == 0

    run(main())


def test_at_steps_the_layers_of_a_stretch_change_one_by_one() -> None:
    """They are staged together; each is voted for when the one before is applied, at a step of its own."""
    seen: list[int] = []

    async def main() -> None:
        settings = chosen(activation="step", step_margin=1, max_pause=0.02, hot_seconds=0.0002)
        fabric = MemoryFabric()
        async with LocalCluster(OLD, row_bytes=ROWS, fabric=fabric, settings=settings) as cluster:
            moving = asyncio.ensure_future(cluster.migrate(NEW))
            while not moving.done():
                for comm in cluster.comms:
                    async with comm.step():
                        now = comm.placement.physical_to_logical_map
                        seen.append(int((now == NEW.physical_to_logical_map).all(axis=1).sum()))
                await asyncio.sleep(0.05)
            all_report(await moving)
            assert posts(fabric, 0) == 4
            assert cluster.wrong_bytes() == 0

    run(main())
    zero, one = seen[::2], seen[1::2]
    assert zero == one, "a step ran with two placements"
    assert max(b - a for a, b in itertools.pairwise(zero)) == 1


@pytest.mark.parametrize("activation", ["immediate", "step"])
def test_a_coordinator_that_is_excluded_alive_is_ahead_by_one_decision(activation: str) -> None:
    """Its COMMIT reached nobody: it has applied what that was of, at steps one layer, and is fenced."""
    old = Placement([[0, 1, 2, 3, 4, 5]] * LAYERS, ep_size=3)
    new = Placement([[2, 3, 4, 5, 0, 1]] * LAYERS, ep_size=3)

    async def main() -> None:
        async with LocalCluster(old, row_bytes=ROWS, settings=chosen(activation=activation)) as cluster:
            driver = cluster.comms[0]._session.driver
            send = driver.send
            driver.send = lambda to, what: None if isinstance(what, Commit) else send(to, what)  # type: ignore[method-assign]
            moving = [asyncio.ensure_future(comm.migrate(new)) for comm in cluster.comms]
            async with asyncio.timeout(10.0):
                while cluster.comms[0].placement == old:
                    await asyncio.sleep(0.001)
            await asyncio.gather(*(cluster.comms[rank].exclude(0) for rank in (1, 2)))
            await asyncio.gather(*moving, return_exceptions=True)
            async with asyncio.timeout(10.0):
                while [comm.health().phase for comm in cluster.comms] != ["fenced", "idle", "idle"]:
                    await asyncio.sleep(0.01)
            ahead = cluster.comms[0].placement.physical_to_logical_map
            layers = int((ahead == new.physical_to_logical_map).all(axis=1).sum())
            assert layers == 1 if activation == "step" else layers > 1
            assert [comm.placement for comm in cluster.comms[1:]] == [old, old]
            assert cluster.wrong_bytes() == 0

    run(main())


@given(
    seed=st.integers(0, 2**32 - 1),
    together=st.lists(st.sampled_from([0, 300, 1000, 1 << 20]), min_size=3, max_size=3),
    staging=st.sampled_from([0, 1, 2, 5]),
    descriptors=st.sampled_from([3, 512]),
    ends=st.sampled_from(["cancel", "kill", "fail", "nothing"]),
    at=st.floats(-4, -1.5),
)
@hypothesis_settings(max_examples=40, deadline=None)
def test_i7_wherever_it_ends_all_ranks_end_at_one_layer(
    seed: int, together: list[int], staging: int, descriptors: int, ends: str, at: float
) -> None:
    """I-7, I-9: a rank cancels, dies or cannot read within a stretch; every rank has its own stretches."""
    rng = np.random.default_rng(seed)
    shape = {"num_layers": 12, "num_logical": 5, "num_local_experts": 4, "ep_size": 3, "empty": 1}
    first, second = (random_placement(rng, **shape) for _ in range(2))
    faults = FaultPlan()
    if ends == "fail":
        faults.fail_read("default/1.", nth=int(10 ** (at + 4) / 10), lands=bool(seed & 1))
    fabric = MemoryFabric(faults)
    more = {"staging_layers": staging, "max_post_descriptors": descriptors, "max_pause": 0.03, "hot_seconds": 0.0002}
    settings = [chosen(max_stretch_bytes=nbytes, **more) for nbytes in together]

    async def main() -> None:
        async with LocalCluster(first, fabric=fabric, settings=settings) as cluster:
            tasks = [asyncio.ensure_future(comm.migrate(second, timeout=30.0)) for comm in cluster.comms]
            await asyncio.sleep(10**at)
            if ends == "cancel":
                tasks[2].cancel()
            elif ends == "kill":
                cluster.kill(2)
            living = [0, 1] if ends == "kill" else [0, 1, 2]
            await asyncio.gather(*(tasks[rank] for rank in living), return_exceptions=True)
            async with asyncio.timeout(10.0):
                while any(cluster.comms[rank].health().phase != "idle" for rank in living):
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)
            assert len({cluster.comms[rank].placement for rank in living}) == 1
            assert cluster.wrong_bytes(living) == 0
            if ends != "kill":
                fabric.faults = FaultPlan()
                again = await cluster.migrate(first)
                all_report(again)
                assert cluster.wrong_bytes() == 0
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    run(main())
    assert not fabric.violations
