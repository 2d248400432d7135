"""One NIXL agent as it lives on its engine loop: regions, peers, READs, leases, quarantine.

Everything here is called on the engine loop only, so nothing here locks. The rules:

1. A READ is posted on leased memory; the lease ends with the READ, not with its awaiter (I-3).
2. A handle is released only when terminal: ``DONE``, or a disconnect. Any other error, a cancel and a timeout
   put handle and memory into quarantine, where the poller goes on asking (I-4; NIXL.md, 17-19).
3. What is still in quarantine at the end goes with the agent, which is destroyed before the memory is (I-4).
4. A completion is looked for before a deadline is (I-11).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from eplb_async.engine import LoopEngine
from eplb_async.errors import (
    CommunicatorBusy,
    CommunicatorClosed,
    HandshakeError,
    NixlPeerDisconnected,
    NixlTransferFailed,
    NixlTransferTimeout,
    TransferError,
    WeightsError,
)
from eplb_async.nixl.card import seal, unseal
from eplb_async.nixl.native import Descriptors, Extent, Native, State
from eplb_async.nixl.poller import Poller, Progress
from eplb_async.nixl.regions import Coverage, Intervals, Leases, Rows, extent_of, intervals_of
from eplb_async.nixl.transfer import Fate, Origin, Transfer
from eplb_async.settings import Settings

_log = logging.getLogger("eplb_async.agent")
_STALE_SECONDS = 0.05
NativeFactory = Callable[[str, Settings], Native]


class Peer:
    """A remote agent that we may read from."""

    def __init__(self, name: str, blob: bytes, extents: list[Extent]) -> None:
        self.name = name
        self.blob = blob
        self.gone = False
        self._regions = {extent.name: Rows(extent, name) for extent in extents}
        self.coverage = Coverage(extents)

    def region(self, name: str) -> Rows:
        """The peer's region of that name.

        Raises:
            KeyError: It has none; the message lists those it has.
        """
        try:
            return self._regions[name]
        except KeyError:
            raise KeyError(f"peer {self.name} has no region {name!r}, only {sorted(self._regions)}") from None

    def __repr__(self) -> str:
        return f"<Peer {self.name!r}{' (gone)' if self.gone else ''}>"


@dataclass(frozen=True, slots=True)
class EndpointStats:
    """Counters of an endpoint.

    Attributes:
        in_flight: READs in flight that somebody awaits.
        quarantined: READs in quarantine.
        quarantined_bytes: Bytes they may still write.
        oldest_seconds: Age of the oldest READ that has not ended; 0 if none.
        oldest_peer: Its peer; empty if none.
        polls: Native polls so far.
        longest_call_seconds: Longest native call so far.
        longest_call: What that call was.
    """

    in_flight: int
    quarantined: int
    quarantined_bytes: int
    oldest_seconds: float
    oldest_peer: str
    polls: int
    longest_call_seconds: float
    longest_call: str


class Endpoint:
    """A NIXL agent on its engine loop.

    Args:
        name: Agent name, unique per incarnation (I-13).
        engine: The engine loop that owns it; the constructor runs there too.
        settings: Limits and pace.
        native: Makes the native agent.
        on_notification: Called with (peer name, message); never awaited, must not raise.
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
        self.peers: dict[str, Peer] = {}
        self.closed = False
        self._closing = False
        self.leases = Leases()
        self._on_notification = on_notification
        self._on_disconnect = on_disconnect
        self._on_end = on_end
        self._served = 0
        self._transfers: dict[Transfer, None] = {}
        self._regions: dict[str, Rows] = {}
        self._registered: dict[tuple[int, int], tuple[Any, int]] = {}
        self._memory: dict[str, Any] = {}
        self._coverage = Coverage(())
        self._changed: asyncio.Event = asyncio.Event()
        self._last_end = 0.0
        self.native = native(name, settings)
        engine.keep(self.native)
        self.poller = Poller(self._lap, self._is_active, settings)
        self._polling = engine.spawn(self.poller.run(), f"poller of {name}")

    # ------------------------------------------------------------------------------------------- regions
    def register(self, memory: Any, name: str) -> Rows:
        """Register memory as a named region; the same extent twice is registered once (NIXL.md, 26)."""
        return self.register_many([(memory, name)])[0]

    def register_many(self, named: list[tuple[Any, str]]) -> list[Rows]:
        """Register several pieces of memory.

        Raises:
            WeightsError: A row is not dense, memory overlaps a region in part, or a name is taken.
        """
        self._check_open()
        extents = [extent_of(memory, name) for memory, name in named]
        taken = set(self._regions)
        for extent in extents:
            if extent.name in taken:
                raise WeightsError(f"region {extent.name!r} exists already")
            taken.add(extent.name)
        known = [rows.extent for rows in self._regions.values()]
        for extent in extents:
            self._refuse_partial_overlap(extent, known)
            known.append(extent)
        fresh: dict[tuple[int, int], Extent] = {}
        for extent in extents:
            key = (extent.address, extent.end)
            if extent.length and key not in self._registered:
                fresh.setdefault(key, extent)
        done = []
        try:
            for key, extent in fresh.items():
                self._registered[key] = (self.native.register([extent]), 0)
                done.append(key)
        except NixlTransferFailed:
            for key in done:
                self.native.deregister(self._registered.pop(key)[0])
            raise
        for extent, (memory, name) in zip(extents, named, strict=True):
            if extent.length:
                token, uses = self._registered[extent.address, extent.end]
                self._registered[extent.address, extent.end] = (token, uses + 1)
            self._regions[name] = Rows(extent)
            self._memory[name] = memory
        self._coverage = Coverage(rows.extent for rows in self._regions.values())
        return [self._regions[name] for _, name in named]

    def deregister(self, region: Rows) -> None:
        """Deregister a region.

        Raises:
            CommunicatorBusy: A READ may still write into it (I-3).
        """
        self._check_open()
        extent = region.extent
        if self._regions.get(extent.name) is None:
            raise WeightsError(f"region {extent.name!r} is not registered here")
        if (holder := self.leases.holder(((extent.address, extent.end),))) is not None:
            raise CommunicatorBusy(f"region {extent.name!r} is leased to {holder}; await its end first")
        if extent.length:
            token, uses = self._registered[extent.address, extent.end]
            if uses == 1:
                self.native.deregister(token)
                del self._registered[extent.address, extent.end]
            else:
                self._registered[extent.address, extent.end] = (token, uses - 1)
        del self._regions[extent.name], self._memory[extent.name]
        self._coverage = Coverage(rows.extent for rows in self._regions.values())

    def metadata(self) -> bytes:
        """This agent's card, for :meth:`add_peer` on other agents."""
        self._check_open()
        extents = [rows.extent for rows in self._regions.values()]
        return seal(self.name, self.native.metadata(), extents, self.settings.secret or b"")

    # ---------------------------------------------------------------------------------------------- peers
    def add_peer(self, blob: bytes) -> Peer:
        """Check a peer's card and load it; loading the same one again returns the same peer.

        A newer card of a known peer replaces it by remove and add, since loading alone would keep old extents
        readable (NIXL.md, 25).

        Raises:
            HandshakeError: The card is bad, our own, or NIXL refuses it.
            CommunicatorBusy: READs from the peer being replaced are in flight.
        """
        self._check_open()
        card = unseal(blob, self.settings.secret or b"", limit=self.settings.max_blob_bytes)
        if card.name == self.name:
            raise HandshakeError(f"metadata blob refused: it is agent {self.name!r}'s own")
        known = self.peers.get(card.name)
        if known is not None:
            if known.blob == blob and not known.gone:
                return known
            self.remove_peer(known)
        try:
            name = self.native.add_remote(card.metadata)
            try:
                if name != card.name:
                    raise HandshakeError(f"card of {card.name!r} carries the metadata of another agent, {name!r}")
                self.native.connect(name)
            except BaseException:
                with contextlib.suppress(NixlTransferFailed):
                    if name not in self.peers:
                        self.native.remove_remote(name)
                raise
        except NixlTransferFailed as error:
            raise HandshakeError(f"NIXL refused the metadata of {card.name!r}: {error}") from error
        peer = self.peers[name] = Peer(name, blob, card.extents())
        return peer

    def remove_peer(self, peer: Peer) -> None:
        """Forget a peer.

        Raises:
            CommunicatorBusy: READs from it may still write; removing it would not stop them (NIXL.md, 19).
        """
        if any(t.peer == peer.name for t in self._transfers):
            raise CommunicatorBusy(f"READs from {peer.name} have not ended; removing it would not stop them")
        peer.gone = True
        if self.peers.pop(peer.name, None) is not None:
            with contextlib.suppress(NixlTransferFailed):
                self.native.remove_remote(peer.name)

    def notify(self, peer: Peer, message: bytes) -> None:
        """Send a notification.

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
            self._lost(peer.name)
            raise
        self.poller.wake()

    # ----------------------------------------------------------------------------------------------- READ
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
        self._check_blocks(local, local_memory, remote, remote_memory, peer)
        loop = self.engine.loop
        now = loop.time()
        transfer = Transfer(
            peer=peer.name,
            nbytes=int(local[:, 1].sum()),
            started=now,
            deadline=now + timeout,
            origin=origin or Origin(),
            future=loop.create_future(),
        )
        if peer.gone:
            raise transfer.explain(NixlPeerDisconnected("it was gone before", phase="post"), now)
        self.leases.acquire(transfer, intervals_of(local), f"READ from {peer.name}", within=within)
        try:
            transfer.handle = self.native.make_read(local, local_memory, remote, remote_memory, peer.name)
        except NixlTransferFailed as error:
            self.leases.release(transfer)
            raise transfer.explain(error, now) from error.__cause__
        self._transfers[transfer] = None
        try:
            state = self.native.post(transfer.handle, notif)
        except NixlTransferFailed as error:
            self._failed(transfer, error)
            raise transfer.explain(error, loop.time()) from error.__cause__
        self._see(transfer, state)
        if transfer.fate is Fate.ACTIVE:
            self._last_end = now
            self.poller.wake()
        elif transfer.error is not None:
            raise transfer.error
        return transfer

    def look(self) -> None:
        """Poll once, now: take completions and notifications, and fail what is overdue."""
        self._lap()

    def abandon(self, transfer: Transfer) -> None:
        """Its awaiter is gone: keep handle and memory until the READ has ended (I-3)."""
        if transfer.fate is Fate.ACTIVE:
            transfer.fate = Fate.QUARANTINED
            transfer.future.cancel()
            _log.info("quarantined %s", transfer)

    async def drained(self, timeout: float, *, of: Callable[[Transfer], bool] = lambda _: True) -> bool:
        """Wait until no transfer that ``of`` selects is left; returns whether that happened in time."""
        return await self._until(lambda: not any(of(t) for t in self._transfers), timeout)

    async def released(self, wanted: Intervals, timeout: float) -> bool:
        """Wait until nobody holds a lease that overlaps; returns whether that happened in time."""
        return await self._until(lambda: self.leases.holder(wanted) is None, timeout)

    def end_lease(self, owner: object) -> None:
        """End the lease of ``owner``."""
        self.leases.release(owner)
        self._changed.set()

    async def _until(self, condition: Callable[[], bool], timeout: float) -> bool:
        deadline = self.engine.loop.time() + timeout
        while not condition():
            left = deadline - self.engine.loop.time()
            if left <= 0:
                return False
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._changed.wait()
        return True

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """READs that have not ended, in the order they were posted."""
        return tuple(self._transfers)

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
        transfers = self.transfers
        quarantined = [t for t in transfers if t.fate is Fate.QUARANTINED]
        oldest = min(transfers, key=lambda t: t.started, default=None)
        seconds, call = self.native.longest_call
        return EndpointStats(
            in_flight=len(transfers) - len(quarantined),
            quarantined=len(quarantined),
            quarantined_bytes=sum(t.nbytes for t in quarantined),
            oldest_seconds=self.engine.loop.time() - oldest.started if oldest else 0.0,
            oldest_peer=oldest.peer if oldest else "",
            polls=self.native.polls,
            longest_call_seconds=seconds,
            longest_call=call,
        )

    # ---------------------------------------------------------------------------------------------- close
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
        left = self.transfers
        for transfer in left:
            transfer.future.cancel()
            if transfer.handle is not None:
                self.native.abandon(transfer.handle)
                transfer.handle = None
        if not left:
            with contextlib.suppress(NixlTransferFailed):
                for token, _ in self._registered.values():
                    self.native.deregister(token)
        self.native.destroy()
        self.engine.drop(self.native)
        self.engine.off_stop(self.close)
        names = tuple(map(str, left))
        for transfer in left:
            self._end(transfer)
        self._registered.clear()
        self._regions.clear()
        self._memory.clear()
        if names:
            _log.warning("agent %s destroyed with %s", self.name, "; ".join(names))
        return names

    # --------------------------------------------------------------------------------------------- within
    def _lap(self) -> Progress:
        if self.closed:
            return Progress.NONE
        self.native.moved = False
        arrived = self.native.notifications()
        for peer, message in arrived:
            self._on_notification(peer, message)
        progressed = bool(arrived)
        now = self.engine.loop.time()
        # Nothing has ended for long: ask one after the other, one every second lap, or many READs on a stopped
        # peer cost that many polls a lap. Progress is made for all of them by the call above.
        stale = now - self._last_end > _STALE_SECONDS and not self.native.moved
        turn = -1 if self.poller.laps % 2 else self.poller.laps // 2 % max(1, len(self._transfers))
        for i, transfer in enumerate(list(self._transfers)):
            if not transfer.pollable or transfer.handle is None:
                continue
            if stale and i != turn and not (transfer.fate is Fate.ACTIVE and now >= transfer.deadline):
                continue
            try:
                self._see(transfer, self.native.check(transfer.handle))
            except NixlTransferFailed as error:
                self._failed(transfer, error)
            progressed |= transfer.fate is Fate.ENDED
        if progressed:
            self._last_end = now
            return Progress.SURE
        return Progress.MAYBE if self.native.moved else Progress.NONE

    def _see(self, transfer: Transfer, state: State) -> None:
        now = self.engine.loop.time()
        if state is State.DONE:
            self._release(transfer)
            if not transfer.future.done():
                transfer.future.set_result(None)
        elif state is State.ERR:
            self._failed(transfer, NixlTransferFailed(phase="poll"))
        elif transfer.fate is Fate.ACTIVE and now >= transfer.deadline:
            late = NixlTransferTimeout("it may still land; its memory stays leased until it ends", phase="poll")
            self._fail(transfer, late, Fate.QUARANTINED)

    def _failed(self, transfer: Transfer, error: NixlTransferFailed) -> None:
        if isinstance(error, NixlPeerDisconnected):  # terminal: nothing lands after it (NIXL.md, 39)
            self._release(transfer)
            self._fail(transfer, error, Fate.ENDED)
            self._lost(transfer.peer)
        else:  # no proof of quiescence: kept until the agent goes
            transfer.pollable = False
            self._fail(transfer, error, Fate.QUARANTINED)

    def _fail(self, transfer: Transfer, error: NixlTransferFailed, fate: Fate) -> None:
        transfer.explain(error, self.engine.loop.time())
        if transfer.fate is Fate.ACTIVE:
            transfer.fate = fate
        transfer.error = error
        if not transfer.future.done():
            transfer.future.set_exception(error)

    def _release(self, transfer: Transfer) -> None:
        handle, transfer.handle = transfer.handle, None
        if handle is not None:
            with contextlib.suppress(NixlTransferFailed):
                self.native.release(handle)
        self._end(transfer)

    def _end(self, transfer: Transfer) -> None:
        transfer.fate = Fate.ENDED
        self._transfers.pop(transfer, None)
        self.leases.release(transfer)
        self._changed.set()
        self._on_end()

    def _lost(self, name: str) -> None:
        peer = self.peers.get(name)
        if peer is not None and not peer.gone:
            peer.gone = True
            self._on_disconnect(name)

    def _is_active(self) -> bool:
        return self._served > 0 or any(t.fate is Fate.ACTIVE for t in self._transfers)

    def _check_open(self) -> None:
        if self.closed:
            raise CommunicatorClosed(f"agent {self.name} is closed")

    def _check_blocks(
        self, local: Descriptors, local_memory: str, remote: Descriptors, remote_memory: str, peer: Peer
    ) -> None:
        if local.shape != remote.shape or local.ndim != 2 or local.shape[1:] != (3,) or not len(local):
            raise TransferError(f"descriptor lists of shapes {local.shape} and {remote.shape}, need equal [n, 3]")
        if not np.array_equal(local[:, 1], remote[:, 1]):
            at = int(np.argmax(local[:, 1] != remote[:, 1]))
            raise TransferError(f"descriptor {at}: {local[at, 1]} bytes here, {remote[at, 1]} bytes at {peer.name}")
        if not local[:, 1].all():
            raise TransferError("a descriptor of zero bytes")
        for blocks, memory, coverage, whose in (
            (local, local_memory, self._coverage, f"agent {self.name}"),
            (remote, remote_memory, peer.coverage, f"peer {peer.name}"),
        ):
            if (at_ := coverage.outside(blocks, memory)) is not None:
                address, nbytes, device = blocks[at_].tolist()
                raise TransferError(
                    f"descriptor {at_} ({nbytes} bytes at {address:#x}, {memory} device {device}) is not inside "
                    f"one registered region of {whose}"
                )

    @staticmethod
    def _refuse_partial_overlap(extent: Extent, known: list[Extent]) -> None:
        for other in known:
            if (
                (extent.memory, extent.device) == (other.memory, other.device)
                and extent.address < other.end
                and other.address < extent.end
                and (extent.address, extent.end) != (other.address, other.end)
            ):
                raise WeightsError(
                    f"regions {other.name!r} and {extent.name!r} overlap in part "
                    f"([{other.address:#x}, {other.end:#x}) and [{extent.address:#x}, {extent.end:#x}))"
                )
