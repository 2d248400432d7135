"""This rank's agent, and its replacement by a successor when quarantine eats the staging (DESIGN §5)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from dataclasses import replace

from eplb_async.communicator.driver import Driver
from eplb_async.communicator.introduction import Introducer
from eplb_async.communicator.members import Identity, Member, Roster
from eplb_async.core import events, messages
from eplb_async.engine import LoopEngine
from eplb_async.errors import CommunicatorClosed, HandshakeError
from eplb_async.nixl.endpoint import Endpoint, NativeFactory
from eplb_async.settings import Settings
from eplb_async.weights import ExpertWeights, Staging

_log = logging.getLogger("eplb_async.communicator")
_MEET_SECONDS = 1.0  # and two idle ticks, in which a member looks for messages
_LAST_LOOKS = 64


class Agents:
    """The agent that lives now and, while it is being replaced, the one that retires.

    Args:
        engine: The engine loop.
        settings: Settings of an agent.
        native: Makes native agents.
        driver: Gets messages of both; told of the current one and of its identity.
        roster: Members to know.
        introducer: Introduces a successor.
        weights: Rows to register.
        staging: Where READs land; asks whether its memory is leased.

    Attributes:
        current: The agent that lives now.
        retiring: The one that is being replaced, or ``None``.
        recycled: How often it was replaced.
        bare: Whether the agent that lives now has no memory, only messages.
    """

    def __init__(
        self,
        *,
        engine: LoopEngine,
        settings: Settings,
        native: NativeFactory,
        driver: Driver,
        roster: Roster,
        introducer: Introducer,
        weights: ExpertWeights,
        staging: Staging,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._native = native
        self._driver = driver
        self._roster = roster
        self._introducer = introducer
        self._weights = weights
        self._staging = staging
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self.retiring: Endpoint | None = None
        self.recycled = 0
        self._past_polls = 0
        self.bare = False
        self.current = driver.endpoint = self._make(driver.identity, bare=False)
        staging.leased = self._is_leased

    @property
    def polls(self) -> int:
        """Native polls so far, of all agents of this rank."""
        agents = [agent for agent in (self.current, self.retiring) if agent is not None]
        return self._past_polls + sum(agent.native.polls for agent in agents)

    async def settled(self) -> None:
        """Wait until no replacement is under way."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def recycle(self, why: str, *, bare: bool = False) -> None:
        """Replace the agent; goes on to its end when its awaiter is cancelled.

        Args:
            why: For the log.
            bare: Register no memory with the successor: it only carries messages.
        """
        if self._closing:
            raise CommunicatorClosed("the communicator closes")
        self._task = self._engine.spawn(self._recycle(why, bare=bare), "recycling")
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._task)

    def begin_close(self) -> None:
        """Make no successor any more."""
        self._closing = True

    async def close(self, timeout: float) -> tuple[str, ...]:
        """Drain and destroy what there is; returns what had not ended, in words."""
        self._closing = True
        deadline = self._engine.loop.time() + timeout
        if self._task is not None and not self._task.done():
            await asyncio.wait([self._task], timeout=timeout)
            self._task.cancel()
            await asyncio.wait([self._task])
        return await self.current.close(max(0.0, deadline - self._engine.loop.time()))

    async def _recycle(self, why: str, *, bare: bool) -> None:
        """What was in flight cannot land any more, and staging is free again.

        The successor is introduced before the old agent goes, so that nobody takes its end for our death.
        """
        old, me = self.current, self._driver.identity
        successor = replace(me, incarnation=me.incarnation + 1)
        fresh = self._make(successor, bare=bare)
        try:
            known = await self._reach_all(fresh)
            self._introducer.layout = self._weights.layout  # they may have moved
            introduction = self._introducer.introduction(successor, fresh)
        except BaseException:  # nothing has changed; the next migration tries again
            fresh.destroy()
            raise
        awaited = [member for member in known if member.rank in self._driver.protocol.members]
        for member in awaited:  # an idle one would hear the successor late: connecting takes its progress several times
            self._driver.send(member.rank, messages.Ping(term=self._driver.protocol.term, sender=me.rank))
        self.retiring = old
        self.current = self._driver.endpoint = fresh
        self.bare = bare
        self._driver.identity = successor
        self.recycled += 1
        for member in known:
            self._roster.put(member)
        silent: list[int] = []
        try:
            with fresh.serving(), old.serving():  # members that have not heard yet still write to the old one
                patience = _MEET_SECONDS + 2 * self._settings.idle_tick
                silent = await self._introducer.announce(introduction, awaited, patience)
                for member in known:
                    if member not in awaited:
                        self._driver.send(member.rank, introduction)
                for _ in range(_LAST_LOOKS):
                    if not old.look():
                        break
        finally:
            left = old.destroy()
            self._driver.dropped["too many"] += old.dropped
            self._past_polls, self.retiring = self._past_polls + old.native.polls, None
            self._staging.wake()
        for rank in silent:
            if rank not in self._driver.degraded:
                self._driver.degraded[rank] = "did not answer our new incarnation"
        _log.warning(
            "agent recycled: %s; %d READs went with it; incarnation is now %x; ranks that did not answer: %s",
            why,
            len(left),
            successor.incarnation,
            silent,
        )
        if self._driver.emit is not None:
            self._driver.emit("agent_recycled", reason=why, incarnation=successor.incarnation)

    async def _reach_all(self, fresh: Endpoint) -> list[Member]:
        """The members as a successor knows them.

        Excluded ones are kept, if they can be reached: who speaks up later must be told that it is out.

        Raises:
            HandshakeError: A member of the view is not known gone, and cannot be reached.
        """
        while True:
            known = []
            unreached: tuple[Member, HandshakeError] | None = None
            for member in self._roster:
                if member.peer.gone:
                    continue
                try:
                    known.append(replace(member, peer=fresh.add_peer(member.peer.blob)))
                except HandshakeError as error:
                    if member.rank in self._driver.protocol.members:
                        unreached = (member, error)
            if unreached is None:
                return known
            member, refusal = unreached
            await self._look_for(member.rank)  # it may be dead, and nobody has noticed
            if self._roster.get(member.rank) is member and not member.peer.gone:
                raise refusal

    async def _look_for(self, rank: int) -> None:
        """Ask a member, by the agent that still knows it, and wait a little for an answer or a proof."""
        driver = self._driver
        driver.feed(events.Suspect(rank))
        with self.current.serving(), contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_MEET_SECONDS):
                await driver.until(lambda: rank not in driver.protocol.suspects)

    def _make(self, identity: Identity, *, bare: bool) -> Endpoint:
        name = f"{identity.group}/{identity.rank}.{identity.incarnation:x}-{secrets.token_hex(4)}"
        endpoint = Endpoint(
            name,
            self._engine,
            self._settings,
            self._native,
            on_notification=self._driver.notification,
            on_disconnect=self._driver.disconnected,
            on_end=self._staging.wake,
        )
        if bare:
            return endpoint
        staging = ((buffer, f"staging {memory}") for memory, buffer in self._staging.buffers.items())
        try:
            endpoint.register_many([*self._weights.regions(), *staging])
        except BaseException:
            endpoint.destroy()
            raise
        return endpoint

    def _is_leased(self, start: int, end: int) -> bool:
        agents = [agent for agent in (self.current, self.retiring) if agent is not None]
        return any(agent.leases.holder(((start, end),)) is not None for agent in agents)
