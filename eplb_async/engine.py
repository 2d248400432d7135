"""The engine loop: a second event loop, in the library's own thread, that owns everything native.

Rules upheld here (DESIGN §3, §5):

1. The user's loop submits one call and awaits one future; it is never blocked by what the call does (I-1).
2. Whatever runs on the engine loop runs one at a time, so what lives there needs no locks (I-2).
3. The thread is a daemon, stopped and joined by ``atexit``: a daemon alone aborts inside NIXL at interpreter
   exit, a non-daemon one hangs it (both measured).
4. A forked child's copy is dead: it refuses calls, and what the parent's UCX owns is never destroyed there.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import logging
import os
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

from eplb_async import descriptors
from eplb_async.errors import CommunicatorClosed
from eplb_async.submission import Submission
from eplb_async.threads import DaemonExecutor, Inline

__all__ = ["Engine", "Inline", "LoopEngine"]

T = TypeVar("T")
_log = logging.getLogger("eplb_async.engine")
_STOP_SECONDS = 10.0
_NO_THREAD = 0  # no thread's number


class LoopEngine:
    """Runs calls on one event loop, submitted from that or any other loop.

    Used as it is where engine and user share a loop (tests under a virtual clock); :class:`Engine` adds the
    thread.

    Args:
        loop: The loop that calls run on.
        worker: Executor for blocking work, such as copies of expert bytes; by default it is run inline.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, worker: Executor | None = None) -> None:
        self.loop = loop
        self.thread_id = threading.get_ident()
        self.pid = os.getpid()
        self.worker = worker or Inline()
        self.immortal: list[Any] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._submissions: set[Submission] = set()
        self._closers: list[Callable[[], Awaitable[object]]] = []
        self._over = False
        _live.add(self)

    async def run(self, call: Callable[[], Coroutine[Any, Any, T]], *, detach: bool = False) -> T:
        """Run ``call()`` on the engine loop and await its result from the running loop.

        If the awaiting task is cancelled it ends within one turn of its own loop; the call is cancelled on
        the engine loop, where it settles in the background.

        Args:
            call: Makes the coroutine.
            detach: Let the call go on to its end when its awaiter is cancelled.

        Raises:
            CommunicatorClosed: The engine has stopped, or belongs to a parent process.
        """
        submission = Submission(call, asyncio.get_running_loop())
        self._submissions.add(submission)
        try:
            self.post(lambda: self._begin(submission))
            result: T = await submission.future
            return result
        except asyncio.CancelledError as error:
            if detach:
                raise
            why = error.args[0] if error.args else None
            with contextlib.suppress(CommunicatorClosed):
                self.post(lambda: submission.cancel(why))
            raise
        finally:
            self._submissions.discard(submission)

    def post(self, callback: Callable[[], object]) -> None:
        """Run ``callback()`` on the engine loop soon; callable from any thread.

        Raises:
            CommunicatorClosed: The engine has stopped, or belongs to a parent process.
        """
        self.check_process()
        try:
            if threading.get_ident() == self.thread_id:
                self.loop.call_soon(callback)
            else:
                self.loop.call_soon_threadsafe(callback)
        except RuntimeError:
            raise CommunicatorClosed("the engine loop has stopped; open a new communicator or agent") from None

    def check_process(self) -> None:
        """Refuse to be used in a fork of the process that the engine lives in.

        Raises:
            CommunicatorClosed: This is a forked child.
        """
        if self.pid != os.getpid():
            raise CommunicatorClosed(
                f"opened in process {self.pid}, used in its fork {os.getpid()}; open a new one in the child"
            )

    def spawn(self, coroutine: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Start a task on the engine loop that the engine keeps alive; its failure is logged, never lost."""
        task = self.loop.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._reap)
        return task

    async def offload(self, work: Callable[[], T]) -> T:
        """Run blocking work off the engine loop, on the worker thread."""
        return await self.loop.run_in_executor(self.worker, work)

    def now(self) -> float:
        """Seconds on the finest clock there is, for measuring; deadlines are in ``loop.time()``."""
        return self.loop.time()

    def on_stop(self, closer: Callable[[], Awaitable[object]]) -> None:
        """Have ``closer()`` awaited on the engine loop before it stops."""
        self._closers.append(closer)

    def off_stop(self, closer: Callable[[], Awaitable[object]]) -> None:
        """Forget a closer that has done its work."""
        with contextlib.suppress(ValueError):
            self._closers.remove(closer)

    def keep(self, native: object) -> None:
        """Note an object that a forked child must never destroy."""
        self.immortal.append(native)

    def drop(self, native: object) -> None:
        """Forget an object noted by :meth:`keep`."""
        self.immortal[:] = [kept for kept in self.immortal if kept is not native]

    def _begin(self, submission: Submission) -> None:
        if self._over:
            submission.refuse()
        elif (task := submission.begin(self.loop)) is not None:
            self._tasks.add(task)
            task.add_done_callback(lambda _: self._forget(task, submission))
            task.add_done_callback(submission.finish)

    def _forget(self, task: asyncio.Task[Any], submission: Submission) -> None:
        self._tasks.discard(task)
        self._submissions.discard(submission)  # it holds the awaiting task, whose loop may be closed

    async def _wind_down(self) -> None:
        for closer in self._closers[::-1]:
            try:
                await closer()
            except Exception:
                _log.exception("closing on the engine loop failed")
        self._closers.clear()
        self._over = True
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _reap(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("task %s on the engine loop failed", task.get_name(), exc_info=error)


class Engine(LoopEngine):
    """An engine loop in its own thread.

    Args:
        name: Shown as the thread's name.
        use_uvloop: Run on uvloop where it is installed.
    """

    def __init__(self, name: str, *, use_uvloop: bool = True) -> None:
        before = descriptors.epolls()
        loop = _new_loop(use_uvloop)
        self._epolls = descriptors.epolls() - before
        descriptors.loops.update(self._epolls)  # an agent that another thread makes meanwhile must not listen to them
        super().__init__(loop, DaemonExecutor(1, name=f"{name}-copy"))
        self._stopping = False
        self._guests: list[LoopEngine] = []
        self._exited: Future[None] = Future()
        self._exited.set_running_or_notify_cancel()  # from now on no awaiter can cancel it
        started = threading.Event()
        self.thread = threading.Thread(target=self._serve, args=(started,), name=name, daemon=True)
        self.thread.start()
        started.wait()

    def now(self) -> float:
        """Seconds on the performance counter: uvloop's own time stands still for a whole turn."""
        return time.perf_counter()

    def guest(self) -> LoopEngine:
        """An engine for what is used from this very loop; it ends before this one. Call it on the loop."""
        guest = _Guest(self.loop, self.worker)
        self.on_stop(guest._wind_down)
        self._guests.append(guest)
        return guest

    def request_stop(self) -> None:
        """Close what runs on the loop, then stop it; returns at once, callable from any thread."""
        with contextlib.suppress(CommunicatorClosed):
            self.post(self._begin_stop)

    def stop(self, timeout: float = _STOP_SECONDS) -> bool:
        """Stop and join the thread; callable from any other thread.

        Returns:
            Whether the thread ended within ``timeout`` seconds.
        """
        if self.pid != os.getpid():
            return True
        self.request_stop()
        self.thread.join(timeout)
        return not self.thread.is_alive()

    async def astop(self) -> None:
        """Stop, awaited from another loop."""
        self.request_stop()
        await asyncio.wrap_future(self._exited)
        self.thread.join(_STOP_SECONDS)

    def _begin_stop(self) -> None:
        if not self._stopping:
            self._stopping = True
            self.loop.create_task(self._wind_down()).add_done_callback(lambda _: self.loop.stop())

    def _serve(self, started: threading.Event) -> None:
        self.thread_id = threading.get_ident()
        asyncio.set_event_loop(self.loop)
        self.loop.call_soon(started.set)
        try:
            self.loop.run_forever()
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            descriptors.loops.difference_update(self._epolls)
            self.loop.close()
            for submission in list(self._submissions):  # posted after the last turn
                submission.refuse()
            self.worker.shutdown(wait=True)
            for engine in (self, *self._guests):
                engine.thread_id = _NO_THREAD  # the system gives an ended thread's number to the next one
            self._exited.set_result(None)


class _Guest(LoopEngine):
    def now(self) -> float:
        """As of its host."""
        return time.perf_counter()


def _new_loop(use_uvloop: bool) -> asyncio.AbstractEventLoop:
    if use_uvloop:
        try:
            import uvloop
        except ImportError:
            pass
        else:
            loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
            return loop
    return asyncio.new_event_loop()


_live: weakref.WeakSet[LoopEngine] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    for engine in list(_live):
        if isinstance(engine, Engine) and not engine.stop():
            _log.error("the engine thread did not stop within %.0f s at interpreter exit", _STOP_SECONDS)


def _after_fork_in_child() -> None:
    # A reference that is never given back: no destructor ever runs, neither the agents' nor that of the loop,
    # whose tasks hold the handles (their destructor calls NIXL) and whose epoll is shared with the parent.
    for engine in list(_live):
        for kept in (engine, engine.loop, *engine.immortal):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


os.register_at_fork(after_in_child=_after_fork_in_child)
