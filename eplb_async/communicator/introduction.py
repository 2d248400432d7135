"""Introductions: what this rank says of itself, what it accepts of others, and the mutual hello.

A blob is checked for length, digest, authenticity and layout before NIXL sees any of it (I-14). A pair of ranks is
ready when each has added the other: each says Hello to whom it has added, and waits for the other's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from eplb_async.communicator.driver import Driver
from eplb_async.communicator.members import Identity, Member, Roster, start_of
from eplb_async.core import messages
from eplb_async.core.layout import Layout, compare
from eplb_async.core.placement import Placement
from eplb_async.core.plan import PLAN_VERSION
from eplb_async.core.text import one_line
from eplb_async.core.wire import MAX_BLOB
from eplb_async.errors import CommunicatorBusy, HandshakeError
from eplb_async.nixl.endpoint import Endpoint
from eplb_async.rendezvous.blob import BlobError, Introduction, open_sealed, seal
from eplb_async.settings import Settings

_log = logging.getLogger("eplb_async.introduction")
_SHOWN = 4


def agreed(settings: Settings) -> dict[str, str]:
    """What all ranks must have alike, or their plans are not one: settings by name, and the plan's version."""
    steps = {"step_margin": str(settings.step_margin)} if settings.activation == "step" else {}
    return {"verify": settings.verify, "activation": settings.activation, **steps, "plan version": str(PLAN_VERSION)}


