"""A call from a plain thread into an event loop, which that thread waits for."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from eplb_async.errors import CommunicatorClosed

__all__ = ["run_on"]

T = TypeVar("T")
_LOOK_SECONDS = 0.5
_GRACE_SECONDS = 5.0


def run_on(
    loop: asyncio.AbstractEventLoop, call: Callable[[], Coroutine[Any, Any, T]], *, what: str, limit: float | None
) -> T:
    """Run ``call()`` on a loop of another thread, and wait for its result.

    Interrupted while it waits, as by Ctrl-C: the call is cancelled.

    Args:
        loop: The loop.
        call: Makes the coroutine.
        what: Its name, for errors.
        limit: Seconds after which the coroutine is done by its own deadline; if it is not a while after that, the loop
            does not run. ``None`` if it has none: this waits as long as the loop lives.

    Raises:
        RuntimeError: This thread runs the loop, and would wait for itself.
        CommunicatorClosed: The loop is closed, or ended before the call did.
        TimeoutError: The loop does not run.
        BaseException: What the call raised, as it raised it.
    """
    if _running() is loop:
        raise RuntimeError(f"{what} would wait for its own event loop in that loop's thread; await it there instead")
    coroutine = call()
    try:
        future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    except RuntimeError:
        coroutine.close()
        raise _closed(what) from None
    try:
        _wait(future, loop, what, limit)
    except BaseException:
        if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED and loop.is_closed():
            coroutine.close()
        elif not loop.is_closed():
            future.cancel()
        raise
    try:
        return future.result()
    except concurrent.futures.CancelledError:
        raise CommunicatorClosed(f"{what} was cancelled on its event loop, which ends") from None


def _wait(
    future: concurrent.futures.Future[Any], loop: asyncio.AbstractEventLoop, what: str, limit: float | None
) -> None:
    deadline = None if limit is None else time.monotonic() + limit + _GRACE_SECONDS
    while not concurrent.futures.wait([future], _LOOK_SECONDS).done:
        if loop.is_closed():
            raise _closed(what)
        if deadline is not None and time.monotonic() >= deadline:
            raise TimeoutError(
                f"{what} had no answer within {limit:g} s and {_GRACE_SECONDS:g} more: the event loop that it runs on "
                "is blocked, or not running; see what its thread does. The call is cancelled when it goes on"
            )


def _running() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _closed(what: str) -> CommunicatorClosed:
    return CommunicatorClosed(f"cannot {what}: the event loop that it runs on is closed")
