"""A rank starts again and comes back, in memory on virtual time: nothing is lost, and all migrate again."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest

from eplb_async.communicator import MigrationReport
from eplb_async.core import events
from eplb_async.core.placement import Placement
from eplb_async.errors import CommunicatorBusy, CommunicatorClosed, EplbError, HandshakeError, MigrationError
from eplb_async.settings import Settings
from eplb_async.testing import FaultPlan, MemoryFabric, run
from eplb_async.testing.cluster import LocalCluster
from tests.communicator.groups import all_report

SETTINGS = Settings(secret=b"s" * 16, settle_timeout=2.0, max_pause=0.03, hot_seconds=0.0002)


def ring_of(ep_size: int, shift: int = 0, *, empty: int | None = None) -> Placement:
    """Two layers; rank r holds experts r and r + 1, moved on by ``shift``, so one rank may be empty."""
    row = [(slot // 2 + slot % 2 + shift) % ep_size for slot in range(2 * ep_size)]
    if empty is not None:
        row[2 * empty : 2 * empty + 2] = [-1, -1]
    return Placement([row, row], ep_size=ep_size, num_logical=ep_size)


async def lose(cluster: LocalCluster, rank: int) -> list[int]:
    """Kill a rank, and have the others make a view without it; returns them."""
    cluster.kill(rank)
    others = [q for q in range(len(cluster.comms)) if q not in cluster.dead]
    for other in others:
        if len(others) == 1:  # no majority
            await cluster.comms[other].exclude(rank)
        else:
            cluster.comms[other]._session.driver.feed(events.Suspect(rank))
    async with asyncio.timeout(10.0):
        while any(rank in cluster.comms[q].health().members for q in others):
            await asyncio.sleep(0.01)
    return others


async def back(cluster: LocalCluster, rank: int, placement: Placement | None = None) -> None:
    """Restart a rank and reconnect to it on all others."""
    opening = asyncio.ensure_future(cluster.restart(rank, placement))
    assert set(await cluster.reconnect(rank)) == {None}
    await opening


async def check_whole(cluster: LocalCluster, new: Placement) -> None:
    """All ranks, the one that is back too, agree and migrate; every byte is right."""
    everybody = tuple(range(len(cluster.comms)))
    assert len({comm.placement for comm in cluster.comms}) == 1, [comm.placement for comm in cluster.comms]
    assert all(comm.health().members == everybody for comm in cluster.comms)
    assert not any(comm.health().degraded for comm in cluster.comms)
    assert cluster.wrong_bytes() == 0
    results = await cluster.migrate(new)
    all_report(results)
    assert [comm.placement for comm in cluster.comms] == [new] * len(everybody)
    assert cluster.wrong_bytes() == 0


@pytest.mark.parametrize(("ep_size", "dead"), [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2), (4, 0), (4, 3)])
@pytest.mark.parametrize("order", ["open first", "reconnect first"])
def test_a_killed_rank_comes_back_and_all_migrate(ep_size: int, dead: int, order: str) -> None:
    """Whichever rank, the coordinator too, and whoever is first; twice."""
    fabric = MemoryFabric()

    async def main() -> None:
        async with LocalCluster(ring_of(ep_size), settings=SETTINGS, fabric=fabric) as cluster:
            for shift in (1, 2):
                others = await lose(cluster, dead)
                if order == "open first":
                    opening = asyncio.ensure_future(cluster.restart(dead, cluster.comms[others[0]].placement))
                    await asyncio.sleep(3.0)
                    assert not opening.done()
                    assert set(await cluster.reconnect(dead, ranks=others)) == {None}
                else:
                    calls = asyncio.ensure_future(cluster.reconnect(dead, ranks=others))
                    await asyncio.sleep(3.0)
                    assert not calls.done()
                    opening = asyncio.ensure_future(cluster.restart(dead, cluster.comms[others[0]].placement))
                    assert set(await calls) == {None}
                await opening
                await check_whole(cluster, ring_of(ep_size, shift))

    run(main())
    assert not fabric.violations


def test_the_others_migrate_while_a_rank_is_out_and_opening() -> None:
    """Other pairs are untouched: before it starts again, while it opens, and before they call reconnect."""

    async def main() -> None:
        async with LocalCluster(ring_of(3), settings=SETTINGS) as cluster:
            others = await lose(cluster, 2)
            all_report(await cluster.migrate(ring_of(3, 1, empty=2), ranks=others))
            opening = asyncio.ensure_future(cluster.restart(2))
            for shift in (2, 0, 1):
                await asyncio.sleep(1.0)
                all_report(await cluster.migrate(ring_of(3, shift, empty=2), ranks=others))
                assert cluster.wrong_bytes(others) == 0
            assert not opening.done()
            assert set(await cluster.reconnect(2, ranks=others)) == {None}
            await opening
            await check_whole(cluster, ring_of(3, 2))

    run(main())


@pytest.mark.parametrize("claim", ["what it held", "nothing", "others of its own"])
def test_its_slots_hold_what_it_says_and_the_rest_is_the_groups(claim: str) -> None:
    """``placement`` of ``open`` counts for its own slots only; all ranks take that over alike."""
    loaded = ring_of(3).physical_to_logical_map.copy()
    loaded[:, 4:6] = {"what it held": loaded[:, 4:6], "nothing": -1, "others of its own": [[-1, 1], [1, 2]]}[claim]
    opened = Placement(loaded, ep_size=3, num_logical=3)
    moved = ring_of(3, 1, empty=2)

    async def main() -> None:
        async with LocalCluster(ring_of(3), settings=SETTINGS) as cluster:
            others = await lose(cluster, 2)
            all_report(await cluster.migrate(moved, ranks=others))
            await back(cluster, 2, opened)
            now = cluster.comms[2].placement
            assert np.array_equal(now.local(2), loaded[:, 4:6])
            assert all(np.array_equal(now.local(rank), moved.local(rank)) for rank in others)
            await check_whole(cluster, ring_of(3, 2))

    run(main())


def test_of_another_weight_version_its_slots_come_in_empty() -> None:
    """Its bytes are of weights that the group has replaced: they are not read, and it takes the version over."""

    async def main() -> None:
        async with LocalCluster(ring_of(3), settings=SETTINGS) as cluster:
            others = await lose(cluster, 2)
            for rank in others:
                session = cluster.comms[rank]._session
                for layer, experts in enumerate(session.placement.local(rank).tolist()):
                    session.weights.write_entries(layer, experts, 7)
                session.version = 7
            await back(cluster, 2)
            assert cluster.comms[2]._session.version == 7
            assert (cluster.comms[0].placement.local(2) == -1).all()
            await check_whole(cluster, ring_of(3, 2))

    run(main())


async def update(cluster: LocalCluster, rank: int, version: int) -> None:
    """A rank's owner writes all layers anew."""
    async with cluster.comms[rank].updating_weights(version=version) as placement:
        cluster.rows[rank].generations = [version] * placement.num_layers
        cluster.rows[rank].fill(placement)


