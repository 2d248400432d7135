"""What every agent implementation does, as cases that run against a `World`: the in-memory one and real NIXL.

A world is one source, which serves `data()`, and as many readers as a case opens. `test_contract.py` runs the
cases in memory; for real NIXL it has `serve` and `read` of this file run in two processes of their own per
transport. A case that adds the source as a peer also exchanges something with it: a reader that connects and is
destroyed before the wire-up has ended can crash the source inside UCX (``ucp_wireup_eps_progress``, about one
agent in a thousand).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np
import pytest

from eplb_async.engine import LoopEngine
from eplb_async.errors import (
    CommunicatorBusy,
    CommunicatorClosed,
    HandshakeError,
    NixlTransferTimeout,
    TransferError,
    WeightsError,
)
from eplb_async.nixl import AsyncNixlAgent, Region
from eplb_async.opening import Opening
from eplb_async.settings import Settings
from eplb_async.testing import MemoryFabric
from tests.procs import stop

MIB = 1 << 20
SETTINGS = Settings(read_timeout=20, close_timeout=5)
CASES: dict[str, Callable[[World], Awaitable[None]]] = {}
WAITING: list[str] = []
FATAL: set[str] = set()
_names = itertools.count()


class World(Protocol):
    """One source, and the means to open readers."""

    blob: bytes

    def open(self, settings: Settings = SETTINGS) -> Opening[AsyncNixlAgent]:
        """Open a reader of a fresh name."""
        ...

    async def ask(self, *command: Any) -> Any:
        """Have the source do something; see `Source`."""
        ...

    def stop(self) -> None:
        """Stop the source's process."""
        ...

    def resume(self) -> None:
        """Have it go on."""
        ...


@functools.cache
def data() -> dict[str, np.ndarray]:
    """What the source serves, by region."""
    numbers = np.random.default_rng(7)
    wide = numbers.integers(0, 256, (16, 256), dtype=np.uint8)
    nan = numbers.integers(0, 1 << 32, (8, 1024), dtype=np.uint32)
    nan[:, ::3] |= 0x7FC00000
    nan[:, 1] = 0x7F800001  # a signalling NaN with a payload
    return {
        "rows": numbers.integers(0, 256, (64, 4096), dtype=np.uint8),
        "gaps": wide[:, 32:160],
        "nan": nan.view(np.float32),
        "empty": np.zeros((4, 0), dtype=np.uint8),
        "bulk": np.arange(64 * MIB // 4, dtype=np.uint32).view(np.uint8).reshape(64, MIB),
    }


class Source:
    """The side that is read from."""

    def __init__(self, agent: AsyncNixlAgent) -> None:
        self.agent = agent
        self._notes: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()
        self._memory = np.arange(MIB, dtype=np.uint32).astype(np.uint8).reshape(256, 4096)
        self._shrinking: Region | None = None

    async def start(self) -> bytes:
        for name, array in data().items():
            await self.agent.register(array, name)
        return await self.agent.metadata()

    async def listen(self) -> None:
        async with self.agent.serving():
            async for note in self.agent.notifications():
                self._notes.put_nowait(note)

    async def do(self, command: str, *args: Any) -> Any:
        if command == "notes":  # the next n notifications
            async with asyncio.timeout(20):
                return [await self._notes.get() for _ in range(args[0])]
        if command == "tell":  # send messages to a reader
            peer = await self.agent.add_peer(args[0])
            for message in args[1]:
                await self.agent.notify(peer, message)
            return None
        if command == "shrink":  # register the first n rows of one and the same memory, instead of what was
            if self._shrinking is not None:
                await self._shrinking.deregister()
            self._shrinking = await self.agent.register(self._memory[: args[0]], "shrinking")
            return await self.agent.metadata()
        raise ValueError(command)


# ----------------------------------------------------------------------------------------------- in memory
class MemoryWorld:
    """A source and readers of a fabric, all on the running loop."""

    def __init__(self, fabric: MemoryFabric) -> None:
        self.fabric = fabric
        self.blob = b""
        self._engine = LoopEngine(asyncio.get_running_loop())
        self._source: Source | None = None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[MemoryWorld]:
        opening = AsyncNixlAgent.open("source", SETTINGS, engine=self._engine, native=self.fabric.native)
        async with opening as agent:
            self._source = Source(agent)
            self.blob = await self._source.start()
            listening = asyncio.create_task(self._source.listen())
            try:
                yield self
            finally:
                listening.cancel()
                await asyncio.gather(listening, return_exceptions=True)

    def open(self, settings: Settings = SETTINGS) -> Opening[AsyncNixlAgent]:
        name = f"reader-{next(_names)}"
        return AsyncNixlAgent.open(name, settings, engine=self._engine, native=self.fabric.native)

    async def ask(self, *command: Any) -> Any:
        assert self._source is not None
        return await self._source.do(*command)

    def stop(self) -> None:
        self.fabric.stop("source")

    def resume(self) -> None:
        self.fabric.resume("source")


async def in_memory(case: str, fabric: MemoryFabric) -> None:
    """Run a case in memory, then check that nothing was done that real NIXL punishes, and nothing is left."""
    async with MemoryWorld(fabric).running() as world:
        async with asyncio.timeout(60):
            await CASES[case](world)
    assert fabric.violations == []
    assert fabric.open_handles == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}


