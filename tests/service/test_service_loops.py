"""The service on real loops: threads, a loop that is closed under it, and one that is dropped."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from eplb_async.core.placement import Placement
from eplb_async.errors import RebalanceFailed
from eplb_async.service import EplbService, ServiceSettings
from eplb_async.service.payloads import TOPIC, Loads
from eplb_async.settings import Settings
from eplb_async.testing.cluster import LocalCluster
from tests.service.cluster import SECRET, skewed

PLACEMENT = Placement.initial(4, 12, ep_size=3, num_redundant=3)
CHOSEN = Settings(secret=SECRET, idle_tick=0.02)


def local(settings: Settings = CHOSEN) -> LocalCluster:
    return LocalCluster(PLACEMENT, settings=settings)


async def opened(cluster: LocalCluster, **options: Any) -> list[EplbService]:
    chosen = {"settings": ServiceSettings(step_interval=0, min_interval=0.0)} | options
    return [await EplbService(comm, **chosen).__aenter__() for comm in cluster.comms]


async def until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.asyncio
@pytest.mark.usefixtures("no_blocking")
async def test_threads_record_pause_and_look_while_rounds_run() -> None:
    """The policy runs in a thread, counts come from others, and the loop is blocked by none of it."""
    threads_seen: set[str] = set()

    def policy(loads: Any, placement: Placement) -> Any:
        threads_seen.add(threading.current_thread().name)
        from eplb_async.policy import rebalance_experts

        return rebalance_experts(loads, 15, 1, 1, 3, current=placement, min_gain=0.0)

    async with local() as cluster:
        settings = ServiceSettings(step_interval=50, min_interval=0.0, window_steps=100)
        services = await opened(cluster, policy=policy, settings=settings)
        over = threading.Event()

        def engine(service: EplbService, number: int) -> None:
            step = 0
            while not over.wait(0.001):
                service.record(skewed(PLACEMENT, step // 100), by="experts")
                step += 1
                if number == 2 and step == 30:
                    service.pause()
                    service.resume()
                service.health()

        threads = [threading.Thread(target=engine, args=(s, i)) for i, s in enumerate(services)]
        for thread in threads:
            thread.start()
        try:
            await until(lambda: services[0].health().rounds.get("moved", 0) >= 3)
        finally:
            over.set()
            for thread in threads:
                thread.join(10)
        for service in services:
            await service.aclose()
            assert service.health().rounds.get("failed", 0) <= 1  # a service that closes ends the round of the others
        assert all(name.startswith("eplb-async service 0") for name in threads_seen)
        await until(lambda: all(comm.health().phase == "idle" for comm in cluster.comms))
        assert cluster.wrong_bytes() == 0


@pytest.mark.asyncio
async def test_a_policy_that_hangs_fails_rounds_and_does_not_hold_up_the_end() -> None:
    """Also the next round says so; the thread is a daemon."""
    free = threading.Event()

    def policy(loads: Any, placement: Placement) -> Placement:
        free.wait(60)
        return placement

    async with local() as cluster:
        settings = ServiceSettings(step_interval=0, round_timeout=0.3, min_interval=0.0)
        services = await opened(cluster, policy=policy, settings=settings)
        services[0].record(skewed(PLACEMENT), by="experts")
        with pytest.raises(RebalanceFailed, match="the policy took longer than"):
            await services[1].rebalance()
        with pytest.raises(RebalanceFailed, match="the policy of round 1 still runs"):
            await services[1].rebalance()
        free.set()
        await until(lambda: services[0]._runner._deciding[1].done())  # type: ignore[index]
        assert (await services[1].rebalance()).outcome == "not_worth_it"
        for service in services:
            await service.aclose()


@pytest.mark.asyncio
@pytest.mark.parametrize("error", [StopIteration, SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError])
async def test_nothing_that_a_policy_raises_ends_more_than_the_round(error: type[BaseException]) -> None:
    """Not even what no future can carry, or what would end the loop."""
    errors = [error]

    def policy(loads: Any, placement: Placement) -> Placement:
        if errors:
            raise errors.pop()
        return placement

    async with local() as cluster:
        services = await opened(cluster, policy=policy)
        services[0].record(skewed(PLACEMENT), by="experts")
        with pytest.raises(RebalanceFailed, match=f"the policy failed.*{error.__name__}"):
            await services[1].rebalance()
        assert (await services[1].rebalance()).outcome == "not_worth_it"
        for service in services:
            await service.aclose()


@pytest.mark.asyncio
async def test_what_came_while_the_loop_was_blocked_counts_before_the_deadline() -> None:
    """The deadline of the round passes meanwhile, and so does the answer come: it is heard first, on any loop."""
    async with local() as cluster:
        chosen = ServiceSettings(step_interval=0, min_interval=0.0, round_timeout=0.2, watch_interval=0.0)
        async with EplbService(cluster.comms[0], settings=chosen) as service:
            asked = asyncio.ensure_future(service.rebalance())
            await until(lambda: service.health().waiting_for == (1, 2))
            answer = Loads(term=0, round=1, loads=np.zeros((4, 12)), steps=1).encode()

            def deliver() -> None:
                for rank in (1, 2):
                    service._runner.heard(rank, answer)

            thread = threading.Timer(0.05, deliver)
            thread.start()
            time.sleep(0.4)  # noqa: ASYNC251
            thread.join()
            assert (await asked).outcome == "no_load"


@pytest.mark.asyncio
async def test_what_an_old_round_fails_of_is_not_taken_for_the_cause_of_a_new_one() -> None:
    """Loads that hang, as on a device that is stuck, and fail in the middle of the next round."""
    free, failed, first = threading.Event(), threading.Event(), threading.Event()

    class Stuck(EplbService):
        def loads(self) -> Any:
            if first.is_set():
                return super().loads()
            first.set()
            free.wait(60)
            try:
                raise ValueError("of the first round")
            finally:
                failed.set()

    def policy(loads: Any, placement: Placement) -> Placement:
        free.set()
        failed.wait(60)
        time.sleep(0.1)
        raise RuntimeError("of the second round")

    async with local() as cluster:
        chosen = ServiceSettings(step_interval=0, min_interval=0.0, round_timeout=1.0)
        kinds = (EplbService, Stuck, EplbService)
        services = [
            await kind(comm, settings=chosen, policy=policy).__aenter__()
            for kind, comm in zip(kinds, cluster.comms, strict=True)
        ]
        services[0].record(skewed(PLACEMENT), by="experts")
        with pytest.raises(RebalanceFailed, match=r"ranks \[1\] did not answer"):
            await services[1].rebalance()
        with pytest.raises(RebalanceFailed, match="of the second round"):
            await services[1].rebalance()
        for service in services:
            await service.aclose()


@pytest.mark.asyncio
async def test_another_loop_or_thread_is_refused() -> None:
    async with local() as cluster:
        services = await opened(cluster)
        errors: list[BaseException] = []

        def elsewhere() -> None:
            for call in (services[0].rebalance, services[0].aclose):
                try:
                    asyncio.run(call())
                except RuntimeError as error:
                    errors.append(error)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        while thread.is_alive():
            await asyncio.sleep(0.01)
        assert ["service.sync" in str(error) for error in errors] == [True, True]
        for service in services:
            await service.aclose()


@pytest.mark.asyncio
async def test_a_dropped_service_says_so_and_is_heard_no_more() -> None:
    """The communicator does not keep it alive."""
    async with local() as cluster:
        services = await opened(cluster)
        for service in services[1:]:
            await service.aclose()
        dropped = weakref.ref(services[0])
        services.clear()
        del service
        with pytest.warns(ResourceWarning, match="rank 0's service was never closed"):
            gc.collect()
        assert dropped() is None
        cluster.comms[1].mail.send(0, TOPIC, b"anybody?")
        await asyncio.sleep(0.05)


def test_a_loop_that_is_closed_under_a_service() -> None:
    """What other threads still call does nothing, and raises nothing."""

    async def main() -> tuple[EplbService, LocalCluster]:
        cluster = await local().__aenter__()
        services = await opened(cluster, settings=ServiceSettings(step_interval=1))
        for service in services[1:]:
            await service.aclose()
        for comm in cluster.comms:
            await comm.aclose()
        return services[0], cluster

    with asyncio.Runner() as runner:
        service, _ = runner.run(main())
    service.record(skewed(PLACEMENT), by="experts")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(service.pause).result(30)
        assert pool.submit(service.sync.close).result(30) == ()
    assert service.health().closed
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        del service, pool
        gc.collect()
