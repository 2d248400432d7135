"""What becomes of READs when real processes die or stop: real NIXL over tcp, where a READ waits for its source.

Each test starts a source of its own and runs one function of this file in a reader's process.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import uvloop

from eplb_async.errors import (
    CommunicatorBusy,
    CommunicatorClosed,
    HandshakeError,
    NixlPeerDisconnected,
    NixlTransferTimeout,
)
from eplb_async.nixl import AsyncNixlAgent
from eplb_async.nixl.bindings import load
from eplb_async.nixl.card import seal
from eplb_async.settings import Settings
from tests.nixl import contract
from tests.procs import Process, Zygote, stop

PROMPT = 10.0  # seconds within which what is noticed "at once" has been noticed, on a loaded machine
MIB = 1 << 20


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote(UCX_TLS="tcp,self") as zygote:
        yield zygote


@pytest.fixture
def source(zygote: Zygote) -> Iterator[Process]:
    from multiprocessing import Pipe

    ours, theirs = Pipe()
    process = zygote.start(contract.__file__, "serve", pipes=(theirs,))
    try:
        process.card = process.receive()  # type: ignore[attr-defined]
        yield process
    finally:
        zygote.sweep()
        ours.close()


class Bench:
    """What a reader works with: an agent, a target of 64 MiB and a source."""

    def __init__(self, agent: AsyncNixlAgent, target: np.ndarray, region: Any, peer: Any, pid: int) -> None:
        self.agent = agent
        self.target = target
        self.region = region
        self.peer = peer
        self.pid = pid

    def signal(self, what: signal.Signals) -> None:
        os.kill(self.pid, what)

    def read(self, first: int, last: int, timeout: float | None = None) -> Awaitable[Any]:
        bulk = self.peer.region("bulk")
        return self.agent.read(self.region[first:last], bulk[first:last], timeout=timeout)

    async def stopped_read(self, first: int, last: int, timeout: float | None = None) -> asyncio.Task[Any]:
        """Stop the source, then have a READ from it in flight, all of its posts."""
        stop(self.pid)
        reading = asyncio.ensure_future(self.read(first, last, timeout))
        posts = -(-(last - first) // (Settings().max_post_bytes // MIB))

        async def all_posted() -> bool:
            return (await self.agent.stats()).in_flight >= min(posts, Settings().max_peer_requests_in_flight)

        await until(all_posted)
        return reading  # type: ignore[return-value]

    async def is_quiet(self) -> bool:
        stats = await self.agent.stats()
        return stats.in_flight == stats.quarantined == 0


async def until(condition: Callable[[], Awaitable[bool]], timeout: float = 30.0) -> None:
    async with asyncio.timeout(timeout):
        while not await condition():
            await asyncio.sleep(0.002)


def reader(function: Callable[[Bench], Awaitable[Any]]) -> Callable[..., Any]:
    """Make of a coroutine function what runs in a reader's process."""

    @functools.wraps(function)
    def run(control: Connection, blob: bytes, pid: int) -> Any:
        async def main() -> Any:
            target = np.zeros((64, MIB), np.uint8)
            async with asyncio.timeout(50):
                agent = await AsyncNixlAgent.open(f"reader-{os.getpid()}", Settings(close_timeout=1))
                try:
                    region = await agent.register(target, "target")
                    peer = await agent.add_peer(blob)
                    await agent.read(region[0], peer.region("bulk")[0])
                    return await function(Bench(agent, target, region, peer, pid))
                finally:
                    await agent.aclose()

        return uvloop.run(main())

    return run


def run(zygote: Zygote, source: Process, function: Callable[..., Any]) -> Any:
    return zygote.call(__file__, function.__name__, *source.card)  # type: ignore[attr-defined]


# --------------------------------------------------------------------------------------------------- deaths
@reader
async def killed_in_the_middle(bench: Bench) -> None:
    reading = await bench.stopped_read(0, 64)
    bench.signal(signal.SIGKILL)
    async with asyncio.timeout(PROMPT):
        with pytest.raises(NixlPeerDisconnected) as caught:
            await reading
    error = caught.value
    assert (error.peer, error.status, error.phase) == (bench.peer.name, "nixlRemoteDisconnectError", "poll")
    assert error.nbytes > 0
    assert isinstance(error, RuntimeError)
    assert str(error).startswith("NIXL transfer failed with state=ERR")
    assert type(error.__cause__).__name__ == "nixlRemoteDisconnectError"
    await until(bench.is_quiet, PROMPT)
    await bench.region.released(timeout=PROMPT)
    with pytest.raises(NixlPeerDisconnected):
        await bench.read(0, 1)
    with pytest.raises(NixlPeerDisconnected):
        await bench.agent.notify(bench.peer, b"still there?")
    await bench.region.deregister()
    assert await bench.agent.aclose() == ()