# -------------------------------------------------------------------------------------------- real processes
class RealWorld:
    """The reader's view of a source in another process."""

    def __init__(self, pipe: Connection, blob: bytes, pid: int) -> None:
        self.blob = blob
        self._pipe = pipe
        self._pid = pid

    def open(self, settings: Settings = SETTINGS) -> Opening[AsyncNixlAgent]:
        return AsyncNixlAgent.open(f"reader-{os.getpid()}-{next(_names)}", settings)

    async def ask(self, *command: Any) -> Any:
        self._pipe.send(command)
        return await incoming(self._pipe)

    def stop(self) -> None:
        stop(self._pid)

    def resume(self) -> None:
        os.kill(self._pid, signal.SIGCONT)


async def incoming(pipe: Connection, timeout: float = 30.0) -> Any:
    """Await what comes through a pipe."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(pipe.fileno(), lambda: ready.done() or ready.set_result(None))
    try:
        async with asyncio.timeout(timeout):
            await ready
    finally:
        loop.remove_reader(pipe.fileno())
    os.set_blocking(pipe.fileno(), True)  # uvloop makes it non-blocking
    return pipe.recv()


def serve(control: Connection, pipe: Connection) -> None:
    """The source's process: does what comes through the pipe, until the control pipe says something."""

    async def main() -> None:
        async with AsyncNixlAgent.open(f"source-{os.getpid()}", SETTINGS) as agent:
            source = Source(agent)
            control.send((await source.start(), os.getpid()))
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(source.listen()), group.create_task(_obey(source, pipe))]
                await incoming(control, timeout=600)
                for task in tasks:
                    task.cancel()

    asyncio.run(main())


async def _obey(source: Source, pipe: Connection) -> None:
    with contextlib.suppress(EOFError):  # the readers' process has ended
        while True:
            command = await incoming(pipe, timeout=600)
            pipe.send(await source.do(*command))


def read(control: Connection, pipe: Connection, blob: bytes, pid: int) -> str:
    """The readers' process: runs the cases it is told to, each on a fresh loop."""
    import traceback

    import uvloop

    world = RealWorld(pipe, blob, pid)

    async def run(case: str) -> None:
        async with asyncio.timeout(60):
            await CASES[case](world)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert [t.name for t in threading.enumerate() if t.name.startswith("eplb")] == []

    while (command := control.recv()) is not None:
        case, loop = command
        try:
            factory = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}[loop]
            with asyncio.Runner(loop_factory=factory) as runner:
                runner.run(run(case))
            control.send("")
        except BaseException:
            control.send(traceback.format_exc())
    return "done"


# -------------------------------------------------------------------------------------------------- the cases
def case(function: Callable[[World], Awaitable[None]]) -> Callable[[World], Awaitable[None]]:
    CASES[function.__name__] = function
    return function


def waiting_case(function: Callable[[World], Awaitable[None]]) -> Callable[[World], Awaitable[None]]:
    """A case that needs a transport on which a READ from a stopped process stays PROC."""
    WAITING.append(function.__name__)
    return case(function)


def fatal_case(function: Callable[[World], Awaitable[None]]) -> Callable[[World], Awaitable[None]]:
    """A waiting case that can cost the source its life: UCX aborts a process that answers a reader who is gone.

    Measured over tcp (software GET): ``ucp_request.inl: Fatal: unexpected error: Endpoint timeout``, SIGABRT.
    """
    FATAL.add(function.__name__)
    return waiting_case(function)