class Introducer:
    """Introduces this rank and admits others, on the engine loop.

    Args:
        driver: Sends and receives control messages; its identity is ours.
        roster: Where members are noted.
        layout: This rank's rows.
        placement_digest: Digest of the placement this rank was opened with.
        key: The job's key.
        settings: Limits.
        current: What is true now: placement, and version of the weights.
    """

    def __init__(
        self,
        driver: Driver,
        roster: Roster,
        layout: Layout,
        placement_digest: bytes,
        key: bytes,
        settings: Settings,
        current: Callable[[], tuple[Placement, int]],
    ) -> None:
        self._driver = driver
        self._roster = roster
        self._placement_digest = placement_digest
        self._key = key
        self._settings = settings
        self._current = current
        self._heard: dict[int, int] = {}
        self._arrived = asyncio.Event()
        self._announced: messages.Introduce | None = None
        self.layout = layout
        driver.on_introduction = self._on_message
        driver.has_met = self.has_met

    def introduction(self, me: Identity, endpoint: Endpoint) -> messages.Introduce:
        """The message that introduces an incarnation of this rank to members.

        Raises:
            HandshakeError: This rank has more to say of itself than a message holds.
        """
        blob = self.blob(endpoint, me, placed=False)
        if len(blob) > MAX_BLOB:
            raise HandshakeError(f"this rank's introduction has {len(blob)} bytes; a message holds {MAX_BLOB}")
        return messages.Introduce(blob=blob)

    def blob(self, endpoint: Endpoint, me: Identity, *, placed: bool = True) -> bytes:
        """This rank's sealed introduction, with what its slots hold unless who gets it knows that.

        In a group that runs it has the whole placement, for a rank that comes back.
        """
        placement, version = self._current()
        term = self._driver.protocol.term
        ids = placement.physical_to_logical_map if term else placement.local(me.rank)
        return seal(
            Introduction(
                group=me.group,
                rank=me.rank,
                ep_size=me.ep_size,
                agent=endpoint.name,
                incarnation=me.incarnation,
                node=me.node,
                metadata=endpoint.metadata(),
                layout=self.layout.to_plain(),
                placement_digest=self._placement_digest,
                agreed=agreed(self._settings),
                term=term,
                version=version,
                num_logical=placement.num_logical,
                slots=ids.astype("<i4").tobytes() if placed else b"",
            ),
            self._key,
        )

    def check(self, rank: int, blob: bytes, *, newer_than: int = -1) -> Introduction:
        """Check a rank's blob.

        Args:
            rank: Rank that it must name.
            blob: Its sealed introduction.
            newer_than: Incarnation that it must exceed.

        Raises:
            HandshakeError: It is bad; says how.
        """
        me = self._driver.identity
        try:
            return open_sealed(
                blob,
                self._key,
                limit=self._settings.max_blob_bytes,
                group=me.group,
                rank=rank,
                ep_size=me.ep_size,
                newer_than=newer_than,
            )
        except BlobError as error:
            raise HandshakeError(f"rank {rank}: {error}") from error

    def admit(
        self, rank: int, blob: bytes, endpoint: Endpoint, *, newer_than: int = -1, incarnation: int | None = None
    ) -> Member:
        """Check a rank's blob and add its agent.

        Args:
            rank: Rank that it must name.
            blob: Its sealed introduction.
            endpoint: Our agent.
            newer_than: Incarnation that it must exceed.
            incarnation: Incarnation that it must name, or None for any.

        Raises:
            HandshakeError: The blob is bad, or the rank's layout, settings or placement are not ours; says how.
        """
        intro = self.check(rank, blob, newer_than=newer_than)
        if others := self._others(intro):
            raise HandshakeError(f"rank {rank} has other settings: {others}; give all ranks the same")
        try:
            layout = Layout.from_plain(intro.layout, like=self.layout)
        except ValueError as error:
            raise HandshakeError(f"rank {rank}: its layout is refused: {error}") from error
        if incarnation is not None and intro.incarnation != incarnation:
            raise HandshakeError(f"rank {rank}: incarnation {incarnation:x} brought the introduction of another one")
        if differences := compare(self.layout, layout):
            more = f"; and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
            raise HandshakeError(f"rank {rank} has another layout: {'; '.join(differences[:_SHOWN])}{more}")
        opens = newer_than < 0 and intro.term == 0  # else the placement has changed since, or is taken over
        if intro.placement_digest != self._placement_digest and opens:
            raise HandshakeError(f"rank {rank} was opened with another placement, ep_size or number of experts")
        peer = endpoint.add_peer(intro.metadata)
        if peer.name != intro.agent:
            raise HandshakeError(f"rank {rank}: its blob names agent {intro.agent!r}, its metadata {peer.name!r}")
        member = Member(rank, intro.incarnation, intro.node, peer, layout)
        replaced = self._roster.put(member)
        if rank in self._driver.degraded:
            del self._driver.degraded[rank]
        if replaced is not None and replaced.peer.name != peer.name:
            endpoint.retire_peer(replaced.peer)
        return member

    def _others(self, intro: Introduction) -> str:
        """What the rank has other than we do of what must be alike, with both values."""
        ours, theirs, unused = agreed(self._settings), intro.agreed, "not used"
        names = [name for name in ours | theirs if ours.get(name) != theirs.get(name)][:_SHOWN]
        return ", ".join(
            f"{name} is {theirs.get(name, unused)} there and {ours.get(name, unused)} here" for name in names
        )

    async def meet(self, member: Member) -> None:
        """Say Hello, and wait until the rank has said it to this incarnation of ours."""
        self._driver.send(member.rank, self._hello())
        await self.met(member)

    async def met(self, member: Member) -> None:
        """Wait until the rank has said Hello to this incarnation of ours."""
        while not self.has_met(member):
            self._arrived.clear()
            await self._arrived.wait()

    async def announce(self, introduction: messages.Introduce, members: list[Member], patience: float) -> list[int]:
        """Introduce a new incarnation of ours to members; returns those of them that did not answer in time.

        Several ranks can do so at once: who introduces itself meanwhile is told of ours again, at its new agent.
        """
        self._heard.clear()
        self._announced = introduction
        try:
            for member in members:
                self._driver.send(member.rank, self._announced)
            async with asyncio.timeout(patience):
                for member in members:
                    await self.met(member)
        except TimeoutError:
            pass
        finally:
            self._announced = None
        return [member.rank for member in members if not self.has_met(member)]

    def has_met(self, member: Member) -> bool:
        """Whether the rank has said Hello to this incarnation of ours."""
        return start_of(self._heard.get(member.rank, 0)) == start_of(member.incarnation)

    def _on_message(self, message: messages.Hello | messages.Introduce) -> None:
        if isinstance(message, messages.Introduce):
            self._on_introduce(message)
            return
        if message.receiver_incarnation == self._driver.identity.incarnation:
            self._heard[message.sender] = message.sender_incarnation
            self._arrived.set()
            self._driver.note()
            if message.term:
                self._driver.found_running()

    def _hello(self) -> messages.Hello:
        return messages.Hello(term=self._driver.protocol.term)

    def _on_introduce(self, message: messages.Introduce) -> None:
        """A member recycled its agent: take the new one, and say so."""
        known = self._roster.get(message.sender)
        endpoint = self._driver.endpoint
        if known is None or endpoint is None or not self._roster.same_start(message.sender, message.sender_incarnation):
            self._driver.dropped["another incarnation"] += 1
            return
        if message.sender_incarnation != known.incarnation:  # else told again: it missed our Hello
            try:
                known = self.admit(
                    message.sender,
                    message.blob,
                    endpoint,
                    newer_than=known.incarnation,
                    incarnation=message.sender_incarnation,
                )
            except (HandshakeError, CommunicatorBusy) as error:
                refused = self._driver.dropped["bad introduction"] = self._driver.dropped["bad introduction"] + 1
                if refused & (refused - 1) == 0:  # the 1st, 2nd, 4th, …: who sends many does not fill the log
                    _log.warning("introduction refused: %s (%d so far)", one_line(str(error)), refused)
                return
            if self._announced is not None and not self.has_met(known):
                self._driver.send(message.sender, self._announced)
        self._driver.send(message.sender, self._hello())
