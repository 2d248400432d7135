"""Whose call it is: which operations of one communicator may run at once, and from where they may be called."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from eplb_async.communicator.owner import Owner
from eplb_async.engine import LoopEngine
from eplb_async.errors import CommunicatorBusy, CommunicatorClosed


class Calls:
    """One communicator's calls, all made from the loop that opened it.

    Args:
        engine: Refuses forks.
        owner: Says whether the communicator is suspended.

    Attributes:
        busy: The operation that runs, unless it is one of the owner's; empty if none does.
        closed: Whether the communicator is closed, or being closed.
    """

    def __init__(self, engine: LoopEngine, owner: Owner) -> None:
        self.busy = ""
        self.closed = False
        self._owned = ""
        self._engine = engine
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Around an operation that nothing else may run beside.

        Raises:
            CommunicatorBusy: Something runs, or it is suspended.
            CommunicatorClosed: It is closed.
        """
        self.check_usable()
        if self.busy or self._owned:
            raise CommunicatorBusy(f"cannot {what}: {self.busy or self._owned} is running; await its end first")
        if self._owner.suspended:
            raise CommunicatorBusy(f"cannot {what}: the communicator is suspended; await resume() first")
        self.busy = what
        try:
            yield
        finally:
            self.busy = ""

    @contextlib.contextmanager
    def owning(self, what: str) -> Iterator[None]:
        """As :meth:`doing`, for what goes before a migration that runs: it is ended."""
        self.check_usable()
        if self._owned or self.busy not in ("", "migrate"):
            raise CommunicatorBusy(f"cannot {what}: {self._owned or self.busy} is running; await its end first")
        self._owned = what
        try:
            yield
        finally:
            self._owned = ""

    def check_usable(self) -> None:
        """Refuse a call once it is closed, or from elsewhere.

        Raises:
            CommunicatorClosed: It is closed.
            RuntimeError: This is not the loop that opened it.
        """
        self.check_loop()
        if self.closed:
            raise CommunicatorClosed("the communicator is closed")

    def check_loop(self) -> None:
        """Refuse a call from elsewhere.

        Raises:
            CommunicatorClosed: This is a fork of the process that opened it.
            RuntimeError: This is not the loop that opened it.
        """
        self._engine.check_process()
        if threading.get_ident() != self._thread or asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("the communicator is bound to the event loop that opened it; use it from there")
