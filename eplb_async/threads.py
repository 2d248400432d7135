"""Executors for blocking calls: daemon threads, and none at all.

``ThreadPoolExecutor`` joins its threads at exit, so one call that hangs (a store on a stopped host, a lock held
by a stopped process) would keep the process from ending. The threads here are daemons, and idle ones end when
the executor is shut down or dropped.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_Job = tuple["Future[Any]", Callable[[], Any]]
_JOIN_SECONDS = 10.0


class Inline(Executor):
    """Runs each call where it is submitted: for loops that may not wait for threads."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run ``fn(*args, **kwargs)`` now."""
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class DaemonExecutor(Executor):
    """Runs calls on up to ``max_workers`` daemon threads, started as they are needed."""

    def __init__(self, max_workers: int, *, name: str) -> None:
        self._max_workers = max_workers
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._closed = False
        weakref.finalize(self, self._jobs.put, None).atexit = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue one call; ``RuntimeError`` after ``shutdown``."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self._name}: already shut down")
            self._jobs.put((future, lambda: fn(*args, **kwargs)))
            if not self._idle.acquire(blocking=False) and len(self._threads) < self._max_workers:
                name = self._name if self._max_workers == 1 else f"{self._name}-{len(self._threads) + 1}"
                thread = threading.Thread(target=_work, args=(self._jobs, self._idle), name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:
        """Take no more calls.

        Args:
            wait: Wait for those that run or are queued, at most ten seconds for each thread.
            cancel_futures: Cancel those that are queued.
        """
        with self._lock:
            self._closed = True
            while cancel_futures:
                try:
                    job = self._jobs.get_nowait()
                except queue.Empty:
                    break
                if job is not None:
                    job[0].cancel()
            self._jobs.put(None)
        for thread in self._threads if wait else ():
            if thread is not threading.current_thread():
                thread.join(_JOIN_SECONDS)


def apart(
    loop: asyncio.AbstractEventLoop, call: Callable[[], T], *, name: str, executor: Executor | None = None
) -> asyncio.Future[T]:
    """Make one blocking call on a thread of its own, which nobody waits for when the future is cancelled.

    Args:
        loop: Loop of the future.
        call: What to call.
        name: Name of the thread.
        executor: Where to call it instead.
    """
    pool = executor or DaemonExecutor(1, name=name)
    future = loop.run_in_executor(pool, call)
    if executor is None:
        pool.shutdown(wait=False)
    return future


def _work(jobs: queue.SimpleQueue[_Job | None], idle: threading.Semaphore) -> None:
    while (job := jobs.get()) is not None:
        future, call = job
        if future.set_running_or_notify_cancel():
            try:
                result = call()
            except BaseException as error:  # it belongs to whoever waits for the future
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
        del job, future, call  # an idle thread keeps nothing alive
        idle.release()
    jobs.put(None)  # for the next thread
