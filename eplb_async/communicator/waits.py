"""One way of waiting that is written once, for a thread that blocks and for a task that awaits."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Generator

Waits = Callable[[Callable[[], object], Callable[[], float]], Generator[float, None, None]]
"""Given what wakes it and a clock, yields how many seconds to wait at most, looks again, and ends or raises."""


def block(waits: Waits) -> None:
    """Wait in a plain thread."""
    woken = threading.Event()
    with contextlib.closing(waits(woken.set, time.monotonic)) as turns:
        for seconds in turns:
            woken.wait(seconds)
            woken.clear()


async def wait(waits: Waits) -> None:
    """Wait in a task, woken from any thread; there is no await after the last look.

    Cancelled: the generator is closed where it waits.
    """
    loop, woken = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(woken.set)

    with contextlib.closing(waits(wake, loop.time)) as turns:
        for seconds in turns:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await woken.wait()
            woken.clear()
