"""``AsyncNixlAgent``: a NIXL agent awaited from the user's loop, alive on its own engine loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from eplb_async.engine import Engine, LoopEngine
from eplb_async.errors import CommunicatorBusy, CommunicatorClosed
from eplb_async.nixl.bindings import NixlNative
from eplb_async.nixl.endpoint import Endpoint, NativeFactory
from eplb_async.nixl.inbox import Inbox
from eplb_async.nixl.native import Native
from eplb_async.nixl.peers import Peer
from eplb_async.nixl.read import read
from eplb_async.nixl.regions import Rows, Span
from eplb_async.nixl.stats import EndpointStats
from eplb_async.nixl.transfer import TransferStats
from eplb_async.opening import Opening
from eplb_async.settings import Settings, seconds

T = TypeVar("T")


def real(name: str, settings: Settings) -> Native:
    """Make a real NIXL agent."""
    return NixlNative(name, progress_thread=settings.progress_thread)


class Region(Rows):
    """Memory registered with an agent; slice it for :meth:`AsyncNixlAgent.read`."""

    def __init__(self, agent: AsyncNixlAgent, rows: Rows) -> None:
        super().__init__(rows.extent)
        self._agent = agent

    async def released(self, *, timeout: float) -> None:
        """Wait until no READ may write into this region any more.

        Cancelled: nothing has changed.

        Args:
            timeout: Seconds.

        Raises:
            TimeoutError: Some still may after ``timeout`` seconds. Nothing has changed.
        """
        await self._agent._released(self.extent.address, self.extent.end, timeout, self.name)

    async def deregister(self) -> None:
        """Deregister the memory; after that it may be freed.

        Cancelled: it may have been done.

        Raises:
            CommunicatorBusy: A READ may still write into it (I-3); it stays registered.
            WeightsError: It is not registered any more.
        """
        await self._agent._run(lambda endpoint: endpoint.deregister(self))


class AsyncNixlAgent:
    """A NIXL agent whose transfers are coroutines. Make one with :meth:`open`.

    Bound to the loop that opened it: another loop or thread gets a ``RuntimeError``. Closed, every other call raises
    `CommunicatorClosed`. Peers make progress for each other: whoever may be read from stays inside :meth:`serving`
    until nobody reads any more (I-17).

    Attributes:
        name: Its agent name.
    """

    def __init__(self, name: str, engine: LoopEngine, endpoint: Endpoint, inbox: Inbox, *, owns_engine: bool) -> None:
        self.name = name
        self._engine = engine
        self._endpoint = endpoint
        self._inbox = inbox
        self._owns_engine = owns_engine
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._closed = False
        self._closing: asyncio.Future[tuple[str, ...]] | None = None

    @classmethod
    def open(
        cls,
        name: str,
        settings: Settings | None = None,
        *,
        engine: LoopEngine | None = None,
        native: NativeFactory = real,
    ) -> Opening[AsyncNixlAgent]:
        """Open an agent: ``async with AsyncNixlAgent.open("reader-0") as agent``.

        Cancelled: everything native is given back in the background.

        Args:
            name: Agent name; two live agents of one name cannot know each other.
            settings: Settings; default from the environment.
            engine: Engine to live on; default one of its own. For tests.
            native: Makes the native agent. For tests.

        Returns:
            An awaitable that is also an asynchronous context manager.

        Raises:
            NixlTransferFailed: NIXL makes no agent.
            EplbError: NIXL is not installed, or does not load.
        """
        settings = settings or Settings.from_env()
        return Opening(lambda: cls._open(name, settings, engine, native))

    @classmethod
    async def _open(
        cls, name: str, settings: Settings, engine: LoopEngine | None, native: NativeFactory
    ) -> AsyncNixlAgent:
        owned = engine is None
        if engine is None:
            engine = Engine(f"eplb-async {name}", use_uvloop=settings.use_uvloop)
        made: list[Endpoint] = []
        inbox = Inbox(settings.max_queued_notifications, lambda peer: made[0].peers.get(peer) is not None)

        async def make() -> Endpoint:
            endpoint = Endpoint(name, engine, settings, native, on_notification=inbox.put)
            made.append(endpoint)
            engine.on_stop(endpoint.close)
            return endpoint

        async def unmake() -> None:
            for endpoint in made:
                await endpoint.close()

        try:
            endpoint = await engine.run(make)
        except BaseException:
            with contextlib.suppress(CommunicatorClosed):
                if owned and isinstance(engine, Engine):
                    engine.request_stop()
                else:
                    engine.post(lambda: engine.spawn(unmake(), f"close of {name}"))
            raise
        return cls(name, engine, endpoint, inbox, owns_engine=owned)

    async def register(self, memory: Any, name: str) -> Region:
        """Register a torch tensor or numpy array, by the rows along its first dimension.

        Cancelled: it is not registered, or soon not any more.

        Args:
            memory: The tensor or array ``[rows, ...]``, on the CPU or a CUDA device. Each row must be one dense block.
                It must stay where it is until it is deregistered or the agent is closed.
            name: What peers ask for with :meth:`Peer.region`.

        Raises:
            WeightsError: Rows are not dense, the memory overlaps a region in part, or the name is taken.
            NixlTransferFailed: NIXL refuses the memory.
        """
        endpoint, made = self._endpoint, list[Rows]()

        def take_back() -> None:
            for rows in made if not endpoint.closed else ():
                endpoint.deregister(rows)

        try:
            await self._run(lambda _: made.append(endpoint.register(memory, name)))
        except asyncio.CancelledError:
            self._undo(take_back)
            raise
        return Region(self, made[0])

    async def metadata(self) -> bytes:
        """NIXL's metadata, the named extents and a digest, for :meth:`add_peer` on other agents.

        It says what is registered now: whoever holds it knows nothing of what is registered later. Cancelled: nothing
        has changed.
        """
        return await self._run(lambda endpoint: endpoint.metadata())

    async def add_peer(self, blob: bytes) -> Peer:
        """Check a peer's metadata and load it; idempotent.

        Newer metadata of an agent that is known replaces the older. Cancelled: it may have been loaded; add it again.

        Args:
            blob: What the peer's :meth:`metadata` returned, however it came here.

        Raises:
            HandshakeError: The blob is damaged, forged, oversized, our own, or refused by NIXL.
            CommunicatorBusy: It would replace a peer from which READs have not ended.
        """
        return await self._run(lambda endpoint: endpoint.add_peer(blob))

    async def remove_peer(self, peer: Peer) -> None:
        """Forget a peer.

        Cancelled: it may have been done; call it again to be sure.

        Raises:
            CommunicatorBusy: READs from it have not ended.
        """
        await self._run(lambda endpoint: endpoint.remove_peer(peer))

    async def read(
        self, local: Span, remote: Span, *, notif: bytes = b"", timeout: float | None = None
    ) -> TransferStats:
        """Read a peer's rows into ours.

        Cancelled: ends at once; the memory stays leased until the READ has ended (I-3). Timed out: the same.

        Args:
            local: Our rows.
            remote: The peer's rows, of the same size: ``peer.region(name)[first:stop]``.
            notif: Sent to the peer when everything has arrived.
            timeout: Seconds; default ``settings.read_timeout``.

        Returns:
            How many bytes it read, and how fast.

        Raises:
            NixlTransferFailed: It failed; ``NixlTransferTimeout``, ``NixlPeerDisconnected`` where known.
            TransferError: Sizes differ, or a span is outside registered memory.
            CommunicatorBusy: Our rows are leased to another READ.
        """
        endpoint = self._endpoint
        limit = seconds(timeout, endpoint.settings.read_timeout)
        return await self._call(lambda: read(endpoint, local, remote, timeout=limit, notif=notif))

    async def notify(self, peer: Peer, message: bytes) -> None:
        """Send a small message to a peer, for its :meth:`notifications`.

        Returns when NIXL has taken it; nothing says when it has arrived. Cancelled: it may have been sent.

        Raises:
            NixlPeerDisconnected: The peer is gone.
        """
        await self._run(lambda endpoint: endpoint.notify(peer, message))

    async def notifications(self) -> AsyncIterator[tuple[str, bytes]]:
        """Yield (peer name, message) as they come; one iterator at a time.

        Of each peer the newest ``settings.max_queued_notifications`` are kept; what was dropped is in :attr:`dropped`.
        Peers take turns; what one of them sends keeps its order.
        Outside :meth:`serving` they are looked for after pauses that grow to ``settings.idle_tick`` seconds.

        Raises:
            CommunicatorBusy: Another iterator is running.
        """
        if self._inbox.taken:
            raise CommunicatorBusy(f"agent {self.name} has a notifications() iterator already")
        self._inbox.taken = True
        try:
            while True:
                await self._call(self._inbox.arrived)
                while (item := self._inbox.take()) is not None:
                    yield item
        finally:
            self._inbox.taken = False

    @property
    def dropped(self) -> int:
        """Notifications dropped because nobody took them."""
        return self._inbox.dropped + self._endpoint.dropped

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Make progress at an active pace while peers may read from us: ``async with agent.serving():``.

        Cancelled while entering or inside: it is over.
        """
        stack = contextlib.ExitStack()
        try:
            await self._run(lambda endpoint: stack.enter_context(endpoint.serving()))
            yield
        finally:
            self._undo(stack.close)

    async def stats(self) -> EndpointStats:
        """Counters: READs in flight, quarantined bytes, polls, the longest native call. Cancelled: nothing changes."""
        return await self._run(lambda endpoint: endpoint.stats())

    async def aclose(self, timeout: float | None = None) -> tuple[str, ...]:
        """Drain with a deadline, destroy the agent, then let go of the memory.

        Idempotent: every call returns when it is closed, with the same answer.

        Cancelled: closing goes on in the background.

        Args:
            timeout: Seconds to wait for READs in flight; default ``settings.close_timeout``.

        Returns:
            What had not ended and went with the agent, in words.
        """
        self._engine.check_process()
        self._check_loop()
        if self._closing is None:
            self._closed = True
            self._closing = asyncio.ensure_future(self._close(timeout))
        return await asyncio.shield(self._closing)

    async def _close(self, timeout: float | None) -> tuple[str, ...]:
        endpoint, engine, inbox = self._endpoint, self._engine, self._inbox
        owned = engine if self._owns_engine and isinstance(engine, Engine) else None

        async def close() -> tuple[str, ...]:
            try:
                inbox.close()
                return await endpoint.close(timeout)
            finally:
                if owned is not None:
                    owned.request_stop()

        left = await engine.run(close, detach=True)
        if owned is not None:
            await owned.astop()
        return left

    async def _released(self, start: int, end: int, timeout: float, name: str) -> None:
        endpoint = self._endpoint
        if not await self._call(lambda: endpoint.released(((start, end),), timeout)):
            raise TimeoutError(f"region {name!r} is still leased after {timeout} s")

    async def _run(self, use: Callable[[Endpoint], T]) -> T:
        async def call() -> T:
            return use(self._endpoint)

        return await self._call(call)

    def _undo(self, what: Callable[[], object]) -> None:
        """Take something back, behind a call that may have done it although its awaiter was cancelled."""
        with contextlib.suppress(CommunicatorClosed):
            self._engine.post(what)

    async def _call(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        self._engine.check_process()
        self._check_loop()
        if self._closed:
            raise CommunicatorClosed(f"agent {self.name} is closed")
        return await self._engine.run(call)

    def _check_loop(self) -> None:
        if threading.get_ident() != self._thread or asyncio.get_running_loop() is not self._loop:
            raise RuntimeError(f"agent {self.name} is bound to the event loop that opened it; use it from there")

    def __del__(self) -> None:
        if self._closed:
            return
        endpoint, engine = self._endpoint, self._engine
        try:
            if self._owns_engine and isinstance(engine, Engine):
                engine.check_process()
                engine.request_stop()
            else:
                engine.post(lambda: engine.spawn(endpoint.close(), f"close of {endpoint.name}"))
        except CommunicatorClosed:  # the engine has stopped, or this is a forked child: nothing is left to close
            return
        warnings.warn(f"agent {self.name} was never closed; use `async with`", ResourceWarning, stacklevel=2)

    def __repr__(self) -> str:
        return f"<AsyncNixlAgent {self.name!r}{' closed' if self._closed else ''}>"
