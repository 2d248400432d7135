"""``load_expert``: how experts that no rank holds any more come in from the caller's disk or host memory."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from typing import Any, TypeVar

import torch

from eplb_async.core.layout import TensorSpec
from eplb_async.engine import Inline, LoopEngine
from eplb_async.errors import CommunicatorBusy, ExpertLoadFailed, describe
from eplb_async.threads import DaemonExecutor
from eplb_async.weights.loaded import LoadedExpert, loaded_rows

LoadExpert = Callable[[int, int], LoadedExpert | Awaitable[LoadedExpert]]
"""Given a layer and a logical expert, returns that expert's tensors, or an awaitable of them.

One tensor ``[...]`` for each tensor of the layer, without the expert dimension: a mapping from their names, or a
sequence in their order; on any device.
"""

T = TypeVar("T")
_inside: contextvars.ContextVar[object] = contextvars.ContextVar("eplb_async load_expert of engine", default=None)


class Loader:
    """Calls one migration's ``load_expert``, one expert at a time.

    It is called in a daemon thread of its own, and an awaitable that it returns is awaited on the user's loop;
    both in a copy of the context that ``migrate`` was called in. Made on the user's loop; used on the engine loop.

    Args:
        load: Given a layer and a logical expert, returns its tensors, or an awaitable of them.
        engine: The engine loop.

    Attributes:
        waiting: What is being loaded, in words; empty if nothing is.
    """

    def __init__(self, load: LoadExpert, engine: LoopEngine) -> None:
        if not callable(load):
            raise TypeError(f"load_expert must be callable with (layer, logical expert), not {type(load).__name__}")
        self.waiting = ""
        self._load = load
        self._engine = engine
        self._user_loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        self._context.run(_inside.set, engine)
        self._thread: Executor | None = None
        self._turn = asyncio.Lock()

    async def rows(self, layer: int, expert: int, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
        """Load one expert; cancelled, it ends at once, and what the caller's code still does is for nothing.

        Args:
            layer: The layer.
            expert: The logical expert.
            specs: The layer's tensors.

        Returns:
            Bytes of its row in each tensor, uint8 ``[1, row_bytes]`` on the CPU.

        Raises:
            ExpertLoadFailed: ``load_expert`` raised, or what it gave is not one expert's tensors.
        """
        async with self._turn:
            self.waiting = f"load_expert(layer={layer}, expert={expert})"
            try:
                return await self._call(layer, expert, specs)
            finally:
                self.waiting = ""

    def close(self) -> None:
        """Take no more; a call that still runs is left to itself."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def _call(self, layer: int, expert: int, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
        try:
            given: Any = await self._in_thread(lambda: self._load(layer, expert))
            if inspect.isawaitable(given):
                given = await self._on_users_loop(given)
            return await self._in_thread(lambda: loaded_rows(given, specs))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise self._failed(layer, expert, "was cancelled, and not by the migration") from None
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # nothing of the caller's ends the engine loop
            raise self._failed(layer, expert, f"failed: {describe(error)}") from error

    def _failed(self, layer: int, expert: int, what: str) -> ExpertLoadFailed:
        return ExpertLoadFailed(f"load_expert(layer={layer}, expert={expert}) {what}", layer=layer, expert=expert)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        if self._thread is None:
            inline = isinstance(self._engine.worker, Inline)
            self._thread = self._engine.worker if inline else DaemonExecutor(1, name="eplb-async load_expert")
        context = self._context.copy()

        def call() -> tuple[T | None, BaseException | None]:  # StopIteration, for one, cannot pass through a future
            try:
                return context.run(work), None
            except BaseException as error:
                return None, error

        result, error = await self._engine.loop.run_in_executor(self._thread, call)
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    async def _on_users_loop(self, given: Awaitable[T]) -> T:
        async def settle() -> T:
            return await given

        if self._user_loop is self._engine.loop:
            return await self._user_loop.create_task(settle(), context=self._context.copy())
        waiting = settle()
        try:
            task = self._context.copy().run(asyncio.run_coroutine_threadsafe, waiting, self._user_loop)
        except RuntimeError:  # it is closed
            waiting.close()
            if inspect.iscoroutine(given):
                given.close()
            raise
        return await asyncio.wrap_future(task)


def refuse_inside(engine: LoopEngine, what: str) -> None:
    """Refuse what would wait for the migration that waits for this ``load_expert``.

    Raises:
        CommunicatorBusy: The caller is a ``load_expert`` of a communicator on this engine.
    """
    if _inside.get() is engine:
        raise CommunicatorBusy(f"cannot {what} from within load_expert: the migration waits for it; return first")
