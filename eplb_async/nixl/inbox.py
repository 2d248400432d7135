"""Notifications on their way from the engine loop to the user's."""

from __future__ import annotations

import asyncio
from collections import deque

from eplb_async.errors import CommunicatorClosed


class Inbox:
    """Notifications that nobody has taken yet: put in on the engine loop, taken on the user's.

    Waiting takes nothing, so that a wait that is cancelled loses nothing.

    Args:
        limit: Notifications kept; the oldest are dropped, and counted.
    """

    def __init__(self, limit: int) -> None:
        self._items: deque[tuple[str, bytes]] = deque(maxlen=limit)
        self._arrived = asyncio.Event()
        self._closed = False
        self.dropped = 0
        self.taken = False

    def put(self, peer: str, message: bytes) -> None:
        """Add one."""
        self.dropped += len(self._items) == self._items.maxlen
        self._items.append((peer, message))
        self._arrived.set()

    async def arrived(self) -> None:
        """Wait until there is one.

        Raises:
            CommunicatorClosed: None will come.
        """
        while not self._items:
            if self._closed:
                raise CommunicatorClosed("the agent is closed; no notification will come")
            self._arrived.clear()
            await self._arrived.wait()

    def take(self) -> tuple[str, bytes] | None:
        """The oldest, as (peer name, message), or ``None``."""
        return self._items.popleft() if self._items else None

    def close(self) -> None:
        """No more will come; end the wait."""
        self._closed = True
        self._arrived.set()
