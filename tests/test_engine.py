"""The engine loop: calls from any loop, cancellation, stopping, forks and interpreter exit."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from eplb_async.engine import Engine, LoopEngine
from eplb_async.errors import CommunicatorClosed
from eplb_async.nixl import AsyncNixlAgent
from eplb_async.nixl.bindings import load
from eplb_async.settings import Settings
from eplb_async.testing import MemoryFabric
from eplb_async.threads import DaemonExecutor
from tests.nixl import contract
from tests.procs import ROOT, Process, Zygote, stop, wait_until

LIMIT = 20.0


@pytest.fixture(params=[True, False], ids=["engine on uvloop", "engine on asyncio"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = Engine("eplb-async test", use_uvloop=request.param)
    yield engine
    assert engine.stop(LIMIT)


async def on_engine() -> str:
    return threading.current_thread().name


# ---------------------------------------------------------------------------------------------------- calls
@pytest.mark.asyncio
async def test_calls_run_on_the_engine_thread(engine: Engine) -> None:
    """A call runs on the engine's thread; its result and its error come back."""

    async def fail() -> None:
        raise ValueError("no")

    assert await engine.run(on_engine) == "eplb-async test"
    with pytest.raises(ValueError, match="no"):
        await engine.run(fail)
    assert engine.thread.daemon
    assert not engine._submissions
    assert not engine._tasks


@pytest.mark.asyncio
async def test_two_loops_call_one_engine(engine: Engine) -> None:
    """Calls from the loops of two threads at once are all answered, each on its own loop."""

    async def double(i: int) -> int:
        await asyncio.sleep(0)
        return 2 * i

    async def many() -> list[int]:
        return await asyncio.gather(*(engine.run(functools.partial(double, i)) for i in range(200)))

    other = asyncio.to_thread(lambda: asyncio.run(many()))
    async with asyncio.timeout(LIMIT):
        assert await asyncio.gather(many(), other) == [[2 * i for i in range(200)]] * 2


@pytest.mark.asyncio
async def test_a_cancelled_awaiter_ends_within_one_turn(engine: Engine) -> None:
    """Cancelling the awaiting task ends it within one turn, even while the engine is blocked (I-10)."""
    entered, go_on, settled = threading.Event(), threading.Event(), threading.Event()

    async def blocks() -> None:
        entered.set()
        go_on.wait(LIMIT)
        try:
            await asyncio.Event().wait()
        finally:
            settled.set()

    task = asyncio.create_task(engine.run(blocks))
    await asyncio.to_thread(entered.wait, LIMIT)
    task.cancel()
    await asyncio.sleep(0)
    assert task.cancelled()
    go_on.set()
    assert await asyncio.to_thread(settled.wait, LIMIT)


@pytest.mark.asyncio
async def test_a_call_cancelled_before_it_starts_never_runs(engine: Engine) -> None:
    """A call whose awaiter is cancelled before the engine takes it up is not begun."""
    block, ran = threading.Event(), []
    engine.post(lambda: block.wait(LIMIT))

    async def call() -> None:
        ran.append(1)

    task = asyncio.create_task(engine.run(call))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    assert task.cancelled()
    block.set()
    await engine.run(on_engine)
    assert ran == []


@pytest.mark.asyncio
async def test_a_cancel_in_the_turn_of_the_result_still_cancels(engine: Engine) -> None:
    """A task that is cancelled when its result has just come ends cancelled, and nothing is left."""
    block = threading.Event()
    engine.post(lambda: block.wait(LIMIT))
    task = asyncio.create_task(engine.run(on_engine))
    await asyncio.sleep(0)
    (submission,) = engine._submissions
    block.set()
    async with asyncio.timeout(LIMIT):
        while not submission.future.done():
            await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    await engine.run(on_engine)
    assert not engine._submissions
    assert not engine._tasks