def zeros_like(name: str, **change: Any) -> np.ndarray:
    array = data()[name]
    return np.zeros(array.shape, array.dtype)


@case
async def reads_a_whole_region(world: World) -> None:
    """All rows of a region arrive, verbatim."""
    target = zeros_like("rows")
    async with world.open() as agent:
        region = await agent.register(target, "target")
        peer = await agent.add_peer(world.blob)
        stats = await agent.read(region[:], peer.region("rows")[:])
    assert stats.nbytes == target.nbytes
    assert np.array_equal(target, data()["rows"])


@case
async def reads_slices(world: World) -> None:
    """Only the rows asked for arrive, where asked for."""
    target = zeros_like("rows")
    async with world.open() as agent:
        region = await agent.register(target, "target")
        peer = await agent.add_peer(world.blob)
        await agent.read(region[3:5], peer.region("rows")[40:42])
        await agent.read(region[-1], peer.region("rows")[0])
    expected = np.zeros_like(target)
    expected[3:5], expected[-1] = data()["rows"][40:42], data()["rows"][0]
    assert np.array_equal(target, expected)


@case
async def reads_rows_with_gaps(world: World) -> None:
    """Strided rows are read into dense ones and into strided ones; gaps stay untouched."""
    dense, base, other = (
        zeros_like("gaps"),
        np.full((16, 300), 0xEE, np.uint8),
        np.full((16, 200), 0xEE, np.uint8),
    )
    async with world.open() as agent:
        peer = await agent.add_peer(world.blob)
        one = await agent.register(dense, "dense")
        two = await agent.register(base[:, 100:228], "strided")
        three = await agent.register(other[:, :128], "strided too")
        await agent.read(one[:], peer.region("gaps")[:])
        await agent.read(two[:], peer.region("gaps")[:])
        await agent.read(three[:], peer.region("gaps")[:])
    assert np.array_equal(dense, data()["gaps"])
    assert np.array_equal(base[:, 100:228], data()["gaps"])
    assert np.array_equal(other[:, :128], data()["gaps"])
    assert (np.delete(base, np.s_[100:228], axis=1) == 0xEE).all()
    assert (other[:, 128:] == 0xEE).all()


@case
async def reads_dense_bytes_into_strided_rows(world: World) -> None:
    """One dense stretch of the peer fills strided rows of ours of other row sizes."""
    base = np.full((32, 200), 0xEE, np.uint8)
    async with world.open() as agent:
        peer = await agent.add_peer(world.blob)
        region = await agent.register(base[:, :128], "strided")
        await agent.read(region[:], peer.region("rows")[5])
    assert np.array_equal(base[:, :128].reshape(-1), data()["rows"][5])
    assert (base[:, 128:] == 0xEE).all()


@case
async def keeps_nan_payloads(world: World) -> None:
    """Any dtype's bytes arrive as they are, quiet and signalling NaNs with their payloads (I-12, C26)."""
    target = zeros_like("nan")
    before = target.ctypes.data
    async with world.open() as agent:
        region = await agent.register(target, "target")
        peer = await agent.add_peer(world.blob)
        await agent.read(region[:], peer.region("nan")[:])
    assert np.array_equal(target.view(np.uint8), data()["nan"].view(np.uint8))
    assert target.ctypes.data == before


@case
async def reads_nothing_without_a_post(world: World) -> None:
    """An empty span and zero-byte rows make no native request, and still send their notification (C17)."""
    target, nothing = zeros_like("rows"), zeros_like("empty")
    async with world.open() as agent:
        region, empty = await agent.register(target, "target"), await agent.register(nothing, "nothing")
        peer = await agent.add_peer(world.blob)
        none = await agent.read(region[2:2], peer.region("rows")[5:5], notif=b"nothing")
        zero = await agent.read(empty[:], peer.region("empty")[:])
        assert (none.posts, none.nbytes, zero.posts, zero.nbytes) == (0, 0, 0, 0)
        assert await world.ask("notes", 1) == [(agent.name, b"nothing")]
        await empty.deregister()
    assert not target.any()


