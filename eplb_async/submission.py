"""One call from a caller's loop to the engine loop and back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

from eplb_async.errors import CommunicatorClosed


class Submission:
    """A task on the engine loop, a future on the caller's.

    Args:
        call: Makes the coroutine.
        caller: The caller's loop, which is running; may be the engine loop.

    Attributes:
        future: For the caller to await.
    """

    def __init__(self, call: Callable[[], Coroutine[Any, Any, Any]], caller: asyncio.AbstractEventLoop) -> None:
        self.future: asyncio.Future[Any] = caller.create_future()
        self._call = call
        self._caller = caller
        self._task: asyncio.Task[Any] | None = None
        self._cancelled = False

    def begin(self, loop: asyncio.AbstractEventLoop) -> asyncio.Task[Any] | None:
        """Start the call on the engine loop, from there; returns ``None`` if it was cancelled before."""
        if not self._cancelled:
            self._task = loop.create_task(self._call())
        return self._task

    def finish(self, task: asyncio.Task[Any]) -> None:
        """Tell the caller how the call ended; a callback of the task."""
        error = None if task.cancelled() else task.exception()
        if self._caller is task.get_loop():
            self._deliver(task, error)
        else:
            self._tell(self._deliver, task, error)

    def cancel(self, why: object = None) -> None:
        """Cancel the call, on the engine loop; ``why`` as the message of a task's cancel."""
        self._cancelled = True
        if self._task is not None:
            self._task.cancel(why)

    def refuse(self) -> None:
        """Tell the caller that the engine has stopped; callable from the engine's thread."""
        self._tell(self._refused)

    def _refused(self) -> None:
        if not self.future.done():
            self.future.set_exception(CommunicatorClosed("the engine loop has stopped"))

    def _tell(self, callback: Callable[..., None], *args: Any) -> None:
        # The caller's loop may be closed by now: nobody is left to tell, and the task's outcome is retrieved.
        with contextlib.suppress(RuntimeError):
            self._caller.call_soon_threadsafe(callback, *args)

    def _deliver(self, task: asyncio.Task[Any], error: BaseException | None) -> None:
        if self.future.done():
            return
        if task.cancelled():
            self.future.set_exception(CommunicatorClosed("closed while the call was running"))
        elif error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(task.result())
