"""Mail of one rank on its way: words out in this view, and words in until they are a message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING
from typing import Protocol as Interface

from eplb_async.communicator.outbox import Outbox
from eplb_async.core.messages import Word
from eplb_async.core.words import Assembly
from eplb_async.engine import LoopEngine

if TYPE_CHECKING:
    from eplb_async.communicator.driver import Driver


class Reader(Interface):
    """Takes mail."""

    def wants(self, topic: int) -> bool:
        """Whether it takes what is about that topic."""

    def deliver(self, sender: int, topic: int, payload: bytes) -> int:
        """Takes a message; returns how many failed at it."""

    def view_changed(self) -> None:
        """There is another view, or this rank is in none any more."""


class Post:
    """Mail moves nothing of the protocol: it goes between members of one view, or is dropped and counted.

    Args:
        driver: The driver, which sends and says who is a member.
        engine: The engine loop.

    Attributes:
        outbox: What waits to be sent.
        assembly: What has come in part.
        reader: Gives who takes mail, if anybody does.
    """

    def __init__(self, driver: Driver, engine: LoopEngine) -> None:
        self._driver = driver
        self.outbox = Outbox(engine, send=self._send, ping=driver.ping, interval=driver.settings.ping_interval / 4)
        self.assembly = Assembly(driver.dropped)
        self.reader: Callable[[], Reader | None] = lambda: None

    def take(self, word: Word) -> None:
        """A part of mail came."""
        driver, reader = self._driver, self.reader()
        view, dropped = driver.view, driver.dropped
        if driver.over:
            dropped["over"] += 1
        elif word.sender not in view.members:
            dropped["foreign"] += 1
        elif word.term != view.term:
            dropped["stale" if word.term < view.term else "early"] += 1
        elif reader is None or not reader.wants(word.topic):
            dropped["unsubscribed"] += 1
        else:
            driver.wakeups.stay_awake()
            if (payload := self.assembly.add(word)) is not None:
                dropped["subscriber failed"] += reader.deliver(word.sender, word.topic, payload)

    def clear(self) -> None:
        """There is another view: what is under way was meant for the one before."""
        self.assembly.clear()
        self._driver.dropped["unsendable"] += self.outbox.clear()

    def tell_view(self) -> None:
        """Tell who takes mail that there is another view, or none any more."""
        if (reader := self.reader()) is not None:
            reader.view_changed()

    def _send(self, to: int, word: Word) -> bool:
        """Send a part of mail, in this view; returns False if that rank gets none."""
        driver = self._driver
        here = driver.identity.rank
        if driver.over or to not in driver.view.members or to in driver.protocol.gone:
            driver.dropped["unsendable"] += 1
            return False
        word = replace(word, term=driver.view.term, sender=here)
        if to == here:
            self.outbox.heard(here)
            self.take(word)
        else:
            driver.wakeups.stay_awake()
            driver.send(to, word)
        return True