@reader
async def killed_before_the_post(bench: Bench) -> None:
    bench.signal(signal.SIGKILL)
    async with asyncio.timeout(PROMPT):
        with pytest.raises(NixlPeerDisconnected):
            await bench.read(0, 64)
    await until(bench.is_quiet, PROMPT)
    assert bench.peer.gone
    assert await bench.agent.aclose() == ()


def test_a_peer_killed_in_the_middle_of_a_read(zygote: Zygote, source: Process) -> None:
    """SIGKILL in mid-READ raises ``NixlPeerDisconnected`` promptly, and frees the memory (C3)."""
    run(zygote, source, killed_in_the_middle)


def test_a_peer_killed_before_the_post(zygote: Zygote, source: Process) -> None:
    """A READ from a peer that is gone raises ``NixlPeerDisconnected`` promptly."""
    run(zygote, source, killed_before_the_post)


# --------------------------------------------------------------------------------------------------- stops
@reader
async def stopped_past_the_deadline(bench: Bench) -> float:
    worst, last = 0.0, time.monotonic()

    async def tick() -> None:
        nonlocal worst, last
        while True:
            await asyncio.sleep(0.001)
            now = time.monotonic()
            worst, last = max(worst, now - last), now

    ticking = asyncio.create_task(tick())
    stop(bench.pid)
    with pytest.raises(NixlTransferTimeout) as caught:
        await bench.read(8, 9, timeout=0.5)
    error = caught.value
    assert (error.peer, error.nbytes, error.state) == (bench.peer.name, MIB, "PROC")
    assert 0.49 <= error.elapsed < PROMPT
    assert isinstance(error, TimeoutError)
    ticking.cancel()
    stats = await bench.agent.stats()
    assert (stats.in_flight, stats.quarantined, stats.quarantined_bytes) == (0, 1, MIB)
    with pytest.raises(TimeoutError):
        await bench.region.released(timeout=0.1)
    with pytest.raises(CommunicatorBusy):
        await bench.region.deregister()
    bench.signal(signal.SIGCONT)
    await until(bench.is_quiet)
    await bench.read(8, 12)
    assert np.array_equal(bench.target[8:12], contract.data()["bulk"][8:12])
    assert await bench.agent.aclose() == ()
    return worst


@reader
async def cancelled_in_the_middle(bench: Bench) -> None:
    reading = await bench.stopped_read(0, 64)
    reading.cancel()
    await asyncio.sleep(0)
    assert reading.cancelled()
    held = (await bench.agent.stats()).quarantined_bytes
    assert held > 0
    with pytest.raises(TimeoutError):
        await bench.region.released(timeout=0.1)
    with pytest.raises(CommunicatorBusy):
        await bench.read(0, 1)
    with pytest.raises(CommunicatorBusy):
        await bench.region.deregister()
    bench.signal(signal.SIGCONT)
    await bench.region.released(timeout=30)
    bench.target[:] = 0xEE
    await untouched(bench.target, 0.5)
    await bench.region.deregister()


@reader
async def closed_in_the_middle(bench: Bench) -> None:
    kept = []
    for metadata in (b"garbage", b"nixl" * 20):
        try:
            await bench.agent.add_peer(seal("stranger", metadata, [], b""))
        except HandshakeError as error:
            kept.append(error)  # its traceback has frames of NIXL's own methods
    assert len(kept) == 2
    reading = await bench.stopped_read(0, 64)
    native = bench.agent._endpoint.native
    alive = [weakref.ref(native._agent), weakref.ref(native._agent.agent)]  # type: ignore[attr-defined]
    left = await bench.agent.aclose(timeout=0.2)
    assert [ref() for ref in alive] == [None, None]
    assert left
    assert all(f"from {bench.peer.name}" in line for line in left)
    with pytest.raises(CommunicatorClosed):
        await reading
    bench.target[:] = 0xEE
    bench.signal(signal.SIGCONT)
    await untouched(bench.target, 1.5)


