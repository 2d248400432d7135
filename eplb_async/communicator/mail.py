"""Small messages between members, for the layer above the communicator."""

from __future__ import annotations

import contextvars
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from eplb_async.communicator.driver import Driver
from eplb_async.core.wire import MAX_TOPIC
from eplb_async.core.words import MAX_MAIL
from eplb_async.engine import LoopEngine
from eplb_async.errors import CommunicatorClosed

__all__ = ["MAX_MAIL", "Mail"]

_log = logging.getLogger("eplb_async.mail")
Callback = Callable[[int, bytes], object]


@dataclass(frozen=True, slots=True, eq=False)
class _Reader:
    """One subscription."""

    callback: Callback
    context: contextvars.Context


class Mail:
    """Messages of bytes between the members of the view, each about a topic; authenticated as a group.

    What comes, comes whole and once, and what one sender sends comes in its order. Nothing promises that it comes:
    not what is under way when the view changes, nor what is sent to a rank that has not subscribed, nor around the
    replacement of an agent. So ask again, or set a deadline. Every member can send in another member's name.

    All methods are thread-safe.
    """

    def __init__(self, engine: LoopEngine, driver: Driver) -> None:
        self._engine = engine
        self._driver = driver
        self._lock = threading.Lock()
        self._readers: dict[int, tuple[_Reader, ...]] = {}
        self._view_readers: tuple[Callable[[], object], ...] = ()
        self._closed = False

    def send(self, rank: int, topic: int, payload: bytes) -> None:
        """Have a message sent to a member, soon; returns at once. To this rank itself: its own subscribers get it.

        Mail to a rank that is no member of the view is dropped, and counted in ``health().dropped``. A large message
        takes turns with all else, and not more than 2 MiB are on their way to a rank that has not been heard since.

        Args:
            rank: To whom.
            topic: About what, 0 to 65535.
            payload: At most `MAX_MAIL` bytes.

        Raises:
            ValueError: There is no such rank or topic, or it is too much.
            CommunicatorBusy: 16 MiB wait for that rank already: it is silent, or the engine thread is behind.
            CommunicatorClosed: The communicator is closed, or was fenced by the others.
        """
        me = self._driver.identity
        if type(rank) is not int or not 0 <= rank < me.ep_size:
            raise ValueError(f"mail to rank {rank!r}: there are ranks 0 to {me.ep_size - 1}")
        _check_topic(topic)
        if not isinstance(payload, bytes) or len(payload) > MAX_MAIL:
            what = f"{len(payload)} bytes" if isinstance(payload, bytes) else type(payload).__name__
            raise ValueError(f"mail to rank {rank}: {what}, at most {MAX_MAIL} bytes can be sent")
        self._engine.check_process()
        if self._closed or self._driver.over:
            raise CommunicatorClosed(f"mail to rank {rank}: the communicator is {self._driver.over or 'closed'}")
        self._driver.post.outbox.put(rank, topic, payload)

    def subscribe(self, topic: int, callback: Callback) -> Callable[[], None]:
        """Have ``callback(sender, payload)`` called for each message about a topic.

        It runs on the engine thread, in a copy of this context: it must be quick, and hop to its own loop or thread.
        What it raises is logged and counted, and changes nothing. Several of one topic are called in turn.

        Args:
            topic: 0 to 65535.
            callback: Called with the rank that sent it, and its bytes.

        Returns:
            What ends the subscription; callable from any thread, also in the callback, and more than once.

        Raises:
            ValueError: There is no such topic.
        """
        _check_topic(topic)
        reader = _Reader(callback, contextvars.copy_context())
        with self._lock:
            self._readers[topic] = (*self._readers.get(topic, ()), reader)

        def remove() -> None:
            with self._lock:
                left = tuple(other for other in self._readers.get(topic, ()) if other is not reader)
                self._readers[topic] = left
                if not left:
                    del self._readers[topic]

        return remove

    def on_view(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Have ``callback()`` called when the view has changed, or this rank is out of the group for good.

        It runs on the engine thread, as a subscriber does. Mail goes to the new view's members from then on; those that
        have not heard of that view yet drop it.

        Returns:
            What ends that; callable from any thread, and more than once.
        """
        with self._lock:
            self._view_readers = (*self._view_readers, callback)

        def remove() -> None:
            with self._lock:
                self._view_readers = tuple(other for other in self._view_readers if other is not callback)

        return remove

    def view_changed(self) -> None:
        """Tell whoever asked for it, on the engine thread."""
        for callback in self._view_readers:
            try:
                callback()
            except BaseException:  # as in deliver()
                _log.exception("a callback for another view failed: see its traceback")

    def close(self) -> None:
        """Take no more mail; the communicator says so when it closes."""
        self._closed = True

    def wants(self, topic: int) -> bool:
        """Whether anybody has subscribed to a topic."""
        return topic in self._readers

    def deliver(self, sender: int, topic: int, payload: bytes) -> int:
        """Hand a message to the subscribers, on the engine thread; returns how many of them failed."""
        failed = 0
        for reader in self._readers.get(topic, ()):
            try:
                reader.context.run(reader.callback, sender, payload)
            except BaseException:  # a CancelledError would end the poller, a SystemExit the engine
                failed += 1
                _log.exception(
                    "a subscriber to topic %d failed for %d bytes of rank %d: see its traceback",
                    topic,
                    len(payload),
                    sender,
                )
        return failed


def _check_topic(topic: object) -> None:
    if type(topic) is not int or not 0 <= topic <= MAX_TOPIC:
        raise ValueError(f"mail topic {topic!r} is not a whole number from 0 to {MAX_TOPIC}")
