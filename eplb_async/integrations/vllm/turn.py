"""One thread at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from eplb_async.errors import CommunicatorBusy

__all__ = ["Turn"]


class Turn:
    """Held by the thread that uses the communicator; ``with`` it. Taken for every expert, so it is kept cheap.

    Args:
        check: Refuses a use that is wrong in any thread.
    """

    __slots__ = ("_check", "_lock")

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._check()
        if not self._lock.acquire(blocking=False):
            raise CommunicatorBusy("another thread uses this communicator at this moment; one at a time")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._lock.release()
