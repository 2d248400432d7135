"""``SyncService``: the service for engines that are not async, from any plain thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import warnings
from collections.abc import Awaitable, Callable, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from eplb_async.communicator import AsyncEplbCommunicator, MigrationReport
from eplb_async.communicator.listeners import AppliedCallback
from eplb_async.communicator.loading import LoadExpert
from eplb_async.communicator.using import Use
from eplb_async.core.placement import Placement
from eplb_async.engine import Engine
from eplb_async.errors import CommunicatorClosed
from eplb_async.service.decision import Policy
from eplb_async.service.forward import Forward
from eplb_async.service.report import RebalanceReport, ServiceHealth
from eplb_async.service_settings import ServiceSettings
from eplb_async.settings import Settings, seconds
from eplb_async.telemetry.event import Hook
from eplb_async.waiting import run_on

if TYPE_CHECKING:
    from eplb_async.service.service import EplbService

__all__ = ["SyncService"]

T = TypeVar("T")
_log = logging.getLogger("eplb_async.service")


class SyncService:
    """The calls of an `EplbService`, for plain threads: ``service.sync``, or :meth:`open` where no loop runs.

    What waits runs on the loop that the service lives on, while the calling thread waits for it, for a bounded time;
    errors are raised as they were there. In that loop's own thread such a call is refused. Interrupted by Ctrl-C, it
    is cancelled. :meth:`record`, :meth:`forward`, :meth:`using` and :meth:`idle` wait for no loop. After a fork the
    child's copy refuses calls.

    Attributes:
        service: The service; bound to its loop but for what may be called in any thread.
        comm: Its communicator; likewise.
    """

    def __init__(self, service: EplbService, engine: Engine | None = None, close_timeout: float = 0.0) -> None:
        self.service = service
        self.comm: AsyncEplbCommunicator = service.comm
        self._loop = service.loop
        self._close_timeout = close_timeout
        self._left: tuple[str, ...] = ()
        self._closed = False
        self._engine = engine

    @classmethod
    def open(
        cls,
        *,
        policy: Policy | None = None,
        service_settings: ServiceSettings | None = None,
        load_expert: LoadExpert | None = None,
        telemetry: Hook | None = None,
        **communicator: Any,
    ) -> SyncService:
        """Open a communicator and its service in a program without asyncio: both live on the engine loop.

        ``with SyncService.open(rank=…, …) as service``. What the caller gives (``weights`` as a callable, telemetry)
        is called in the engine's thread: keep it short, since peers wait for that thread.

        Interrupted, or failed: everything is given back, and the engine's thread has ended.

        Args:
            policy: As of `EplbService`.
            service_settings: Its ``settings``.
            load_expert: As of `EplbService`.
            telemetry: As of `EplbService`, and of the communicator.
            **communicator: Arguments of `AsyncEplbCommunicator.open`; ``settings`` are the communicator's.

        Raises:
            PlacementError: As ``AsyncEplbCommunicator.open`` and ``EplbService`` do, and likewise the next ones.
            WeightsError: A tensor cannot be moved.
            HandshakeError: Peers are missing or refused.
            ValueError: An argument is wrong.
        """
        from eplb_async.service.service import EplbService

        settings = communicator["settings"] = communicator.get("settings") or Settings.from_env()
        if telemetry is not None:
            communicator["telemetry"] = telemetry
        stream = _stream_here(communicator.get("weights"))
        engine = Engine(
            f"eplb-async {communicator.get('group', 'default')}/{communicator.get('rank')}",
            use_uvloop=settings.use_uvloop,
        )

        async def opened() -> EplbService:
            with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
                comm = await AsyncEplbCommunicator.open(engine=engine.guest(), **communicator)
            service: EplbService | None = None

            async def close() -> None:
                if service is not None:
                    await service.aclose()
                await comm.aclose()

            engine.on_stop(close)
            service = EplbService(
                comm, policy=policy, settings=service_settings, load_expert=load_expert, telemetry=telemetry
            )
            return await service.__aenter__()

        try:
            service = run_on(engine.loop, opened, what="open", limit=None)
        except BaseException:
            _stop(engine)
            raise
        return cls(service, engine, settings.close_timeout)

    def __enter__(self) -> SyncService:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -------------------------------------------------------------------------------------- these wait for no loop
    def record(self, counts: Any, *, by: str | None = None, placement: Placement | None = None) -> None:
        """Add the counts of one step to the load window: ``EplbService.record``."""
        self.service.record(counts, by=by, placement=placement)

    def forward(self, number: int | None = None) -> Forward:
        """Around each forward pass of an engine in lock-step, with a plain ``with``: ``EplbService.forward``."""
        return self.service.forward(number)

    def idle(self, number: int | None = None) -> None:
        """The engine stops stepping for now, on every rank after the same step: ``EplbService.idle``."""
        self.service.idle(number)

    def using(self, layer: int) -> Use:
        """Around the use of a layer where layers are applied at once: ``AsyncEplbCommunicator.using``."""
        return self.comm.using(layer)

    def on_applied(self, callback: AppliedCallback) -> Callable[[], None]:
        """Have a callback told of each layer that is applied: ``AsyncEplbCommunicator.on_applied``."""
        return self.comm.on_applied(callback)

    def pause(self) -> None:
        """Take part in no round until :meth:`resume`: ``EplbService.pause``."""
        self.service.pause()

    def resume(self) -> None:
        """End a :meth:`pause`."""
        self.service.resume()

    def health(self) -> ServiceHealth:
        """What the service does now; ``comm.health()`` is the communicator's."""
        return self.service.health()

    @property
    def placement(self) -> Placement:
        """Where the experts are now."""
        return self.comm.placement

    # ------------------------------------------------------------------------------------------------- these wait
    def attach(self, counter: Any, *, by: str | None = None) -> None:
        """Read loads from a tensor that the engine's kernels add to: ``EplbService.attach``, with its errors."""

        async def call() -> None:
            self.service.attach(counter, by=by)

        self._run(call, "attach", 0.0)

    def rebalance(self, *, force: bool = False, timeout: float | None = None) -> RebalanceReport:
        """Have a round now, and wait for its end on this rank: ``EplbService.rebalance``, with its errors.

        Interrupted or timed out: the round goes on in the background.

        Raises:
            CommunicatorClosed: The loop that the service lives on is closed, or ended meanwhile.
            TimeoutError: That loop does not run.
            RuntimeError: This is that loop's thread.
        """
        limit = seconds(timeout, self.service.settings.rebalance_timeout)
        return self._run(lambda: self.service.rebalance(force=force, timeout=limit), "rebalance", limit)

    def migrate(
        self, placement: Placement, *, timeout: float | None = None, load_expert: LoadExpert | None = None
    ) -> MigrationReport:
        """Move to a placement of the caller's: ``AsyncEplbCommunicator.migrate``, with its errors.

        Interrupted: the migration is cancelled, as there.

        Args:
            placement: Where the experts are to be; the same on all ranks, each of which calls this.
            timeout: Seconds; default ``migrate_timeout`` of the service's settings.
            load_expert: As there.

        Raises:
            CommunicatorClosed: The loop that the communicator lives on is closed, or ended meanwhile, too.
            TimeoutError: That loop does not run.
            RuntimeError: This is that loop's thread.
        """
        limit = seconds(timeout, self.service.settings.migrate_timeout)
        return self._run(lambda: self.comm.migrate(placement, timeout=limit, load_expert=load_expert), "migrate", limit)

    def call(self, call: Callable[[], Awaitable[T]], *, timeout: float) -> T:
        """Run any coroutine on the loop that the service lives on: ``sync.call(lambda: comm.exclude(3), timeout=5.0)``.

        For the calls of the communicator that have no method here. An update of weights is one coroutine, too: ``async
        with comm.updating_weights() as placement: await asyncio.to_thread(write, placement)``.

        Interrupted or timed out: it is cancelled.

        Args:
            call: Makes the coroutine; called on that loop.
            timeout: Seconds.

        Raises:
            TimeoutError: It took longer.
            CommunicatorClosed: The loop is closed, or ended meanwhile.
            RuntimeError: This is that loop's thread.
            BaseException: What the coroutine raised.
        """
        limit = seconds(timeout, 0.0)

        async def bounded() -> T:
            try:
                async with asyncio.timeout(limit) as bound:
                    return await call()
            except TimeoutError:
                if not bound.expired():
                    raise
                raise TimeoutError(f"the call took longer than {limit:g} s and was cancelled") from None

        return self._run(bounded, "call", limit)

    def close(self, timeout: float | None = None) -> tuple[str, ...]:
        """Close the service; where :meth:`open` made this, the communicator and the engine loop, too.

        Idempotent, from any thread; several at once all wait for the end. Interrupted: closing goes on.

        Args:
            timeout: Seconds for the communicator; default ``close_timeout`` of its settings.

        Returns:
            What ``AsyncEplbCommunicator.aclose`` answers; of ``service.sync`` nothing.

        Raises:
            RuntimeError: This is the thread of the loop that it lives on.
        """
        limit = seconds(timeout, self._close_timeout)
        engine = self._engine
        self.comm.check_may_wait("close")
        if engine is None:
            if not (self._loop.is_closed() and self.service.health().closed):  # else it has ended with its loop
                self._run(self.service.aclose, "close", self.service.settings.round_timeout)
            return ()
        self._closed = True

        async def shut() -> tuple[str, ...]:
            await self.service.aclose()
            return await self.comm.aclose(limit)

        try:
            with contextlib.suppress(CommunicatorClosed):  # another thread has closed it
                self._left = run_on(engine.loop, shut, what="close", limit=limit + self.service.settings.round_timeout)
        finally:
            _stop(engine)
        return self._left

    def _run(self, call: Callable[[], Awaitable[T]], what: str, limit: float) -> T:
        self.comm.check_may_wait(what)
        return run_on(self._loop, call, what=what, limit=limit)

    def __del__(self) -> None:
        engine: Engine | None = getattr(self, "_engine", None)
        if engine is None or self._closed:
            return
        try:
            engine.check_process()
        except CommunicatorClosed:  # a fork's copy: nothing of it is ours to close
            return
        engine.request_stop()
        warnings.warn(f"{self!r} was never closed; use `with`", ResourceWarning, stacklevel=2)

    def __repr__(self) -> str:
        return f"<SyncService of {self.comm!r}>"


def _stop(engine: Engine) -> None:
    if not engine.stop():
        _log.error("the thread of %s did not end; see where it is stuck", engine.thread.name)


def _stream_here(weights: Any) -> Any:
    """The CUDA stream that is current in this thread for the weights; ``None`` where they are not on CUDA."""
    given = weights() if callable(weights) else weights
    for tensors in given or ():
        values: Iterable[Any] = tensors.values() if isinstance(tensors, Mapping) else tensors
        for tensor in values:
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                return torch.cuda.current_stream(tensor.device)
    return None
