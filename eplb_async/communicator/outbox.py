"""Mail on its way out: a line for each rank, sent a few words at a time, so that nothing else waits behind it.

NIXL takes messages for a stopped peer without end (NIXL.md, 42). So a rank that has not been heard since it was sent
``_WINDOW`` bytes gets no more, only pings, until it is heard again; what waits for it meanwhile is bounded too.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from eplb_async.core.messages import Word
from eplb_async.core.words import MAX_MAIL, cut
from eplb_async.engine import LoopEngine
from eplb_async.errors import CommunicatorBusy

_ENVELOPE = 1024  # what a message costs beside its bytes: many empty ones are bounded too
MAX_WAITING = 4 * (MAX_MAIL + _ENVELOPE)
"""Bytes of mail that may wait for one rank: four of the largest messages."""
_WINDOW = 2 << 20  # a peer keeps four times that, and drops the oldest beyond it: see nixl.inbox
_TURN = 8  # words; some 0.1 ms each


@dataclass(slots=True)
class _Letter:
    """A message that waits, or is being sent."""

    topic: int
    payload: bytes
    words: Iterator[Word] | None = None
    """Those that are still to be sent, once it is its turn."""

    @property
    def cost(self) -> int:
        """Bytes that it counts for."""
        return len(self.payload) + _ENVELOPE


@dataclass(slots=True)
class _Line:
    """What waits for one rank."""

    letters: deque[_Letter] = field(default_factory=deque)
    waiting: int = 0
    unheard: int = 0
    """Bytes sent to it since it was heard."""


class Outbox:
    """Lines of mail. :meth:`put` may be called in any thread; all else runs on the engine loop.

    Args:
        engine: The engine loop.
        send: Sends a word to a rank; returns False if that rank gets no mail.
        ping: Called with a rank that is waited for.
        interval: Seconds between two pings.
    """

    def __init__(
        self,
        engine: LoopEngine,
        *,
        send: Callable[[int, Word], bool],
        ping: Callable[[int], object],
        interval: float,
    ) -> None:
        self._engine = engine
        self._send = send
        self._ping = ping
        self._interval = interval
        self._lock = threading.Lock()
        self._lines: dict[int, _Line] = {}
        self._ready: deque[int] = deque()
        """Ranks whose line is not empty and not held, but for the one that is being sent to."""
        self._held: set[int] = set()
        self._serial = 0
        self._pumping = False
        self._stopped = False
        self._timer: asyncio.TimerHandle | None = None

    def put(self, rank: int, topic: int, payload: bytes) -> None:
        """Have a message sent, after what waits for that rank.

        Raises:
            CommunicatorBusy: `MAX_WAITING` bytes wait for it already.
            CommunicatorClosed: The engine has stopped.
        """
        letter = _Letter(topic, payload)
        with self._lock:
            line = self._lines.setdefault(rank, _Line())
            if line.waiting + letter.cost > MAX_WAITING:
                raise CommunicatorBusy(
                    f"mail to rank {rank} is not taken: {line.waiting} bytes wait for it already. Either this process "
                    "sends faster than its engine thread can, or that rank is silent: see health()"
                )
            line.letters.append(letter)
            line.waiting += letter.cost
            if len(line.letters) == 1 and rank not in self._held:
                self._ready.append(rank)
            post, self._pumping = not self._pumping, True
        if post:
            self._engine.post(self._pump)

    def heard(self, rank: int) -> None:
        """A message of that rank came: it may be sent more."""
        line = self._lines.get(rank)
        if line is None or not line.unheard:
            return
        line.unheard = 0
        if rank not in self._held:
            return
        with self._lock:
            self._held.discard(rank)
            if not line.letters:
                return
            self._ready.append(rank)
            post, self._pumping = not self._pumping, True
        if post:
            self._engine.loop.call_soon(self._pump)

    def clear(self) -> int:
        """Another view: what waits was meant for the one before. Returns how many messages that were."""
        with self._lock:
            count = sum(len(line.letters) for line in self._lines.values())
            self._lines.clear()
            self._ready.clear()
            self._held.clear()
        return count

    def stop(self) -> None:
        """Send nothing any more."""
        self._stopped = True
        self.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _pump(self) -> None:
        """Send a few words, to one rank after the other, and the rest in later turns of the loop."""
        for _ in range(_TURN):
            with self._lock:
                if self._stopped or not self._ready:
                    self._pumping = False
                    return
                rank = self._ready.popleft()
                line = self._lines[rank]
            self._send_one(rank, line)
        self._engine.loop.call_soon(self._pump)

    def _send_one(self, rank: int, line: _Line) -> None:
        """Send the next word of a line, and put the line where it belongs then."""
        letter = line.letters[0]
        if letter.words is None:
            self._serial += 1
            letter.words = cut(letter.payload, topic=letter.topic, serial=self._serial)
        word = next(letter.words)
        goes = self._send(rank, word)
        line.unheard += len(word.data) + _ENVELOPE if goes else 0
        with self._lock:
            if not goes or word.part == word.parts - 1:
                line.letters.popleft()
                line.waiting -= letter.cost
            if line.unheard >= _WINDOW:
                self._held.add(rank)
            elif line.letters:
                self._ready.append(rank)
        if line.unheard >= _WINDOW:
            self._ping(rank)
            if self._timer is None:
                self._timer = self._engine.loop.call_later(self._interval, self._ping_held)

    def _ping_held(self) -> None:
        self._timer = None
        for rank in tuple(self._held):
            self._ping(rank)
        if self._held:
            self._timer = self._engine.loop.call_later(self._interval, self._ping_held)
