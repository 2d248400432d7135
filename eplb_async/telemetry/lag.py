"""How late an event loop is: a timer that says how long after its time it ran."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class LagTicker:
    """Looks at the loop that runs where this is made, if one does; it costs a timer each interval, and no task.

    Args:
        interval: Seconds between two looks.
        observe: Told how late each was, in seconds.
    """

    def __init__(self, interval: float, observe: Callable[[float], object]) -> None:
        self._interval = interval
        self._observe = observe
        self._goes_on: Callable[[], bool] = lambda: False
        self._ticks = False
        self._due = 0.0
        try:
            self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None

    @property
    def ticks(self) -> bool:
        """Whether it goes on."""
        return self._ticks and self._loop is not None and not self._loop.is_closed()

    def is_like(self, other: LagTicker) -> bool:
        """Whether this still ticks, and looks at the same loop as often as the other."""
        return self.ticks and (self._loop, self._interval) == (other._loop, other._interval)

    def start(self, goes_on: Callable[[], bool]) -> None:
        """Tick as long as ``goes_on()``; if it ticks already, it looks at that from now on."""
        self._goes_on = goes_on
        if not self._ticks:
            self._next()

    def stop(self) -> None:
        """Tick no more; from any thread. The timer that is set runs out."""
        self._goes_on = lambda: False

    def _next(self) -> None:
        self._ticks = self._loop is not None and self._goes_on()
        if self._loop is not None and self._ticks:
            self._due = time.perf_counter() + self._interval
            self._loop.call_later(self._interval, self._tick)

    def _tick(self) -> None:
        self._observe(max(0.0, time.perf_counter() - self._due))
        self._next()
