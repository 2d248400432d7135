"""The service on a cluster in one loop: it balances, and whatever fails is named, counted and survived."""

from __future__ import annotations

import asyncio
import itertools
import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from eplb_async.core.placement import Placement
from eplb_async.errors import (
    CommunicatorBusy,
    CommunicatorClosed,
    MigrationError,
    PlacementError,
    RebalanceFailed,
    RebalanceTimeout,
)
from eplb_async.service import RebalanceReport, ServiceSettings
from eplb_async.service.payloads import TOPIC, Ask, Loads, Verdict
from eplb_async.testing import run
from tests.service.cluster import MANUAL, Services, skewed


def test_a_rebalance_moves_every_rank_and_raises_the_balance() -> None:
    """Asked of any rank; the report is of the group, bytes and placement are right everywhere."""

    async def main() -> None:
        async with Services() as group:
            group.record(3)
            report = await group.services[1].rebalance()
            assert report.outcome == "moved"
            assert report.balancedness_before is not None
            assert report.balancedness_after is not None
            assert report.balancedness_after > report.balancedness_before + 0.1
            assert report.num_moves > 0
            assert report.migration is not None
            await group.idle()
            placements = {comm.placement.digest() for comm in group.cluster.comms}
            assert len(placements) == 1
            assert group.placement.digest() not in placements
            assert group.cluster.wrong_bytes() == 0
            for service in group.services.values():
                health = service.health()
                assert (health.round, health.rounds, health.failures) == (1, {"moved": 1}, 0)
                assert health.last_report is not None
                assert health.last_report.balancedness_after == report.balancedness_after

    run(main())


def test_loads_of_all_ranks_are_summed() -> None:
    """And steps of an earlier placement count for the experts that were in the slots then."""
    seen: list[np.ndarray[Any, Any]] = []

    def policy(loads: np.ndarray[Any, Any], placement: Placement) -> Placement:
        seen.append(loads.copy())
        loads[:] = -1.0  # its own copy
        return placement

    async def main() -> None:
        async with Services(policy=policy) as group:
            group.record(2)
            group.record(1, hot=5, ranks=(2,))
            report = await group.services[2].rebalance()
            assert (report.outcome, report.reason) == ("not_worth_it", "the policy keeps the placement")

    run(main())
    p = Placement.initial(4, 12, ep_size=3, num_redundant=3)
    np.testing.assert_allclose(seen[0], 6 * skewed(p) + skewed(p, 5))


def test_small_gains_are_not_worth_it_unless_forced() -> None:
    async def main() -> None:
        async with Services(settings=replace(MANUAL, min_gain=0.9)) as group:
            group.record()
            report = await group.services[0].rebalance()
            assert report.outcome == "not_worth_it"
            assert "below min_gain 0.9" in report.reason
            assert report.migration is None
            assert all(comm.placement == group.placement for comm in group.cluster.comms)
            assert (await group.services[0].rebalance(force=True)).outcome == "moved"

    run(main())


def test_no_load_and_too_soon_are_answers() -> None:
    async def main() -> None:
        async with Services(settings=replace(MANUAL, min_interval=30.0)) as group:
            assert (await group.services[1].rebalance()).outcome == "no_load"
            group.record()
            assert (await group.services[1].rebalance()).outcome == "moved"
            group.record(hot=4)
            soon = await group.services[2].rebalance()
            assert (soon.outcome, soon.round) == ("too_soon", 0)
            assert group.services[0].health().seconds_left > 0
            await asyncio.sleep(31)
            assert (await group.services[2].rebalance()).round > 1

    run(main())


def test_moves_are_limited() -> None:
    async def main() -> None:
        async with Services(settings=replace(MANUAL, max_moves=3)) as group:
            group.record()
            report = await group.services[0].rebalance()
            assert report.outcome == "moved"
            assert 0 < report.num_moves <= 3

    run(main())


