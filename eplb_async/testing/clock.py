"""An event loop whose clock is virtual: waiting costs nothing, and a test that can never go on says so.

Whenever nothing is ready, time jumps to the next timer. Where there is no timer either, the loop raises
:class:`Deadlock`, which names the tasks that wait and where. Every turn of the loop takes a little virtual
time, so that code which laps without a pause gets to its deadlines too.

Nothing outside the loop is waited for: no threads, no sockets.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from eplb_async.engine import Inline

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Nothing is ready and no timer is set: the tasks that are left wait for ever."""


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """An asyncio loop on virtual time.

    Args:
        start: Virtual seconds at the start.
        turn: Virtual seconds that each turn of the loop takes.
    """

    def __init__(self, *, start: float = 0.0, turn: float = 10e-6) -> None:
        self._now = start
        self._turn = turn
        super().__init__(_JumpingSelector(self._jump))

    def time(self) -> float:
        """Virtual seconds."""
        return self._now

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Run work in place; a thread's progress would be invisible to the virtual clock, so it is refused."""
        if not isinstance(executor, Inline):
            raise RuntimeError("no threads under the virtual clock; give the work to the loop itself")
        return super().run_in_executor(executor, func, *args)

    def _jump(self, timeout: float | None) -> None:
        self._now += self._turn
        if timeout is None:
            raise Deadlock("nothing is ready and no timer is set" + _waiting(self))
        if timeout > 0:
            self._now += timeout


class _JumpingSelector(selectors.DefaultSelector):
    """A selector that never waits: it asks for a jump in time instead."""

    def __init__(self, jump: Callable[[float | None], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        self._jump(0.0 if ready else timeout)
        return ready


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a fresh :class:`VirtualClockLoop`, as ``asyncio.run`` does.

    Raises:
        Deadlock: What is left can never go on.
    """
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(main)


def _waiting(loop: asyncio.AbstractEventLoop) -> str:
    lines = []
    for task in sorted(asyncio.all_tasks(loop), key=lambda t: t.get_name()):
        stack = task.get_stack()
        where = f"{stack[-1].f_code.co_qualname} line {stack[-1].f_lineno}" if stack else "nowhere"
        lines.append(f"\n  {task.get_name()} waits in {where}")
    return "".join(lines)
