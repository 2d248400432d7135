"""A call from a plain thread into an event loop, which that thread waits for."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from eplb_async.errors import CommunicatorClosed

__all__ = ["run_on"]

T = TypeVar("T")
_LOOK_SECONDS = 0.5
_GRACE_SECONDS = 5.0


def run_on(loop: asyncio.AbstractEventLoop, call: Callable[[], Awaitable[T]], *, what: str, limit: float | None) -> T:
    """Run ``call()`` on a loop of another thread, and wait for its result.

    Interrupted while it waits, as by Ctrl-C: the call is cancelled.

    Args:
        loop: The loop.
        call: Makes what is awaited there; called there.
        what: Its name, for errors.
        limit: Seconds after which it is done by its own deadline; if it is not a while after that, the loop does not
            run. ``None`` if it has none: this waits as long as the loop lives.

    Raises:
        RuntimeError: This thread runs the loop, and would wait for itself.
        CommunicatorClosed: The loop is closed, or ended before the call did.
        TimeoutError: The loop does not run; the call is cancelled when it does.
        BaseException: What the call raised, as it raised it.
    """
    if _running() is loop:
        raise RuntimeError(f"{what} would wait for its own event loop in that loop's own thread; await it there")
    running = _Call(loop, call)
    try:
        loop.call_soon_threadsafe(running.begin)
    except RuntimeError:
        raise _closed(what) from None
    deadline = None if limit is None else time.monotonic() + limit + _GRACE_SECONDS
    try:
        while not concurrent.futures.wait([running.future], _LOOK_SECONDS).done:
            if loop.is_closed():
                raise _closed(what)
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(
                    f"{what} had no answer within {limit:g} s and {_GRACE_SECONDS:g} more: the event loop that it runs "
                    "on is blocked, or not running; see what its thread does. The call is cancelled when it goes on"
                )
    except BaseException:
        running.cancel()
        raise
    try:
        return running.future.result()
    except concurrent.futures.CancelledError:
        raise CommunicatorClosed(f"{what} was cancelled on its event loop, which ends") from None


class _Call(Generic[T]):
    """One call on its way: a task on the loop, a future for the thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, call: Callable[[], Awaitable[T]]) -> None:
        self.future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._loop = loop
        self._call = call
        self._task: asyncio.Task[T] | None = None

    def begin(self) -> None:
        """Start it, on the loop, unless it was cancelled before."""
        if self.future.set_running_or_notify_cancel():
            self._task = self._loop.create_task(self._run())
            self._task.add_done_callback(self._end)

    def cancel(self) -> None:
        """Cancel it, from any thread."""
        if not self.future.cancel():
            with contextlib.suppress(RuntimeError):  # the loop is closed: nothing runs
                self._loop.call_soon_threadsafe(self._cancel)

    async def _run(self) -> T:
        return await self._call()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _end(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self.future.set_exception(concurrent.futures.CancelledError())
        elif (error := task.exception()) is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(task.result())


def _running() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _closed(what: str) -> CommunicatorClosed:
    return CommunicatorClosed(f"cannot {what}: the event loop that it runs on is closed")
