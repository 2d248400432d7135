"""``AsyncEplbCommunicator``: what an async inference server awaits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import warnings
from collections.abc import Iterator

import torch

from eplb_async.communicator.opener import Opener
from eplb_async.communicator.report import Health, MigrationReport
from eplb_async.communicator.session import Session
from eplb_async.core.placement import Placement
from eplb_async.engine import Engine, LoopEngine
from eplb_async.errors import CommunicatorBusy, CommunicatorClosed, PlacementError
from eplb_async.nixl.agent import real
from eplb_async.nixl.endpoint import NativeFactory
from eplb_async.opening import Opening
from eplb_async.rendezvous import Rendezvous
from eplb_async.settings import Settings, seconds
from eplb_async.weights import ExpertWeights, WeightsLike

_log = logging.getLogger("eplb_async.communicator")


class AsyncEplbCommunicator:
    """Moves expert weights between the ranks of one expert-parallel group. Make one with :meth:`open`.

    Bound to the loop that opened it; only :meth:`health` and :attr:`placement` may be used from other threads.
    """

    def __init__(self, engine: LoopEngine, session: Session, weights: ExpertWeights, store: Rendezvous | None) -> None:
        self._engine = engine
        self._session = session
        self._weights = weights
        self._store = store
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._busy = ""
        self._closed = False
        self._closing: asyncio.Future[tuple[str, ...]] | None = None

    @classmethod
    def open(
        cls,
        *,
        rank: int,
        ep_size: int,
        weights: WeightsLike,
        placement: Placement,
        rendezvous: object,
        group: str = "default",
        node: str | None = None,
        staging: int | torch.Tensor | None = None,
        settings: Settings | None = None,
        timeout: float | None = None,
        engine: LoopEngine | None = None,
        native: NativeFactory = real,
    ) -> Opening[AsyncEplbCommunicator]:
        """Open this rank: register the weights, and exchange introductions with every peer concurrently.

        A rank that starts again calls this again, at the same rendezvous. Where the others go on without it, it
        waits until they have called :meth:`reconnect`, and takes over their placement; of ``placement`` its own
        slots count then, -1 for those that hold nothing.

        Cancelled or timed out: everything native is given back in the background; open again to retry.

        Args:
            rank: This rank within the expert-parallel group.
            ep_size: Ranks in the group.
            weights: ``[layers]`` of tensors ``[num_local_experts, ...]`` (sequences or mappings), or a callable
                returning that, which is asked again before each migration.
            placement: Where the experts are now; the same on every rank.
            rendezvous: ``"tcp://host:port"``, ``"file://path"``, a torch Store, or a ``Rendezvous`` object.
            group: Separates several models or pipeline stages on one rendezvous.
            node: Host label, for "same node first"; default the host's boot id.
            staging: Bytes of staging, or the caller's own flat uint8 buffer; default two layers.
            settings: Every other number and switch; default from ``EPLB_ASYNC_*``.
            timeout: Deadline for each peer, in seconds; default ``settings.peer_timeout``.
            engine: Engine to live on; default one of its own. For tests.
            native: Makes the native agent. For tests.

        Returns:
            An awaitable that is also an asynchronous context manager.

        Raises:
            PlacementError: The placement is not one of ``ep_size`` ranks.
            WeightsError: A tensor cannot be moved, or staging is too small; nothing native was touched.
            HandshakeError: Peers are missing or refused, or the group runs and does not have this rank back; lists
                each and why.
        """
        chosen = settings or Settings.from_env()

        async def opened() -> AsyncEplbCommunicator:
            opener = Opener(
                rank=rank,
                ep_size=ep_size,
                weights=weights,
                placement=placement,
                rendezvous=rendezvous,
                group=group,
                node=node,
                staging=staging,
                settings=chosen,
                timeout=seconds(timeout, chosen.peer_timeout),
                native=native,
            )
            rows = opener.check()
            where = engine or Engine(f"eplb-async {group}/{rank}", use_uvloop=chosen.use_uvloop)
            session, store = await opener.open(where, rows, own=engine is None)
            return cls(where, session, rows, store)

        return Opening(opened)

    async def migrate(self, placement: Placement, *, timeout: float | None = None) -> MigrationReport:
        """Move to a new placement, together with every rank of the view; each calls this with the same one.

        Cancelled: ends at once; the epoch ends on all ranks at one layer, possibly the last, settles in the
        background, and the next ``migrate`` or ``aclose`` waits for that. Timed out: the same, and it says who was
        waited for. Failed: every layer is wholly old or wholly new, the same on all ranks of the view.

        Args:
            placement: Where the experts are to be.
            timeout: Seconds, queueing included; default ``settings.migrate_timeout``.

        Returns:
            What was moved, and how fast.

        Raises:
            PlacementError: It does not fit the current one, or an expert has no source; nothing was sent.
            WeightsError: A tensor moved since it was registered; nothing was sent.
            NixlTransferFailed: A READ failed on this rank; the epoch was ended on all.
            IntegrityError: A READ brought other bytes than meant; the epoch was ended on all.
            MigrationAborted: Another rank ended the epoch; ``MigrationTimeout``: this rank's deadline passed.
            MigrationInDoubt: This rank voted and cannot learn the decision.
            CommunicatorBusy: A migration is running already.
            CommunicatorClosed: It is closed, or was fenced by the others.
        """
        session = self._session
        if not isinstance(placement, Placement):
            raise PlacementError(f"need a Placement, not {type(placement).__name__}")
        limit = seconds(timeout, session.settings.migrate_timeout)
        with self._doing("migrate"):
            self._weights.moved()
            return await self._engine.run(lambda: session.migrate(placement, limit))

    async def rebind(self) -> None:
        """Register the weights as they are now, after a reload moved their storage.

        Call it outside migrations; the bytes in the rows must be those of the current placement.

        Raises:
            WeightsError: A tensor cannot be moved; nothing has changed then.
        """
        with self._doing("rebind"):
            await self._engine.run(self._session.settled)
            self._weights.rebind()  # the caller's callable runs on the caller's loop
            await self._engine.run(self._session.rebind)

    async def exclude(self, rank: int) -> None:
        """Say that a rank is dead: the others go on without it, and it is fenced if it is not.

        Raises:
            ValueError: It is this rank, or no rank of the group.
        """
        self._check_usable()

        async def call() -> None:
            self._session.exclude(rank)

        await self._engine.run(call)

    async def reconnect(self, rank: int, *, timeout: float | None = None) -> None:
        """Have a rank back whose process started again and calls ``open``; every rank of the view calls this.

        It waits until the view has that rank again; then ``migrate`` works with all. The rank must be out of the
        view, as after its death or :meth:`exclude`. :attr:`placement` then says what its slots hold: what it said
        in ``open``, or nothing where the weights have changed version since.

        Cancelled, timed out or failed: this rank is as before, and it can be called again. The rank that opens is
        let in when all ranks have called it and not before.

        Args:
            rank: The rank that started again.
            timeout: Seconds; default ``settings.peer_timeout``.

        Raises:
            ValueError: It is this rank, no rank of the group, or a member that is not known gone.
            HandshakeError: It was not met, or not let in, in time; says what was waited for.
            CommunicatorBusy: A migration or another reconnect is running.
            CommunicatorClosed: It is closed, or was fenced by the others.
        """
        session = self._session
        limit = seconds(timeout, session.settings.peer_timeout)
        with self._doing("reconnect"):
            await self._engine.run(lambda: session.reconnect(rank, limit))

    @property
    def placement(self) -> Placement:
        """What is true now, layer by layer. Thread-safe."""
        return self._session.placement

    def health(self) -> Health:
        """What is going on now: phase, whom we wait for, the oldest READ, quarantine. Thread-safe."""
        return self._session.health()

    async def aclose(self, timeout: float | None = None) -> tuple[str, ...]:
        """Leave the group, drain with a deadline, destroy the agent, then let go of the memory.

        Idempotent: every call returns when it is closed, with the same answer.

        Cancelled: closing goes on in the background.

        Args:
            timeout: Seconds; default ``settings.close_timeout``.

        Returns:
            What had not ended and went with the agent, in words.
        """
        self._check_loop()
        limit = seconds(timeout, self._session.settings.close_timeout)
        if self._closing is None:
            self._closed = True
            self._closing = asyncio.ensure_future(self._close(limit))
        return await asyncio.shield(self._closing)

    async def _close(self, limit: float) -> tuple[str, ...]:
        session, store, engine = self._session, self._store, self._engine

        async def close() -> tuple[str, ...]:
            try:
                return await session.close(limit)
            finally:
                if store is not None:
                    await engine.offload(store.close)
                if isinstance(engine, Engine):
                    engine.request_stop()

        left = await engine.run(close, detach=True)
        if isinstance(engine, Engine):
            await engine.astop()
        return left

    @contextlib.contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        self._check_usable()
        if self._busy:
            raise CommunicatorBusy(f"cannot {what}: a {self._busy} is running; await it first")
        self._busy = what
        try:
            yield
        finally:
            self._busy = ""

    def _check_usable(self) -> None:
        self._check_loop()
        if self._closed:
            raise CommunicatorClosed("the communicator is closed")

    def _check_loop(self) -> None:
        self._engine.check_process()
        if threading.get_ident() != self._thread or asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("the communicator is bound to the event loop that opened it; use it from there")

    def __del__(self) -> None:
        if getattr(self, "_closed", True):
            return
        try:
            self._engine.check_process()
        except CommunicatorClosed:  # a fork's copy: nothing of it is ours to close
            return
        rank = self._session.driver.identity.rank
        if isinstance(self._engine, Engine):
            self._engine.request_stop()
        warnings.warn(f"rank {rank}'s communicator was never closed; use `async with`", ResourceWarning, stacklevel=2)

    def __repr__(self) -> str:
        me = self._session.driver.identity
        return f"<AsyncEplbCommunicator rank {me.rank} of {me.ep_size} in group {me.group!r}>"
