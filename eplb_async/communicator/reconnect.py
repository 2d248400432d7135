"""A rank that starts again comes back: how it enters a group that runs, and how the others have it in (rule 12).

The others publish their introductions anew, with the placement that is true, before they say that they have met
the rank. So once a view has the rank, it finds that placement at the rendezvous, and takes it over with what it
holds itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb_async.communicator.driver import Driver
from eplb_async.communicator.introduction import Introducer
from eplb_async.communicator.members import GENERATION_BITS, start_of
from eplb_async.core import events
from eplb_async.core.events import Phase
from eplb_async.core.placement import Placement
from eplb_async.engine import LoopEngine
from eplb_async.errors import CommunicatorClosed, HandshakeError, PlacementError
from eplb_async.nixl.endpoint import Endpoint
from eplb_async.rendezvous import Rendezvous, exchange
from eplb_async.rendezvous.blob import Introduction

_log = logging.getLogger("eplb_async.reconnect")
_LOOKING = "a newer introduction of it: is it started again, and opening?"
_ANSWER = "it to answer: it has published an introduction, and is dead, stopped, or does not reach this rank"


class Reconnector:
    """Enters a group, and has ranks back into it, on the engine loop.

    Args:
        driver: The protocol.
        introducer: Introduces this rank and admits others.
        engine: The engine loop.
        endpoint: This rank's agent.
        current: What is true now: placement, and version of the weights.
        adopt: Called with both when they change because a rank came back.
    """

    def __init__(
        self,
        driver: Driver,
        introducer: Introducer,
        *,
        engine: LoopEngine,
        endpoint: Callable[[], Endpoint],
        current: Callable[[], tuple[Placement, int]],
        adopt: Callable[[Placement, int], object],
    ) -> None:
        self._driver = driver
        self._introducer = introducer
        self._engine = engine
        self._endpoint = endpoint
        self._current = current
        self._adopt = adopt
        self._rendezvous: Rendezvous | None = None
        self._executor: Executor | None = None
        self._members = driver.protocol.members
        self._over: dict[int, int] = {}
        """By rank: its start that was a member and is out."""
        self._met: dict[int, Introduction] = {}
        """By rank: what it said of itself when it was met again."""
        self._stage = ""
        driver.on_installed = self._installed

    # ---------------------------------------------------------------------------------- the rank that opens
    async def enter(self, rendezvous: Rendezvous, timeout: float, executor: Executor | None) -> dict[int, float]:
        """Meet all peers; where they say that the group runs already, wait until it has this rank in.

        Returns:
            Seconds until each peer was met.

        Raises:
            HandshakeError: Lists every peer that was not met and why, or says what entering waits for.
        """
        self._rendezvous, self._executor = rendezvous, executor
        introducer, driver = self._introducer, self._driver

        async def meet(rank: int, blob: bytes) -> None:
            await introducer.meet(introducer.admit(rank, blob, self._endpoint()))

        meeting = asyncio.ensure_future(self._exchange(meet, timeout))
        entering = asyncio.ensure_future(self._let_in())
        deadline = self._engine.loop.time() + timeout
        async with _both_ended(meeting, entering):
            await asyncio.wait({meeting, entering}, return_when=asyncio.FIRST_COMPLETED)
            if driver.returning and not entering.done():
                await asyncio.wait({entering}, timeout=max(0.0, deadline - self._engine.loop.time()))
                if not entering.done():
                    raise HandshakeError(self._never_let_in(timeout))
            if driver.returning:
                entering.result()
            met = {} if driver.returning else meeting.result()
            driver.opened = True
            return met

    async def _let_in(self) -> None:
        """Wait until a view has this rank, then take over the group's placement."""
        driver = self._driver
        here = driver.identity.rank
        await driver.until(lambda: driver.returning and (bool(driver.over) or self._is_in()))
        if driver.over:
            raise HandshakeError(f"rank {here} is not let in ({driver.over}); open it again")
        members = sorted(driver.protocol.members - {here})
        for rank in members:
            if (intro := await self._look_up(rank)) is not None:
                self._take_over(rank, intro)
                return
        raise HandshakeError(f"rank {here} is let in, and none of {members} says where the experts are; open again")

    def _is_in(self) -> bool:
        """Whether a view has this rank, and it has met all who are in it."""
        driver = self._driver
        members = [driver.roster.get(rank) for rank in driver.protocol.members - {driver.identity.rank}]
        met = all(member is not None and self._introducer.has_met(member) for member in members)
        return met and not driver.protocol.outside

    async def _look_up(self, rank: int) -> Introduction | None:
        """A member's introduction, if it is one with the group's placement."""
        rendezvous, member = self._rendezvous, self._driver.roster.get(rank)
        assert rendezvous is not None
        assert member is not None
        group = self._driver.identity.group
        blob = await self._engine.offload(lambda: rendezvous.get(f"{group}/blob/{rank}"))
        if blob is None:
            return None
        intro = self._introducer.check(rank, blob)
        return intro if intro.term and start_of(intro.incarnation) == start_of(member.incarnation) else None

    def _take_over(self, rank: int, intro: Introduction) -> None:
        own, version = self._current()
        here = self._driver.identity.rank
        try:
            ids = _slots_of(intro, own, own.num_physical)
            group = Placement(ids, ep_size=own.ep_size, num_logical=own.num_logical)
            held = own.local(here) if version == intro.version else np.full_like(own.local(here), -1)
            self._adopt(group.with_rank(here, held), intro.version)
        except PlacementError as error:
            raise HandshakeError(f"rank {rank} says where the experts are, and it is refused: {error}") from error
        _log.info("rank %d is back, in term %d", here, self._driver.protocol.term)

    def _never_let_in(self, timeout: float) -> str:
        met = sorted(m.rank for m in self._driver.roster if self._introducer.has_met(m))
        return (
            f"rank {self._driver.identity.rank} was not let in within {timeout:g} s: its group runs already (ranks "
            f"{met} say so); every rank of the view must call reconnect({self._driver.identity.rank}) while it opens"
        )

    # ------------------------------------------------------------------------------------------- the others
    async def reconnect(self, rank: int, timeout: float, settled: Callable[[], Awaitable[None]]) -> None:
        """Have a rank back; see ``AsyncEplbCommunicator.reconnect``.

        Args:
            rank: It.
            timeout: Seconds.
            settled: Waits until nothing of an earlier migration or view change is under way.
        """
        loop, driver = self._engine.loop, self._driver
        deadline = loop.time() + timeout
        self._stage = "an earlier migration or a view change to settle"  # in words, for the error
        try:
            with self._endpoint().serving():
                async with asyncio.timeout_at(deadline):
                    await self._until_out(rank, settled)
                self._stage = _LOOKING
                left = max(0.0, deadline - loop.time())
                meeting = asyncio.ensure_future(self._exchange(self._have_back, left, only=rank))
                ended = asyncio.ensure_future(driver.until(lambda: bool(driver.over)))
                async with _both_ended(meeting, ended):
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
        self._returned(rank, intro)  # refuses now what could not be taken over later
        member = introducer.admit(rank, blob, self._endpoint(), newer_than=newer_than)
        self._met[rank] = intro
        self._stage = _ANSWER
        await introducer.meet(member)
        driver.feed(events.Met(rank, start_of(member.incarnation)))
        try:
            await driver.until(lambda: rank in driver.protocol.members and rank not in driver.protocol.arriving)
        finally:
            self._stage = self._who_is_missing(rank)
            driver.feed(events.Met(rank, 0))

    def _who_is_missing(self, rank: int) -> str:
        member, others = self._driver.roster.get(rank), sorted(self._driver.protocol.waiting_for - {rank})
        if member is not None and member.peer.gone:
            return "a newer start of it: the one that was met has died too"
        return f"ranks {others or 'of the view'} to call reconnect({rank}) too, and a view with it"

    def _installed(self, members: frozenset[int]) -> None:
        """A new view: note who is out, and take over what those hold who came."""
        driver, before = self._driver, self._members
        self._members = members
        for rank in before - members:
            member = driver.roster.get(rank)
            if member is not None and driver.opened:  # else this rank comes back, and whom it met may open, too
                self._over[rank] = start_of(member.incarnation)
        for rank in members - before:
            if (intro := self._met.pop(rank, None)) is not None:
                try:
                    self._adopt(self._returned(rank, intro), self._current()[1])
                except HandshakeError as error:  # refused when it was met, unless the placement has changed since
                    self._engine.loop.call_soon(driver.break_off, str(error))
        for rank in members:
            member = driver.roster.get(rank)
            if member is not None and member.peer.gone:  # its proof may have come before it was a member
                self._engine.loop.call_soon(driver.lost, member.peer.name)

    def _returned(self, rank: int, intro: Introduction) -> Placement:
        """The placement with a rank back that says what it holds; nothing, if its weights are of another version.

        Raises:
            HandshakeError: What it says is no placement, or would leave an expert without a copy.
        """
        placement, version = self._current()
        try:
            claim = _slots_of(intro, placement, placement.num_local_experts)
            return placement.with_rank(rank, claim if intro.version == version else np.full_like(claim, -1))
        except PlacementError as error:
            raise HandshakeError(f"rank {rank} cannot come back with what it says its slots hold: {error}") from error

    def _never_back(self, rank: int, timeout: float, error: Exception) -> str:
        text = f"rank {rank} is not back within {timeout:g} s; waited for {self._stage}"
        if isinstance(error, HandshakeError) and self._stage == _LOOKING:
            text += f" ({error.failures.get(rank, error)})"
        if self._driver.protocol.phase is Phase.IN_DOUBT:
            text += f"; this rank is in doubt: {self._driver.last_error}"
        url = "" if self._rendezvous is None else self._rendezvous.url
        if rank == 0 and url.startswith("tcp://"):
            text += (
                f"\nrank 0 hosted the rendezvous {url}, which ended with it: ranks can only come back by one that "
                "outlives them, as file:// or a store of the launcher's"
            )
        return text

    async def _exchange(
        self, on_peer: Callable[[int, bytes], Awaitable[None]], timeout: float, *, only: int | None = None
    ) -> dict[int, float]:
        me, endpoint = self._driver.identity, self._endpoint()
        assert self._rendezvous is not None
        return await exchange(
            self._rendezvous,
            group=me.group,
            rank=me.rank,
            ep_size=me.ep_size,
            sealed=self._introducer.blob(endpoint, me),
            deadline_per_peer=timeout,
            on_peer=on_peer,
            executor=self._executor,
            peers=None if only is None else [only],
        )


@contextlib.asynccontextmanager
async def _both_ended(*tasks: asyncio.Future[Any]) -> AsyncIterator[None]:
    """End tasks with the block."""
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _slots_of(intro: Introduction, like: Placement, width: int) -> NDArray[np.int32]:
    """What an introduction says is in its slots, ``[num_layers, width]``; ids are not checked."""
    if len(intro.slots) != 4 * like.num_layers * width or intro.num_logical != like.num_logical:
        raise PlacementError(
            f"{intro.num_logical} logical experts and {len(intro.slots)} bytes of slots do not fit {like!r}"
        )
    return np.frombuffer(intro.slots, dtype="<i4").reshape(like.num_layers, width)
