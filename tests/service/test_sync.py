"""The service from plain threads: the same calls, errors as they were raised, no wait without an end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import uvloop

from eplb_async import waiting
from eplb_async.communicator import MigrationReport
from eplb_async.core.placement import Placement
from eplb_async.errors import CommunicatorClosed, HandshakeError, MigrationTimeout, PlacementError
from eplb_async.service import EplbService, ServiceSettings, SyncService
from eplb_async.settings import Settings
from eplb_async.testing import MemoryFabric
from eplb_async.testing.cluster import LocalCluster, MemoryRendezvous
from eplb_async.testing.patterns import PatternWeights

pytestmark = pytest.mark.timeout(60)

OLD = Placement([[0, 1, 2, 0, 3, 1]] * 2, ep_size=2)
NEW = Placement([[3, 1, 2, 0, 0, 1]] * 2, ep_size=2)
QUIET = ServiceSettings(step_interval=0, min_interval=0.0, watch_interval=0.0)
SKEWED = np.array([[1, 1, 100, 1]] * 2)


class Served:
    """Two ranks in memory with their services, on a loop in a thread of its own."""

    def __init__(self, make_loop: Callable[[], asyncio.AbstractEventLoop], policy: Any = None) -> None:
        self.loop = make_loop()
        self.policy = policy
        self.cluster = LocalCluster(OLD, settings=Settings(secret=b"the cluster's secret", max_pause=0.002))
        self.services: list[EplbService] = []
        self.stack = contextlib.AsyncExitStack()
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()
        self.run(self._open())

    @property
    def syncs(self) -> list[SyncService]:
        return [service.sync for service in self.services]

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    def both(self, call: Callable[[SyncService], Any]) -> list[Any]:
        """Call it on both ranks at once, from a thread each."""
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(call, self.syncs))

    def end(self) -> None:
        if self.loop.is_closed():
            return
        self.run(self.stack.aclose())
        self.close_loop()

    def close_loop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(30)

    async def _open(self) -> None:
        await self.stack.enter_async_context(self.cluster)
        for comm in self.cluster.comms:
            service = EplbService(comm, settings=QUIET, policy=self.policy)
            self.services.append(await self.stack.enter_async_context(service))

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.close()


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    served = Served(request.param)
    yield served
    served.end()


# --------------------------------------------------------------------------------------------------- service.sync
def test_the_calls_of_a_service_from_plain_threads(served: Served) -> None:
    told: list[int] = []
    one, two = served.syncs
    remove = one.on_applied(lambda layer, _: told.append(layer))
    for sync in (one, two):
        sync.record(SKEWED, by="experts")
    assert two.placement == OLD
    report = two.rebalance(force=True)
    assert report.outcome == "moved"
    assert report.balancedness_after > report.balancedness_before
    served.both(lambda sync: sync.call(lambda: settled(sync), timeout=10.0))
    assert one.placement == two.placement != OLD
    assert told == [0, 1]
    remove()
    for result in served.both(lambda sync: sync.migrate(NEW)):
        assert isinstance(result, MigrationReport)
    assert served.run(wrong_bytes(served)) == 0
    with one.using(1) as placement:
        assert placement == NEW
    assert one.health().rounds == {"moved": 1}
    one.pause()
    assert one.rebalance().outcome == "paused"
    one.resume()
    one.attach(np.zeros((2, 4), dtype=np.int64), by="experts")
    with pytest.raises(ValueError, match="77"):
        one.attach(np.zeros((2, 77), dtype=np.int64))
    with pytest.raises(RuntimeError, match="lock-step"):
        one.forward()


async def settled(sync: SyncService) -> None:
    while sync.service.health().phase != "idle":
        await asyncio.sleep(0.005)


async def wrong_bytes(served: Served) -> int:
    return served.cluster.wrong_bytes()


def test_an_error_is_raised_as_it_was() -> None:
    """Its own class, its own traceback down to the line that raised it."""

    def policy(loads: Any, placement: Placement) -> Placement:
        raise ZeroDivisionError("of the policy")

    served = Served(asyncio.new_event_loop, policy)
    try:
        for sync in served.syncs:
            sync.record(SKEWED, by="experts")
        with pytest.raises(ZeroDivisionError, match="of the policy") as caught:
            served.syncs[0].rebalance(force=True)
        assert "raise ZeroDivisionError" in "".join(traceback.format_exception(caught.value))
        with pytest.raises(PlacementError):
            served.syncs[0].migrate(Placement([[0, 1]], ep_size=2))
        with pytest.raises(ValueError, match="timeout=-1"):
            served.syncs[0].migrate(NEW, timeout=-1)
    finally:
        served.end()


def test_a_deadline_is_that_of_the_call(served: Served) -> None:
    with pytest.raises(MigrationTimeout):
        served.syncs[0].migrate(NEW, timeout=0.2)
    with pytest.raises(TimeoutError, match=r"took longer than 0\.05 s and was cancelled"):
        served.syncs[0].call(lambda: asyncio.sleep(30), timeout=0.05)

    async def late() -> None:
        raise TimeoutError("of its own")

    with pytest.raises(TimeoutError, match="of its own"):
        served.syncs[0].call(late, timeout=5.0)


def test_in_the_loops_own_thread_it_is_refused(served: Served) -> None:
    """It would wait for itself; what waits for nothing may be called there."""
    one = served.syncs[0]
    refused: list[object] = []

    async def inside() -> None:
        for call in (lambda: one.rebalance(), lambda: one.migrate(NEW), lambda: one.close()):
            try:
                call()
            except RuntimeError as error:
                refused.append(str(error))
        one.record(SKEWED, by="experts")
        with one.using(0):
            pass

    served.run(inside())
    assert len(refused) == 3
    assert all("own thread" in str(why) for why in refused), refused


def test_a_fork_refuses(served: Served) -> None:
    one = served.syncs[0]
    engine = one.comm._engine
    engine.pid += 1
    try:
        with pytest.raises(CommunicatorClosed, match="in its fork"):
            one.rebalance()
    finally:
        engine.pid = os.getpid()


def test_a_loop_that_is_closed_or_closes_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_LOOK_SECONDS", 0.02)
    served = Served(asyncio.new_event_loop)
    one = served.syncs[0]
    served.run(served.stack.aclose())
    waits: list[object] = []
    begun = threading.Event()

    async def for_ever() -> None:
        begun.set()
        await asyncio.Event().wait()

    def wait() -> None:
        try:
            one.call(for_ever, timeout=50.0)
        except CommunicatorClosed as error:
            waits.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    assert begun.wait(30)
    task = next(task for task in asyncio.all_tasks(served.loop) if "_Call._run" in repr(task))
    served.close_loop()
    thread.join(30)
    assert len(waits) == 1
    assert "closed" in str(waits[0])
    with pytest.raises(CommunicatorClosed, match="closed"):
        one.rebalance()
    assert one.close() == ()  # it was closed before its loop
    task._log_destroy_pending = False  # type: ignore[attr-defined]


def test_a_call_that_its_loop_cancels_says_so(served: Served) -> None:
    """As at the end of ``asyncio.run``, which cancels every task."""
    one = served.syncs[0]

    async def cancelled() -> None:
        asyncio.current_task().cancel()  # type: ignore[union-attr]
        await asyncio.sleep(30)

    with pytest.raises(CommunicatorClosed, match="was cancelled on its event loop"):
        one.call(cancelled, timeout=5.0)


def test_a_loop_that_is_blocked_is_not_waited_for_for_ever(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_LOOK_SECONDS", 0.02)
    monkeypatch.setattr(waiting, "_GRACE_SECONDS", 0.1)
    free, ran = threading.Event(), []

    async def run() -> None:
        ran.append(1)

    served.loop.call_soon_threadsafe(free.wait, 30)
    with pytest.raises(TimeoutError, match="is blocked, or not running"):
        served.syncs[0].call(run, timeout=0.1)
    free.set()
    served.run(asyncio.sleep(0))
    assert not ran, "it was cancelled"


def interrupt_soon(ready: threading.Event) -> None:
    """Ctrl-C for the main thread, once it waits."""

    def send() -> None:
        assert ready.wait(30)
        time.sleep(0.05)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=send, daemon=True).start()


def test_an_interrupt_gets_through_and_cancels_the_call(served: Served) -> None:
    begun, cancelled = threading.Event(), threading.Event()

    async def for_ever() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    interrupt_soon(begun)
    with pytest.raises(KeyboardInterrupt):
        served.syncs[0].call(for_ever, timeout=50.0)
    assert cancelled.wait(30)


def test_closing_it_closes_the_service_and_not_the_communicator(served: Served) -> None:
    one = served.syncs[0]
    assert one.close() == one.close() == ()
    assert one.health().closed
    with pytest.raises(CommunicatorClosed):
        one.rebalance()
    assert one.comm.health().phase == "idle"


# ------------------------------------------------------------------------------------------------ without any loop
ALONE = Placement([[0, 1, 2]] * 2, ep_size=1)
OTHER = Placement([[2, 0, 1]] * 2, ep_size=1)


def alone(**more: Any) -> tuple[SyncService, PatternWeights]:
    rows = PatternWeights(ALONE, 0, (64, 24))
    arguments: dict[str, Any] = {
        "rank": 0,
        "ep_size": 1,
        "weights": rows.layers,
        "placement": ALONE,
        "rendezvous": MemoryRendezvous(),
        "group": "alone",
        "settings": Settings(secret=b"the cluster's secret"),
        "native": MemoryFabric().native,
        "service_settings": QUIET,
        "timeout": 20.0,
    }
    return SyncService.open(**(arguments | more)), rows


def engines() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("eplb-async alone/")]


@pytest.mark.parametrize("use_uvloop", [False, True])
def test_a_program_without_a_loop_opens_migrates_and_closes(use_uvloop: bool) -> None:
    service, rows = alone(settings=Settings(secret=b"the cluster's secret", use_uvloop=use_uvloop))
    told: list[str] = []
    with service:
        service.on_applied(lambda *_: told.append(threading.current_thread().name))
        assert isinstance(service.migrate(OTHER), MigrationReport)
        assert service.placement == OTHER
        assert rows.wrong_bytes(OTHER) == 0
        assert set(told) == {"eplb-async alone/0-copy"}, "not on the loop that polls"
        service.record(np.ones((2, 3)), by="experts")
        assert service.rebalance().outcome == "not_worth_it"
        with service.using(0) as placement:
            assert placement == OTHER
        assert service.comm.health().phase == "idle"
    assert engines() == []
    assert service.close() == ()
    with pytest.raises(CommunicatorClosed):
        service.rebalance()
    with pytest.raises(CommunicatorClosed), service.using(0):
        pass


def test_steps_from_the_engines_own_program() -> None:
    """A plain ``with`` for each forward pass; the layer is applied between two of them."""
    settings = Settings(secret=b"the cluster's secret", activation="step")
    service, rows = alone(settings=settings)
    over, steps = threading.Event(), []

    def engine() -> None:
        while not over.is_set():
            with service.forward() as step:
                steps.append(step.number)
                before = service.placement
                time.sleep(0.001)
                assert service.placement == before
        service.idle()

    with service:
        thread = threading.Thread(target=engine)
        thread.start()
        try:
            service.migrate(OTHER)
        finally:
            over.set()
            thread.join(30)
        assert rows.wrong_bytes(OTHER) == 0
        assert steps == list(range(1, len(steps) + 1))


def test_several_threads_close_at_once_and_all_wait_for_the_end() -> None:
    service, _ = alone()
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: service.close(), range(4))) == [()] * 4
    assert engines() == []


def test_a_thread_that_has_the_ended_engines_number_is_not_taken_for_it() -> None:
    """The system gives the number of an ended thread to the next one that starts."""
    service, _ = alone()
    ended = service.comm._engine.thread_id
    service.close()
    with_its_number: list[object] = []

    def close() -> None:
        if threading.get_ident() == ended:
            with_its_number.append(service.close())

    for _ in range(200):
        thread = threading.Thread(target=close)
        thread.start()
        thread.join(20)
        if with_its_number:
            break
    assert with_its_number == [()]


def test_a_thread_that_waits_when_another_closes_is_told_and_so_is_who_closes() -> None:
    """Who closes while a layer is in use learns what was not applied."""
    service, rows = alone()
    ends: list[object] = []

    def migrate() -> None:
        try:
            service.migrate(OTHER, timeout=40.0)
        except BaseException as error:
            ends.append(error)

    with service.using(0):
        thread = threading.Thread(target=migrate)
        thread.start()
        while not service.comm.health().in_use:
            time.sleep(0.001)
        left = service.close(timeout=0.2)
        thread.join(30)
        assert rows.wrong_bytes(ALONE) == 0
    assert [type(end) for end in ends] == [CommunicatorClosed]
    why = "committed and not applied: 1 users of layer 0 had not left"
    assert left == (f"layer 0, {why}", f"layer 1, {why}")
    assert engines() == []


def test_what_open_raises_is_raised_and_nothing_is_left() -> None:
    with pytest.raises(PlacementError):
        alone(ep_size=2)
    with pytest.raises(TypeError):
        alone(no_such_argument=1)
    with pytest.raises(HandshakeError):
        alone(placement=OLD, ep_size=2, weights=PatternWeights(OLD, 0, (64,)).layers, timeout=0.2)
    assert engines() == []


def test_a_service_that_cannot_be_made_takes_the_communicator_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing stays registered, and no thread is left."""
    fabric = MemoryFabric()
    with pytest.raises(AttributeError):
        alone(service_settings="none", native=fabric.native)
    assert engines() == []
    assert not fabric.violations


def test_an_interrupt_in_open_gets_through_and_nothing_is_left() -> None:
    """Peers that do not come are not waited for any longer."""
    ready = threading.Event()
    layers = PatternWeights(OLD, 0, (64,)).layers

    def weights() -> Any:
        ready.set()
        return layers

    interrupt_soon(ready)
    with pytest.raises(KeyboardInterrupt):
        alone(placement=OLD, ep_size=2, weights=weights, timeout=50.0)
    assert engines() == []


def test_one_that_is_dropped_says_so_and_ends() -> None:
    service, _ = alone()
    dropped = [service]
    del service
    with pytest.warns(ResourceWarning, match="was never closed"):
        dropped.clear()
    gc.collect()
    deadline = time.monotonic() + 30
    while engines() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engines() == []
