"""The test kit itself: the virtual clock, and the in-memory NIXL with its habits and faults."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from eplb_async.engine import LoopEngine
from eplb_async.errors import (
    CommunicatorBusy,
    HandshakeError,
    NixlPeerDisconnected,
    NixlTransferFailed,
    NixlTransferTimeout,
)
from eplb_async.nixl import AsyncNixlAgent
from eplb_async.nixl.native import Descriptors, State
from eplb_async.settings import Settings
from eplb_async.testing import Deadlock, FaultPlan, Life, MemoryFabric, MemoryNative, run

SETTINGS = Settings(close_timeout=1)


# ---------------------------------------------------------------------------------------------------- clock
def test_waiting_takes_no_time() -> None:
    """An hour of virtual time passes at once, in order."""

    async def main() -> list[int]:
        order: list[int] = []

        async def wait(seconds: float, i: int) -> None:
            await asyncio.sleep(seconds)
            order.append(i)

        await asyncio.gather(wait(3600, 2), wait(1, 0), wait(60, 1))
        assert 3600 <= asyncio.get_running_loop().time() < 3601
        return order

    started = time.monotonic()
    assert run(main()) == [0, 1, 2]
    assert time.monotonic() - started < 30


def test_a_deadlock_is_named() -> None:
    """Where nothing can ever go on, the loop says which task waits where."""

    async def stuck() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        await asyncio.create_task(stuck(), name="the stuck one")

    with pytest.raises(Deadlock, match=r"the stuck one waits in .*stuck"):
        run(main())


def test_code_that_never_pauses_reaches_its_deadline() -> None:
    """Turns take virtual time, so a task that laps without a pause is timed out all the same."""

    async def main() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(TimeoutError):
        run(asyncio.wait_for(main(), 0.01))


def test_threads_are_refused() -> None:
    """A thread's progress would be invisible to the clock."""

    async def main() -> None:
        with pytest.raises(RuntimeError, match="no threads"):
            await asyncio.to_thread(time.time)

    run(main())


# ---------------------------------------------------------------------------------------------------- plans
def test_a_plan_prints_itself() -> None:
    """A plan's ``repr`` is the chain that makes it."""
    plan = (
        FaultPlan()
        .fail_read("reader", nth=2, status="nixlUnknownError", phase="post")
        .late_landing("reader", peer="source", nth=None, delay=0.5)
        .hold_read(min_bytes=4096)
        .drop_notif("a", receiver="b")
        .duplicate_notif("a", nth=3, copies=5)
        .delay_notif(delay=1.0)
        .fail_call("add_remote", "reader")
        .kill("source", at=1.5)
        .stop("source", at=2)
        .resume("source", at=3)
    )
    again = eval(repr(plan), {"FaultPlan": FaultPlan})
    assert repr(again) == repr(plan)
    assert repr(FaultPlan()) == "FaultPlan()"
    assert ".fail_read('reader', nth=2, status='nixlUnknownError', phase='post')" in repr(plan)


# ------------------------------------------------------------------------------------------- with an agent
@dataclass
class Two:
    """A source and a reader in memory."""

    fabric: MemoryFabric
    source: AsyncNixlAgent
    reader: AsyncNixlAgent
    rows: np.ndarray
    target: np.ndarray
    region: Any
    peer: Any

    def read(self, first: int = 0, stop: int = 16, **more: Any) -> Awaitable[Any]:
        return self.reader.read(self.region[first:stop], self.peer.region("rows")[first:stop], **more)

    async def quiet(self) -> None:
        async with asyncio.timeout(60):
            while (stats := await self.reader.stats()).in_flight + stats.quarantined:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def two(fabric: MemoryFabric) -> AsyncIterator[Two]:
    engine = LoopEngine(asyncio.get_running_loop())
    rows = np.arange(16 * 4096, dtype=np.uint32).astype(np.uint8).reshape(16, 4096) | 1
    target = np.zeros_like(rows)
    async with (
        AsyncNixlAgent.open("source", SETTINGS, engine=engine, native=fabric.native) as source,
        AsyncNixlAgent.open("reader", SETTINGS, engine=engine, native=fabric.native) as reader,
    ):
        await source.register(rows, "rows")
        region = await reader.register(target, "target")
        peer = await reader.add_peer(await source.metadata())
        yield Two(fabric, source, reader, rows, target, region, peer)
    assert fabric.open_handles == 0


