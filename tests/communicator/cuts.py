"""The ways in which a caller ends an await early, each checked for how its task ends."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine
from typing import Any

Call = Callable[[float | None], Coroutine[Any, Any, Any]]
Ends = Callable[[], "asyncio.Future[Any] | None"]
TURN = 10e-6  # of the virtual loop


class _Sibling(Exception):
    """Another task of the group fails."""


class Cutter:
    """Cuts calls off at random moments in random ways.

    Attributes:
        cancels: Calls that were cancelled before they had ended.
        ways: How often each way cancelled one.
    """

    def __init__(self, rng: random.Random) -> None:
        self.cancels = 0
        self.ways: dict[str, int] = {}
        self.last_cut = 0.0
        self._random = rng

    async def cut(self, call: Call, seconds: Callable[[], float], ends: Ends | None = None) -> object:
        """Run ``call(timeout)`` and cut it off.

        Args:
            call: Makes the call; ``None`` stands for a timeout that does not matter.
            seconds: Draws a moment within the call.
            ends: The future that the call's end hangs on, once there is one.

        Returns:
            What it returned or raised.
        """
        ways = [self._turns, self._seconds, self._twice, self._deadline, self._both_deadlines, self._block, self._group]
        if ends is not None:
            ways += [self._completion, self._completion]
        way = self._random.choice(ways)
        before = self.cancels
        outcome = await (way(call, seconds, ends) if way == self._completion else way(call, seconds))
        if self.cancels > before:
            name = way.__name__.strip("_")
            self.ways[name] = self.ways.get(name, 0) + 1
        return outcome

    async def _turns(self, call: Call, seconds: Callable[[], float]) -> object:
        task = asyncio.ensure_future(call(None))
        for _ in range(self._some_turns()):
            await asyncio.sleep(0)
        return await self._cancel(task)

    async def _seconds(self, call: Call, seconds: Callable[[], float]) -> object:
        task = asyncio.ensure_future(call(None))
        await asyncio.sleep(seconds())
        return await self._cancel(task)

    async def _twice(self, call: Call, seconds: Callable[[], float]) -> object:
        """Cancelled again while it ends, or before it has run at all."""
        task = asyncio.ensure_future(call(None))
        if self._random.random() < 0.7:
            await asyncio.sleep(seconds())
        if not task.done():
            task.cancel()
            if self._random.random() < 0.5:
                await asyncio.sleep(0)
        return await self._cancel(task, was_cancelled=not task.done() or task.cancelled())

    async def _completion(self, call: Call, seconds: Callable[[], float], ends: Ends) -> object:
        """Cancelled in the turn in which the result comes."""
        task = asyncio.ensure_future(call(None))
        while (end := ends()) is None and not task.done():
            await asyncio.sleep(0)
        if end is not None and not end.done():
            asked: list[bool] = []
            end.add_done_callback(lambda _: asked.append(task.cancel()))
            await asyncio.wait([task])
            if asked and asked[0]:
                assert task.cancelled(), "I-10: cancelled in the turn of its result, and did not end cancelled"
                self._cut()
        return await _outcome(task)

    async def _deadline(self, call: Call, seconds: Callable[[], float]) -> object:
        """Given no time, or too little; nobody cancels."""
        self.last_cut = 0.0
        return await _outcome(asyncio.ensure_future(call(self._random.choice((0.0, seconds(), seconds())))))

    async def _both_deadlines(self, call: Call, seconds: Callable[[], float]) -> object:
        """Its own deadline and a cancel within a few turns of each other."""
        limit = self._random.choice((0.0, seconds(), seconds()))
        task = asyncio.ensure_future(call(limit))
        await asyncio.sleep(max(0.0, limit + self._random.randint(-3, 3) * TURN))
        return await self._cancel(task)

    async def _block(self, call: Call, seconds: Callable[[], float]) -> object:
        """``asyncio.timeout`` around it, perhaps with a cancel from outside at the same moment."""
        limit = self._random.choice((0.0, seconds(), seconds()))

        async def within() -> Any:
            async with asyncio.timeout(limit) as block:
                try:
                    return await call(None)
                finally:
                    expired.append(block)

        expired: list[asyncio.Timeout] = []
        task = asyncio.ensure_future(within())
        if self._random.random() < 0.4:
            await asyncio.sleep(max(0.0, limit + self._random.randint(-1, 1) * TURN))
            return await self._cancel(task, may_time_out=True)
        outcome = await _outcome(task)
        if not expired or expired[0].expired():
            assert type(outcome) is TimeoutError, repr(outcome)
            self._cut()
        return outcome

    async def _group(self, call: Call, seconds: Callable[[], float]) -> object:
        """A sibling in its task group fails."""
        tasks: list[asyncio.Task[Any]] = []
        turns, wait = self._some_turns(), seconds() if self._random.random() < 0.5 else 0.0

        async def fails() -> None:
            for _ in range(turns):
                await asyncio.sleep(0)
            await asyncio.sleep(wait)
            raise _Sibling

        with contextlib.suppress(BaseExceptionGroup):
            async with asyncio.TaskGroup() as group:
                tasks.append(group.create_task(call(None)))
                group.create_task(fails())
        if tasks[0].cancelled():
            self._cut()
        return await _outcome(tasks[0])

    async def _cancel(
        self, task: asyncio.Task[Any], *, was_cancelled: bool = False, may_time_out: bool = False
    ) -> object:
        if not task.done():
            task.cancel()
            was_cancelled = True
            for _ in range(2):
                await asyncio.sleep(0)
            assert task.done(), "I-10: a cancelled call did not end at once"
        if was_cancelled:
            timed_out = may_time_out and isinstance(task.exception() if not task.cancelled() else None, TimeoutError)
            assert task.cancelled() or timed_out, f"I-10: a cancelled call did not end cancelled: {task}"
            self._cut()
        return await _outcome(task)

    def _cut(self) -> None:
        self.cancels += 1
        self.last_cut = asyncio.get_running_loop().time()

    def _some_turns(self) -> int:
        return self._random.choice([self._random.randint(0, most) for most in (6, 15, 400)])


async def _outcome(task: asyncio.Task[Any]) -> object:
    await asyncio.wait([task])
    if task.cancelled():
        return asyncio.CancelledError()
    return task.exception() or task.result()