def test_rounds_come_by_themselves_every_so_many_steps() -> None:
    """Steps are counted by record(); the coordinator begins, and no other rank asks it to."""

    async def main() -> None:
        async with Services(settings=replace(MANUAL, step_interval=10)) as group:
            for step in range(35):
                group.record(hot=step // 10)
                await asyncio.sleep(0.05)
            await group.idle()
            healths = [service.health() for service in group.services.values()]
            assert [health.round for health in healths] == [3] * 3
            assert healths[0].steps == 35
            assert healths[0].steps_left == 5
            assert healths[0].dropped == {}
            assert group.cluster.wrong_bytes() == 0

    run(main())


def test_a_coordinator_that_counts_no_steps_is_asked() -> None:
    """Where ranks are not in lock-step, those that have steps ask for the round, an eighth later."""

    async def main() -> None:
        async with Services(settings=replace(MANUAL, step_interval=16)) as group:
            for _ in range(18):
                group.record(ranks=(2,))
                await asyncio.sleep(0.05)
            await group.idle()
            assert [service.health().rounds for service in group.services.values()] == [{"moved": 1}] * 3

    run(main())


def test_automatic_rounds_wait_for_the_least_interval() -> None:
    async def main() -> None:
        async with Services(settings=replace(MANUAL, step_interval=5, min_interval=30.0)) as group:
            for step in range(40):
                group.record(hot=step)
                await asyncio.sleep(0.05)
            assert group.services[0].health().round == 1
            await asyncio.sleep(30)
            assert group.services[0].health().round == 2

    run(main())


def test_a_paused_rank_is_named_and_resume_lets_what_is_due_go() -> None:
    async def main() -> None:
        async with Services(settings=replace(MANUAL, step_interval=10)) as group:
            group.services[1].pause()
            group.services[1].pause()
            group.record(10)
            report = await group.services[2].rebalance()
            assert (report.outcome, report.reason) == ("paused", "rank 1 is paused")
            mine = await group.services[1].rebalance()
            assert (mine.outcome, mine.round) == ("paused", 0)
            assert group.services[1].health().phase == "paused"
            group.services[1].resume()
            assert group.services[1].health().phase == "idle"
            assert (await group.services[2].rebalance()).outcome == "moved"

    run(main())


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (lambda loads, placement: 1 / 0, "ZeroDivisionError"),
        (lambda loads, placement: placement.physical_to_logical_map, "not a Placement"),
        (lambda loads, placement: Placement.initial(2, 12, ep_size=3, num_redundant=3), "num_layers is 4"),
        (lambda loads, placement: Placement(np.zeros((4, 15), dtype=int), ep_size=3, num_logical=12), "without any"),
    ],
)
def test_a_policy_that_fails_fails_the_round_and_no_more(
    broken: Any, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own error on the coordinator, the reason on the others; the next round is a new one."""
    policies = [broken, broken]

    async def main() -> None:
        def policy(loads: Any, placement: Placement) -> Any:
            return (policies.pop() if policies else lambda *_: placement)(loads, placement)

        async with Services(policy=policy) as group:
            group.record()
            with pytest.raises(
                (ZeroDivisionError, TypeError, PlacementError), match=None if words[0] == "Z" else words
            ):
                await group.services[0].rebalance()
            with pytest.raises(RebalanceFailed, match=f"the policy failed.*{words}"):
                await group.services[2].rebalance()
            health = group.services[0].health()
            assert (health.failures, health.rounds["failed"]) == (2, 2)
            assert words in health.last_error
            assert (await group.services[2].rebalance()).outcome == "not_worth_it"
            assert group.services[0].health().failures == 0

    with caplog.at_level(logging.WARNING, "eplb_async.service"):
        run(main())
    assert any("round 1 failed" in record.message for record in caplog.records)


def test_failed_automatic_rounds_come_again_with_a_back_off() -> None:
    """Doubled up to the bound, whatever the steps; over with the first that does not fail."""
    times: list[float] = []

    async def main() -> None:
        def policy(loads: Any, placement: Placement) -> Placement:
            times.append(asyncio.get_running_loop().time())
            if len(times) < 6:
                raise ValueError("not yet")
            return placement

        chosen = replace(MANUAL, step_interval=10, backoff=2.0, backoff_max=10.0)
        async with Services(settings=chosen, policy=policy) as group:
            group.record(10)
            await asyncio.sleep(100)
            assert len(times) == 6
            assert group.services[0].health().failures == 0

    run(main())
    pauses = [round(b - a) for a, b in itertools.pairwise(times)]
    assert pauses == [2, 4, 8, 10, 10]


def test_a_rank_without_a_service_is_named() -> None:
    async def main() -> None:
        async with Services(without=(2,)) as group:
            group.record()
            with pytest.raises(RebalanceFailed, match=r"ranks \[2\] did not answer within 10 s") as caught:
                await group.services[1].rebalance()
            assert "EplbService" in str(caught.value)
            await group.start(2)
            group.record(ranks=(2,))
            assert (await group.services[1].rebalance()).outcome == "moved"

    run(main())


def test_a_coordinator_without_a_service_is_named() -> None:
    async def main() -> None:
        async with Services(without=(0,)) as group:
            group.record()
            with pytest.raises(RebalanceFailed, match="rank 0, the coordinator, began no round") as caught:
                await group.services[1].rebalance()
            assert caught.value.ranks == (0,)

    run(main())


def test_a_rank_that_is_busy_with_its_own_migration_fails_the_round_at_once() -> None:
    """It says so, and nobody waits for it until the deadline of the migration."""

    async def main() -> None:
        async with Services() as group:
            group.record()
            comm = group.cluster.comms[1]
            own = asyncio.ensure_future(comm.migrate(group.placement, timeout=60.0))  # the others never join
            await asyncio.sleep(0.1)
            start = asyncio.get_running_loop().time()
            with pytest.raises(RebalanceFailed, match="rank 1 does not move: CommunicatorBusy"):
                await group.services[2].rebalance()
            assert asyncio.get_running_loop().time() - start < 5
            with pytest.raises(MigrationError):
                await own  # the ranks wanted different things
            busy = asyncio.ensure_future(comm.migrate(group.placement, timeout=60.0))
            await asyncio.sleep(0.1)
            with pytest.raises(CommunicatorBusy):
                await group.services[1].rebalance()
            with pytest.raises(MigrationError):
                await busy
            assert (await group.services[2].rebalance()).outcome == "moved"
            assert group.cluster.wrong_bytes() == 0

    run(main())


def test_a_suspended_rank_fails_the_round_at_once() -> None:
    async def main() -> None:
        async with Services() as group:
            group.record()
            await group.cluster.comms[2].suspend()
            with pytest.raises(RebalanceFailed, match=r"rank 2 does not move.*suspended"):
                await group.services[0].rebalance()
            await group.cluster.comms[2].resume()
            assert (await group.services[0].rebalance()).outcome == "moved"

    run(main())


def test_a_member_that_dies_is_emptied_by_the_next_round() -> None:
    """The round that waits for it fails, naming it; a new view brings a round of its own, whatever the steps."""
    placement = Placement(np.tile(np.tile(np.arange(8), 3)[:24], (3, 1)), ep_size=3)  # every rank has all

    async def main() -> None:
        chosen = replace(MANUAL, step_interval=1000, watch_interval=0.5)
        async with Services(placement, settings=chosen) as group:
            group.record()
            asked = asyncio.ensure_future(group.rebalance(1))
            await asyncio.sleep(0)
            group.cluster.kill(2)
            answer = await asked
            assert isinstance(answer, RebalanceFailed | RebalanceReport | MigrationError)
            for _ in range(400):
                if (group.cluster.comms[0].placement.local(2) == -1).all():
                    break
                await asyncio.sleep(0.5)
            assert group.cluster.comms[0].placement.digest() == group.cluster.comms[1].placement.digest()
            assert (group.cluster.comms[0].placement.local(2) == -1).all()
            assert group.cluster.wrong_bytes(ranks=(0, 1)) == 0
            assert group.services[0].health().members == (0, 1)
            assert group.services[0].health().failures == 0

    run(main())


def test_the_next_rank_coordinates_when_the_coordinator_dies() -> None:
    placement = Placement(np.tile(np.arange(8), (3, 3)), ep_size=3)

    async def main() -> None:
        async with Services(placement, settings=replace(MANUAL, watch_interval=0.5)) as group:
            group.record()
            assert (await group.services[2].rebalance(force=True)).round == 1
            group.cluster.kill(0)
            report = await group.services[2].rebalance()  # the wish goes on to the next coordinator
            assert (report.outcome, report.round > 1) == ("moved", True)
            assert group.services[2].health().coordinator == 1
            assert "ranks [0] are out" in report.reason

    run(main())


def test_cancelled_or_timed_out_the_round_goes_on() -> None:
    async def main() -> None:
        async with Services() as group:
            group.record()
            asked = asyncio.ensure_future(group.services[1].rebalance())
            await asyncio.sleep(0)
            asked.cancel()
            await asyncio.wait([asked])
            assert asked.cancelled()
            await asyncio.sleep(5)
            assert [service.health().rounds for service in group.services.values()] == [{"moved": 1}] * 3
            group.record(5, hot=6)
            with pytest.raises(RebalanceTimeout, match="goes on"):
                await group.services[1].rebalance(timeout=0.0)
            await asyncio.sleep(5)
            assert group.services[0].health().rounds == {"moved": 2}

    run(main())


def test_a_rank_that_comes_back_is_filled_again() -> None:
    placement = Placement(np.tile(np.arange(8), (3, 3)), ep_size=3)

    async def main() -> None:
        async with Services(placement, settings=replace(MANUAL, step_interval=1000, watch_interval=0.5)) as group:
            cluster = group.cluster
            group.record()
            cluster.kill(2)
            await holds(group, 2, False)
            back = asyncio.ensure_future(cluster.restart(2, placement))
            assert await cluster.reconnect(2) == [None, None]
            await back
            await group.start(2)
            group.record()
            await holds(group, 2, True)
            await group.idle()
            assert group.services[0].health().members == (0, 1, 2)
            assert len({comm.placement.digest() for comm in cluster.comms}) == 1
            assert cluster.wrong_bytes() == 0

    run(main())


async def holds(group: Services, rank: int, something: bool) -> None:
    """Until rank 0 says that a rank holds something, or nothing."""
    async with asyncio.timeout(300):
        while bool((group.cluster.comms[0].placement.local(rank) >= 0).any()) != something:
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("loads", [True, False], ids=["with a loader", "without"])
def test_lost_experts_come_from_the_loader_or_the_log_says_that_one_is_needed(
    loads: bool, caplog: pytest.LogCaptureFixture
) -> None:
    placement = Placement.initial(2, 6, ep_size=3, num_redundant=6)
    alone = Placement(placement.physical_to_logical_map[:, [0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5]], ep_size=3)

    async def main() -> None:
        chosen = replace(MANUAL, step_interval=1000, watch_interval=0.5)

        def of_rank(group: Services, rank: int) -> dict[str, Any]:
            return {"load_expert": group.cluster.rows[rank].load} if loads else {}

        async with Services(alone, settings=chosen, of_rank=of_rank) as group:
            group.record()
            group.cluster.kill(2)
            await asyncio.sleep(30)
            emptied = (group.cluster.comms[0].placement.local(2) == -1).all()
            assert emptied == loads
            assert (group.services[0].health().failures == 0) == loads
            assert group.cluster.wrong_bytes(ranks=(0, 1)) == 0

    with caplog.at_level(logging.WARNING, "eplb_async.service"):
        run(main())
    assert any("load_expert" in record.getMessage() for record in caplog.records) != loads


def test_a_second_service_of_a_communicator_is_refused() -> None:
    async def main() -> None:
        async with Services(settings=replace(MANUAL, max_bytes_per_second=12345)) as group:
            with pytest.raises(CommunicatorBusy, match="a service runs on this communicator already"):
                await group.start(1)
            await asyncio.sleep(0.1)
            assert group.cluster.comms[1].health().max_bytes_per_second == 12345
            group.services[1] = next(iter(group.services.values()))

    run(main())


@pytest.mark.parametrize("turns", [0, 5])
@pytest.mark.parametrize("what", ["loads", "policy", "migration"])
def test_a_task_that_is_cancelled_by_somebody_fails_the_round_and_no_more(what: str, turns: int) -> None:
    """Also before it has run at all."""

    async def main() -> None:
        async with Services() as group:
            group.record()
            asked = asyncio.ensure_future(group.rebalance(0))
            while not (found := [t for t in asyncio.all_tasks() if t.get_name() == f"{what} of round 1"]):
                await asyncio.sleep(0)
            for _ in range(turns):
                await asyncio.sleep(0)
            begun = asyncio.get_running_loop().time()
            found[0].cancel()
            assert isinstance(await asked, RebalanceFailed | MigrationError | RebalanceReport)
            await asyncio.sleep(0.5)  # all have heard
            await group.idle()
            assert asyncio.get_running_loop().time() - begun < 5
            assert isinstance(await group.rebalance(1, force=True), RebalanceReport)
            assert group.cluster.wrong_bytes() == 0

    run(main())


@pytest.mark.parametrize("closes", [0, 1])
def test_closing_while_a_round_moves_ends_it_everywhere(closes: int) -> None:
    """Twice is once; the communicators stay, and the others are told at once."""

    async def main() -> None:
        async with Services() as group:
            group.record()
            asked = {rank: asyncio.ensure_future(group.rebalance(rank)) for rank in range(3)}
            while group.services[closes].health().phase != "moving":
                await asyncio.sleep(0)
            await asyncio.gather(group.services[closes].aclose(), group.services[closes].aclose())
            await group.services[closes].aclose()
            answers = {rank: await task for rank, task in asked.items()}
            assert isinstance(answers[closes], CommunicatorClosed)
            with pytest.raises(CommunicatorClosed, match="the service is over"):
                await group.services[closes].rebalance()
            assert group.services[closes].health().phase == "closed"
            await asyncio.sleep(1)
            assert all(comm.health().phase == "idle" for comm in group.cluster.comms)
            assert len({comm.placement.digest() for comm in group.cluster.comms}) == 1
            assert group.cluster.wrong_bytes() == 0
            await group.start(closes)
            group.record()
            assert isinstance(await group.services[1 - closes].rebalance(), RebalanceReport)

    run(main())


def test_a_closed_communicator_ends_the_service() -> None:
    async def main() -> None:
        async with Services() as group:
            await group.cluster.comms[1].aclose()
            await asyncio.sleep(0.1)
            health = group.services[1].health()
            assert (health.phase, health.closed) == ("closed", "the communicator is closed")
            with pytest.raises(CommunicatorClosed, match="the communicator is closed"):
                await group.services[1].rebalance()
            with pytest.raises(CommunicatorClosed):
                await group.start(1)

    run(main())


def test_a_fenced_rank_ends_its_service_and_the_others_go_on() -> None:
    placement = Placement(np.tile(np.arange(8), (3, 3)), ep_size=3)

    async def main() -> None:
        async with Services(placement) as group:
            group.record()
            for rank in (0, 1):
                await group.cluster.comms[rank].exclude(2)
            await asyncio.sleep(1)
            report = await group.services[1].rebalance()
            assert report.outcome == "moved"
            for _ in range(100):
                if group.services[2].health().closed:
                    break
                await asyncio.sleep(0.1)
            assert "fenced" in group.services[2].health().closed

    run(main())


def test_garbage_from_a_member_is_refused_and_named(caplog: pytest.LogCaptureFixture) -> None:
    """Bytes, shapes and numbers that cannot be: counted, logged, and of no effect on who does not wait for them."""
    placement = Placement.initial(4, 12, ep_size=3, num_redundant=3)
    bad = np.full((4, 12), np.nan)
    payloads = [
        b"",
        b"x" * 100,
        Loads(term=0, round=1, loads=bad, steps=1).encode(),
        Loads(term=0, round=1, loads=-np.ones((4, 12)), steps=1).encode(),
        Loads(term=0, round=1, loads=np.ones((4, 11)), steps=1).encode(),
        Ask(term=0, round=1).encode() + b"\0",
        Verdict(term=0, round=1, outcome="moved", placement=Placement.initial(4, 12, ep_size=3)).encode(),
        Verdict(term=0, round=1, outcome="paused", placement=placement).encode(),
    ]

    async def main() -> None:
        async with Services() as group:
            group.record()
            for payload in payloads:
                group.cluster.comms[2].mail.send(0, TOPIC, payload)
            await asyncio.sleep(1)
            assert group.services[0].health().dropped == {"damaged": len(payloads)}
            assert (await group.services[0].rebalance()).outcome == "moved"

    with caplog.at_level(logging.WARNING, "eplb_async.service"):
        run(main())
    assert sum("the service of rank 2 sent what it should not" in r.message for r in caplog.records) == len(payloads)


def test_steps_are_remembered_with_their_placement() -> None:
    """In lock-step: rounds come by the steps, layers change between the same two, counts go to the right experts."""

    async def main() -> None:
        chosen = replace(MANUAL, step_interval=20, window_steps=20)
        async with Services(settings=chosen, step=True) as group:
            ran: dict[tuple[int, int], bytes] = {}

            async def engine(rank: int) -> None:
                service = group.services[rank]
                for number in range(1, 120):
                    async with service.forward() as step:
                        placement = group.cluster.comms[rank].placement
                        assert step.number == number
                        key = ran.setdefault((number, 0), placement.digest())
                        assert key == placement.digest(), f"step {number}"
                        local = placement.local(rank)
                        counts = np.take_along_axis(skewed(placement, number // 40), local.astype(int), axis=1)
                        share = np.take_along_axis(placement.logical_replica_count, local.astype(int), axis=1)
                        await asyncio.sleep(0.01)
                    service.record(counts / share, by="local")
                service.idle()

            await asyncio.gather(*(engine(rank) for rank in range(3)))
            await group.idle()
            assert group.services[0].health().rounds["moved"] >= 3
            assert group.services[0].health().steps == 119
            assert group.cluster.wrong_bytes() == 0
            total = sum(service.loads()[0] for service in group.services.values())
            steps = group.services[0].loads()[1]
            np.testing.assert_allclose(total, steps * skewed(group.placement, 2), rtol=1e-9)

    run(main())


def test_forward_is_refused_where_layers_are_applied_at_once() -> None:
    async def main() -> None:
        async with Services() as group:
            with pytest.raises(RuntimeError, match=r"comm\.using\(layer\)"):
                group.services[0].forward()

    run(main())


def test_an_attached_counter_is_read_before_a_round_and_now_and_then() -> None:
    async def main() -> None:
        chosen = replace(MANUAL, step_interval=30, window_steps=16)
        async with Services(settings=chosen, step=True) as group:
            counters = [np.zeros((4, 12), dtype=np.int64) for _ in range(3)]
            for rank, service in group.services.items():
                service.attach(counters[rank], by="experts")

            async def engine(rank: int) -> None:
                for _ in range(60):
                    async with group.services[rank].forward():
                        counters[rank] += skewed(group.placement).astype(np.int64)
                        await asyncio.sleep(0.01)
                group.services[rank].idle()

            await asyncio.gather(*(engine(rank) for rank in range(3)))
            await group.idle()
            health = group.services[0].health()
            assert health.rounds.get("moved", 0) >= 1
            assert group.services[0].loads()[1] <= 16 + 2
            assert group.cluster.wrong_bytes() == 0

    run(main())


def test_steps_can_be_said_where_layers_are_applied_at_once() -> None:
    async def main() -> None:
        async with Services(settings=replace(MANUAL, step_interval=32, window_steps=16)) as group:
            counters = [np.zeros((4, 12), dtype=np.int64) for _ in range(3)]
            for rank, service in group.services.items():
                service.attach(counters[rank], by="experts")
            for _ in range(40):
                for rank, service in group.services.items():
                    counters[rank] += skewed(group.placement).astype(np.int64)
                    service.stepped()
                await asyncio.sleep(0.01)
            await group.idle()
            assert group.services[0].health().rounds == {"moved": 1}
            assert group.services[0].health().steps == 40
            loads, steps = group.services[0].loads()
            assert 0 < steps <= 18
            np.testing.assert_array_equal(loads, steps * skewed(group.placement).astype(np.int64))

    run(main())


@pytest.mark.parametrize("stopped", [0, 2])
def test_a_rank_that_is_stopped_is_named_and_takes_part_again_when_it_goes_on(stopped: int) -> None:
    """As SIGSTOP does: nothing proves it gone, so the view stays, and each round fails in time."""

    async def main() -> None:
        async with Services() as group:
            group.record()
            group.cluster.stop(stopped)
            begun = asyncio.get_running_loop().time()
            with pytest.raises(RebalanceFailed) as caught:
                await group.services[1].rebalance()
            assert caught.value.ranks == (stopped,) if stopped == 0 else f"ranks [{stopped}]" in str(caught.value)
            assert asyncio.get_running_loop().time() - begun < 30
            group.cluster.resume(stopped)
            await asyncio.sleep(30)
            await group.idle()
            assert (await group.services[1].rebalance(force=True)).outcome in ("moved", "not_worth_it")
            assert len({comm.placement.digest() for comm in group.cluster.comms}) == 1
            assert group.cluster.wrong_bytes() == 0

    run(main())


def test_the_hook_hears_of_every_round() -> None:
    heard: list[tuple[str, dict[str, Any]]] = []

    async def main() -> None:
        def hook(event: Any) -> None:
            heard.append((event.name, dict(event.fields)))
            raise ValueError("hooks change nothing")

        async with Services(of_rank=lambda _, rank: {"telemetry": hook} if rank == 0 else {}) as group:
            group.record()
            await group.services[0].rebalance()
            group.services[0].pause()
            await group.services[0].rebalance()
            group.services[0].resume()

    run(main())
    names = [name for name, _ in heard]
    assert names == ["rebalance_ended", "rebalancing_paused", "rebalance_ended", "rebalancing_resumed"]
    assert heard[0][1]["outcome"] == "moved"


def test_the_number_of_experts_must_fit_in_a_message() -> None:
    async def main() -> None:
        placement = Placement.initial(600, 1024, ep_size=1)
        async with Services(Placement.initial(1, 2, ep_size=1)) as group:
            comm = group.cluster.comms[0]
            comm._session.placement = placement
            with pytest.raises(ValueError, match="do not fit in a message"):
                await group.start(0)

    run(main())


def test_what_a_service_is_can_be_read() -> None:
    async def main() -> None:
        async with Services(settings=ServiceSettings(step_interval=10)) as group:
            group.record(4)
            assert str(group.services[0].health()).startswith("rank 0's service: idle")
            assert "4 steps, 6 to the next round" in str(group.services[0].health())
            assert repr(group.services[1]) == "<EplbService of rank 1: idle>"

    run(main())