@case
async def bounds_its_posts(world: World) -> None:
    """64 MiB are read in posts of at most 12 MiB, and one notification comes after the last."""
    target = zeros_like("bulk")
    async with world.open() as agent:
        region = await agent.register(target, "target")
        peer = await agent.add_peer(world.blob)
        stats = await agent.read(region[:], peer.region("bulk")[:], notif=b"all of it")
        assert await world.ask("notes", 1) == [(agent.name, b"all of it")]
        await agent.read(region[0], peer.region("bulk")[0], notif=b"once")
        assert await world.ask("notes", 1) == [(agent.name, b"once")]
    assert stats.posts >= 64 / 12
    assert np.array_equal(target, data()["bulk"])


@case
async def cuts_a_row_larger_than_a_post(world: World) -> None:
    """A row larger than ``max_post_bytes`` is read in pieces."""
    target = zeros_like("bulk")[:2]
    async with world.open(replace(SETTINGS, max_post_bytes=100_000, max_peer_requests_in_flight=3)) as agent:
        region = await agent.register(target, "target")
        peer = await agent.add_peer(world.blob)
        stats = await agent.read(region[:], peer.region("bulk")[7:9])
    assert stats.posts >= 21
    assert np.array_equal(target, data()["bulk"][7:9])


@case
async def refuses_sizes_that_differ(world: World) -> None:
    """Spans of different sizes are refused before NIXL, naming both."""
    target = zeros_like("rows")
    async with world.open() as agent:
        region = await agent.register(target, "target")
        peer = await agent.add_peer(world.blob)
        with pytest.raises(TransferError, match=r"'target' is 8192 bytes.*'rows' 12288"):
            await agent.read(region[0:2], peer.region("rows")[0:3])
        assert not target.any()
        await agent.read(region[0:2], peer.region("rows")[0:2])


@case
async def refuses_rows_outside_a_region(world: World) -> None:
    """Rows that are not inside registered memory are refused by name, before NIXL (C16)."""
    target = zeros_like("rows")
    async with world.open() as agent:
        region = await agent.register(target, "target")
        peer = await agent.add_peer(world.blob)
        theirs = peer.region("rows")
        for rows in (slice(60, 65), slice(-70, 3), 64, -65):
            with pytest.raises(IndexError, match="'rows' has 64 rows"):
                theirs[rows]
        crossing = replace(theirs[0:2], first=63)
        with pytest.raises(TransferError, match=f"not inside one registered region of peer {peer.name}"):
            await agent.read(region[0:2], crossing)
        with pytest.raises(TransferError, match=f"not inside one registered region of agent {agent.name}"):
            await agent.read(replace(region[0:2], first=63), theirs[0:2])
        with pytest.raises(KeyError, match="no region 'nope'"):
            peer.region("nope")
        with pytest.raises(TransferError, match="no peer"):
            await agent.read(region[0:2], region[2:4])
        await region.deregister()
        with pytest.raises(TransferError, match="not inside one registered region"):
            await agent.read(region[0:2], theirs[0:2])
        again = await agent.register(target, "target")
        await agent.read(again[:], theirs[:])
    assert np.array_equal(target, data()["rows"])


@case
async def refuses_rows_that_are_not_dense(world: World) -> None:
    """Strided, transposed and expanded rows are refused, naming strides; a view of later rows works (C18)."""
    array = np.arange(32, dtype=np.int32).reshape(4, 8)
    async with world.open() as agent:
        for bad in (array[:, ::2], array.T, np.broadcast_to(array[0], (4, 8)), array[::-1]):
            with pytest.raises(WeightsError, match="strides"):
                await agent.register(bad, "bad")
        with pytest.raises(WeightsError, match="scalar"):
            await agent.register(np.array(1.0), "bad")
        await agent.register(array[1:], "good")


@case
async def tells_the_source_after_the_data(world: World) -> None:
    """The notification of a READ comes when the bytes have."""
    target = zeros_like("rows")
    async with world.open() as agent:
        region = await agent.register(target, "target")
        peer = await agent.add_peer(world.blob)
        await agent.read(region[:], peer.region("rows")[:], notif=b"read\x00\xff")
        assert np.array_equal(target, data()["rows"])
        assert await world.ask("notes", 1) == [(agent.name, b"read\x00\xff")]