async def untouched(target: np.ndarray, seconds: float) -> None:
    """Watch that nobody writes, for a while."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert (target == 0xEE).all()
        await asyncio.sleep(0.05)


@reader
async def waiting_for_long(bench: Bench) -> list[tuple[int, float]]:
    costs = []
    for first, last in ((0, 1), (1, 64)):
        reading = await bench.stopped_read(first, last)
        polls, cpu = (await bench.agent.stats()).polls, time.process_time()
        await asyncio.sleep(2)
        costs.append(((await bench.agent.stats()).polls - polls, time.process_time() - cpu))
        reading.cancel()
        await asyncio.sleep(0)
        assert reading.cancelled()
        bench.signal(signal.SIGCONT)
        await until(bench.is_quiet)
    return costs


def test_a_stopped_peer_times_out_and_its_quarantine_drains(zygote: Zygote, source: Process) -> None:
    """SIGSTOP past the deadline: a timeout, the lease kept, the user's loop alive; SIGCONT drains it (C1)."""
    assert run(zygote, source, stopped_past_the_deadline) < 0.5


def test_a_cancelled_read_keeps_its_memory_until_it_has_ended(zygote: Zygote, source: Process) -> None:
    """Memory of a cancelled READ is granted only when nothing is written to it any more (I-3, C2)."""
    run(zygote, source, cancelled_in_the_middle)


def test_closing_destroys_the_agent_before_the_memory_is_free(zygote: Zygote, source: Process) -> None:
    """After closing with a READ in flight nothing lands, even if an exception of NIXL's is still kept (I-4, C7)."""
    run(zygote, source, closed_in_the_middle)


def test_waiting_for_a_stopped_peer_is_cheap(zygote: Zygote, source: Process) -> None:
    """Two seconds of waiting cost few polls and little CPU, for one READ and for many (C9)."""
    for polls, cpu in run(zygote, source, waiting_for_long):
        assert polls < 5000
        assert cpu < 0.5


# ------------------------------------------------------------------------------------------------- threads
def watched(control: Connection, blob: bytes, pid: int) -> tuple[set[str], int]:
    """Do a bit of everything, and note on which threads NIXL's own methods ran."""
    api, _ = load()
    seen: set[tuple[str, str]] = set()
    for kind in (api.nixl_agent, api.nixl_xfer_handle):
        for name, function in list(vars(kind).items()):
            if callable(function) and name not in ("__repr__", "__new__"):
                setattr(kind, name, _noting(function, f"{kind.__name__}.{name}", seen))

    async def main() -> None:
        target = np.zeros((64, 4096), np.uint8)
        async with AsyncNixlAgent.open(f"reader-{os.getpid()}") as agent, agent.serving():
            region = await agent.register(target, "target")
            peer = await agent.add_peer(blob)
            with pytest.raises(HandshakeError):
                await agent.add_peer(seal("stranger", b"garbage", [], b""))
            await agent.read(region[:], peer.region("rows")[:], notif=b"x")
            await agent.notify(peer, b"y")
            stop(pid)
            reading = asyncio.create_task(agent.read(region[:], peer.region("rows")[:], timeout=0.2))
            with pytest.raises(NixlTransferTimeout):
                await reading
            os.kill(pid, signal.SIGCONT)
            await region.released(timeout=30)
            await region.deregister()
            await agent.remove_peer(peer)

    asyncio.run(main())
    calls = {call for call, _ in seen}
    assert {"nixl_agent.__init__", "nixl_agent.transfer", "nixl_xfer_handle.release"} <= calls
    assert threading.current_thread().name not in {thread for _, thread in seen}
    return {thread for _, thread in seen}, len(calls)


def _noting(function: Any, name: str, seen: set[tuple[str, str]]) -> Any:
    @functools.wraps(function)
    def noting(*args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(Exception):
            seen.add((name, threading.current_thread().name))
        return function(*args, **kwargs)

    return noting


def test_nixl_is_called_on_the_engine_thread_only(zygote: Zygote, source: Process) -> None:
    """Every native call, destructors included, is made on one thread, which is not the user's (I-1, I-2)."""
    threads, calls = run(zygote, source, watched)
    assert len(threads) == 1
    assert threads.pop().startswith("eplb-async reader-")
    assert calls >= 12
