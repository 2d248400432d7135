"""The event-loop poller: learns completions and notifications, at a pace that follows what is going on.

NIXL offers neither callback nor file descriptor (NIXL.md, 1), so somebody must ask. The poller is a task of the
engine loop: no pause while it sees progress, short pauses while something is in flight or somebody may read
from us (a source must make progress too: NIXL.md, 8). Either way a pause grows with the quiet before it: what is rare
waits longest, and a wake costs far more than the lap (0.1 ms, after a long pause 3-6 ms, on a virtual machine).
Some transports of UCX do tell, although NIXL does not pass it on: their bells cut a pause short.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import select
from collections.abc import Callable, Sequence
from enum import IntEnum

from eplb_async.settings import Settings

_log = logging.getLogger("eplb_async.poller")
_QUIET_SHARE = 0.02
_SHORTEST_SHARE = 1 / 8
_FALSE_SECONDS = 2.0


class Progress(IntEnum):
    """What a lap saw."""

    NONE = 0
    MAYBE = 1
    """A poll took long: it moved bytes, or its caches were cold after a pause."""
    SURE = 2
    """A completion or a notification."""


class Pacing:
    """How long to pause after a lap.

    Args:
        settings: ``hot_seconds``, ``max_pause`` and ``idle_tick``.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._last = 0.0
        self._paused = False

    def after(self, now: float, *, progress: Progress, active: bool) -> float:
        """Seconds to pause; 0 means: yield to the loop and lap again.

        Args:
            now: Monotonic seconds.
            progress: What the lap saw. ``MAYBE`` right after a pause earns one more lap, which tells.
            active: Something is in flight, or somebody may read from us.
        """
        look_again = progress is Progress.MAYBE and active and self._paused
        if progress is Progress.SURE or (progress is Progress.MAYBE and active and not self._paused):
            self._last = now
        quiet = now - self._last
        if look_again or quiet < self._settings.hot_seconds:
            pause = 0.0
        else:
            shortest = self._settings.max_pause * _SHORTEST_SHARE
            longest, wanted = (
                (self._settings.max_pause, quiet * _QUIET_SHARE) if active else (self._settings.idle_tick, quiet)
            )
            pause = min(longest, max(shortest, wanted))
        self._paused = pause > 0
        return pause


class Poller:
    """Laps until told to stop.

    Args:
        lap: One round of native polls; returns what it saw.
        active: Whether something is in flight or served.
        settings: Pace.
        bells: File descriptors that become readable when a lap may be worth while; a pause ends when one does.
    """

    def __init__(
        self,
        lap: Callable[[], Progress],
        active: Callable[[], bool],
        settings: Settings,
        *,
        bells: Sequence[int] = (),
    ) -> None:
        self._bells = tuple(bells)
        self._ringing = select.poll()
        self._rung = False
        self._false_since = math.inf
        self._lap = lap
        self._active = active
        self._pacing = Pacing(settings)
        self._sleeper: asyncio.Future[None] | None = None
        self._stopped = False
        self._woken = True
        self.laps = 0

    def wake(self) -> None:
        """Lap again soon: something was posted."""
        self._woken = True
        if self._sleeper is not None and not self._sleeper.done():
            self._sleeper.set_result(None)

    def stop(self) -> None:
        """End after the current lap, and leave the bells alone from now on."""
        self._stopped = True
        self._silence()
        self.wake()

    async def run(self) -> None:
        """Lap until stopped. An error in one lap is logged; the poller itself never dies of it."""
        loop = asyncio.get_running_loop()
        for bell in self._bells if not self._stopped else ():
            loop.add_reader(bell, self._ring)
            self._ringing.register(bell, select.POLLIN)
        while not self._stopped:
            progress, self._woken = Progress.SURE if self._woken else Progress.NONE, False
            self.laps += 1
            try:
                progress = max(progress, self._lap())
            except Exception:
                _log.exception("a poller lap failed; polling goes on")
            pause = self._pacing.after(loop.time(), progress=progress, active=self._active())
            if pause <= 0 or self._woken:
                os.sched_yield()  # others may need this core to make the progress we look for
                await asyncio.sleep(0)
            else:
                if self._rung:
                    self._heed(loop.time(), progress)
                await self._pause(loop, pause)

    def _ring(self) -> None:
        """Something may have come: one lap, and no hot laps unless it sees progress."""
        if self._sleeper is not None:
            self._rung = True
            _finish(self._sleeper)

    def _silence(self) -> None:
        """Listen to no bell any more. On the loop's thread, before the agent closes them."""
        bells, self._bells = self._bells, ()
        for bell in bells:
            asyncio.get_running_loop().remove_reader(bell)

    def _heed(self, now: float, progress: Progress) -> None:
        """A bell that rang, and rings on although a lap saw nothing: another thread's, or one that costs a core."""
        if progress is not Progress.NONE or not self._ringing.poll(0):
            self._false_since = math.inf
        elif (since := min(self._false_since, now)) < now - _FALSE_SECONDS:
            _log.warning("a transport says without end that something has come; it is polled instead")
            self._silence()
        else:
            self._false_since = since
            os.sched_yield()

    async def _pause(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._rung = False
        sleeper = self._sleeper = loop.create_future()
        timer = loop.call_later(seconds, _finish, sleeper)
        try:
            await sleeper
        finally:
            timer.cancel()
            self._sleeper = None


def _finish(sleeper: asyncio.Future[None]) -> None:
    if not sleeper.done():
        sleeper.set_result(None)
