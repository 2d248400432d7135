"""How often a rank is pinged and answered: NIXL takes messages for a stopped peer without end (NIXL.md, 42)."""

from __future__ import annotations

from eplb_async.core.messages import Message, Ping, Pong

_EAGER = 64


class Chatter:
    """Pings and answers that are worth sending; everything else is, always.

    A rank that has not been heard for many pings gets one in many, so that its death is still found; one that
    asks often is not answered each time, since the latest answer says all.

    Args:
        interval: Seconds between two pings of one sender.
    """

    def __init__(self, interval: float) -> None:
        self._between = interval / 8
        self._unheard: dict[int, int] = {}
        self._answered: dict[int, float] = {}

    def heard(self, rank: int) -> None:
        """A message of that rank came."""
        self._unheard.pop(rank, None)

    def is_due(self, rank: int, message: Message, now: float) -> bool:
        """Whether to send it; counts it."""
        if isinstance(message, Ping):
            count = self._unheard[rank] = self._unheard.get(rank, 0) + 1
            return count <= _EAGER or count % _EAGER == 0
        if isinstance(message, Pong):
            last = self._answered.get(rank)
            if last is not None and 0 <= now - last < self._between:
                return False
            self._answered[rank] = now
        return True
