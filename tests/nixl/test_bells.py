"""Bells: file descriptors that cut the poller's pauses short where a transport has any."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import uvloop

from eplb_async.engine import Engine
from eplb_async.nixl import AsyncNixlAgent, bindings
from eplb_async.nixl.bindings import NixlNative, load
from eplb_async.nixl.poller import Poller, Progress
from eplb_async.settings import Settings
from tests.procs import Zygote

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
RARELY = Settings(hot_seconds=0, max_pause=1, idle_tick=10)  # without a bell, nothing is seen before a second is over
READS = 30


@pytest.fixture(params=LOOPS)
def runner(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
        yield runner


@pytest.fixture
def bell() -> Iterator[tuple[int, Callable[[], object]]]:
    """A descriptor, and what makes it readable."""
    out, into = os.pipe()
    os.set_blocking(out, False)
    yield out, lambda: os.write(into, b"!")
    os.close(out)
    os.close(into)


def test_a_bell_ends_a_pause(runner: asyncio.Runner, bell: tuple[int, Callable[[], object]]) -> None:
    """A poller that pauses for ten seconds laps thirty times within them if a bell rings thirty times."""
    fd, ring = bell

    async def main() -> None:
        lapped = asyncio.Event()

        def lap() -> Progress:
            with contextlib.suppress(BlockingIOError):
                os.read(fd, 64)
            lapped.set()
            return Progress.NONE

        poller = Poller(lap, lambda: False, RARELY, bells=(fd,))
        running = asyncio.ensure_future(poller.run())
        async with asyncio.timeout(9):
            for _ in range(READS):
                await lapped.wait()
                lapped.clear()
                ring()
        poller.stop()
        await running
        assert not asyncio.get_running_loop().remove_reader(fd), "it must be let go of before its owner closes it"

    runner.run(main())


def test_a_bell_that_never_stops_is_done_without(
    runner: asyncio.Runner,
    bell: tuple[int, Callable[[], object]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A descriptor that stays readable though laps see nothing costs no core: it is told of once, and left alone."""
    fd, ring = bell
    monkeypatch.setattr("eplb_async.nixl.poller._FALSE_SECONDS", 0.05)

    async def main() -> None:
        poller = Poller(lambda: Progress.NONE, lambda: False, RARELY, bells=(fd,))
        ring()
        running = asyncio.ensure_future(poller.run())
        async with asyncio.timeout(30):
            while not caplog.records:
                await asyncio.sleep(0.01)
        assert not asyncio.get_running_loop().remove_reader(fd)
        poller.stop()
        await running

    runner.run(main())
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def read_from_a_source_that_rests(control: Connection) -> None:
    """Two agents that look once a second at most; each READ needs both to look."""

    async def main() -> None:
        async with (
            AsyncNixlAgent.open("source", RARELY) as source,
            AsyncNixlAgent.open("reader", RARELY) as reader,
        ):
            rows = np.arange(READS * 4096, dtype=np.uint8).reshape(READS, 4096)
            target = np.zeros_like(rows)
            await source.register(rows, "rows")
            region: Any = await reader.register(target, "target")
            peer = await reader.add_peer(await source.metadata())
            await reader.read(region[0], peer.region("rows")[0])
            async with asyncio.timeout(READS / 2):
                for row in range(READS):
                    await reader.read(region[row], peer.region("rows")[row])
            assert (target == rows).all()

    uvloop.run(main())


def test_over_tcp_a_source_that_rests_is_woken_by_a_read() -> None:
    """Real NIXL: thirty READs from a source that rests a second or more take nowhere near thirty seconds."""
    with Zygote(UCX_TLS="tcp,self") as zygote:
        zygote.call(__file__, read_from_a_source_that_rests.__name__)


def bells_are_ones_own(control: Connection) -> None:
    """Loops and agents come and go in other threads while agents are made."""
    api, _ = load()
    make, made = api.nixl_agent, threading.Event()
    engines: list[Engine] = []
    strangers: list[select.epoll] = []

    def another() -> None:
        engines.append(Engine("another", use_uvloop=False))
        made.set()

    def slowly(*args: Any) -> Any:
        thread = threading.Thread(target=another, daemon=True)
        thread.start()
        assert made.wait(10), "an engine is not made while an agent is: whoever opens one is held up"
        if not os.fork():  # what a fork inherits must not be held for good
            os._exit(0 if bindings._making.acquire(timeout=5) else 1)
        strangers.append(select.epoll())
        return make(*args)

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    async def main() -> None:
        async with AsyncNixlAgent.open("first", RARELY):
            pass
        before = descriptors()
        for number in range(5):
            async with AsyncNixlAgent.open(f"agent {number}", RARELY):
                assert descriptors() > before
        assert descriptors() == before

    plain = NixlNative("plain")
    usual = len(plain.bells)
    assert usual
    plain.destroy()
    api.nixl_agent = slowly
    native = NixlNative("slow")
    assert len(native.bells) == usual + 1, "the loop of another thread was taken for a bell"
    strangers.pop().close()
    for bell in native.bells:
        os.fstat(bell)  # its number is not anybody's next
    assert ended_child() == 0
    native.destroy()
    api.nixl_agent = make
    engines[0].stop()
    asyncio.run(main())


def ended_child() -> int:
    """Status of a child at its end, awaited for ten seconds at most."""
    for _ in range(1000):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            return status
        time.sleep(0.01)
    raise TimeoutError("a forked child hangs")


def test_bells_are_an_agents_own_and_are_given_back() -> None:
    """Real NIXL over tcp: no other loop is taken for a bell, a fork amid it goes on, and no descriptor is left."""
    with Zygote(UCX_TLS="tcp,self") as zygote:
        zygote.call(__file__, bells_are_ones_own.__name__)
