"""One NIXL agent as it lives on its engine loop: its memory, its peers, its READs, and the poller that drives them.

Everything here is called on the engine loop only, so nothing here locks (I-2). What is still in quarantine at the
end goes with the agent, which is destroyed before the memory is (I-4).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

from eplb_async.engine import LoopEngine
from eplb_async.errors import CommunicatorClosed, NixlPeerDisconnected
from eplb_async.nixl.blocks import Blocks
from eplb_async.nixl.card import seal
from eplb_async.nixl.flights import Flights
from eplb_async.nixl.inbox import FairQueue
from eplb_async.nixl.leases import Intervals
from eplb_async.nixl.memory import Memory
from eplb_async.nixl.native import Descriptors, Native
from eplb_async.nixl.peers import Peer, Peers
from eplb_async.nixl.poller import Poller, Progress
from eplb_async.nixl.regions import Rows
from eplb_async.nixl.stats import EndpointStats
from eplb_async.nixl.transfer import Fate, Origin, Transfer
from eplb_async.settings import Settings

__all__ = ["Endpoint", "EndpointStats", "NativeFactory", "Peer"]

_log = logging.getLogger("eplb_async.agent")
NativeFactory = Callable[[str, Settings], Native]
_QUEUED = 4096
_LAP_MESSAGES = 64
_LAP_BYTES = 1 << 20


class Endpoint:
    """A NIXL agent on its engine loop.

    Args:
        name: Agent name, unique per incarnation (I-13).
        engine: The engine loop that owns it; the constructor runs there too.
        settings: Limits and pace.
        native: Makes the native agent.
        on_notification: Called with (peer name, message); never awaited, must not raise. It returns True if nothing is
            likely to follow, so that an idle agent need not look often for a while.
        on_disconnect: Called with a peer's name, once, when NIXL says that it is gone.
        on_end: Called when a READ has ended and its memory is free.
    """

    def __init__(
        self,
        name: str,
        engine: LoopEngine,
        settings: Settings,
        native: NativeFactory,
        *,
        on_notification: Callable[[str, bytes], object],
        on_disconnect: Callable[[str], object] = lambda _: None,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        self.name = name
        self.engine = engine
        self.settings = settings
        self.closed = False
        self._closing = False
        self._served = 0
        self._on_notification = on_notification
        self.native = native(name, settings)
        engine.keep(self.native)
        self._on_end = on_end
        self._flights = Flights(
            self.native, engine.loop, on_end=self._ended, on_lost=lambda peer: self.peers.lost(peer)
        )
        self.leases = self._flights.leases
        self.peers = Peers(self.native, settings, is_read=self._flights.is_read, on_disconnect=on_disconnect)
        self._memory = Memory(self.native, self.leases)
        self._arrived = FairQueue(_QUEUED, lambda peer: self.peers.get(peer) is not None)
        self.poller = Poller(self._lap, self._is_active, settings, bells=self.native.bells)
        self._polling = engine.spawn(self.poller.run(), f"poller of {name}")

    def register(self, memory: Any, name: str) -> Rows:
        """Register one piece of memory as a named region; see :meth:`register_many`."""
        return self.register_many([(memory, name)])[0]

    def register_many(self, named: list[tuple[Any, str]]) -> list[Rows]:
        """Register several pieces of memory, or none; see :meth:`Memory.register`."""
        self._check_open()
        return self._memory.register(named)

    def deregister(self, region: Rows) -> None:
        """Deregister a region; see :meth:`Memory.deregister`."""
        self._check_open()
        self._memory.deregister(region)

    def metadata(self) -> bytes:
        """This agent's card, for :meth:`add_peer` on other agents."""
        self._check_open()
        return seal(self.name, self.native.metadata(), self._memory.extents, self.settings.secret or b"")

    def add_peer(self, blob: bytes) -> Peer:
        """Check a peer's card and load it; see :meth:`Peers.add`."""
        self._check_open()
        return self.peers.add(blob)

    def remove_peer(self, peer: Peer) -> None:
        """Forget a peer; see :meth:`Peers.remove`."""
        self.peers.remove(peer)

    def retire_peer(self, peer: Peer) -> None:
        """Forget a peer now, or else when READs from it have ended."""
        self.peers.retire(peer)

    def notify(self, peer: Peer, message: bytes, *, stir: bool = True) -> None:
        """Send a notification.

        Args:
            peer: To whom.
            message: What.
            stir: Look often for a while, since an answer is likely; at rest that is done anyway.

        Raises:
            NixlPeerDisconnected: The peer is gone.
        """
        self._check_open()
        if peer.gone:
            raise NixlPeerDisconnected(peer=peer.name, phase="notify", detail="it was gone before")
        try:
            self.native.notify(peer.name, message)
        except NixlPeerDisconnected as error:
            error.peer = peer.name
            self.peers.lost(peer.name)
            raise
        if stir or not self._served:
            self.poller.wake()

    def post(
        self,
        local: Descriptors,
        remote: Descriptors,
        peer: Peer,
        *,
        timeout: float,
        local_memory: str = "DRAM",
        remote_memory: str = "DRAM",
        origin: Origin | None = None,
        notif: bytes = b"",
        within: object = None,
    ) -> Transfer:
        """Post one READ; await ``transfer.future`` for its end. Can block the engine loop for the whole copy.

        Args:
            local: Where the bytes go, ``[n, 3]``; leased until the READ has ended.
            remote: Where they come from, ``[n, 3]``, of the same lengths.
            peer: Whom to read from.
            timeout: Seconds until the READ counts as failed (its memory stays leased).
            local_memory: NIXL's memory type of our side.
            remote_memory: NIXL's memory type of the peer's side.
            origin: What the READ belongs to, for errors.
            notif: Sent to the peer when the READ has completed.
            within: Holder of a lease that this READ is a part of.

        Raises:
            TransferError: A descriptor lies outside registered memory, or lengths differ.
            CommunicatorBusy: The memory is leased.
            NixlTransferFailed: NIXL refused it, or it failed at once.
        """
        self._check_open()
        if self._closing:
            raise CommunicatorClosed(f"agent {self.name} is closing")
        blocks = Blocks(local, remote, local_memory, remote_memory)
        blocks.check(peer.name)
        self._memory.coverage.check(local, local_memory, f"agent {self.name}")
        peer.coverage.check(remote, remote_memory, f"peer {peer.name}")
        transfer = self._flights.post(
            blocks, peer, timeout=timeout, origin=origin or Origin(), notif=notif, within=within
        )
        if transfer.fate is Fate.ACTIVE:
            self.poller.wake()
        return transfer

    def look(self) -> bool:
        """Poll once, now: take completions and notifications, and fail what is overdue; returns if there were any."""
        return self._lap() is Progress.SURE or bool(self._arrived)

    def abandon(self, transfer: Transfer) -> None:
        """Its awaiter is gone: keep handle and memory until the READ has ended (I-3)."""
        self._flights.abandon(transfer)

    async def drained(self, timeout: float, *, of: Callable[[Transfer], bool] = lambda _: True) -> bool:
        """Wait until no transfer that ``of`` selects is left; returns whether that happened in time."""
        with self.serving():  # somebody waits: look often
            return await self._flights.drained(timeout, of=of)

    async def released(self, wanted: Intervals, timeout: float) -> bool:
        """Wait until nobody holds a lease that overlaps; returns whether that happened in time."""
        with self.serving():
            return await self._flights.released(wanted, timeout)

    def end_lease(self, owner: object) -> None:
        """End the lease of ``owner``."""
        self._flights.end_lease(owner)

    @property
    def dropped(self) -> int:
        """Notifications that were dropped because a peer sent more than are kept."""
        return self._arrived.dropped

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """READs that have not ended, in the order they were posted."""
        return self._flights.transfers

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Make progress at an active pace: peers may read from us, or we wait for their messages (I-17)."""
        self._served += 1
        self.poller.wake()
        try:
            yield
        finally:
            self._served -= 1

    def stats(self) -> EndpointStats:
        """Counters, as they are now; safe from any thread."""
        return EndpointStats.of(self.transfers, self.native, self.engine.loop.time())

    async def close(self, timeout: float | None = None) -> tuple[str, ...]:
        """Drain with a deadline, then destroy the agent, then let go of the memory (I-4).

        Args:
            timeout: Seconds to drain; default ``settings.close_timeout``.

        Returns:
            What had not ended and went with the agent, in words.
        """
        if self.closed:
            return ()
        self._closing = True
        for transfer in self.transfers:
            self.abandon(transfer)
        await self.drained(self.settings.close_timeout if timeout is None else timeout)
        return self.destroy()

    def destroy(self) -> tuple[str, ...]:
        """Destroy the agent now. Nothing lands afterwards; READs that had not ended are named."""
        if self.closed:
            return ()
        self.closed = True
        self.poller.stop()
        left = self._flights.give_up()
        if not left:
            self._memory.deregister_all()
        self.native.destroy()
        self.engine.drop(self.native)
        self.engine.off_stop(self.close)
        self._flights.forget()
        self._memory.forget()
        if left:
            _log.warning("agent %s destroyed with %s", self.name, "; ".join(left))
        return left

    def _ended(self) -> None:
        if not self.closed:
            self.peers.sweep()
        self._on_end()

    def _lap(self) -> Progress:
        if self.closed:
            return Progress.NONE
        self.native.moved = False
        heard = self._hear()
        if heard:
            self._flights.stir()
        if self._flights.lap():
            return Progress.SURE
        return max(heard, Progress.MAYBE) if self.native.moved else heard

    def _hear(self) -> Progress:
        """Hand on some of the notifications that have come; surely there were some, or only such as nothing follows.

        Bounded, and one peer after the other: however many one of them sends, READs are polled, the others are
        heard, and what does not fit is dropped and counted.
        """
        for peer, message in self.native.notifications():
            self._arrived.put(peer, message)
        count = nbytes = 0
        heard = Progress.NONE
        while count < _LAP_MESSAGES and nbytes < _LAP_BYTES and (item := self._arrived.take()) is not None:
            count += 1
            nbytes += len(item[1])
            heard = max(heard, Progress.MAYBE if self._on_notification(*item) is True else Progress.SURE)
        return Progress.SURE if count == _LAP_MESSAGES or nbytes >= _LAP_BYTES else heard

    def _is_active(self) -> bool:
        return self._served > 0 or self._flights.is_active

    def _check_open(self) -> None:
        if self.closed:
            raise CommunicatorClosed(f"agent {self.name} is closed")