def test_ranks_of_unlike_weight_versions_do_not_have_it_back_differently() -> None:
    """A death amid a rolling update: the view waits until all say the same of its slots, and the error says so."""

    async def main() -> None:
        async with LocalCluster(ring_of(3), settings=SETTINGS) as cluster:
            others = await lose(cluster, 2)
            await update(cluster, 0, 1)
            opening = asyncio.ensure_future(cluster.restart(2))
            for rank, error in zip(others, await cluster.reconnect(2, timeout=2.0), strict=True):
                assert isinstance(error, HandshakeError)
                assert f"weight version ({1 - rank})" in str(error)
            assert not opening.done()
            await update(cluster, 1, 1)
            assert set(await cluster.reconnect(2)) == {None}
            await opening
            cluster.rows[2].generations = [1, 1]
            assert [comm.health().weight_version for comm in cluster.comms] == [1, 1, 1]
            await check_whole(cluster, ring_of(3, 1))

    run(main())


@pytest.mark.parametrize("turns", range(1, 60, 3))
def test_an_update_right_after_a_reconnect_was_cut_off_changes_nothing_of_what_was_agreed(turns: int) -> None:
    """The view may have been made all the same: what the rank's slots hold was said before the update."""
    fabric = MemoryFabric(latency=0.001)

    async def main() -> None:
        async with LocalCluster(ring_of(3), settings=SETTINGS, fabric=fabric) as cluster:
            others = await lose(cluster, 2)
            opening = asyncio.ensure_future(cluster.restart(2))
            await asyncio.sleep(1.0)
            calls = [asyncio.ensure_future(cluster.comms[rank].reconnect(2)) for rank in others]
            for _ in range(turns):
                await asyncio.sleep(0)
            calls[1].cancel()
            await asyncio.wait([calls[1]])
            await update(cluster, 1, 1)
            await asyncio.sleep(1.0)
            if not opening.done():
                calls[0].cancel()
                await asyncio.wait([calls[0]])
                await update(cluster, 0, 1)
                assert set(await cluster.reconnect(2)) == {None}
            else:
                await update(cluster, 0, 1)
            await opening
            if cluster.comms[2].health().weight_version == 0:
                await update(cluster, 2, 1)
            cluster.rows[2].generations = [1, 1]
            await check_whole(cluster, ring_of(3, 1))

    run(main())