def with_two(plan: FaultPlan | None = None, **more: Any) -> Callable[..., Callable[[], None]]:
    """Run a test on virtual time with a source and a reader; no violation may be left."""

    def decorate(test: Callable[[Two], Awaitable[None]]) -> Callable[[], None]:
        def wrapper() -> None:
            fabric = MemoryFabric(plan, **more)

            async def main() -> None:
                async with two(fabric) as both:
                    await test(both)

            run(main())
            assert fabric.violations == [], fabric

        wrapper.__name__, wrapper.__doc__ = getattr(test, "__name__", ""), test.__doc__
        return wrapper

    return decorate


@with_two(FaultPlan().fail_read("reader", nth=1, status="nixlBackendError").late_landing("reader", nth=1, delay=2))
async def test_an_error_is_no_proof_of_quiescence(both: Two) -> None:
    """A READ that failed may still land: its memory stays leased, its handle is kept until the agent goes (I-3)."""
    await both.read(0, 1)
    with pytest.raises(NixlTransferFailed) as caught:
        await both.read(4, 8)
    error = caught.value
    assert (error.status, error.phase, error.peer, error.nbytes) == ("nixlBackendError", "poll", "source", 16384)
    assert not both.target[4:8].any()
    with pytest.raises(CommunicatorBusy):
        await both.region.deregister()
    await asyncio.sleep(5)
    assert np.array_equal(both.target[4:8], both.rows[4:8])  # it landed, two seconds after it had failed
    with pytest.raises(TimeoutError):
        await both.region.released(timeout=1)
    assert len(await both.reader.aclose()) == 1


@with_two(FaultPlan().fail_read(status="nixlRemoteDisconnectError", lands=False))
async def test_a_disconnect_is_terminal(both: Two) -> None:
    """After a disconnect nothing lands: memory and handle are free at once."""
    with pytest.raises(NixlPeerDisconnected):
        await both.read()
    assert both.fabric.open_handles == 0
    await both.region.deregister()
    assert not both.target.any()


@with_two(FaultPlan().fail_read(phase="post", status="nixlUnknownError").fail_read(phase="make", nth=1))
async def test_errors_of_post_and_make(both: Two) -> None:
    """A post that fails quarantines its memory; a request that could not be made leaves nothing."""
    with pytest.raises(NixlTransferFailed, match="phase=post"):
        await both.read(0, 1)
    with pytest.raises(NixlTransferFailed, match="phase=make"):
        await both.read(1, 2)
    with pytest.raises(CommunicatorBusy):
        await both.read(0, 1)
    await both.read(1, 2)


@with_two(FaultPlan().hold_read("reader", min_bytes=8192))
async def test_a_held_read_waits_until_let_go(both: Two) -> None:
    """A held READ stays ``PROC``; let go, its quarantine drains."""
    await both.read(0, 1)
    with pytest.raises(NixlTransferTimeout) as caught:
        await both.read(2, 4, timeout=10)
    assert 10 <= caught.value.elapsed < 10.1
    both.fabric.unhold("reader")
    await both.quiet()
    await both.region.released(timeout=1)
    assert np.array_equal(both.target[2:4], both.rows[2:4])


@with_two(FaultPlan().kill("source", at=1.0), bytes_per_second=1e3)
async def test_a_killed_source_disconnects_its_readers(both: Two) -> None:
    """SIGKILL in mid-READ, then a post and a message to the dead: all say that the peer is gone."""
    with pytest.raises(NixlPeerDisconnected) as caught:
        await both.read()
    assert 0.9 < caught.value.elapsed < 1.1
    for use in (both.read(0, 1), both.reader.notify(both.peer, b"there?")):
        with pytest.raises(NixlPeerDisconnected):
            await use
    assert both.fabric.life("source") is Life.DEAD