@case
async def keeps_messages_in_order(world: World) -> None:
    """Notifications of one sender come in the order they were sent, both ways."""
    messages = [b"%d" % i for i in range(50)] + [b"x" * 60_000, b""]
    async with world.open() as agent:
        peer = await agent.add_peer(world.blob)
        for message in messages:
            await agent.notify(peer, message)
        assert await world.ask("notes", len(messages)) == [(agent.name, m) for m in messages]
        await world.ask("tell", await agent.metadata(), messages)
        got = []
        async for sender, message in agent.notifications():
            assert sender == peer.name
            got.append(message)
            if len(got) == len(messages):
                break
        assert got == messages


@case
async def allows_one_iterator_and_loses_nothing(world: World) -> None:
    """A second iterator is refused; one that was cancelled leaves the messages to the next."""
    async with world.open(replace(SETTINGS, idle_tick=0.005)) as agent:
        await agent.add_peer(world.blob)
        waiting = asyncio.create_task(anext(agent.notifications()))
        await asyncio.sleep(0)
        with pytest.raises(CommunicatorBusy, match="iterator already"):
            await anext(agent.notifications())
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await world.ask("tell", await agent.metadata(), [b"1", b"2", b"3"])
        got = []
        for _ in range(3):
            messages = agent.notifications()
            got.append((await anext(messages))[1])
            await messages.aclose()
        assert got == [b"1", b"2", b"3"]


@case
async def drops_the_oldest_message_and_counts(world: World) -> None:
    """Messages that nobody takes are bounded: the newest are kept, the others counted."""
    async with world.open(replace(SETTINGS, max_queued_notifications=4)) as agent:
        await world.ask("tell", await agent.metadata(), [b"%d" % i for i in range(10)])
        async with asyncio.timeout(20), agent.serving():
            while agent.dropped < 6:
                await asyncio.sleep(0.005)
        messages = agent.notifications()
        assert [(await anext(messages))[1] for _ in range(4)] == [b"6", b"7", b"8", b"9"]
        await messages.aclose()


@case
async def ends_an_iterator_when_closing(world: World) -> None:
    """Whoever waits for messages when the agent is closed is told so."""
    async with world.open() as agent:
        waiting = asyncio.create_task(anext(agent.notifications()))
        await asyncio.sleep(0)
    async with asyncio.timeout(20):
        with pytest.raises(CommunicatorClosed):
            await waiting


@case
async def adds_a_peer_once_for_concurrent_callers(world: World) -> None:
    """Eight callers at once share one peer (C12)."""
    target = zeros_like("rows")
    async with world.open() as agent:
        region = await agent.register(target, "target")
        peers = await asyncio.gather(*(agent.add_peer(world.blob) for _ in range(8)))
        assert len(set(map(id, peers))) == 1
        assert await agent.add_peer(world.blob) is peers[0]
        await agent.read(region[:], peers[0].region("rows")[:])


@case
async def refuses_bad_metadata_and_then_takes_the_good(world: World) -> None:
    """Damaged, foreign and own blobs are refused before NIXL sees them; the good one works (C13)."""
    target, good = zeros_like("rows"), world.blob
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 1
    async with world.open() as agent, world.open() as bare:
        region = await agent.register(target, "target")
        own = await agent.metadata()
        bad = [
            good[:-10],
            good[:20],
            b"hello",
            b"",
            bytes(flipped),
            good + b"z",
            b"EPLBcard" + bytes(200),
            own,
        ]
        for blob in bad:
            with pytest.raises(HandshakeError, match="metadata blob refused"):
                await agent.add_peer(blob)
        with pytest.raises(HandshakeError, match="must be bytes"):
            await agent.add_peer("blob")  # type: ignore[arg-type]
        without = await agent.add_peer(await bare.metadata())
        with pytest.raises(KeyError, match="no region"):
            without.region("rows")
        await agent.notify(without, b"hello")
        messages = bare.notifications()
        assert await anext(messages) == (agent.name, b"hello")
        await messages.aclose()
        peer = await agent.add_peer(good)
        await agent.read(region[:], peer.region("rows")[:])
    assert np.array_equal(target, data()["rows"])


@case
async def refuses_oversized_metadata(world: World) -> None:
    """A blob larger than ``max_blob_bytes`` is refused, naming both numbers."""
    async with world.open(replace(SETTINGS, max_blob_bytes=1024)) as agent:
        with pytest.raises(HandshakeError, match=r"max_blob_bytes=1024"):
            await agent.add_peer(world.blob + bytes(1024))