@pytest.mark.asyncio
async def test_a_detached_call_goes_on(engine: Engine) -> None:
    """A detached call runs to its end when its awaiter is cancelled."""
    entered, go_on, done = threading.Event(), asyncio.Event(), threading.Event()

    async def call() -> None:
        entered.set()
        await go_on.wait()
        done.set()

    task = asyncio.create_task(engine.run(call, detach=True))
    await asyncio.to_thread(entered.wait, LIMIT)
    task.cancel()
    await asyncio.sleep(0)
    assert task.cancelled()
    engine.post(go_on.set)
    assert await asyncio.to_thread(done.wait, LIMIT)


def test_the_users_loop_may_be_closed_while_a_call_runs(engine: Engine) -> None:
    """The engine finishes a call whose loop is closed, and goes on serving others; nothing is kept."""
    entered, go_on, done = threading.Event(), threading.Event(), threading.Event()

    async def call() -> None:
        entered.set()
        await engine.offload(lambda: go_on.wait(LIMIT))
        done.set()

    loop = asyncio.new_event_loop()
    task = loop.create_task(engine.run(call))
    loop.call_soon(loop.stop)
    loop.run_forever()
    assert entered.wait(LIMIT)
    loop.close()
    go_on.set()
    assert done.wait(LIMIT)
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    del task
    gc.collect()
    assert asyncio.run(engine.run(on_engine)) == "eplb-async test"
    assert not engine._submissions


@pytest.mark.asyncio
async def test_blocking_work_goes_to_the_copy_thread(engine: Engine) -> None:
    """Offloaded work runs on the worker's thread, in order, and its error comes back."""

    async def call() -> list[str]:
        names = [await engine.offload(lambda: threading.current_thread().name) for _ in range(2)]
        with pytest.raises(ZeroDivisionError):
            await engine.offload(lambda: 1 // 0)
        return names

    assert await engine.run(call) == ["eplb-async test-copy"] * 2


@pytest.mark.asyncio
async def test_an_engine_may_share_the_users_loop() -> None:
    """Without a thread of its own an engine runs calls, and offloaded work, on the user's loop."""
    engine = LoopEngine(asyncio.get_running_loop())

    async def call() -> str:
        return await engine.offload(lambda: threading.current_thread().name)

    assert await engine.run(call) == threading.current_thread().name
    task = asyncio.create_task(engine.run(asyncio.Event().wait))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    assert task.cancelled()
    async with asyncio.timeout(LIMIT):
        while engine._tasks:
            await asyncio.sleep(0)


# ------------------------------------------------------------------------------------------------- stopping
@pytest.mark.asyncio
async def test_a_stopped_engine_refuses_calls() -> None:
    """Calls to a stopped engine raise ``CommunicatorClosed``; stopping again is nothing."""
    engine = Engine("eplb-async test")
    assert await asyncio.to_thread(engine.stop, LIMIT)
    with pytest.raises(CommunicatorClosed, match="stopped"):
        await engine.run(on_engine)
    with pytest.raises(CommunicatorClosed, match="stopped"):
        engine.post(lambda: None)
    assert engine.stop(LIMIT)
    await engine.astop()


@pytest.mark.asyncio
async def test_stopping_ends_the_calls_that_run() -> None:
    """Whoever awaits a call when the engine stops is told ``CommunicatorClosed``."""
    engine = Engine("eplb-async test")
    tasks = [asyncio.create_task(engine.run(asyncio.Event().wait)) for _ in range(3)]
    await engine.run(on_engine)
    await engine.astop()
    async with asyncio.timeout(LIMIT):
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(r) for r in results] == [CommunicatorClosed] * 3


@pytest.mark.asyncio
async def test_a_call_that_races_with_the_stop_is_answered() -> None:
    """A call made while the engine stops gets a result or ``CommunicatorClosed``, never silence."""
    for turns in range(40):
        engine = Engine("eplb-async test", use_uvloop=bool(turns % 2))
        engine.request_stop()
        calls = []
        for _ in range(turns):
            calls.append(asyncio.create_task(engine.run(on_engine)))
            await asyncio.sleep(0)
        async with asyncio.timeout(LIMIT):
            results = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(r) for r in results} <= {str, CommunicatorClosed}
        await engine.astop()