def test_one_that_is_back_takes_part_when_a_migration_is_made_again() -> None:
    """It was in no epoch yet: where no rank has begun the one that a new view ends, it too makes it again."""

    async def main() -> None:
        async with LocalCluster(ring_of(4), settings=SETTINGS) as cluster:
            all_report(await cluster.migrate(ring_of(4, 1)))
            await lose(cluster, 2)
            await back(cluster, 2, ring_of(4, 1))
            migrating = asyncio.ensure_future(cluster.migrate(ring_of(4, 2, empty=3), ranks=[0, 1, 2]))
            await asyncio.sleep(0.05)
            cluster.kill(3)
            results = await migrating
            all_report(results)

    run(main())


def test_an_expert_that_would_be_left_without_a_copy_is_said_and_nothing_changes() -> None:
    """The only copies were on it, and it says that it holds nothing: refused, and with them it is let in."""
    old = Placement([[0, 1, 2, 3, 4, 5]], ep_size=3)

    async def main() -> None:
        async with LocalCluster(old, settings=SETTINGS) as cluster:
            await lose(cluster, 2)
            opening = asyncio.ensure_future(cluster.restart(2, Placement([[4, 5, 0, 1, 2, 3]], ep_size=3), timeout=4.0))
            for error in await cluster.reconnect(2, timeout=3.0):
                assert isinstance(error, HandshakeError)
                assert "without" in str(error)
                assert "layer 0: experts 4, 5" in str(error)
            with pytest.raises(HandshakeError, match="rank 2"):
                await opening
            await back(cluster, 2)
            await check_whole(cluster, Placement([[5, 4, 3, 2, 1, 0]], ep_size=3))

    run(main())


def test_an_unnoticed_death_is_looked_for() -> None:
    """It died while all were idle: reconnect asks for the proof, waits for the view without it, and goes on."""

    async def main() -> None:
        async with LocalCluster(ring_of(3), settings=SETTINGS) as cluster:
            cluster.kill(1)
            await back(cluster, 1)
            await check_whole(cluster, ring_of(3, 1))

    run(main())


def test_a_member_that_lives_has_to_be_excluded_first() -> None:
    async def main() -> None:
        async with LocalCluster(ring_of(3), settings=SETTINGS) as cluster:
            for wrong in (0, 3, -1, "1"):
                with pytest.raises(ValueError, match="not another rank"):
                    await cluster.comms[0].reconnect(wrong)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match=r"exclude\(2\) first"):
                await cluster.comms[0].reconnect(2)
            await check_whole(cluster, ring_of(3, 1))

    run(main())


def test_with_two_ranks_the_survivor_has_to_exclude_first() -> None:
    """Nobody has a majority: it cannot go on by proof alone."""

    async def main() -> None:
        async with LocalCluster(ring_of(2), settings=SETTINGS) as cluster:
            cluster.kill(1)
            with pytest.raises(ValueError, match=r"exclude\(1\) first"):
                await cluster.comms[0].reconnect(1)
            await cluster.comms[0].exclude(1)
            await back(cluster, 1)
            await check_whole(cluster, ring_of(2, 1))

    run(main())


