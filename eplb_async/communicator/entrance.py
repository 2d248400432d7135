"""How a rank enters its group: it meets all others, or comes back into a group that runs already (rule 12)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import numpy as np

from eplb_async.communicator.driver import Driver
from eplb_async.communicator.introduction import Introducer
from eplb_async.communicator.meetings import Meetings, all_ended, slots_of
from eplb_async.core.placement import Placement
from eplb_async.engine import LoopEngine
from eplb_async.errors import HandshakeError, PlacementError
from eplb_async.rendezvous.blob import Introduction

_log = logging.getLogger("eplb_async.reconnect")


class Entrance:
    """The end of ``open``, on the engine loop.

    Args:
        driver: The protocol.
        introducer: Admits others.
        meetings: Where to find them.
        engine: The engine loop.
        current: What this rank was opened with: placement, and version of the weights.
        adopt: Called with both when they are taken over from a group that runs.
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

    async def enter(self, timeout: float) -> dict[int, float]:
        """Meet all peers; where they say that the group runs already, wait until it has this rank in.

        Returns:
            Seconds until each peer was met.

        Raises:
            HandshakeError: Lists every peer that was not met and why, or says what entering waits for.
        """
        introducer, driver = self._introducer, self._driver

        async def meet(rank: int, blob: bytes) -> None:
            await introducer.meet(introducer.admit(rank, blob, self._meetings.endpoint()))

        meeting = asyncio.ensure_future(self._meetings.exchange(meet, timeout))
        entering = asyncio.ensure_future(self._let_in())
        deadline = self._engine.loop.time() + timeout
        async with all_ended(meeting, entering):
            await asyncio.wait({meeting, entering}, return_when=asyncio.FIRST_COMPLETED)
            if driver.returning and not entering.done():
                await asyncio.wait({entering}, timeout=max(0.0, deadline - self._engine.loop.time()))
                if not entering.done():
                    raise HandshakeError(self._never_let_in(timeout))
            if driver.returning:
                entering.result()
            met = {} if driver.returning else meeting.result()
            driver.start()
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
            if (intro := await self._meetings.group_placement(rank)) is not None:
                self._take_over(rank, intro)
                return
        raise HandshakeError(f"rank {here} is let in, and none of {members} says where the experts are; open again")

    def _is_in(self) -> bool:
        """Whether a view has this rank, and it has met all who are in it."""
        driver = self._driver
        members = [driver.roster.get(rank) for rank in driver.protocol.members - {driver.identity.rank}]
        met = all(member is not None and self._introducer.has_met(member) for member in members)
        return met and not driver.protocol.outside

    def _take_over(self, rank: int, intro: Introduction) -> None:
        own, version = self._current()
        here = self._driver.identity.rank
        try:
            ids = slots_of(intro, own, own.num_physical)
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