@case
async def refuses_another_secret(world: World) -> None:
    """A card that was not made with this job's secret is refused, and nothing of the secret is shown."""
    async with world.open(replace(SETTINGS, secret=b"sixteen bytes or more")) as agent:
        with pytest.raises(HandshakeError, match="secret") as caught:
            await agent.add_peer(world.blob)
        assert "sixteen" not in str(caught.value)


@case
async def forgets_and_adds_a_peer_again(world: World) -> None:
    """Fifty times remove, add and READ (C10)."""
    target = zeros_like("rows")
    async with world.open() as agent:
        region = await agent.register(target, "target")
        for i in range(50):
            peer = await agent.add_peer(world.blob)
            await agent.read(region[i], peer.region("rows")[i])
            await agent.remove_peer(peer)
        with pytest.raises(TransferError, match="no peer"):
            await agent.read(region[0], peer.region("rows")[0])
    assert np.array_equal(target[:50], data()["rows"][:50])


@case
async def refuses_what_a_peer_no_longer_registers(world: World) -> None:
    """A peer registers less at the same address: whoever refreshes is refused the rest, which NIXL would read (C11)."""
    target = np.zeros((256, 4096), np.uint8)
    async with world.open() as agent:
        region = await agent.register(target, "target")
        before = await agent.add_peer(await world.ask("shrink", 256))
        old = before.region("shrinking")
        await agent.read(region[:], old[:])
        assert target.any()
        target[:] = 0
        after = await agent.add_peer(await world.ask("shrink", 128))
        assert before.gone
        with pytest.raises(IndexError, match="'shrinking' has 128 rows"):
            after.region("shrinking")[:256]
        with pytest.raises(TransferError, match=f"not inside one registered region of peer {after.name}"):
            await agent.read(region[:], old[:])
        assert not target.any()
        await agent.read(region[:128], after.region("shrinking")[:])
        assert target[:128].any()
        assert not target[128:].any()


@case
async def registers_a_gigabyte_beside_a_ticking_loop(world: World) -> None:
    """The user's loop goes on meanwhile: registration is the engine loop's (C8)."""
    late = [0.0]

    async def tick() -> None:
        while True:
            due = time.perf_counter() + 0.001
            await asyncio.sleep(0.001)
            late.append(time.perf_counter() - due)

    async with world.open() as agent:
        ticking = asyncio.create_task(tick())
        for _ in range(3):
            started = time.perf_counter()
            region = await agent.register(np.empty((1 << 10, 1 << 20), np.uint8), "gigabyte")
            took = time.perf_counter() - started
            await region.deregister()
        ticking.cancel()
        print(f"registered in {took * 1e3:.2f} ms, worst lag {max(late) * 1e3:.2f} ms")
        assert max(late) < 0.25, f"a tick came {max(late):.3f} s late"


@case
async def registers_the_same_memory_once(world: World) -> None:
    """Tied memory is one registration, used until its last name goes, and closes clean (C15)."""
    target = zeros_like("rows")
    async with world.open() as agent:
        one = await agent.register(target, "one")
        two = await agent.register(target, "two")
        with pytest.raises(WeightsError, match="exists already"):
            await agent.register(target, "two")
        peer = await agent.add_peer(world.blob)
        await agent.read(one[:32], peer.region("rows")[:32])
        await one.deregister()
        await agent.read(two[32:], peer.region("rows")[32:])
        await agent.register(target, "one")
    assert np.array_equal(target, data()["rows"])


@case
async def refuses_regions_that_overlap_in_part(world: World) -> None:
    """Memory that overlaps a region in part is refused, naming both (C15)."""
    target = zeros_like("rows")
    async with world.open() as agent:
        await agent.register(target[:40], "first")
        with pytest.raises(WeightsError, match="'first' and 'second' overlap in part"):
            await agent.register(target[30:], "second")
        await agent.register(target[40:], "second")


@case
async def takes_back_what_a_cancelled_call_has_done(world: World) -> None:
    """Cancelled after any turn: memory is not registered, and ``serving`` is not left on."""
    array = np.zeros((4, 64), dtype=np.uint8)

    async def serve(agent: AsyncNixlAgent) -> None:
        async with agent.serving():
            await asyncio.Event().wait()

    async with world.open() as agent:
        for turns in range(8):
            for call in (agent.register(array, "array"), serve(agent)):
                task = asyncio.ensure_future(call)
                for _ in range(turns):
                    await asyncio.sleep(0)
                registered = task.done()
                task.cancel()
                await asyncio.wait([task])
                if registered:
                    await task.result().deregister()
            await (await agent.register(array, "array")).deregister()
            assert agent._endpoint._served == 0