def test_a_fenced_rank_opens_again_in_the_same_process() -> None:
    """Stopped, excluded, continued: it is fenced, closes, opens again, and is back."""

    async def main() -> None:
        async with LocalCluster(ring_of(3), settings=SETTINGS) as cluster:
            cluster.stop(2)
            await asyncio.gather(*(cluster.comms[rank].exclude(2) for rank in (0, 1)))
            all_report(await cluster.migrate(ring_of(3, 1, empty=2), ranks=(0, 1)))
            cluster.resume(2)
            with pytest.raises((MigrationError, CommunicatorClosed)):
                await cluster.comms[2].migrate(ring_of(3, 1), timeout=5.0)
            assert cluster.comms[2].health().phase == "fenced"
            await cluster.comms[2].aclose()
            await back(cluster, 2)
            await check_whole(cluster, ring_of(3, 2))

    run(main())


def test_a_rank_that_closed_comes_back() -> None:
    """Rule 10, then rule 12: LEAVE, and open again."""

    async def main() -> None:
        async with LocalCluster(ring_of(3), settings=SETTINGS) as cluster:
            await cluster.comms[0].aclose()
            await back(cluster, 0)
            await check_whole(cluster, ring_of(3, 2))

    run(main())


def test_what_the_old_start_left_in_flight_is_not_waited_for() -> None:
    """C14: READs from it never end, so its agent stays until the next migration gets the staging back."""
    fabric = MemoryFabric(latency=0.001)

    async def main() -> None:
        settings = replace(SETTINGS, staging_layers=1)
        async with LocalCluster(ring_of(3), settings=settings, fabric=fabric) as cluster:
            migrating = asyncio.ensure_future(cluster.migrate(ring_of(3, 1), timeout=1.0))
            while not cluster.comms[0].health().reads_in_flight:
                await asyncio.sleep(0.0001)
            cluster.stop(2)
            await migrating
            quarantined = [cluster.comms[rank].health().quarantined_bytes for rank in (0, 1)]
            assert any(quarantined)
            await asyncio.gather(*(cluster.comms[rank].exclude(2) for rank in (0, 1)))
            await back(cluster, 2)  # its old process is still stopped
            assert [cluster.comms[rank].health().quarantined_bytes for rank in (0, 1)] == quarantined
            await check_whole(cluster, ring_of(3, 2))
            healths = [comm.health() for comm in cluster.comms]
            assert [health.recycled for health in healths[:2]] == [int(bool(nbytes)) for nbytes in quarantined]
            cluster.resume(2)
            await asyncio.sleep(5.0)
            assert cluster.wrong_bytes() == 0
            await check_whole(cluster, ring_of(3, 0))

    run(main())
    assert not fabric.violations


@pytest.mark.parametrize("rank", [0, 2])
def test_survivors_that_recycled_are_met_at_their_agents_of_now(rank: int) -> None:
    """What they published in ``open`` is stale by then."""

    async def main() -> None:
        async with LocalCluster(ring_of(3), settings=SETTINGS) as cluster:
            others = await lose(cluster, rank)
            await asyncio.gather(*(cluster.comms[other].rebind() for other in others))
            await back(cluster, rank)
            await check_whole(cluster, ring_of(3, 2))

    run(main())


@pytest.mark.parametrize("order", [(2, 1), (0, 1), (1, 0)])
def test_two_ranks_come_back_one_after_the_other(order: tuple[int, int]) -> None:
    """The first one back reconnects to the second, too."""

    async def main() -> None:
        async with LocalCluster(ring_of(4), settings=SETTINGS) as cluster:
            for rank in order:
                others = await lose(cluster, rank)
            openings = [asyncio.ensure_future(cluster.restart(rank)) for rank in order]
            await asyncio.sleep(0.5)
            assert set(await cluster.reconnect(order[0], ranks=others)) == {None}
            await openings[0]
            assert set(await cluster.reconnect(order[1], ranks=[*others, order[0]])) == {None}
            await openings[1]
            await check_whole(cluster, ring_of(4, 2))

    run(main())


