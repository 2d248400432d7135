"""How far the members have come among the steps, as far as this rank has heard."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eplb_async.communicator.driver import Driver


class Strides:
    """Heard with each ping and answer; asked for while a layer waits for its step. Runs on the engine loop.

    Args:
        driver: The driver, which says who is a member and where this rank's engine stands, and pings.
        loop: The engine loop.

    Attributes:
        heard: Stride by rank, as heard last.
    """

    def __init__(self, driver: Driver, loop: asyncio.AbstractEventLoop) -> None:
        self.heard: dict[int, int] = {}
        self._driver = driver
        self._loop = loop
        self._asking: asyncio.TimerHandle | None = None

    def behind(self) -> tuple[int, ...]:
        """Members that have come least far, this rank included, and those not heard of yet; of steps there must be."""
        driver = self._driver
        assert driver.steps is not None
        protocol, heard = driver.protocol, dict(self.heard)
        strides = {rank: heard.get(rank, -1) for rank in protocol.members - protocol.gone}
        strides[driver.identity.rank] = driver.steps.come
        least = min(stride for stride in strides.values() if stride >= 0)
        return tuple(sorted(rank for rank, stride in strides.items() if stride <= least))

    def settle(self) -> None:
        """Something happened: if a layer waits for its step by now, ask the others where they stand."""
        steps = self._driver.steps
        if steps is not None and self._asking is None and steps.waiting:
            self.heard.clear()
            self._ask_later()

    def stop(self) -> None:
        """Ask no more."""
        if self._asking is not None:
            self._asking.cancel()

    def _ask(self) -> None:
        """Again and again, for as long as the layer waits."""
        driver = self._driver
        self._asking = None
        if driver.steps is None or not driver.steps.waiting or driver.over:
            return
        for rank in driver.protocol.members - {driver.identity.rank}:
            driver.ping(rank)
        self._ask_later()

    def _ask_later(self) -> None:
        self._asking = self._loop.call_later(self._driver.settings.ping_interval, self._ask)