@case
async def opens_and_closes_often(world: World) -> None:
    """Twenty times open, register and close leave no task and no thread behind (C34)."""
    threads = threading.active_count()
    for _ in range(20):
        async with world.open() as agent:
            await agent.register(np.zeros((2, 8), np.uint8), "a")
        await agent.aclose()
    assert threading.active_count() == threads
    assert len([t for t in asyncio.all_tasks() if "poller of reader" in t.get_name()]) == 0


@case
async def refuses_use_after_close(world: World) -> None:
    """A closed agent says so, and closing again is nothing."""
    target = zeros_like("rows")
    agent = await world.open()
    region = await agent.register(target, "target")
    peer = await agent.add_peer(world.blob)
    await agent.read(region[:], peer.region("rows")[:])
    assert await agent.aclose() == ()
    assert await agent.aclose() == ()
    for call in (
        lambda: agent.read(region[:], peer.region("rows")[:]),
        lambda: agent.register(target, "again"),
        agent.metadata,
        lambda: agent.notify(peer, b""),
        lambda: agent.add_peer(world.blob),
        lambda: anext(agent.notifications()),
        region.deregister,
    ):
        with pytest.raises(CommunicatorClosed, match="closed"):
            await call()


@case
async def survives_garbage_collection(world: World) -> None:
    """Collecting garbage in the middle of a transfer loses neither poller nor READ (C36)."""
    target = zeros_like("bulk")
    async with world.open() as agent:
        region = await agent.register(target, "target")
        peer = await agent.add_peer(world.blob)
        reading = asyncio.create_task(agent.read(region[:], peer.region("bulk")[:]))
        while not reading.done():
            gc.collect()
            await asyncio.sleep(0.001)
        await reading
    assert np.array_equal(target, data()["bulk"])


async def in_flight(world: World, agent: AsyncNixlAgent, name: str, rows: slice) -> tuple[Any, np.ndarray, Any]:
    """Stop the source and post a READ that it cannot answer; returns region, array and the awaiting task."""
    target = zeros_like(name)
    region = await agent.register(target, "target")
    peer = await agent.add_peer(world.blob)
    await agent.read(region[0], peer.region(name)[0])
    world.stop()
    reading = asyncio.create_task(agent.read(region[rows], peer.region(name)[rows]))
    async with asyncio.timeout(20):
        while (await agent.stats()).in_flight == 0:
            await asyncio.sleep(0.002)
    return region, target, reading


@waiting_case
async def cancelling_ends_the_task_and_keeps_the_lease(world: World) -> None:
    """A cancelled READ ends its task within one turn; its memory is kept until it has ended (I-3, I-10, C2)."""
    async with world.open() as agent:
        region, target, reading = await in_flight(world, agent, "rows", slice(0, 8))
        try:
            reading.cancel()
            await asyncio.sleep(0)
            assert reading.cancelled()
            with pytest.raises(TimeoutError, match="'target' is still leased"):
                await region.released(timeout=0.2)
            peer = await agent.add_peer(world.blob)
            with pytest.raises(CommunicatorBusy, match="may still write"):
                await agent.read(region[7:9], peer.region("rows")[7:9])
            with pytest.raises(CommunicatorBusy, match="leased"):
                await region.deregister()
            with pytest.raises(CommunicatorBusy, match="have not ended"):
                await agent.remove_peer(peer)
            stats = await agent.stats()
            assert (stats.in_flight, stats.quarantined, stats.quarantined_bytes) == (0, 1, 8 * 4096)
            assert stats.oldest_peer == peer.name
            assert stats.oldest_seconds > 0
        finally:
            world.resume()
        await region.released(timeout=20)
        assert np.array_equal(target[:8], data()["rows"][:8])
        target[:] = 0xEE
        assert (await agent.stats()).quarantined == 0
        await agent.read(region[8:], peer.region("rows")[8:])
        assert (target[:8] == 0xEE).all()
        await region.deregister()