@with_two(FaultPlan().stop("source", at=0.0).resume("source", at=5.0))
async def test_a_stopped_source_answers_when_it_goes_on(both: Two) -> None:
    """SIGSTOP keeps a READ waiting; SIGCONT completes it."""
    stats = await both.read(timeout=20)
    assert 4.9 < stats.seconds < 5.5
    assert np.array_equal(both.target, both.rows)


@with_two(needs_target_progress=True, bytes_per_second=1e12)
async def test_a_source_without_progress_starves_its_reader(both: Two) -> None:
    """Where the source must make progress, a READ waits for its next lap."""
    await asyncio.sleep(1)  # the source's poller has come to rest
    idle = await both.read(0, 1)
    async with both.source.serving():
        served = await both.read(1, 2)
    assert idle.seconds > 5 * served.seconds


@with_two()
async def test_a_cut_link_looks_like_a_death(both: Two) -> None:
    """Either side takes the other for dead."""
    back = await both.source.add_peer(await both.reader.metadata())
    both.fabric.cut("reader", "source")
    with pytest.raises(NixlPeerDisconnected):
        await both.read()
    with pytest.raises(NixlPeerDisconnected):
        await both.source.notify(back, b"there?")


@with_two(
    FaultPlan().drop_notif("reader", nth=1).duplicate_notif("reader", nth=2).delay_notif("reader", nth=3, delay=1)
)
async def test_messages_are_lost_doubled_and_overtaken_by_address(both: Two) -> None:
    """Each fault hits the message it addresses, and no other."""
    for i in range(6):
        await both.reader.notify(both.peer, b"%d" % i)
    await asyncio.sleep(2)
    messages = both.source.notifications()
    assert [(await anext(messages))[1] for _ in range(6)] == [b"0", b"2", b"2", b"4", b"5", b"3"]
    await messages.aclose()


@with_two(FaultPlan().fail_call("add_remote", "reader", nth=1).fail_call("connect", "reader", nth=1))
async def test_a_peer_that_could_not_be_added_can_be_retried(both: Two) -> None:
    """Of eight callers at once the first two fail, at load and at wire-up; the others share one peer (C12)."""
    await both.reader.remove_peer(both.peer)
    blob = await both.source.metadata()
    results = await asyncio.gather(*(both.reader.add_peer(blob) for _ in range(8)), return_exceptions=True)
    assert [type(r) for r in results[:2]] == [HandshakeError, HandshakeError]
    assert len(set(map(id, results[2:]))) == 1
    both.peer = results[2]
    await both.read()


@with_two(FaultPlan().fail_call("register", "reader", nth=1))
async def test_memory_that_could_not_be_registered_is_not_kept(both: Two) -> None:
    """A registration that fails leaves no trace; the same memory can be registered afterwards."""
    more = np.zeros((4, 64), np.uint8)
    with pytest.raises(NixlTransferFailed, match="phase=register"):
        await both.reader.register(more, "more")
    region = await both.reader.register(more, "more")
    await region.deregister()


# --------------------------------------------------------------------------------------- habits of the native
def descriptors(*arrays: np.ndarray) -> Descriptors:
    return np.array([(a.ctypes.data, a.nbytes, 0) for a in arrays], dtype=np.uint64)


def natives(fabric: MemoryFabric) -> tuple[MemoryNative, MemoryNative, np.ndarray, np.ndarray, list[Any]]:
    from eplb_async.nixl.regions import extent_of

    source, reader = fabric.native("source", SETTINGS), fabric.native("reader", SETTINGS)
    rows, target = np.full(4096, 7, np.uint8), np.zeros(4096, np.uint8)
    tokens = [source.register([extent_of(rows, "r")]), reader.register([extent_of(target, "t")])]
    reader.add_remote(source.metadata())
    return source, reader, rows, target, tokens


def test_release_in_mid_read_is_a_violation_and_lands() -> None:
    """A READ that is released while ``PROC`` lands all the same (N-17); a correct caller never does that."""
    now = 0.0
    fabric = MemoryFabric(clock=lambda: now, latency=1.0)
    _, reader, rows, target, _ = natives(fabric)
    handle = reader.make_read(descriptors(target), "DRAM", descriptors(rows), "DRAM", "source")
    assert reader.post(handle) is State.PROC
    reader.release(handle)
    assert len(fabric.violations) == 1
    assert "is PROC (17)" in fabric.violations[0]
    now = 2.0
    reader.notifications()
    assert (target == 7).all()