@pytest.mark.asyncio
async def test_a_cancelled_stop_harms_nobody() -> None:
    """Cancelling the awaiter of a stop leaves the stop going on."""
    engine = Engine("eplb-async test")
    go_on = threading.Event()

    async def close() -> None:
        await engine.offload(lambda: go_on.wait(LIMIT))

    engine.on_stop(close)
    task = asyncio.create_task(engine.astop())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    go_on.set()
    await engine.astop()
    assert not engine.thread.is_alive()


@pytest.mark.asyncio
async def test_closers_run_last_in_first_out(caplog: pytest.LogCaptureFixture) -> None:
    """What is to be closed is closed in reverse order; one that fails is logged and stops no other."""
    engine, order = Engine("eplb-async test"), []

    def closer(i: int) -> Any:
        async def close() -> None:
            order.append(i)
            engine.off_stop(closers[i])
            if i == 1:
                raise ValueError("broken closer")

        return close

    closers = [closer(i) for i in range(4)]
    for close in closers:
        engine.on_stop(close)
    engine.off_stop(closers[2])
    await engine.astop()
    assert order == [3, 1, 0]
    assert "broken closer" in caplog.text


def test_a_stopped_engine_leaves_nothing_alive() -> None:
    """Neither threads nor the engine object outlive the stop."""
    engine = Engine("eplb-async test")
    assert engine.stop(LIMIT)
    assert not [t for t in threading.enumerate() if t.name.startswith("eplb-async test")]
    ref = weakref.ref(engine)
    del engine
    gc.collect()
    assert ref() is None


def test_a_worker_survives_what_its_work_raises() -> None:
    """Work that raises, whatever it is, ends neither the worker nor the work after it."""
    worker = DaemonExecutor(1, name="eplb-async test worker")

    def leave() -> None:
        raise SystemExit(3)

    left, after = worker.submit(leave), worker.submit(int, "7")
    assert isinstance(left.exception(LIMIT), SystemExit)
    assert after.result(LIMIT) == 7
    worker.shutdown()


# --------------------------------------------------------------------------------------- unclosed, in memory
@pytest.mark.asyncio
@pytest.mark.parametrize("severity", ["always", "error"])
async def test_dropping_an_open_agent_warns_and_closes_it(severity: Any) -> None:
    """The last reference gone: a ``ResourceWarning``, nothing native on this thread, the engine ends (I-15, C35)."""
    threads: set[str] = set()
    fabric = MemoryFabric()

    def native(name: str, settings: Settings) -> Any:
        agent = fabric.native(name, settings)
        for call in ("destroy", "deregister", "notifications", "release", "abandon"):
            setattr(agent, call, _noting(getattr(agent, call), threads))
        return agent

    agent = await AsyncNixlAgent.open("dropped", Settings(), native=native)
    await agent.register(np.zeros((4, 8), np.uint8), "a")
    thread, endpoint = agent._engine.thread, agent._endpoint  # type: ignore[attr-defined]
    unraisable = []
    with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "unraisablehook", lambda info: unraisable.append(info.exc_value))
        warnings.simplefilter(severity, ResourceWarning)
        del agent
        gc.collect()
    seen = unraisable if severity == "error" else [w.message for w in caught]
    assert [type(w) for w in seen if "dropped was never closed" in str(w)] == [ResourceWarning]
    await asyncio.to_thread(thread.join, LIMIT)
    assert not thread.is_alive()
    assert endpoint.closed
    assert threads == {"eplb-async dropped"}
    assert fabric.violations == []


@pytest.mark.asyncio
async def test_dropping_an_agent_of_a_shared_engine_closes_that_agent(engine: Engine) -> None:
    """On an engine that others use too, only the dropped agent is closed."""
    fabric = MemoryFabric()
    agent = await AsyncNixlAgent.open("dropped", Settings(), engine=engine, native=fabric.native)
    other = await AsyncNixlAgent.open("other", Settings(), engine=engine, native=fabric.native)
    endpoint = agent._endpoint
    kept: list[Any] = [agent]
    del agent
    with pytest.warns(ResourceWarning, match="dropped was never closed"):
        _drop(kept)
    async with asyncio.timeout(LIMIT):
        while not endpoint.closed:
            await asyncio.sleep(0.001)
    await other.metadata()
    await other.aclose()
    assert engine._closers == []
    assert engine.immortal == []