def test_a_rank_that_dies_while_it_opens_may_start_a_third_time() -> None:
    """Met and dead before it is in, and in and dead at once: the calls that wait find the next start."""

    async def main() -> None:
        async with LocalCluster(ring_of(3), settings=SETTINGS) as cluster:
            others = await lose(cluster, 2)
            first = asyncio.ensure_future(cluster.restart(2, timeout=3.0))
            await asyncio.sleep(0.5)
            early = asyncio.ensure_future(cluster.comms[0].reconnect(2))
            await asyncio.sleep(0.5)
            cluster.kill(2)
            with pytest.raises(HandshakeError):
                await first
            late = asyncio.ensure_future(cluster.comms[1].reconnect(2))
            await asyncio.sleep(1.0)
            assert not early.done()
            assert not late.done()
            await cluster.restart(2)
            await asyncio.gather(early, late)
            await check_whole(cluster, ring_of(3, 1))
            cluster.kill(2)
            await back(cluster, 2, ring_of(3, 1))
            assert others == [0, 1]
            await check_whole(cluster, ring_of(3, 2))

    run(main())


@pytest.mark.parametrize("ep_size", [2, 3])
def test_a_start_that_has_died_since_it_was_met_is_not_let_in(ep_size: int) -> None:
    """It opened, said Hello and gave up: its introduction is still there, and no view may get it."""

    async def main() -> None:
        async with LocalCluster(ring_of(ep_size), settings=SETTINGS) as cluster:
            others = await lose(cluster, ep_size - 1)
            with pytest.raises(HandshakeError):
                await cluster.restart(ep_size - 1, timeout=1.0)
            calls = asyncio.ensure_future(cluster.reconnect(ep_size - 1, ranks=others))
            await asyncio.sleep(1.0)
            assert not calls.done()
            assert cluster.comms[0].health().members == tuple(others)
            await cluster.restart(ep_size - 1)
            assert set(await calls) == {None}
            await check_whole(cluster, ring_of(ep_size, 1))

    run(main())


def test_a_survivor_that_dies_meanwhile_is_waited_for_no_more() -> None:
    """It had not called reconnect: the coordinator looks for it, and the rank comes back to those who live."""

    async def main() -> None:
        async with LocalCluster(ring_of(4), settings=SETTINGS) as cluster:
            await lose(cluster, 3)
            opening = asyncio.ensure_future(cluster.restart(3))
            calls = asyncio.ensure_future(cluster.reconnect(3, ranks=[0, 1]))
            await asyncio.sleep(1.0)
            assert cluster.comms[0].health().waiting_for == (2,)
            assert cluster.comms[1].health().waiting_for == (0,)
            cluster.kill(2)
            assert await calls == [None, None]
            await opening
            assert cluster.comms[3].health().members == (0, 1, 3)
            await back(cluster, 2)
            await check_whole(cluster, ring_of(4, 2))

    run(main())


def test_errors_say_what_was_waited_for() -> None:
    """Not started; started and the others do not call; opens and nobody calls."""

    async def main() -> None:
        async with LocalCluster(ring_of(3), settings=SETTINGS) as cluster:
            await lose(cluster, 2)
            for error in await cluster.reconnect(2, timeout=1.0):
                assert isinstance(error, HandshakeError)
                assert "started again" in str(error)
            opening = asyncio.ensure_future(cluster.restart(2, timeout=3.0))
            (error,) = await cluster.reconnect(2, timeout=1.0, ranks=[0])
            assert "ranks [1] to call reconnect(2)" in str(error)
            (error,) = await cluster.reconnect(2, timeout=1.0, ranks=[1])
            assert "ranks [0] to call reconnect(2)" in str(error)
            with pytest.raises(HandshakeError, match=r"must call reconnect\(2\)"):
                await opening
            (error,) = await cluster.reconnect(2, timeout=1.0, ranks=[0])
            assert "is it started again, and opening?" in str(error)  # that open took its introduction back
            all_report(await cluster.migrate(ring_of(3, 1, empty=2), ranks=[0, 1]))
            await back(cluster, 2)
            await check_whole(cluster, ring_of(3, 1))

    run(main())


