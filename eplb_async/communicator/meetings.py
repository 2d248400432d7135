"""How ranks find each other at the rendezvous, and what an introduction says of slots.

The rendezvous is kept for the life of the communicator: ranks that start again are met there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb_async.communicator.driver import Driver
from eplb_async.communicator.introduction import Introducer
from eplb_async.communicator.members import start_of
from eplb_async.core.placement import Placement
from eplb_async.engine import LoopEngine
from eplb_async.errors import PlacementError
from eplb_async.nixl.endpoint import Endpoint
from eplb_async.rendezvous import Rendezvous, exchange, withdraw
from eplb_async.rendezvous.blob import Introduction
from eplb_async.threads import apart

_log = logging.getLogger("eplb_async.communicator")
_WITHDRAW_SECONDS = 1.0


class Meetings:
    """Publishes this rank's introduction, and looks for those of others.

    Args:
        driver: Its identity is ours.
        introducer: Makes our introduction and checks those of others.
        engine: The engine loop.
        endpoint: This rank's agent.

    Attributes:
        rendezvous: Where introductions are left; ``None`` before ``open`` has one.
        executor: Where to call it; default threads of its own.
    """

    def __init__(
        self, driver: Driver, introducer: Introducer, *, engine: LoopEngine, endpoint: Callable[[], Endpoint]
    ) -> None:
        self.rendezvous: Rendezvous | None = None
        self.executor: Executor | None = None
        self.endpoint = endpoint
        self._driver = driver
        self._introducer = introducer
        self._engine = engine
        self._published = b""

    async def exchange(
        self, on_peer: Callable[[int, bytes], Awaitable[None]], timeout: float, *, only: int | None = None
    ) -> dict[int, float]:
        """Publish our introduction as it is now, and meet all others, or one; see ``rendezvous.exchange``."""
        me, endpoint = self._driver.identity, self.endpoint()
        assert self.rendezvous is not None
        self._published = self._introducer.blob(endpoint, me)
        return await exchange(
            self.rendezvous,
            group=me.group,
            rank=me.rank,
            ep_size=me.ep_size,
            sealed=self._published,
            deadline_per_peer=timeout,
            on_peer=on_peer,
            executor=self.executor,
            peers=None if only is None else [only],
        )

    async def withdraw(self) -> None:
        """Take our introduction back from a rendezvous that outlives us; best effort, bounded, never raises."""
        rendezvous, me = self.rendezvous, self._driver.identity
        if rendezvous is None or not self._published or not getattr(rendezvous, "lasting", True):
            return
        sealed, self._published = self._published, b""
        call = partial(withdraw, rendezvous, group=me.group, rank=me.rank, sealed=sealed)
        try:
            async with asyncio.timeout(_WITHDRAW_SECONDS):
                await apart(self._engine.loop, call, name="eplb-withdraw", executor=self.executor)
        except Exception as error:  # whatever a caller's Rendezvous raises
            _log.info("rank %d could not withdraw its introduction: %s", me.rank, error)

    async def group_placement(self, rank: int) -> Introduction | None:
        """The introduction of a member that we know, if it is one with the group's placement."""
        rendezvous, member = self.rendezvous, self._driver.roster.get(rank)
        assert rendezvous is not None
        assert member is not None
        key = f"{self._driver.identity.group}/blob/{rank}"
        blob = await apart(
            self._engine.loop, lambda: rendezvous.get(key), name="eplb-placement", executor=self.executor
        )
        if not blob:
            return None
        intro = self._introducer.check(rank, blob)
        return intro if intro.term and start_of(intro.incarnation) == start_of(member.incarnation) else None


@contextlib.asynccontextmanager
async def all_ended(*tasks: asyncio.Future[Any]) -> AsyncIterator[None]:
    """End tasks with the block."""
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def slots_of(intro: Introduction, like: Placement, width: int) -> NDArray[np.int32]:
    """What an introduction says is in its slots, ``[num_layers, width]``; ids are not checked."""
    if len(intro.slots) != 4 * like.num_layers * width or intro.num_logical != like.num_logical:
        raise PlacementError(
            f"{intro.num_logical} logical experts and {len(intro.slots)} bytes of slots do not fit {like!r}"
        )
    return np.frombuffer(intro.slots, dtype="<i4").reshape(like.num_layers, width)
