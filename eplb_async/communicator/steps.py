"""The steps of this rank's engine as two threads meet at them: the one that steps, and the engine loop.

What a step waits for is in ``core.steps``. The step is fast because it looks at one number, the gate. Whoever lowers
the gate shuts it first and looks afterwards where the engine stands; who begins a step says so first and looks at the
gate afterwards. So one of them sees the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Generator, Iterable

from eplb_async.communicator.waits import block, wait
from eplb_async.core.steps import MAX_STEP, NEVER, StepCounter
from eplb_async.engine import LoopEngine
from eplb_async.errors import ActivationTimeout, CommunicatorClosed

_SHUT = -1


class Steps(StepCounter):
    """Where the engine stands, and what it must wait for; ``with`` or ``async with`` it for one step.

    Args:
        engine: The engine loop.
        margin: Whole steps that begin after a vote before the engine waits for the decision; the same on all ranks.
        timeout: Seconds that a step waits before the migration is given up, and then for the end of that.
        mark: Called in the thread that steps when it leaves one: marks the end of what it has queued on its stream.

    Attributes:
        number: The last step begun; inside ``with`` the one that runs.
        term: Term of the view. Tag with it what a step exchanges between ranks, so that a rank that was fenced
            cannot run a step with the others.
    """

    def __init__(
        self, engine: LoopEngine, *, margin: int, timeout: float, mark: Callable[[], object] | None = None
    ) -> None:
        super().__init__(margin)
        self.term = 0
        self.give_up: Callable[[str], object] = lambda _: None
        self.awaited: Callable[[], Iterable[int]] = lambda: ()
        self._engine = engine
        self._timeout = timeout
        self._mark = mark
        self._lock = threading.Lock()
        self._next = 1
        self._over = ""
        self._abandoned = False
        self._wake: Callable[[], object] | None = None  # wakes who waits to begin a step
        self._news = asyncio.Event()

    # ------------------------------------------------------------------------------- the thread that steps
    def next(self, number: int | None = None) -> Steps:
        """The next step; see ``AsyncEplbCommunicator.step``."""
        stride = self.stride
        if not stride & 1:
            raise RuntimeError(f"step {stride >> 1} has not ended; steps run one after the other")
        if number is None:
            self._next = (stride >> 1) + 1
        elif type(number) is int and stride >> 1 < number <= MAX_STEP:
            self._next = number
        else:
            raise ValueError(f"step {number!r} does not come after step {stride >> 1}, or is above {MAX_STEP}")
        return self

    def __enter__(self) -> Steps:
        number = self._next
        self.stride = number << 1
        if number >= self.gate:
            self._wait(number)
        self.number = number
        return self

    def __exit__(self, *_: object) -> None:
        if self._mark is not None:
            self._mark()
        self.stride += 1
        if self.gate != NEVER:
            self._poke()

    async def __aenter__(self) -> Steps:
        number = self._next
        self.stride = number << 1
        if number >= self.gate:
            await wait(lambda wake, now: self._waits(number, wake, now))
        self.number = number
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.__exit__(*exc)

    def idle(self, number: int | None = None) -> None:
        """The engine stops stepping; see ``AsyncEplbCommunicator.idle``."""
        with self._lock:
            if not self.stride & 1:
                raise RuntimeError(f"step {self.stride >> 1} has not ended: the engine is not idle inside of it")
            if number is not None and not (type(number) is int and self.number <= number <= MAX_STEP):
                raise ValueError(f"step {number!r} is before step {self.number}, or above {MAX_STEP}")
            super().idle(number)
        self._poke()

    def _wait(self, number: int) -> None:
        if threading.get_ident() == self._engine.thread_id:
            self._step_back()
            raise RuntimeError("this thread runs the engine loop, and would wait for itself; use `async with`")
        block(lambda wake, now: self._waits(number, wake, now))

    def _waits(self, number: int, wake: Callable[[], object], now: Callable[[], float]) -> Generator[float, None, None]:
        """Yields how long to wait, until the step may begin.

        Raises:
            ActivationTimeout: It may not in time; it has not begun.
            CommunicatorClosed: This rank is out of the group; it has not begun.
        """
        try:
            for last in (False, True):
                deadline = now() + self._timeout
                while not self._may_begin(number, wake):
                    left = deadline - now()
                    if left <= 0:
                        break
                    yield left
                else:
                    return
                if last:
                    raise self._timed_out(number)
                self._post(lambda: self._overdue(number))
        except BaseException:
            self._step_back()
            raise

    def _may_begin(self, number: int, wake: Callable[[], object]) -> bool:
        with self._lock:
            if self._over:
                raise CommunicatorClosed(f"the communicator is {self._over}")
            begins = number < self.gate
            news = not begins and self._wake is None
            self._wake = None if begins else wake
        if news:
            self._poke()
        return begins

    def _step_back(self) -> None:
        """The step that wanted to begin has not."""
        with self._lock:
            self._wake = None
            self.stride = (self.number << 1) + 1
        self._poke()

    def _timed_out(self, number: int) -> ActivationTimeout:
        with self._lock:
            layer, at = min(self.due.items(), default=(self.undecided, number))
            due = bool(self.due)
        ranks = () if due else tuple(sorted(self.awaited()))
        what = (
            f"layer {layer} is to be applied before step {at}, and was not"
            if due
            else f"this rank voted for layer {layer} and does not know the decision; waiting for ranks {list(ranks)}"
        )
        return ActivationTimeout(
            f"step {number} cannot begin: {what} within {2 * self._timeout:g} s; see health(), then begin it again",
            layer=layer,
            step=number,
            ranks=ranks,
        )

    def _poke(self) -> None:
        self._post(self._news.set)

    def _post(self, callback: Callable[[], object]) -> None:
        with contextlib.suppress(CommunicatorClosed):
            self._engine.post(callback)

    # ------------------------------------------------------------------------------------- the engine loop
    def voted(self, layer: int) -> int:
        """This rank votes for a layer: returns its hold."""
        with self._lock:
            self.gate = _SHUT
            return super().voted(layer)

    def decide(self) -> None:
        """No vote of this rank is outstanding any more."""
        if self.hold != NEVER:
            with self._lock:
                super().decide()

    def commit(self, layer: int, at: int) -> None:
        """A layer is to be applied before step ``at``, and after those below it."""
        with self._lock:
            super().commit(layer, at)

    async def reached(self, layer: int) -> bool:
        """Wait until a committed layer may be applied; the next step then waits for :meth:`applied`.

        Returns:
            False if it is not to be applied any more.
        """
        while not self._abandoned:
            self._news.clear()
            with self._lock:
                if self.is_time(layer, held=self._wake is not None):
                    return True
            await self._news.wait()
        return False

    def applied(self, layer: int) -> None:
        """The layer is applied: its step may begin."""
        with self._lock:
            super().applied(layer)

    def end(self, why: str) -> None:
        """This rank is out of the group: no step begins any more, and what is due is applied outside of one."""
        with self._lock:
            self._over = self._over or why
            self.set_gate()
        self._news.set()

    def abandon(self) -> dict[int, int]:
        """Wait for no step any more; returns the layers that stay as they are, with their steps."""
        self._abandoned = True
        self._news.set()
        return self.waiting

    @property
    def waiting(self) -> dict[int, int]:
        """The step of each layer that is committed and not applied. Safe from any thread."""
        with self._lock:
            return dict(self.due)

    @property
    def come(self) -> int:
        """How far the engine has come: its stride, without a step that waits to begin. Safe from any thread."""
        with self._lock:
            return self.stride if self._wake is None else (self.number << 1) + 1

    def _overdue(self, number: int) -> None:
        if self.hold <= number:
            self.give_up(
                f"layer {self.undecided} was not decided before step {number}, which has waited {self._timeout:g} s "
                f"for it, for ranks {sorted(self.awaited())}"
            )

    def is_time(self, layer: int, *, held: bool = False) -> bool:
        """Whether a layer that is due may be applied now; of a rank that is out, outside of any step."""
        return bool(self._over and self.stride & 1) or super().is_time(layer, held=held)

    def set_gate(self) -> None:
        """Something has changed that the gate depends on; under the lock."""
        super().set_gate()
        if self._over:
            self.gate = _SHUT
        if self._wake is not None:
            self._wake()