def test_busy_both_ways() -> None:
    """One thing at a time on a rank: a migration, or a reconnect, or another."""

    async def main() -> None:
        async with LocalCluster(ring_of(3), settings=SETTINGS) as cluster:
            others = await lose(cluster, 2)
            comm = cluster.comms[0]
            calls = asyncio.ensure_future(cluster.reconnect(2, ranks=others))
            await asyncio.sleep(0.1)
            with pytest.raises(CommunicatorBusy):
                await comm.reconnect(2)
            with pytest.raises(CommunicatorBusy):
                await comm.migrate(ring_of(3))
            await cluster.restart(2)
            assert await calls == [None, None]
            migrating = asyncio.ensure_future(cluster.migrate(ring_of(3, 1)))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            with pytest.raises(CommunicatorBusy):
                await comm.reconnect(2)
            all_report(await migrating)
            await check_whole(cluster, ring_of(3, 2))
            await comm.aclose()
            with pytest.raises(CommunicatorClosed):
                await comm.reconnect(2)

    run(main())


def test_closing_while_a_reconnect_waits_ends_it() -> None:
    async def main() -> None:
        async with LocalCluster(ring_of(3), settings=SETTINGS) as cluster:
            await lose(cluster, 2)
            calls = asyncio.ensure_future(cluster.reconnect(2, ranks=[0]))
            await asyncio.sleep(0.5)
            await cluster.comms[0].aclose()
            (error,) = await calls
            assert isinstance(error, CommunicatorClosed)

    run(main())


@pytest.mark.parametrize("seed", range(60))
def test_cut_off_at_any_moment_it_can_be_called_again(seed: int) -> None:
    """Cancelled or timed out on some ranks, at random: all are as before, and the next calls work."""
    choose = random.Random(seed)
    ep_size = choose.randint(2, 4)
    dead = choose.randrange(ep_size)
    fabric = MemoryFabric(latency=choose.choice((20e-6, 1e-3, 30e-3)))

    async def main() -> None:
        async with LocalCluster(ring_of(ep_size), settings=SETTINGS, fabric=fabric) as cluster:
            others = await lose(cluster, dead)
            opening = asyncio.ensure_future(cluster.restart(dead, timeout=20.0))
            for _ in range(choose.randint(1, 3)):
                tasks = []
                for other in others:
                    limit = choose.choice((0.0, 10 ** choose.uniform(-4, 0.5), 5.0, 5.0))
                    tasks.append(asyncio.ensure_future(cluster.comms[other].reconnect(dead, timeout=limit)))
                if choose.random() < 0.5:
                    for _ in range(choose.randint(0, 60)):
                        await asyncio.sleep(0)
                else:
                    await asyncio.sleep(10 ** choose.uniform(-5, 0.3))
                for task in choose.sample(tasks, choose.randint(0, len(tasks))):
                    done = task.done()
                    task.cancel()
                    for _ in range(2):
                        await asyncio.sleep(0)
                    assert done or task.cancelled(), "I-10: a cancelled call did not end at once"
                for result in await asyncio.gather(*tasks, return_exceptions=True):
                    ok = result is None or isinstance(result, HandshakeError | asyncio.CancelledError | ValueError)
                    assert ok, repr(result)
            await asyncio.sleep(1.0)
            inside = [other for other in others if dead not in cluster.comms[other].health().members]
            if inside:
                assert inside == others, "the view has it on all or on none"
                empty = ring_of(ep_size, empty=dead)
                all_report(await cluster.migrate(empty, ranks=others))
                if opening.done():
                    await asyncio.wait([opening])
                    opening = asyncio.ensure_future(cluster.restart(dead, timeout=20.0))
                assert set(await cluster.reconnect(dead, ranks=others)) == {None}
            await opening
            await check_whole(cluster, ring_of(ep_size, 1))
        await asyncio.sleep(0.01)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main())
    assert not fabric.violations
    assert fabric.open_handles == 0