@pytest.mark.asyncio
async def test_an_open_that_is_cancelled_leaves_no_agent(engine: Engine) -> None:
    """Cancelling ``open`` at any moment leaves neither agent nor thread behind."""
    fabric = MemoryFabric()
    for shared in (engine, None):
        for turns in range(6):
            task = asyncio.create_task(
                AsyncNixlAgent.open(f"a{turns}", Settings(), engine=shared, native=fabric.native)._opener()
            )
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            outcome = (await asyncio.gather(task, return_exceptions=True))[0]
            if isinstance(outcome, AsyncNixlAgent):
                await outcome.aclose()
        async with asyncio.timeout(LIMIT):
            while not all(agent.destroyed for agent in fabric.agents.values()):
                await asyncio.sleep(0.001)
    await asyncio.to_thread(
        wait_until, lambda: not [t for t in threading.enumerate() if t.name.startswith("eplb-async a")]
    )
    await engine.run(on_engine)
    assert engine._closers == []


@pytest.mark.asyncio
async def test_an_agent_is_bound_to_its_loop() -> None:
    """Another loop or thread gets a clear error."""
    async with AsyncNixlAgent.open("bound", Settings(), native=MemoryFabric().native) as agent:
        with pytest.raises(RuntimeError, match="bound to the event loop that opened it"):
            await asyncio.to_thread(lambda: asyncio.run(agent.metadata()))


def _drop(kept: list[Any]) -> None:
    kept.clear()
    gc.collect()


def _noting(function: Any, threads: set[str]) -> Any:
    def noting(*args: Any) -> Any:
        threads.add(threading.current_thread().name)
        return function(*args)

    return noting


# ------------------------------------------------------------------------------- exit and fork, with real NIXL
@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote(UCX_TLS="tcp,self") as zygote:
        yield zygote


@pytest.fixture
def source(zygote: Zygote) -> Iterator[Process]:
    ours, theirs = Pipe()
    process = zygote.start(contract.__file__, "serve", pipes=(theirs,))
    try:
        process.card = process.receive()  # type: ignore[attr-defined]
        yield process
    finally:
        zygote.sweep()
        ours.close()


class Open:
    """An agent opened on a loop that is not running all the time, as scripts and notebooks do."""

    def __init__(self, blob: bytes, settings: Settings | None = None) -> None:
        self.runner = asyncio.Runner()
        self.target = np.zeros((64, 4096), np.uint8)
        self.settings = settings or Settings(close_timeout=0.5)
        self.runner.run(self._open(blob))

    async def _open(self, blob: bytes) -> None:
        self.agent = await AsyncNixlAgent.open(f"reader-{os.getpid()}", self.settings)
        self.region = await self.agent.register(self.target, "target")
        self.peer = await self.agent.add_peer(blob)
        await self.read()

    async def read(self) -> None:
        await self.agent.read(self.region[:], self.peer.region("rows")[:])
        assert np.array_equal(self.target, contract.data()["rows"])

    async def start_reading(self, source: int) -> asyncio.Task[None]:
        stop(source)
        reading = asyncio.create_task(self.read())
        while (await self.agent.stats()).in_flight == 0:
            await asyncio.sleep(0.001)
        return reading


KEPT: list[Any] = []


def exits_in_mid_read(control: Connection, blob: bytes, pid: int) -> None:
    opened = Open(blob)
    KEPT.append((opened, opened.runner.run(opened.start_reading(pid))))


def exits_by_an_error(control: Connection, blob: bytes, pid: int) -> None:
    KEPT.append(Open(blob))
    raise SystemExit(3)


def test_the_interpreter_exits_with_a_read_in_flight(zygote: Zygote, source: Process) -> None:
    """Interpreter exit with an open agent and a READ that never ends: no hang, no abort, rc 0."""
    process = zygote.start(__file__, "exits_in_mid_read", *source.card)  # type: ignore[attr-defined]
    assert process.receive() is None
    assert process.exit_code(LIMIT) == 0


