"""Every asyncio test runs on asyncio's loop and on uvloop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
import uvloop
from blockbuster import blockbuster_ctx
from hypothesis import HealthCheck, settings

# No test fails because the machine is busy.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture
def no_blocking() -> Iterator[None]:
    """What this library calls on a loop may not block it (I-1); native calls are checked by thread and by lag."""
    with blockbuster_ctx("eplb_async") as blocking:
        # Starting a thread, and joining one that has said that it ends, take microseconds.
        for function in blocking.functions.values():
            function.can_block_in("eplb_async/engine.py", {"__init__", "astop"})
            function.can_block_in("eplb_async/threads.py", {"submit"})
        yield
