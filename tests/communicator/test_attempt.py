"""The report of one attempt."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from eplb_async.communicator.attempt import Attempt
from eplb_async.communicator.epoch import Traffic
from eplb_async.core.events import Ended
from eplb_async.testing import run


def test_phases_are_told_apart_even_when_begin_comes_in_the_tick_of_join() -> None:
    """uvloop's clock stands still for a millisecond: BEGIN at the time of JOIN is still a BEGIN."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        now = [100.0]
        clock: Any = SimpleNamespace(time=lambda: now[0], create_future=loop.create_future)
        endpoint: Any = SimpleNamespace(native=SimpleNamespace(polls=0, longest_call=(0.0, "")))

        async def finish(committed: int) -> None:
            now[0] += 2.0

        epoch: Any = SimpleNamespace(start=lambda: None, finish=finish, traffic=Traffic(), held="")
        plan: Any = None
        attempt = Attempt(
            plan, deadline=200.0, endpoint=endpoint, loop=clock, planned_seconds=0.5, make_run=lambda _: epoch
        )
        attempt.begin(1, frozenset({0}))
        now[0] += 3.0
        await attempt.finish(Ended(epoch=1, committed=1, complete=True, origin=-1, reason=""))
        seconds = (await attempt.result).seconds
        assert seconds == {"plan": 0.5, "join": 0.0, "move": 3.0, "apply": 2.0, "total": 5.5}

    run(main())
