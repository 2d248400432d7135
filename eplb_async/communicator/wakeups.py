"""When a rank looks at its protocol again, and how long its agent is looked after often."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from eplb_async.core import events
from eplb_async.core.events import Phase
from eplb_async.nixl.endpoint import Endpoint

if TYPE_CHECKING:
    from eplb_async.communicator.driver import Driver

_QUIET = (Phase.IDLE, Phase.CLOSED, Phase.FENCED)


class Wakeups:
    """The one timer of a driver's protocol, and what keeps its agent awake. Runs on the engine loop.

    Args:
        driver: The driver; its protocol says when it wants to be looked at.
        loop: The engine loop.
    """

    def __init__(self, driver: Driver, loop: asyncio.AbstractEventLoop) -> None:
        self._driver = driver
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at: float | None = None
        self._serving = contextlib.ExitStack()
        self._served: Endpoint | None = None
        self._linger_until = 0.0

    def settle(self) -> None:
        """Something happened: set the timer, and serve the agent while there is something to do."""
        driver, protocol = self._driver, self._driver.protocol
        now = self._loop.time()
        wakeup = protocol.next_wakeup
        lingers = now < self._linger_until
        at = self._linger_until if wakeup is None and lingers else wakeup
        if at != self._wakes_at:  # a coordinator is fed once for each vote: most leave the time as it is
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None if at is None else self._loop.call_at(max(at, now), self._wake)
            self._wakes_at = at
        busy = protocol.phase not in _QUIET or driver.attempt is not None or wakeup is not None or lingers
        endpoint = driver.endpoint
        wanted = endpoint if busy and endpoint is not None and not endpoint.closed else None
        if wanted is not self._served:
            self._serving.close()
            if wanted is not None:
                self._serving.enter_context(wanted.serving())
            self._served = wanted

    def linger(self, seconds: float) -> None:
        """Serve the agent for so long at least, from the next :meth:`settle` on."""
        self._linger_until = max(self._linger_until, self._loop.time() + seconds)

    def stay_awake(self) -> None:
        """Mail is answered: look for it often, for as long as an idle rank may take to see what it was sent."""
        tick = self._driver.settings.idle_tick
        until = self._loop.time() + 2 * tick
        if until > self._linger_until + tick / 2 and not self._driver.over:
            self._linger_until = until
            self._driver.settle()

    def stop(self) -> None:
        """Neither wake nor serve any more."""
        if self._timer is not None:
            self._timer.cancel()
        self._serving.close()

    def _wake(self) -> None:
        self._timer = self._wakes_at = None
        if self._driver.protocol.next_wakeup is None:
            self._driver.settle()
        else:
            self._driver.feed(events.Tick())
