"""The steps of this rank's engine: counted, and held up where a layer must change before the next one (rule 11).

Ranks run steps in lock-step, so step *n* is the same step on all. A vote for a layer carries its *hold*, the first
step that this rank does not begin undecided; COMMIT says *at*, the largest hold; and each rank applies the layer after
its step ``at - 1`` and before its step ``at``. So no step runs with different placements, and none waits for a
collective of ours.

Two threads meet here: the one that steps, and the engine loop. The step is fast because it looks at one number, the
*gate*, the first step that may not begin as things are. Whoever lowers it shuts it first and looks afterwards where
the engine stands; who begins a step says so first and looks at the gate afterwards. So one of them sees the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Generator, Iterable

from eplb_async.engine import LoopEngine
from eplb_async.errors import ActivationTimeout, CommunicatorClosed

_OPEN = 1 << 62
_SHUT = -1
MAX_STEP = (1 << 32) - 2_000
"""The highest number of a step: holds are unsigned 32-bit numbers."""


class Steps:
    """Where the engine stands, and what it must wait for; ``with`` or ``async with`` it for one step.

    Args:
        engine: The engine loop.
        margin: Whole steps that begin after a vote before the engine waits for the decision; the same on all ranks.
        timeout: Seconds that a step waits before the migration is given up, and then for the end of that.
        mark: Called in the thread that steps when it leaves one: marks the end of what it has queued on its stream.

    Attributes:
        number: The last step begun; 0 before the first.
        term: Term of the view. Tag with it what a step exchanges between ranks, so that a rank that was fenced
            cannot run a step with the others.
    """

    def __init__(
        self, engine: LoopEngine, *, margin: int, timeout: float, mark: Callable[[], object] | None = None
    ) -> None:
        self.number = 0
        self.term = 0
        self.give_up: Callable[[str], object] = lambda _: None
        self.awaited: Callable[[], Iterable[int]] = lambda: ()
        self._engine = engine
        self._margin = margin
        self._timeout = timeout
        self._mark = mark
        self._lock = threading.Lock()
        self._next = 1
        self._stride = 1  # twice the step that runs or wants to begin; one more after it
        self._idle_after = 0
        self._gate = _OPEN
        self._hold = _OPEN
        self._undecided = -1  # the layer voted for
        self._due: dict[int, int] = {}  # committed, not applied: its step by layer
        self._over = ""
        self._abandoned = False
        self._wake: Callable[[], object] | None = None  # wakes who waits to begin a step
        self._news = asyncio.Event()

    # ------------------------------------------------------------------------------- the thread that steps
    def next(self, number: int | None = None) -> Steps:
        """The next step; see ``AsyncEplbCommunicator.step``."""
        stride = self._stride
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
        self._stride = number << 1
        if number >= self._gate:
            self._wait(number)
        self.number = number
        return self

    def __exit__(self, *_: object) -> None:
        if self._mark is not None:
            self._mark()
        self._stride += 1
        if self._gate != _OPEN:
            self._poke()

    async def __aenter__(self) -> Steps:
        number = self._next
        self._stride = number << 1
        if number >= self._gate:
            loop, woken = asyncio.get_running_loop(), asyncio.Event()
            with contextlib.closing(self._waits(number, lambda: _call(loop, woken.set), loop.time)) as waits:
                for seconds in waits:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(seconds):
                            await woken.wait()
                    woken.clear()
        self.number = number
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.__exit__(*exc)

    def idle(self) -> None:
        """The engine stops stepping; see ``AsyncEplbCommunicator.idle``."""
        with self._lock:
            if not self._stride & 1:
                raise RuntimeError(f"step {self._stride >> 1} has not ended: the engine is not idle inside of it")
            self._idle_after = self.number
            if self._hold != _OPEN:
                self._hold = min(self._hold, self.number + 1)
            self._due = {layer: self._brought_forward(at) for layer, at in self._due.items()}
            self._set_gate()
        self._poke()

    def _wait(self, number: int) -> None:
        if threading.get_ident() == self._engine.thread_id:
            self._step_back()
            raise RuntimeError("this thread runs the engine loop, and would wait for itself; use `async with`")
        woken = threading.Event()
        with contextlib.closing(self._waits(number, woken.set, time.monotonic)) as waits:
            for seconds in waits:
                woken.wait(seconds)
                woken.clear()

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
            begins = number < self._gate
            news = not begins and self._wake is None
            self._wake = None if begins else wake
        if news:
            self._poke()
        return begins

    def _step_back(self) -> None:
        """The step that wanted to begin has not."""
        with self._lock:
            self._wake = None
            self._stride = (self.number << 1) + 1
        self._poke()

    def _timed_out(self, number: int) -> ActivationTimeout:
        with self._lock:
            layer, at = min(self._due.items(), default=(self._undecided, number))
            due = bool(self._due)
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
    def vote(self, layer: int) -> int:
        """This rank votes for a layer: returns its hold."""
        with self._lock:
            self._gate = _SHUT
            number = self._stride >> 1
            idle = self._stride == (self._idle_after << 1) + 1
            hold = number + 1 if idle else number + 1 + self._margin
            self._hold, self._undecided = min(self._hold, hold), layer
            self._set_gate()
        return hold

    def decided(self) -> None:
        """No vote of this rank is outstanding any more."""
        if self._hold != _OPEN:
            with self._lock:
                self._hold = _OPEN
                self._set_gate()

    def commit(self, layer: int, at: int) -> None:
        """A layer is to be applied after step ``at - 1`` and before step ``at``."""
        with self._lock:
            self._due[layer] = self._brought_forward(at)
            self._set_gate()

    async def reached(self, layer: int) -> bool:
        """Wait until a committed layer may be applied; the next step then waits for :meth:`applied`.

        Returns:
            False if it is not to be applied any more.
        """
        while not self._abandoned:
            self._news.clear()
            with self._lock:
                if self._is_time(self._due[layer]):
                    return True
            await self._news.wait()
        return False

    def applied(self, layer: int) -> None:
        """The layer is applied: its step may begin."""
        with self._lock:
            del self._due[layer]
            self._set_gate()

    def end(self, why: str) -> None:
        """This rank is out of the group: no step begins any more, and what is due is applied outside of one."""
        with self._lock:
            self._over = self._over or why
            self._set_gate()
        self._news.set()

    def abandon(self) -> dict[int, int]:
        """Wait for no step any more; returns the layers that stay as they are, with their steps."""
        self._abandoned = True
        self._news.set()
        return self.due

    @property
    def due(self) -> dict[int, int]:
        """The step of each layer that is committed and not applied. Safe from any thread."""
        with self._lock:
            return dict(self._due)

    @property
    def stride(self) -> int:
        """Twice the step that runs, and one more between that and the next. Safe from any thread."""
        with self._lock:
            return self._stride if self._wake is None else (self.number << 1) + 1

    def _overdue(self, number: int) -> None:
        if self._hold <= number:
            self.give_up(
                f"layer {self._undecided} was not decided before step {number}, which has waited {self._timeout:g} s "
                f"for it, for ranks {sorted(self.awaited())}"
            )

    def _is_time(self, at: int) -> bool:
        number, outside = self._stride >> 1, self._stride & 1
        if outside:
            return bool(self._over) or number + 1 >= at
        return self._wake is not None and number >= at

    def _brought_forward(self, at: int) -> int:
        """The engine is idle between two steps, the same two on all ranks: what was to come soon after comes there.

        Votes from before have holds of at most the next step and the margin, votes from after have larger ones. So
        all ranks bring the same layers forward, whenever they hear of them.
        """
        first = self._idle_after + 1
        return first if first < at <= first + self._margin else at

    def _set_gate(self) -> None:
        self._gate = _SHUT if self._over else min(self._hold, *self._due.values(), _OPEN)
        if self._wake is not None:
            self._wake()


def _call(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    with contextlib.suppress(RuntimeError):  # it is closed: nobody waits
        loop.call_soon_threadsafe(callback)
