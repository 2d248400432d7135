"""Notifications that wait to be handled: a peer that sends many costs the others neither memory nor their turn."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from eplb_async.errors import CommunicatorClosed

MAX_BYTES = 8 << 20
_STRANGERS = ""
_FEW = 64


class _Box:
    """What one peer sent. Its counters have one writer each, so that two threads may use it without a lock."""

    __slots__ = ("items", "put", "taken", "waits")

    def __init__(self) -> None:
        self.items: deque[tuple[str, bytes]] = deque()
        self.put = 0
        self.taken = 0
        self.waits = False
        """Whether it has a place in the queue of boxes; two places do no harm."""


class FairQueue:
    """Notifications of many peers, bounded for each in number and bytes, taken from one peer after the other.

    A peer's own keep their order. One thread may put while another takes. Neither costs more with more peers.

    Args:
        limit: Notifications kept of each peer; the oldest are dropped, and counted.
        known: Whether a name is a peer's. Names are the senders' word: all others share one place.
        max_bytes: Bytes kept of each peer, or one notification that is larger.
    """

    def __init__(self, limit: int, known: Callable[[str], bool], *, max_bytes: int = MAX_BYTES) -> None:
        self._limit = limit
        self._known = known
        self._max_bytes = max_bytes
        self._boxes: dict[str, _Box] = {}
        self._waiting: deque[_Box] = deque()
        self._sweep_at = _FEW
        self.dropped = 0

    def put(self, peer: str, message: bytes) -> None:
        """Add one."""
        place = peer if self._known(peer) else _STRANGERS
        box = self._boxes.get(place)
        if box is None:
            if len(self._boxes) >= self._sweep_at:
                self._boxes = {name: box for name, box in self._boxes.items() if box.items or self._known(name)}
                self._sweep_at = max(_FEW, 2 * len(self._boxes))
            box = self._boxes[place] = _Box()
        box.put += len(message)
        box.items.append((peer, message))
        while len(box.items) > 1 and (len(box.items) > self._limit or box.put - box.taken > self._max_bytes):
            try:
                oldest = box.items.popleft()
            except IndexError:  # taken this moment
                break
            box.put -= len(oldest[1])
            self.dropped += 1
        if not box.waits:
            self._line_up(box)

    def take(self) -> tuple[str, bytes] | None:
        """The oldest of the peer whose turn it is, as (peer name, message), or ``None``."""
        while self._waiting:
            box = self._waiting.popleft()
            item: tuple[str, bytes] | None = None
            try:
                item = box.items.popleft()
                box.taken += len(item[1])
            except IndexError:  # it had two places
                pass
            box.waits = False
            if box.items:  # looked at after the mark is off: what is put from now on lines it up itself
                self._line_up(box)
            if item is not None:
                return item
        return None

    def _line_up(self, box: _Box) -> None:
        box.waits = True
        self._waiting.append(box)

    def __bool__(self) -> bool:
        return any(box.items for box in list(self._boxes.values()))


class Inbox(FairQueue):
    """Notifications that nobody has taken yet: put in on the engine loop, taken on the user's.

    Waiting takes nothing, so that a wait that is cancelled loses nothing.

    Args:
        limit: Notifications kept of each peer; the oldest are dropped, and counted.
        known: Whether a name is a peer's.
    """

    def __init__(self, limit: int, known: Callable[[str], bool]) -> None:
        super().__init__(limit, known)
        self._arrived = asyncio.Event()
        self._closed = False
        self.taken = False

    def put(self, peer: str, message: bytes) -> None:
        """Add one."""
        super().put(peer, message)
        self._arrived.set()

    async def arrived(self) -> None:
        """Wait until there is one.

        Raises:
            CommunicatorClosed: None will come.
        """
        while not self:
            if self._closed:
                raise CommunicatorClosed("the agent is closed; no notification will come")
            self._arrived.clear()
            await self._arrived.wait()

    def close(self) -> None:
        """No more will come; end the wait."""
        self._closed = True
        self._arrived.set()