def test_the_interpreter_keeps_its_exit_code(zygote: Zygote, source: Process) -> None:
    """``sys.exit(3)`` with an open agent exits with 3."""
    process = zygote.start(__file__, "exits_by_an_error", *source.card)  # type: ignore[attr-defined]
    assert process.exit_code(LIMIT) == 3


def test_a_script_may_exit_without_closing() -> None:
    """A fresh interpreter whose script never closes its agent exits clean and in time."""
    script = (
        "import asyncio, numpy as np\n"
        "from eplb_async.nixl import AsyncNixlAgent\n"
        "from eplb_async.settings import Settings\n"
        "async def main():\n"
        "    agent = await AsyncNixlAgent.open('a', Settings())\n"
        "    await agent.register(np.zeros((4, 4096), np.uint8), 'x')\n"
        "    return agent\n"
        "agent = asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    assert "Traceback" not in done.stderr


def forks(control: Connection, blob: bytes, pid: int, how: str, in_flight: bool) -> None:
    opened = Open(blob)
    reading = opened.runner.run(opened.start_reading(pid)) if in_flight else None
    child = os.fork()
    if child == 0:
        # The user's own loop shares its epoll with the parent; closing that here is the user's affair, not ours.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(opened.runner.get_loop()))
        uses = [
            opened.agent.metadata,
            opened.agent.aclose,
            opened.read,
            lambda: anext(opened.agent.notifications()),
        ]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", ResourceWarning)
                for use in uses:
                    with pytest.raises(CommunicatorClosed, match="used in its fork"):
                        asyncio.run(_await(use))
                assert opened.agent._engine.stop()  # type: ignore[attr-defined]
                if how == "drop":
                    del opened, reading, uses, use
                    gc.collect()
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
        if how == "_exit":
            os._exit(0)
        sys.exit(0)
    deadline = time.monotonic() + LIMIT
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        assert time.monotonic() < deadline, "the child hangs"
        time.sleep(0.005)
    assert os.waitstatus_to_exitcode(ended[1]) == 0
    if reading is not None:
        os.kill(pid, signal.SIGCONT)
        opened.runner.run(_within(reading))
    opened.target[:] = 0
    opened.runner.run(opened.read())
    opened.runner.run(opened.agent.aclose())
    opened.runner.close()


async def _await(use: Any) -> Any:
    return await use()


async def _within(task: asyncio.Task[None]) -> None:
    async with asyncio.timeout(LIMIT):
        await task


@pytest.mark.parametrize("in_flight", [False, True], ids=["idle", "mid-READ"])
@pytest.mark.parametrize("how", ["exit", "_exit", "drop"])
def test_a_forked_child_is_harmless(zygote: Zygote, source: Process, how: str, in_flight: bool) -> None:
    """A forked child's copy refuses use; however the child ends, the parent's agent goes on working."""
    zygote.call(__file__, "forks", *source.card, how, in_flight)  # type: ignore[attr-defined]


def drops(control: Connection, blob: bytes, pid: int) -> None:
    """Drop an open agent with a READ in flight, and note who called NIXL from then on."""
    opened = Open(blob, Settings(close_timeout=0.3))
    reading = opened.runner.run(opened.start_reading(pid))
    api, _ = load()
    threads: set[str] = set()
    for kind in (api.nixl_agent, api.nixl_xfer_handle):
        for name, function in list(vars(kind).items()):
            if callable(function) and name not in ("__repr__", "__new__", "__init__"):
                setattr(kind, name, _noting(function, threads))
    thread = opened.agent._engine.thread  # type: ignore[attr-defined]
    reading.cancel()
    opened.runner.close()
    kept: list[Any] = [opened]
    del opened, reading
    with pytest.warns(ResourceWarning, match="never closed"):
        _drop(kept)
    thread.join(LIMIT)
    assert not thread.is_alive()
    assert threads == {thread.name}


def test_dropping_a_real_agent_calls_nothing_native_here(zygote: Zygote, source: Process) -> None:
    """Dropping an agent in mid-READ: all that is native, destructors included, happens on the engine's thread."""
    zygote.call(__file__, "drops", *source.card)  # type: ignore[attr-defined]
