"""One line in the log when a rank stands in one phase for long.

There is a timer only while a phase lasts that is to end: an idle rank has none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from eplb_async.communicator.report import Health
from eplb_async.communicator.standing import Standing

_log = logging.getLogger("eplb_async.watchdog")
_HAIR = 1.01

_ADVICE = {
    "joined": "see whether those ranks live and have called migrate() with the same placement; exclude(rank) says that "
    "one is dead",
    "open": "see whether the ranks waited for and read from run and are reachable; exclude(rank) says that one is dead",
    "paused": "await resume() on this rank: it is paused, and all ranks wait for its READs",
    "activating": "see why the ranks named run no steps; an engine that has stopped stepping says so with idle()",
    "in use": "see which threads and tasks of this rank are inside of using() for that layer, and why they stay",
    "settling": "nothing if it ends soon; exclude(rank) says that a rank waited for is dead",
    "view_change": "see whether the ranks waited for run; exclude(rank) says that one is dead",
    "in_doubt": "say with exclude(rank) which ranks are dead; until a view decides, nothing is applied",
    "closing": "nothing: aclose() ends by itself, with those ranks or without",
}


class Watchdog:
    """Logs one line when a phase outlives a fraction of its deadline, and again each time that has doubled.

    Args:
        loop: The engine loop.
        fraction: Fraction of the deadline; 0 for never.
        health: Says what the line shall say.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, fraction: float, health: Callable[[], Health]) -> None:
        self._loop = loop
        self._fraction = fraction
        self._health = health
        self._watched: tuple[str, float] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def note(self, standing: Standing) -> None:
        """A rank stands here now."""
        watched = (standing.phase, standing.since)
        if watched == self._watched:
            return
        self._watched = watched
        self.stop()
        if standing.deadline is not None and self._fraction:
            wait = self._fraction * max(0.0, standing.deadline - standing.since)
            self._timer = self._loop.call_at(standing.since + wait, self._bark, standing.since, wait)

    def stop(self) -> None:
        """No line any more for the phase that lasts."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _bark(self, since: float, waited: float) -> None:
        health = self._health()
        advice = "paused" if health.paused and health.phase == "open" else health.phase
        if health.in_use:
            advice = "in use"
        _log.warning("%s. Next: %s", health, _ADVICE.get(advice, "see health()"))
        # A hair later than double, so that a deadline of that moment ends the phase first.
        again = max(2 * waited * _HAIR, 0.001)
        self._timer = self._loop.call_at(since + again, self._bark, since, again)
