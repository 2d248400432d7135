"""Layers are applied between the same two steps on every rank (rule 11, C21), whatever becomes of the epoch."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from eplb_async.communicator import AsyncEplbCommunicator, MigrationReport
from eplb_async.core.placement import Placement
from eplb_async.errors import (
    ActivationTimeout,
    CommunicatorClosed,
    HandshakeError,
    MigrationAborted,
    MigrationTimeout,
    NixlTransferTimeout,
)
from eplb_async.settings import Settings
from eplb_async.testing import FaultPlan, MemoryFabric, run
from eplb_async.testing.cluster import LocalCluster
from eplb_async.testing.placements import random_placement
from tests.communicator.groups import NEW, OLD, THREE, THREE_NEW, all_report, eventually
from tests.communicator.lockstep import LockStep, settings

CALM = {"max_pause": 0.02, "hot_seconds": 0.0002}  # virtual time goes by in fewer laps


class Running:
    """A cluster whose ranks step, each in a task of its own."""

    def __init__(self, cluster: LocalCluster, *, steps: int = 10_000, **how: Any) -> None:
        self.cluster = cluster
        self.engines = LockStep(range(len(cluster.comms)))
        self.tasks = [
            asyncio.ensure_future(self.engines.run(rank, comm, steps, look=self._look(rank), **how))
            for rank, comm in enumerate(cluster.comms)
        ]

    def _look(self, rank: int) -> Callable[[Placement], None]:
        def look(placement: Placement) -> None:
            assert self.cluster.rows[rank].wrong_bytes(placement) == 0, "a step saw rows that are not the placement's"

        return look

    async def __aenter__(self) -> Running:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self.tasks:
            task.cancel()
        for result in await asyncio.gather(*self.tasks, return_exceptions=True):
            if isinstance(result, Exception) and not isinstance(result, CommunicatorClosed):
                raise result
        self.engines.check()

    async def step(self, number: int) -> None:
        """Wait until all ranks have begun a step."""
        await eventually(lambda: all(comm.health().step >= number for comm in self.cluster.comms))


# ---------------------------------------------------------------------------------------- without any failure
def test_every_layer_changes_between_the_same_two_steps_and_all_are_told() -> None:
    """While the engines step: three layers, three changes, each between two steps; the callback is inside of each."""
    told: dict[int, list[tuple[int, Placement]]] = {0: [], 1: []}

    async def main() -> None:
        async with LocalCluster(OLD, settings=settings(), on_layer_applied=lambda r: lambda *a: told[r].append(a)) as c:
            async with Running(c) as running:
                await running.step(3)
                before = [comm.health().step for comm in c.comms]
                all_report(await c.migrate(NEW))
                await running.step(before[0] + 12)
            assert running.engines.check() == 3
            assert c.wrong_bytes() == 0
        after = [OLD.with_layers(NEW, layer + 1) for layer in range(3)]
        assert told == {rank: list(enumerate(after)) for rank in (0, 1)}

    run(main())


@pytest.mark.parametrize("said", [False, True], ids=["before the first step", "idle after some steps"])
def test_an_idle_engine_waits_for_no_step(said: bool) -> None:
    async def main() -> None:
        async with LocalCluster(OLD, settings=settings()) as c:
            if said:
                async with Running(c, steps=5) as running:
                    await asyncio.gather(*running.tasks)
                for comm in c.comms:
                    comm.idle()
            all_report(await c.migrate(NEW, timeout=2.0))
            all_report(await c.migrate(OLD, timeout=2.0))
            async with Running(c, steps=5) as running:
                await asyncio.gather(*running.tasks)
            assert c.wrong_bytes() == 0

    run(main())


def test_what_waits_for_a_step_is_applied_when_the_engine_becomes_idle() -> None:
    """One rank has voted in a step, the engines stop before the step that all wait for: idle() brings it forward."""
    fabric = MemoryFabric(FaultPlan().hold_read("default/1.", nth=0))

    async def main() -> None:
        async with LocalCluster(OLD, fabric=fabric, settings=settings()) as c:
            running = Running(c, steps=4)
            await running.step(2)
            migrating = asyncio.ensure_future(c.migrate(NEW, timeout=20.0))
            await asyncio.gather(*running.tasks)
            fabric.unhold()
            await eventually(lambda: all(comm.health().due for comm in c.comms))
            assert [comm.placement for comm in c.comms] == [OLD, OLD]
            c.comms[0].idle()
            await asyncio.sleep(1.0)
            assert not migrating.done(), "one rank is idle, the other may step"
            assert [comm.placement == OLD for comm in c.comms] == [False, True]
            c.comms[1].idle()
            all_report(await migrating)
            async with Running(c, steps=5) as running:
                await asyncio.gather(*running.tasks)

    run(main())


def test_a_rank_that_gave_its_numbers_goes_on_with_them() -> None:
    async def main() -> None:
        async with LocalCluster(OLD, settings=settings()) as c:
            async with Running(c, steps=40, number=5_000) as running:
                await running.step(5_003)
                all_report(await c.migrate(NEW))
                await asyncio.gather(*running.tasks)
            assert min(running.engines.seen) == 5_000
            for wrong in (5_039, 0, -1, 1 << 32, True, "1"):
                with pytest.raises(ValueError, match=r"step .* does not come after step 5039"):
                    c.comms[0].step(wrong)  # type: ignore[arg-type]

    run(main())


def test_a_rank_that_comes_back_takes_up_the_count_of_the_others() -> None:
    """It says after which step all are idle, and then switches with them, idle and in steps."""

    async def main() -> None:
        async with LocalCluster(THREE, settings=settings()) as c:
            async with Running(c, steps=5) as running:
                await asyncio.gather(*running.tasks)
            c.kill(2)
            await asyncio.gather(c.comms[0].exclude(2), c.comms[1].exclude(2))
            opening = asyncio.ensure_future(c.restart(2))
            assert set(await c.reconnect(2)) == {None}
            await opening
            for comm in c.comms:
                comm.idle(5)
            all_report(await c.migrate(THREE_NEW, timeout=3.0))
            async with Running(c) as running:
                await running.step(8)
                all_report(await c.migrate(THREE, timeout=3.0))
                await running.step(c.comms[0].health().step + 2)
            assert running.engines.check() == 3
            assert min(running.engines.seen) == 6

    run(main())


def test_a_callback_that_fails_is_counted_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(layer: int, placement: Placement) -> None:
        raise ValueError(f"no room for layer {layer}")

    async def main() -> None:
        async with LocalCluster(OLD, settings=settings(), on_layer_applied=lambda rank: refuse if rank else None) as c:
            async with Running(c):
                all_report(await c.migrate(NEW))
            healths = [comm.health() for comm in c.comms]
            assert [health.callback_errors for health in healths] == [0, 3]
            assert "no room for layer 2" in healths[1].last_error
            assert c.wrong_bytes() == 0

    run(main())
    assert "on_layer_applied failed for layer 0" in caplog.text


def test_ranks_must_mean_the_same_by_a_step() -> None:
    """One applies at once, or with another margin: no rank opens, and each says what differs, with both values."""

    async def main(other: Settings, *says: str) -> None:
        with pytest.raises(HandshakeError) as caught:
            async with LocalCluster(OLD, settings=[settings(), other]):
                pass
        said = str(caught.value)
        assert "has other settings: " in said
        assert [word for word in says if word not in said] == []

    run(main(settings(step_margin=3), "step_margin is 3 there and 2 here"))
    run(
        main(
            settings(activation="immediate"),
            "activation is immediate there and step here",
            "step_margin is not used there and 2 here",
        )
    )
    run(main(settings(verify="off"), "verify is off there and identity here"))


def test_steps_that_are_not_used_or_not_closed_are_refused() -> None:
    async def main() -> None:
        async with LocalCluster(OLD, settings=settings(activation="immediate")) as c:
            for call in (c.comms[0].step, c.comms[0].idle):
                with pytest.raises(RuntimeError, match="activation='step'"):
                    call()
        async with LocalCluster(OLD, settings=settings()) as c:
            async with c.comms[0].step() as step:
                assert (step.number, step.term) == (1, 0)
                for call in (c.comms[0].step, c.comms[0].idle):
                    with pytest.raises(RuntimeError, match="step 1 has not ended"):
                        call()
            comm = c.comms[0]
        with pytest.raises(CommunicatorClosed, match="closed"):
            async with comm.step():
                pass

    run(main())


# --------------------------------------------------------------------------------------------------------- C21
def test_c21_a_rank_that_does_not_decide_ends_the_migration_and_holds_no_step_for_longer() -> None:
    """Before COMMIT: the voter waits before its hold, bounded; aborted on both with the layer; then all is well."""
    fabric = MemoryFabric(FaultPlan().hold_read("default/1.", nth=1))

    async def main() -> None:
        async with LocalCluster(
            OLD, fabric=fabric, settings=settings(activation_timeout=1.5, max_stretch_bytes=0)
        ) as c:
            async with Running(c) as running:
                await running.step(2)
                loop = asyncio.get_running_loop()
                begun = loop.time()
                one, two = await c.migrate(NEW, timeout=30.0)
                assert 1.5 <= loop.time() - begun < 3.0
                for error in (one, two):
                    assert isinstance(error, MigrationAborted), error
                    assert (error.origin, error.committed_layers) == (0, 1)
                    assert "layer 1 was not decided before step" in error.reason
                    assert "for ranks [1]" in error.reason
                assert [comm.health().phase for comm in c.comms] == ["idle", "idle"]
                assert [comm.placement for comm in c.comms] == [OLD.with_layers(NEW, 1)] * 2
                fabric.unhold()
                all_report(await c.migrate(NEW))
                await running.step(c.comms[0].health().step + 2)
            assert running.engines.check() == 3

    run(main())


@pytest.mark.parametrize("stuck", [0, 1])
def test_c21_a_rank_stuck_in_its_step_before_commit_ends_the_migration_on_both(stuck: int) -> None:
    """It does not vote and never comes to its boundary: the deadline ends it on both, whichever is the coordinator."""
    fabric = MemoryFabric(FaultPlan().hold_read(f"default/{stuck}.", nth=0))

    async def main() -> None:
        async with LocalCluster(OLD, fabric=fabric, settings=settings()) as c, Running(c) as running:
            await running.step(2)
            running.engines.stuck.add(stuck)
            errors = await c.migrate(NEW, timeout=5.0)
            assert isinstance(errors[stuck], NixlTransferTimeout)  # its own READ is the cause that it knows
            assert errors[stuck].layer == 0
            assert isinstance(errors[1 - stuck], MigrationAborted)
            assert re.search(r"layer=0|layer 0 undecided, waiting for ranks", str(errors[1 - stuck]))
            assert [comm.health().phase for comm in c.comms] == ["idle", "idle"]
            assert [comm.placement for comm in c.comms] == [OLD, OLD]
            fabric.unhold()
            running.engines.free()
            all_report(await c.migrate(NEW))
            await running.step(c.comms[0].health().step + 2)

    run(main())


@pytest.mark.parametrize("stuck", [0, 1])
def test_c21_a_rank_that_does_not_come_to_the_step_of_a_committed_layer_is_named(stuck: int) -> None:
    """After COMMIT: both say which rank, layer and step; nothing changes until it comes, and then on both."""

    async def main() -> None:
        async with LocalCluster(OLD, settings=settings()) as c:
            async with Running(c) as running:
                await running.step(2)
                running.engines.stuck.add(stuck)
                errors = await c.migrate(NEW, timeout=5.0)
                healths = [comm.health() for comm in c.comms]
                for error, health in zip(errors, healths, strict=True):
                    assert isinstance(error, ActivationTimeout), error
                    assert isinstance(error, TimeoutError)
                    assert (error.layer, error.ranks, error.committed_layers) == (0, (stuck,), 1)
                    assert f"least far are ranks [{stuck}]" in str(error)
                    assert health.due == {0: error.step}
                    assert health.behind == (stuck,)
                    assert health.phase == "activating"
                    assert f"layer 0 for step {error.step} waits, least far are ranks {stuck}" in str(health)
                assert [comm.placement for comm in c.comms] == [OLD, OLD]
                for error in await c.migrate(NEW, timeout=2.0):
                    assert isinstance(error, MigrationTimeout), error
                    assert f"least far are ranks [{stuck}]" in str(error)
                running.engines.free()
                all_report(await c.migrate(NEW))
                assert [comm.placement for comm in c.comms] == [NEW, NEW]
                await running.step(c.comms[0].health().step + 2)
            assert running.engines.check() == 3

    run(main())


# ----------------------------------------------------------------------- what else may come while a layer is due
@contextlib.asynccontextmanager
async def due(placement: Placement, new: Placement, **more: Any) -> Any:
    """Layer 0 is committed, the engines are stuck in a step before its own; the migrations run."""
    async with LocalCluster(placement, settings=settings(**more)) as c, Running(c) as running:
        await running.step(2)
        running.engines.stuck = set(range(placement.ep_size))
        migrating = [asyncio.ensure_future(comm.migrate(new, timeout=30.0)) for comm in c.comms]
        await eventually(lambda: all(comm.health().due for comm in c.comms))
        yield c, running, migrating
        running.engines.free()
        for task in migrating:
            task.cancel()
        await asyncio.gather(*migrating, return_exceptions=True)


def test_a_due_layer_outlives_a_cancel() -> None:
    """The caller is told at once; layer 0 changes on both at its step, the others on neither."""

    async def main() -> None:
        async with due(OLD, NEW) as (c, running, migrating):
            migrating[0].cancel()
            with pytest.raises(asyncio.CancelledError):
                await migrating[0]
            await asyncio.sleep(1.0)
            assert not migrating[1].done()
            assert [comm.placement for comm in c.comms] == [OLD, OLD]
            running.engines.free()
            with pytest.raises(MigrationAborted, match="cancelled by its caller"):
                await migrating[1]
            await eventually(lambda: c.comms[0].health().phase == "idle")
            assert [comm.placement for comm in c.comms] == [OLD.with_layers(NEW, 1)] * 2
            all_report(await c.migrate(NEW))

    run(main())


@pytest.mark.parametrize("dead", [0, 2])
@pytest.mark.parametrize("word", [False, True], ids=["dies", "is excluded"])
def test_a_due_layer_outlives_a_view(dead: int, word: bool) -> None:
    """The coordinator or another is gone: the survivors switch at the same step all the same."""

    async def main() -> None:
        async with due(THREE, THREE_NEW) as (c, running, migrating):
            others = [rank for rank in range(3) if rank != dead]
            step = c.comms[others[0]].health().due
            if word:
                await asyncio.gather(*(c.comms[rank].exclude(dead) for rank in others))
            else:
                c.kill(dead)
            await eventually(lambda: all(c.comms[rank].health().term > 0 for rank in others))
            assert all(c.comms[rank].health().due == step for rank in others)
            assert all(c.comms[rank].placement == THREE for rank in others)
            running.engines.leave(dead)
            running.tasks[dead].cancel()
            running.engines.free()
            for rank in others:
                with pytest.raises(MigrationAborted, match="the view changed"):
                    await migrating[rank]
            assert all(c.comms[rank].placement == THREE.with_layers(THREE_NEW, 1) for rank in others)
            seen = running.engines.seen
            await eventually(lambda: len(seen.get(step[0], {})) == 2)
            assert set(seen[step[0]].values()) == {THREE.with_layers(THREE_NEW, 1)}
            assert c.wrong_bytes(others) == 0

    run(main())


def test_a_fenced_rank_applies_what_was_committed_and_steps_no_more() -> None:
    async def main() -> None:
        async with due(THREE, THREE_NEW) as (c, running, migrating):
            await asyncio.gather(c.comms[0].exclude(2), c.comms[1].exclude(2))
            await eventually(lambda: c.comms[2].health().phase in ("fenced", "closed"))
            running.engines.leave(2)
            running.engines.free()
            with pytest.raises(CommunicatorClosed, match="fenced"):
                await running.tasks[2]
            with pytest.raises(CommunicatorClosed):
                await migrating[2]
            await eventually(lambda: not c.comms[2].health().due)
            assert c.comms[2].placement == THREE.with_layers(THREE_NEW, 1)
            assert c.wrong_bytes([2]) == 0

    run(main())


def test_a_rank_that_closes_applies_what_is_due_outside_of_steps() -> None:
    """Nobody steps with it any more: it waits for no step, only for its own engine to leave the one it is in."""

    async def main() -> None:
        async with due(THREE, THREE_NEW) as (c, running, _migrating):
            closing = asyncio.ensure_future(c.comms[2].aclose(timeout=20.0))
            await asyncio.sleep(0.5)
            assert c.comms[2].placement == THREE
            running.engines.free()
            assert await closing == ()
            assert c.comms[2].placement == THREE.with_layers(THREE_NEW, 1)
            assert c.wrong_bytes([2]) == 0
            running.engines.leave(2)

    run(main())


def test_a_close_says_which_layer_it_could_not_apply(caplog: pytest.LogCaptureFixture) -> None:
    """The engine never leaves its step: the rows stay as they are, and the answer names layer and step."""

    async def main() -> None:
        async with due(THREE, THREE_NEW) as (c, _running, _migrating):
            step = c.comms[2].health().due[0]
            left = await c.comms[2].aclose(timeout=1.0)
            assert f"layer 0, committed for step {step} and not applied" in left
            assert c.comms[2].placement == THREE
            assert c.wrong_bytes([2]) == 0

    run(main())
    assert "broken" not in caplog.text  # it closed, and said so: nothing failed


@pytest.mark.parametrize("turn", ["suspend", "update"])
def test_the_owner_waits_for_the_step_of_a_due_layer_or_until_the_engine_is_idle(turn: str) -> None:
    async def main() -> None:
        async with due(OLD, NEW) as (c, running, migrating):
            comm: AsyncEplbCommunicator = c.comms[0]

            async def own(timeout: float) -> None:
                if turn == "suspend":
                    await comm.suspend(timeout=timeout)
                else:
                    async with comm.updating_weights([2], timeout=timeout):
                        pass

            with pytest.raises(MigrationTimeout, match=r"layer 0 for step \d+ waits; least far are ranks"):
                await own(0.5)
            for task in running.tasks:
                task.cancel()
            await asyncio.gather(*running.tasks, return_exceptions=True)
            for other in c.comms:
                other.idle()
            await own(2.0)
            assert comm.placement == OLD.with_layers(NEW, 1)
            for result in await asyncio.gather(*migrating, return_exceptions=True):
                assert isinstance(result, MigrationAborted), result
            if turn == "suspend":
                await comm.resume()

    run(main())


def test_in_doubt_no_step_begins_until_a_word_decides() -> None:
    """Rank 1 voted and the coordinator is dead, of two: it cannot know, and waits before its hold step."""
    fabric = MemoryFabric(FaultPlan().hold_read("default/0.", nth=0))

    async def main() -> None:
        quick = settings(activation_timeout=2.0, settle_timeout=1.0)
        async with LocalCluster(OLD, fabric=fabric, settings=quick) as c:
            async with Running(c) as running:
                await running.step(2)
                migrating = [asyncio.ensure_future(comm.migrate(NEW, timeout=30.0)) for comm in c.comms]
                await eventually(lambda: c.comms[1].health().prepared == 1)
                c.kill(0)
                running.engines.leave(0)
                running.tasks[0].cancel()
                with pytest.raises(ActivationTimeout, match="does not know the decision") as caught:
                    await running.tasks[1]
                assert caught.value.layer == 0
                assert c.comms[1].health().phase == "in_doubt"
                running.tasks = []
                entering = asyncio.ensure_future(running.engines.run(1, c.comms[1], 3))
                await asyncio.sleep(1.0)
                assert not entering.done()
                await c.comms[1].exclude(0)
                await entering
                assert c.comms[1].placement == OLD
            await asyncio.gather(*migrating, return_exceptions=True)

    run(main())


def test_a_rank_with_little_staging_holds_nobody_up_that_has_voted() -> None:
    """Rank 0 has nothing to read and could vote for all layers; rank 1 has room for one, freed by a step at a time."""
    old, new = Placement([[0, 1, 0, 2]] * 6, ep_size=2), Placement([[0, 1, 1, 2]] * 6, ep_size=2)

    async def main() -> None:
        async with LocalCluster(old, settings=settings(staging_layers=1)) as c, Running(c) as running:
            await running.step(2)
            all_report(await c.migrate(new, timeout=5.0))
            await running.step(c.comms[0].health().step + 2)
        assert running.engines.check() == 6

    run(main())


# ------------------------------------------------------------------------------------------------ at random
ENDS = (MigrationReport, MigrationAborted, ActivationTimeout, NixlTransferTimeout, asyncio.CancelledError)


async def stepping_at_random(seed: int, steps: int, *, ranks: int = 3) -> tuple[int, int]:
    """Migrations, cancels, deadlines, pauses and idle phases while all step; returns changes and migrations done."""
    rng = random.Random(seed)

    def placement() -> Placement:
        return random_placement(
            np.random.default_rng(rng.getrandbits(32)),
            num_layers=4,
            num_logical=5,
            num_local_experts=3,
            ep_size=ranks,
            empty=1,
        )

    def pause() -> float:
        return rng.choice([0.0, 0.0, 0.001, 0.01]) if rng.random() < 0.95 else rng.uniform(0.0, 0.3)

    fabric = MemoryFabric()
    done = 0
    margin = rng.choice([0, 1, 2, 5])
    async with LocalCluster(placement(), fabric=fabric, settings=settings(step_margin=margin, **CALM)) as c:
        engines = LockStep(range(ranks))

        async def engine(rank: int) -> None:
            phases = random.Random(seed)  # the same on all ranks, as an engine in lock-step knows its phases
            left = steps
            while left:
                block = min(left, phases.randint(1, 60))
                left -= block

                def look(placement: Placement) -> None:
                    if rng.random() < 0.05:
                        assert c.rows[rank].wrong_bytes(placement) == 0

                await engines.run(
                    rank, c.comms[rank], block, work=lambda: rng.uniform(0.0, 0.02), pause=pause, look=look
                )
                if phases.random() < 0.5:
                    c.comms[rank].idle()
                    await asyncio.sleep(phases.uniform(0.0, 1.0) + pause())

        engines_run = [asyncio.ensure_future(engine(rank)) for rank in range(ranks)]
        while not all(task.done() for task in engines_run):
            new = placement()
            timeouts = [rng.choice([30.0, 30.0, 30.0, rng.uniform(0.001, 0.3)]) for _ in range(ranks)]
            calls = [asyncio.ensure_future(c.comms[rank].migrate(new, timeout=timeouts[rank])) for rank in range(ranks)]
            if rng.random() < 0.2:
                await asyncio.sleep(rng.uniform(0.0, 0.3))
                calls[rng.randrange(ranks)].cancel()
            results = await asyncio.gather(*calls, return_exceptions=True)
            for result in results:
                assert isinstance(result, ENDS), repr(result)
            done += all(isinstance(result, MigrationReport) for result in results)
            await asyncio.sleep(rng.choice([0.0, 0.05, 0.5]))
            if any(task.done() and task.exception() for task in engines_run):
                break
        await asyncio.gather(*engines_run)
        for comm in c.comms:
            comm.idle()
        await eventually(lambda: all(comm.health().phase == "idle" for comm in c.comms))
        assert len({comm.placement for comm in c.comms}) == 1
        assert c.wrong_bytes() == 0
        assert not fabric.violations
        assert len(engines.seen) == steps
        return engines.check(), done


@pytest.mark.parametrize("seed", range(3))
def test_random_steps_see_one_placement_on_all_ranks(seed: int) -> None:
    print("seed", seed, run(stepping_at_random(seed, 120)))


@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(100, 104))
def test_thousands_of_random_steps_see_one_placement_on_all_ranks(seed: int) -> None:
    print("seed", seed, run(stepping_at_random(seed, 2_000)))
