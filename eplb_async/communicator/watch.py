"""Pings to all members also while nothing is waited for: who has died is noticed, and who is silent is named."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection

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

    Silence is counted in pings, not in seconds: a rank that stood still itself takes nobody for silent.

    Args:
        loop: The engine loop.
        idle_tick: Longest pause of an idle rank between two looks for messages.
        members: The members that are not known gone, without this rank.
        ping: Pings a rank.
        degraded: Where it is noted who is silent.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        idle_tick: float,
        members: Callable[[], Collection[int]],
        ping: Callable[[int], object],
        degraded: dict[int, str],
    ) -> None:
        self._loop = loop
        self._idle_tick = idle_tick
        self._members = members
        self._ping = ping
        self._degraded = degraded
        self._seconds = 0.0
        self._patience = 0
        self._unheard: dict[int, int] = {}
        """Pings that each member was sent since it was heard."""
        self._silent: dict[int, str] = {}
        """As noted in ``degraded``."""
        self._timer: asyncio.TimerHandle | None = None

    def set(self, seconds: float) -> None:
        """Ping all members now and every so many seconds; 0 for never."""
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
            _log.warning("rank %d is heard again", rank)

    def stop(self) -> None:
        """Ping nobody any more."""
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
        for rank in members:
            unheard = self._unheard.get(rank, 0)
            if unheard >= self._patience:
                self._note(rank, unheard * self._seconds)
            self._unheard[rank] = unheard + 1
            self._ping(rank)

    def _note(self, rank: int, seconds: float) -> None:
        """A member is silent."""
        known = self._silent.get(rank)
        if known is None:
            _log.warning(
                "rank %d has not been heard for %.1f s. Next: see whether its process is stopped or its host cut off; "
                "migrations wait for it, and exclude(%d) says that it is dead",
                rank,
                seconds,
                rank,
            )
        if self._degraded.get(rank) == known:
            self._degraded[rank] = self._silent[rank] = f"silent for {seconds:.1f} s"

    def _forget(self, rank: int) -> None:
        text = self._silent.pop(rank)
        if self._degraded.get(rank) == text:
            del self._degraded[rank]