@pytest.mark.parametrize("sender", [0, 1, 2])
@pytest.mark.parametrize("nth", range(8))
def test_a_lost_message_costs_a_call_at_most(sender: int, nth: int) -> None:
    """Any one that a rank sends from the restart on: it comes back at once, or when all try again."""
    faults = FaultPlan()

    async def main() -> None:
        async with LocalCluster(ring_of(3), settings=SETTINGS, faults=faults) as cluster:
            others = await lose(cluster, 2)
            cluster.fabric.faults = FaultPlan().drop_notif(f"default/{sender}.", nth=nth)
            opening = asyncio.ensure_future(cluster.restart(2, timeout=4.0))
            results = await cluster.reconnect(2, timeout=3.0, ranks=others)
            assert all(result is None or isinstance(result, HandshakeError) for result in results)
            await asyncio.wait([opening])
            await asyncio.sleep(3.0)
            if opening.exception() is not None:
                assert isinstance(opening.exception(), HandshakeError)
                await back(cluster, 2)
            cluster.fabric.faults = FaultPlan()
            await check_whole(cluster, ring_of(3, 1))

    run(main())


@pytest.mark.parametrize("apart", [0.0, 1.0])
def test_a_job_that_starts_over_on_a_store_that_remembers_opens_as_ever(apart: float) -> None:
    """Introductions of the run before are left, of ranks that are dead: nobody is taken for gone by them."""
    fabric = MemoryFabric()

    async def main() -> None:
        first = LocalCluster(ring_of(3), settings=SETTINGS, fabric=fabric)
        async with first:
            all_report(await first.migrate(ring_of(3, 1)))
        second = LocalCluster(ring_of(3), settings=SETTINGS, fabric=fabric)
        second.rendezvous = first.rendezvous
        opening = []
        for rank in range(3):
            opening.append(asyncio.ensure_future(second._open(rank)))
            await asyncio.sleep(apart)
        second.comms = await asyncio.gather(*opening)
        assert all(comm.health().term == 0 for comm in second.comms)
        await check_whole(second, ring_of(3, 2))
        await asyncio.gather(*(comm.aclose() for comm in second.comms))

    run(main())


def test_a_group_that_fails_as_a_whole_opens_as_a_whole() -> None:
    """All ranks die after views have come and gone: terms of the run before mean nothing to the next."""
    fabric = MemoryFabric()

    async def main() -> None:
        first = LocalCluster(ring_of(3), settings=SETTINGS, fabric=fabric)
        async with first:
            await lose(first, 2)
            await back(first, 2)
            for rank in range(3):
                first.kill(rank)
            second = LocalCluster(ring_of(3), settings=SETTINGS, fabric=fabric)
            second.rendezvous = first.rendezvous
            async with second:
                await check_whole(second, ring_of(3, 2))

    run(main())


def test_another_layout_is_refused() -> None:
    """As at open: says what differs; the others are as before."""

    async def main() -> None:
        async with LocalCluster(ring_of(3), settings=SETTINGS) as cluster:
            others = await lose(cluster, 2)
            cluster._row_bytes = (64, 32)
            opening = asyncio.ensure_future(cluster.restart(2, timeout=3.0))
            for error in await cluster.reconnect(2, timeout=2.0, ranks=others):
                assert isinstance(error, EplbError)
                assert "layout" in str(error)
            with pytest.raises(HandshakeError):
                await opening
            cluster._row_bytes = (64, 24)
            await back(cluster, 2)
            await check_whole(cluster, ring_of(3, 2))

    run(main())


def test_a_rank_in_doubt_is_resolved_and_has_the_other_back() -> None:
    """Rule 9, then 12: two ranks, one dies between vote and COMMIT; exclude says so, and it comes back."""
    faults = FaultPlan().drop_notif("default/0.", receiver="default/1.", nth=None)

    async def main() -> None:
        async with LocalCluster(ring_of(2), settings=SETTINGS) as cluster:
            new = ring_of(2, 1)
            migrating = asyncio.ensure_future(cluster.migrate(new, timeout=2.0))
            while cluster.comms[1].health().phase != "open":
                await asyncio.sleep(0.00001)
            cluster.fabric.faults = faults
            results = await migrating
            cluster.fabric.faults = FaultPlan()
            cluster.kill(0)
            assert not isinstance(results[1], MigrationReport)
            async with asyncio.timeout(10.0):
                while cluster.comms[1].health().phase != "in_doubt":
                    await asyncio.sleep(0.1)
            with pytest.raises(HandshakeError, match="in doubt"):
                await cluster.comms[1].reconnect(0, timeout=1.0)
            await cluster.comms[1].exclude(0)
            await back(cluster, 0)
            await check_whole(cluster, new)

    run(main())
