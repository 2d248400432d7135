"""How the members of a group have a rank back that started again (rule 12).

They publish their introductions anew, with the placement that is true, before they say that they have met the
rank. So once a view has the rank, it finds that placement at the rendezvous, and takes it over with what it holds
itself; they do the same when they install that view.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from eplb_async.communicator.driver import Driver
from eplb_async.communicator.introduction import Introducer
from eplb_async.communicator.meetings import Meetings, all_ended, slots_of
from eplb_async.communicator.members import GENERATION_BITS, start_of
from eplb_async.core import events
from eplb_async.core.events import Phase
from eplb_async.core.messages import DIGEST_BYTES, VERSION_BYTES
from eplb_async.core.placement import Placement
from eplb_async.engine import LoopEngine
from eplb_async.errors import CommunicatorClosed, HandshakeError, PlacementError
from eplb_async.rendezvous.blob import Introduction

_LOOKING = "a newer introduction of it: is it started again, and opening?"
_ANSWER = "it to answer: it has published an introduction, and is dead, stopped, or does not reach this rank"


@dataclass(frozen=True, slots=True)
class Return:
    """A rank that was met again.

    Attributes:
        intro: What it said of itself.
        version: Weight version of this rank then.
    """

    intro: Introduction
    version: int


class Reconnector:
    """Has ranks back, one at a time, on the engine loop.

    Args:
        driver: The protocol.
        introducer: Admits the rank.
        meetings: Where to find it.
        engine: The engine loop.
        current: What is true now: placement, and version of the weights.
        adopt: Called with both when a rank has come back.
    """

    def __init__(
        self,
        driver: Driver,
        introducer: Introducer,
        meetings: Meetings,
        *,
        engine: LoopEngine,
        current: Callable[[], tuple[Placement, int]],
        adopt: Callable[[Placement, int], object],
    ) -> None:
        self._driver = driver
        self._introducer = introducer
        self._meetings = meetings
        self._engine = engine
        self._current = current
        self._adopt = adopt
        self._members = driver.protocol.members
        self._over: dict[int, int] = {}
        """By rank: its start that was a member and is out."""
        self._met: dict[int, Return] = {}
        """By rank: what it said of itself when it was met again, and what that was to mean."""
        self._stage = ""
        driver.on_installed = self._installed

    async def reconnect(self, rank: int, timeout: float, settled: Callable[[], Awaitable[None]]) -> None:
        """Have a rank back; see ``AsyncEplbCommunicator.reconnect``.

        Args:
            rank: It.
            timeout: Seconds.
            settled: Waits until nothing of an earlier migration or view change is under way.
        """
        loop, driver = self._engine.loop, self._driver
        if why := getattr(self._meetings.rendezvous, "one_time", ""):
            raise HandshakeError(f"rank {rank} cannot be had back: {why}")
        deadline = loop.time() + timeout
        self._stage = "an earlier migration or a view change to settle"  # in words, for the error
        try:
            with self._meetings.endpoint().serving():
                async with asyncio.timeout_at(deadline):
                    await self._until_out(rank, settled)
                self._stage = _LOOKING
                left = max(0.0, deadline - loop.time())
                meeting = asyncio.ensure_future(self._meetings.exchange(self._have_back, left, only=rank))
                ended = asyncio.ensure_future(driver.until(lambda: bool(driver.over)))
                async with all_ended(meeting, ended):
                    await asyncio.wait({meeting, ended}, return_when=asyncio.FIRST_COMPLETED)
                    if driver.over:
                        raise CommunicatorClosed(f"the communicator is {driver.over}")
                    meeting.result()
        except (TimeoutError, HandshakeError) as error:
            raise HandshakeError(self._never_back(rank, timeout, error)) from error

    async def _until_out(self, rank: int, settled: Callable[[], Awaitable[None]]) -> None:
        """Wait until the view is one without the rank.

        Raises:
            ValueError: It is a member, and either answers, or nobody may make a view without it.
        """
        driver = self._driver
        await settled()
        if rank in driver.protocol.members and rank not in driver.protocol.gone:
            driver.feed(events.Suspect(rank))
            await driver.until(lambda: bool(driver.over) or rank not in driver.protocol.suspects)
        await settled()
        if rank in driver.protocol.members:
            raise ValueError(f"rank {rank} is a member of the view: exclude({rank}) first if it is to start again")

    async def _have_back(self, rank: int, blob: bytes) -> None:
        """Meet the new start of a rank, say so, and wait until a view has it."""
        driver, introducer = self._driver, self._introducer
        newer_than = ((self._over.get(rank, 0) + 1) << GENERATION_BITS) - 1
        intro = introducer.check(rank, blob, newer_than=newer_than)
        met = Return(intro, self._current()[1])
        placement = self._returned(rank, met)  # refuses now what could not be taken over later
        digest = blake2b(placement.digest() + met.version.to_bytes(VERSION_BYTES), digest_size=DIGEST_BYTES).digest()
        member = introducer.admit(rank, blob, self._meetings.endpoint(), newer_than=newer_than)
        self._met[rank] = met
        self._stage = _ANSWER
        await introducer.meet(member)
        if member.peer.gone:  # met by an earlier call, and dead since: a view must not get it
            self._stage = self._who_is_missing(rank)
            raise HandshakeError(f"rank {rank}: the start that published this introduction has died")
        protocol = driver.protocol
        try:
            while not self._is_back(rank):  # an earlier start may be in, and dead, until a view has lost it
                driver.feed(events.Met(rank, start_of(member.incarnation), digest))
                await driver.until(lambda: rank in protocol.members)
                await driver.until(lambda: self._is_back(rank) or rank not in protocol.members)
        finally:
            self._stage = self._who_is_missing(rank)
            driver.feed(events.Met(rank, 0))

    def _is_back(self, rank: int) -> bool:
        protocol = self._driver.protocol
        return rank in protocol.members and rank not in protocol.arriving and rank not in protocol.gone

    def _who_is_missing(self, rank: int) -> str:
        protocol = self._driver.protocol
        member, others = self._driver.roster.get(rank), sorted(protocol.waiting_for - {rank})
        if rank in protocol.members & protocol.gone:
            return f"a view without its start that died as it was let in; exclude({rank}) makes one"
        if member is not None and member.peer.gone:
            return "a newer start of it: the one that was met has died too"
        return (
            f"ranks {others or 'of the view'} to call reconnect({rank}) too, with the same placement and weight "
            f"version ({self._current()[1]}) as this one, and a view with it"
        )

    def _installed(self, members: frozenset[int]) -> None:
        """A new view: note who is out, and take over what those hold who came."""
        driver, before = self._driver, self._members
        self._members = members
        for rank in before - members:
            member = driver.roster.get(rank)
            if member is not None and driver.opened:  # else this rank comes back, and whom it met may open, too
                self._over[rank] = start_of(member.incarnation)
        for rank in members - before:
            if (met := self._met.pop(rank, None)) is not None:
                try:
                    self._adopt(self._returned(rank, met), self._current()[1])
                except HandshakeError as error:  # refused when it was met, unless the placement has changed since
                    self._engine.loop.call_soon(driver.break_off, str(error))
        for rank in members:
            member = driver.roster.get(rank)
            if member is not None and member.peer.gone:  # its proof may have come before it was a member
                self._engine.loop.call_soon(driver.lost, member.peer.name)

    def _returned(self, rank: int, met: Return) -> Placement:
        """The placement with a rank back that says what it holds; nothing, if its weights were of another version.

        Which version counts is the one of then, and all members have said the same one: this rank's own may have
        begun to update its weights since.

        Raises:
            HandshakeError: What it says is no placement, or would leave an expert without a copy.
        """
        placement, _ = self._current()
        try:
            claim = slots_of(met.intro, placement, placement.num_local_experts)
            return placement.with_rank(rank, claim if met.intro.version == met.version else np.full_like(claim, -1))
        except PlacementError as error:
            raise HandshakeError(f"rank {rank} cannot come back with what it says its slots hold: {error}") from error

    def _never_back(self, rank: int, timeout: float, error: Exception) -> str:
        text = f"rank {rank} is not back within {timeout:g} s; waited for {self._stage}"
        if isinstance(error, HandshakeError) and self._stage == _LOOKING:
            text += f" ({error.failures.get(rank, error)})"
        if self._driver.protocol.phase is Phase.IN_DOUBT:
            text += f"; this rank is in doubt: {self._driver.last_error}"
        rendezvous = self._meetings.rendezvous
        if rank == 0 and rendezvous is not None and not getattr(rendezvous, "lasting", True):
            text += (
                f"\nrank 0 hosted the rendezvous {rendezvous.url}, which ended with it: rank 0 hosts it anew when it "
                "opens again at that address"
            )
        return text
