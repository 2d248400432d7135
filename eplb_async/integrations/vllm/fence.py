"""Runs rounds on the engine loop: the member's part, the coordinator's on the lowest rank, and their messages."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence

from eplb_async.core.text import one_line
from eplb_async.errors import (
    CommunicatorClosed,
    NixlPeerDisconnected,
    NixlTransferFailed,
    NixlTransferTimeout,
)
from eplb_async.integrations.vllm.coordinator import Coordinator
from eplb_async.integrations.vllm.member import Member, Phase
from eplb_async.integrations.vllm.messages import Cause, Codec, Kind, Message, MessageError
from eplb_async.integrations.vllm.outcomes import cause_of, error_of
from eplb_async.nixl.endpoint import Endpoint, Peer

__all__ = ["Fence"]

_log = logging.getLogger("eplb_async.vllm")
_FIRST = 0  # the lowest rank coordinates
_MOST_LAPS = 100
_OF_MEMBERS = (Kind.JOIN, Kind.DONE, Kind.FAIL, Kind.SEEN)


class Fence:
    """Rounds of one communicator. Everything is called on the engine loop.

    Args:
        rank: This rank.
        size: Number of ranks.
        codec: Of its messages.
        endpoint: Its agent.

    Attributes:
        dropped: Messages that were not taken, by reason.
        sent: Messages sent to other ranks.
    """

    def __init__(self, rank: int, size: int, codec: Codec, endpoint: Endpoint) -> None:
        self.dropped: Counter[str] = Counter()
        self.sent = 0
        self._rank = rank
        self._codec = codec
        self._endpoint = endpoint
        self._peers: dict[int, Peer] = {}
        self._ranks: dict[str, int] = {}
        self._member = Member(rank)
        self._coordinator = Coordinator(size, rank) if rank == _FIRST else None
        self._changed = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._closing = False

    @property
    def peers(self) -> Mapping[int, Peer]:
        """The other ranks' agents."""
        return self._peers

    def meet(self, peers: Mapping[int, Peer]) -> None:
        """These are the other ranks."""
        self._peers = dict(peers)
        self._ranks = {peer.name: rank for rank, peer in self._peers.items()}

    async def run(
        self, layer: int, digest: bytes, read: Callable[[], Awaitable[None]], *, deadline: float, patience: float
    ) -> None:
        """One round: join, read when all have, and return when all have read.

        Cancelled, failed or timed out: this rank has left, and all others that are in the round are told.

        Args:
            layer: What is moved; all ranks must say the same.
            digest: Of what the reads depend on; all ranks must say the same.
            read: Reads, from the moment that all rows may be read.
            deadline: In the loop's time.
            patience: Seconds that this deadline was set for, for errors.

        Raises:
            NixlTransferFailed: The round failed, here or elsewhere; subclasses say how.
        """
        if self._closing:
            raise CommunicatorClosed("the communicator is closed")
        try:
            with self._endpoint.serving():
                self._hear()
                joining = self._member.join(layer, digest)
                if joining is not None:
                    self._tell(joining)
                    self._tick()
                    await self._until(lambda: self._member.phase is not Phase.JOINED, deadline, patience)
                    self._check(layer)
                    await self._read(read, layer)
                    self._tell(self._member.done())
                    await self._until(lambda: self._member.outcome is not None, deadline, patience)
                self._check(layer)
        except BaseException as error:
            if self._member.phase is not Phase.IDLE:
                self._tell(self._member.fail(*cause_of(error, self._ranks)))
            raise

    def refuse(self, text: str, cause: Cause) -> None:
        """This rank's call fails before it has begun: tell the others."""
        if self._member.phase is Phase.IDLE:
            with self._endpoint.serving():
                self._tell(self._member.fail(cause, text))

    def on_notification(self, peer: str, data: bytes) -> None:
        """Take a message; what is not authentic, or not of who sent it, is counted and dropped."""
        try:
            message = self._codec.decode(data)
        except MessageError as error:
            self._drop(peer, str(error))
            return
        if self._ranks.get(peer) != message.sender:
            self._drop(peer, "it is in another rank's name")
            return
        if message.kind is Kind.PING:
            return
        if message.sender == _FIRST and message.kind not in _OF_MEMBERS:
            self._to_member(message)
        elif self._coordinator is not None and message.kind in (*_OF_MEMBERS, Kind.LEAVE):
            self._to_coordinator(message)
        else:
            self._drop(peer, "it is not for this rank to say, or not to this one")

    def on_disconnect(self, peer: str) -> None:
        """NIXL says that a peer is gone."""
        if (rank := self._ranks.get(peer)) is not None:
            self._gone(rank, f"rank {rank} is gone: its process died, or closed its communicator")

    async def close(self, timeout: float) -> None:
        """Leave for good: the others are told, when they know how their last round ended."""
        if self._closing:
            return
        self._closing = True
        if self._member.phase is not Phase.IDLE:
            self._tell(self._member.fail(Cause.FAILED, "it closed its communicator"))
        self._member.gone(self._rank, "the communicator is closed")
        self._changed.set()
        if self._reading is not None:
            self._reading.cancel()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        with self._endpoint.serving():
            while self._coordinator is not None and self._coordinator.unseen and loop.time() < deadline:
                self._changed.clear()
                await _wait(self._changed, min(self._endpoint.settings.ping_interval, deadline - loop.time()))
                self._post(self._coordinator.unseen)
            for rank in self._peers if self._coordinator is not None else (_FIRST,):
                self._notify(rank, Message(Kind.LEAVE, self._rank))
        if self._ticking is not None:
            self._ticking.cancel()

    def _hear(self) -> None:
        """Take what has come meanwhile: a call that others have given up must not be mistaken for the next one."""
        for _ in range(_MOST_LAPS):
            if not self._endpoint.look():
                return

    async def _read(self, read: Callable[[], Awaitable[None]], layer: int) -> None:
        """Read, until the round ends."""

        async def reading() -> None:
            await read()

        self._reading = asyncio.ensure_future(reading())
        try:
            await self._reading
            self._check(layer)  # it may have ended in the very turn in which the READs did
        except asyncio.CancelledError:
            if self._member.outcome is None and not self._closing:
                raise  # it is this call that is cancelled
            self._check(layer)
            raise
        finally:
            self._reading.cancel()
            self._reading = None

    async def _until(self, condition: Callable[[], bool], deadline: float, patience: float) -> None:
        loop = asyncio.get_running_loop()
        while not condition():
            left = deadline - loop.time()
            if left <= 0:
                raise self._too_late(patience)
            self._changed.clear()
            await _wait(self._changed, left)

    def _too_late(self, patience: float) -> NixlTransferTimeout:
        phase, coordinator = self._member.phase, self._coordinator
        what = "begin theirs" if phase is Phase.JOINED else "end their READs"
        if coordinator is not None:
            waits = ", ".join(map(str, coordinator.missing))
            whom = f"rank{'s' if len(coordinator.missing) != 1 else ''} {waits} to {what}"
        else:
            whom = self._member.waiting_for or f"rank {_FIRST}, which says when all {what}"
        return NixlTransferTimeout(f"waited {patience:g} s for {whom}", phase="fence")

    def _check(self, layer: int) -> None:
        outcome = self._member.outcome
        if outcome is None or outcome.cause is Cause.NONE:
            return
        raise error_of(outcome, layer)

    def _tell(self, message: Message) -> None:
        """To the coordinator."""
        if self._coordinator is not None:
            self._to_coordinator(message)
        else:
            self._notify(_FIRST, message)

    def _to_coordinator(self, message: Message) -> None:
        assert self._coordinator is not None
        self._post(self._coordinator.handle(message))
        self._changed.set()
        if self._coordinator.is_open:
            self._tick()

    def _to_member(self, message: Message) -> None:
        answer = self._member.handle(message)
        self._changed.set()
        if self._member.outcome is not None and self._reading is not None:
            self._reading.cancel()
        if answer is not None:
            self._tell(answer)

    def _post(self, mail: Sequence[tuple[int, Message]]) -> None:
        for rank, message in mail:
            if rank == self._rank:
                self._to_member(message)
            else:
                self._notify(rank, message)

    def _notify(self, rank: int, message: Message) -> None:
        peer = self._peers[rank]
        try:
            self._endpoint.notify(peer, self._codec.encode(message))
            self.sent += 1
        except NixlPeerDisconnected:
            self.on_disconnect(peer.name)
        except NixlTransferFailed as error:  # it is said again
            _log.warning("rank %d could not be told (%s); it will be again", rank, error)
        except CommunicatorClosed:
            pass

    def _gone(self, rank: int, text: str) -> None:
        if self._coordinator is not None:
            self._post(self._coordinator.gone(rank, text))
        elif (leaving := self._member.gone(rank, text)) is not None and rank != _FIRST:
            self._tell(leaving)
        self._changed.set()
        if self._member.outcome is not None and self._reading is not None:
            self._reading.cancel()

    def _tick(self) -> None:
        """See to it that what was said is said again while somebody waits for the answer."""
        if self._ticking is None or self._ticking.done():
            self._ticking = self._endpoint.engine.spawn(self._repeat(), "vllm fence")

    async def _repeat(self) -> None:
        with self._endpoint.serving():
            while not self._closing:
                await asyncio.sleep(self._endpoint.settings.ping_interval)
                if self._coordinator is not None:
                    if not self._coordinator.is_open:
                        return
                    self._post(self._coordinator.again())
                elif self._member.phase is Phase.IDLE:
                    return
                else:
                    self._notify(_FIRST, self._member.again() or Message(Kind.PING, self._rank))

    def _drop(self, peer: str, why: str) -> None:
        self.dropped[why] += 1
        count = self.dropped[why]
        if count & (count - 1) == 0:  # the 1st, 2nd, 4th, …
            _log.warning("a message of %s was dropped: %s (%d so far)", one_line(peer), why, count)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(max(0.0, seconds)):
            await event.wait()
