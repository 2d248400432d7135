"""A number of the engine loop's that the caller sets, and may put back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Generic, TypeVar

from eplb_async.engine import LoopEngine
from eplb_async.errors import CommunicatorClosed

T = TypeVar("T")


class Dial(Generic[T]):
    """What it was set to last is known here, where it is set; the engine loop follows.

    Args:
        engine: The engine loop.
        turn: Sets it, on the engine loop.
        value: What it is at first.
    """

    def __init__(self, engine: LoopEngine, turn: Callable[[T], object], value: T) -> None:
        self._engine = engine
        self._turn = turn
        self._value = value
        self._times = 0

    def set(self, value: T) -> Callable[[], None]:
        """Set it; returns what puts back the value before, if this was the last time that it was set.

        Raises:
            CommunicatorClosed: The engine has stopped, or belongs to a parent process.
        """
        before = self._value
        self._engine.post(lambda: self._turn(value))
        self._value, self._times = value, self._times + 1
        mine = self._times

        def put_back() -> None:
            if self._times == mine:
                with contextlib.suppress(CommunicatorClosed):
                    self.set(before)

        return put_back
