"""A word to all members also while nothing is waited for: who has died is noticed, and who is silent is named.

A member that was heard since the last time is told that this rank is here, which asks for no answer: where all watch,
that is one message for each pair and direction. Only one that was not heard is pinged.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection

from eplb_async.communicator.degraded import Degraded
from eplb_async.core.views import bit, names

_log = logging.getLogger("eplb_async.watch")
_LEAST, _MOST = 0.05, 3600.0


def checked_interval(seconds: float) -> float:
    """Seconds between two pings of one member, or 0.

    Raises:
        ValueError: Neither 0 nor 0.05 to 3600.
    """
    if (
        isinstance(seconds, bool)
        or not isinstance(seconds, int | float)
        or not (seconds == 0 or _LEAST <= seconds <= _MOST)
    ):
        raise ValueError(f"watch interval {seconds!r} is neither 0 nor a number of seconds from {_LEAST} to {_MOST}")
    return float(seconds)


class Watch:
    """Off until :meth:`set`. Runs on the engine loop.

    Silence is counted in rounds, not in seconds: a rank that stood still itself takes nobody for silent.

    Args:
        loop: The engine loop.
        idle_tick: Longest pause of an idle rank between two looks for messages.
        members: The members that are not known gone, without this rank.
        greet: Tells a rank that this one is here.
        ping: Asks a rank whether it is.
        degraded: Where it is noted who is silent.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        idle_tick: float,
        members: Callable[[], Collection[int]],
        greet: Callable[[int], object],
        ping: Callable[[int], object],
        degraded: Degraded,
    ) -> None:
        self._loop = loop
        self._idle_tick = idle_tick
        self._members = members
        self._greet = greet
        self._ping = ping
        self._degraded = degraded
        self._seconds = 0.0
        self._patience = 0
        self._unheard: dict[int, int] = {}
        """Rounds since each member was heard."""
        self._silent: dict[int, str] = {}
        """As noted in ``degraded``."""
        self._timer: asyncio.TimerHandle | None = None

    def set(self, seconds: float) -> None:
        """Send to all members now and every so many seconds; 0 for never."""
        self.stop()
        self._seconds = seconds
        if seconds:
            # An idle rank looks for messages once in an idle tick: there for the ping, here for the answer.
            self._patience = 2 + math.ceil(2 * self._idle_tick / seconds)
            self._tick()

    def heard(self, rank: int) -> None:
        """A message of that rank came."""
        self._unheard.pop(rank, None)
        if rank in self._silent:
            self._forget(rank)
            _log.info("rank %d is heard again", rank)

    def stop(self) -> None:
        """Send nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._unheard.clear()
        for rank in tuple(self._silent):
            self._forget(rank)

    def _tick(self) -> None:
        members = self._members()
        self._timer = self._loop.call_later(self._seconds, self._tick)
        for rank in [rank for rank in self._unheard if rank not in members]:
            del self._unheard[rank]
            if rank in self._silent:
                self._forget(rank)
        fresh = 0
        for rank in members:
            unheard = self._unheard.get(rank, 0)
            if unheard >= self._patience:
                fresh |= self._note(rank, unheard * self._seconds)
            self._unheard[rank] = unheard + 1
            (self._ping if unheard else self._greet)(rank)
        if fresh:
            _log.warning(
                "not heard for %.1f s: %s. Next: see whether the process is stopped, or a host cut off, which may be "
                "this one; migrations wait for it, and exclude(rank) says that a rank is dead",
                self._patience * self._seconds,
                names(fresh),
            )

    def _note(self, rank: int, seconds: float) -> int:
        """A member is silent; returns the set of it, if it was not before."""
        known = self._silent.get(rank)
        text = self._silent[rank] = f"silent for {seconds:.1f} s"
        noted = self._degraded.get(rank)
        if noted is None:
            self._degraded[rank] = text
        elif noted == known:
            self._degraded.reword(rank, text)
        return bit(rank) if known is None else 0

    def _forget(self, rank: int) -> None:
        text = self._silent.pop(rank)
        if self._degraded.get(rank) == text:
            del self._degraded[rank]