@case
async def cancelling_at_any_moment_writes_nothing_late(world: World) -> None:
    """C2: 25 READs cancelled at random moments within one; memory that was granted again is never written."""
    rng, loop = random.Random(3), asyncio.get_running_loop()
    target, bulk = np.zeros((16, MIB), dtype=np.uint8), data()["bulk"]
    async with world.open() as agent:
        region = await agent.register(target, "target")
        peer = await agent.add_peer(world.blob)
        started = loop.time()
        await agent.read(region[:], peer.region("bulk")[0:16])
        seconds, cancelled = loop.time() - started, 0
        while cancelled < 25:
            reading = asyncio.ensure_future(agent.read(region[:], peer.region("bulk")[0:16]))
            await asyncio.sleep(rng.uniform(0.0, 0.9) * seconds)
            if reading.cancel():
                cancelled += 1
                for _ in range(2):
                    await asyncio.sleep(0)
                assert reading.cancelled()
            await region.released(timeout=20)
            target[:] = 0xEE
            await asyncio.sleep(rng.choice((0.0, seconds)))
            assert (target == 0xEE).all()
        stats = await agent.stats()
        assert (stats.in_flight, stats.quarantined) == (0, 0)
        await agent.read(region[:], peer.region("bulk")[0:16])
        assert np.array_equal(target, bulk[:16])


@waiting_case
async def a_reads_whole_target_is_leased(world: World) -> None:
    """Rows that a READ has yet to post are leased too: another READ into them is refused, the first ends."""
    async with world.open(replace(SETTINGS, max_peer_requests_in_flight=2)) as agent:
        region, target, reading = await in_flight(world, agent, "bulk", slice(0, 64))
        try:
            peer = await agent.add_peer(world.blob)
            with pytest.raises(CommunicatorBusy, match="may still write"):
                await agent.read(region[63], peer.region("bulk")[1])
            assert (await agent.stats()).in_flight == 2
        finally:
            world.resume()
        await reading
        assert np.array_equal(target, data()["bulk"])


@waiting_case
async def timing_out_says_what_was_waited_for(world: World) -> None:
    """A READ past its deadline says peer, bytes and time; its memory stays leased until it ends (C1)."""
    target = zeros_like("rows")
    async with world.open() as agent:
        region = await agent.register(target, "target")
        peer = await agent.add_peer(world.blob)
        await agent.read(region[0], peer.region("rows")[0])
        world.stop()
        try:
            with pytest.raises(NixlTransferTimeout) as caught:
                await agent.read(region[:4], peer.region("rows")[:4], timeout=0.3)
            error = caught.value
            assert (error.peer, error.nbytes, error.state, error.phase) == (
                peer.name,
                4 * 4096,
                "PROC",
                "poll",
            )
            assert 0.29 <= error.elapsed < 10
            assert str(error).startswith(f"NIXL transfer failed with state=PROC phase=poll peer={peer.name}")
            with pytest.raises(CommunicatorBusy, match="leased"):
                await region.deregister()
        finally:
            world.resume()
        await region.released(timeout=20)
        await region.deregister()


@fatal_case
async def closing_is_bounded_and_names_what_is_left(world: World) -> None:
    """Closing with a READ that never ends is bounded, says what was left, and tells its awaiter."""
    agent = await world.open()
    _, _, reading = await in_flight(world, agent, "rows", slice(0, 8))
    try:
        async with asyncio.timeout(20):
            left = await agent.aclose(timeout=0.2)
        assert len(left) == 1
        assert "READ of 32768 bytes from source" in left[0]
        with pytest.raises(CommunicatorClosed):
            await reading
    finally:
        world.resume()


@fatal_case
async def a_cancelled_close_goes_on(world: World) -> None:
    """A cancelled close ends its task at once, and the agent closes in the background."""
    agent = await world.open()
    _, _, reading = await in_flight(world, agent, "rows", slice(0, 8))
    try:
        closing = asyncio.create_task(agent.aclose(timeout=0.3))
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.sleep(0)
        assert closing.cancelled()
        async with asyncio.timeout(20):
            with pytest.raises(CommunicatorClosed):
                await reading
            while any(t.name.endswith(agent.name) for t in threading.enumerate()):
                await asyncio.sleep(0.005)
            await agent.aclose()  # a second call waits for the end of the first
            assert agent._endpoint.closed
    finally:
        world.resume()