def test_remove_and_deregister_in_mid_read_are_violations() -> None:
    """Removing the peer is an error and no quiescence (N-19); deregistering succeeds (N-18)."""
    now = 0.0
    fabric = MemoryFabric(clock=lambda: now, latency=1.0)
    _, reader, rows, target, tokens = natives(fabric)
    handle = reader.make_read(descriptors(target), "DRAM", descriptors(rows), "DRAM", "source")
    reader.post(handle)
    reader.remove_remote("source")
    with pytest.raises(NixlTransferFailed, match="nixlNotFoundError"):
        reader.check(handle)
    now = 2.0
    reader.notifications()
    assert (target == 7).all()
    reader.post(reader.make_read(*_after_add(fabric, reader, target, rows)))
    reader.deregister(tokens[1])
    assert [("(19)" in v, "(18)" in v) for v in fabric.violations] == [(True, False), (False, True)]


def _after_add(fabric: MemoryFabric, reader: MemoryNative, target: np.ndarray, rows: np.ndarray) -> Any:
    reader.add_remote(fabric.agents["source"].metadata())
    return descriptors(target), "DRAM", descriptors(rows), "DRAM", "source"


def test_destroying_the_agent_stops_every_landing() -> None:
    """Nothing lands in the memory of a destroyed agent (N-38), and its readers are disconnected."""
    now = 0.0
    fabric = MemoryFabric(clock=lambda: now, latency=1.0)
    source, reader, rows, target, _ = natives(fabric)
    handle = reader.make_read(descriptors(target), "DRAM", descriptors(rows), "DRAM", "source")
    reader.post(handle)
    reader.abandon(handle)
    reader.destroy()
    now = 5.0
    source.notifications()
    assert not target.any()
    assert fabric.violations == []
    with pytest.raises(NixlTransferFailed):
        reader.notifications()
    assert fabric.violations == ["reader notifications after destroy"]


def test_statuses_of_misuse() -> None:
    """Misuse has NIXL's own names (N-24, N-27, N-28, N-30), and damaged metadata poisons its name (N-23)."""
    fabric = MemoryFabric(clock=lambda: 0.0, latency=1.0)
    source, reader, rows, target, _ = natives(fabric)
    ours, theirs, stranger = descriptors(target), descriptors(rows), descriptors(np.zeros(8, np.uint8))
    handle = reader.make_read(ours, "DRAM", theirs, "DRAM", "source")

    def status(call: Callable[..., Any], *args: Any) -> str:
        with pytest.raises(NixlTransferFailed) as caught:
            call(*args)
        return caught.value.status

    assert status(reader.check, handle) == "nixlNotPostedError"
    reader.post(handle)
    assert status(reader.post, handle) == "nixlRepostActiveError"
    assert status(reader.make_read, stranger, "DRAM", theirs, "DRAM", "source") == "nixlNotFoundError"
    assert status(reader.make_read, ours, "DRAM", stranger, "DRAM", "source") == "nixlNotFoundError"
    assert status(reader.make_read, ours, "DRAM", theirs, "DRAM", "nobody") == "nixlNotFoundError"
    assert status(reader.make_read, ours[:0], "DRAM", theirs[:0], "DRAM", "source") == "IndexError"
    short = theirs.copy()
    short[0, 1] = 8
    assert status(reader.make_read, ours, "DRAM", short, "DRAM", "source") == "nixlInvalidParamError"
    assert status(reader.add_remote, reader.metadata()) == "nixlInvalidParamError"
    assert status(reader.add_remote, b"hello") == "nixlMismatchError"
    assert status(reader.notify, "nobody", b"") == "nixlNotFoundError"
    source.destroy()
    again = fabric.native("source", SETTINGS)
    assert status(reader.add_remote, again.metadata()) == "nixlNotAllowedError"
    other = fabric.native("other", SETTINGS)
    assert status(reader.add_remote, other.metadata()[:-3]) == "nixlMismatchError"
    assert status(reader.add_remote, other.metadata()) == "nixlMismatchError"
