"""``AsyncEplbCommunicator``: what an async inference server awaits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import warnings
import weakref
from collections.abc import AsyncIterator, Callable, Iterable

import torch

from eplb_async.communicator.calls import Calls
from eplb_async.communicator.dial import Dial
from eplb_async.communicator.listeners import AppliedCallback, Listeners
from eplb_async.communicator.loading import Loader, LoadExpert, refuse_inside
from eplb_async.communicator.mail import Mail
from eplb_async.communicator.opener import Opener
from eplb_async.communicator.owner import checked_version, chosen_layers
from eplb_async.communicator.report import Health, MigrationReport, View
from eplb_async.communicator.session import Session
from eplb_async.communicator.steps import Steps
from eplb_async.communicator.using import Use
from eplb_async.communicator.watch import checked_interval
from eplb_async.core.forecast import Forecast
from eplb_async.core.placement import Placement
from eplb_async.engine import Engine, LoopEngine
from eplb_async.errors import CommunicatorClosed, PlacementError, WeightsError
from eplb_async.nixl.agent import real
from eplb_async.nixl.endpoint import NativeFactory
from eplb_async.opening import Opening
from eplb_async.rendezvous import Rendezvous
from eplb_async.settings import Settings, seconds
from eplb_async.telemetry.emitter import Emitter
from eplb_async.telemetry.event import Hook
from eplb_async.weights import ExpertWeights, WeightsLike

_log = logging.getLogger("eplb_async.communicator")


class AsyncEplbCommunicator:
    """Moves expert weights between the ranks of one expert-parallel group. Make one with :meth:`open`.

    Bound to the loop that opened it; only :meth:`health`, :meth:`plan`, :attr:`placement`, :attr:`view`, :attr:`mail`,
    :meth:`using`, :meth:`on_applied`, and :meth:`step` and :meth:`idle` may be used from other threads.
    """

    def __init__(
        self,
        engine: LoopEngine,
        session: Session,
        weights: ExpertWeights,
        store: Rendezvous | None,
        on_layer_applied: AppliedCallback | None = None,
        telemetry: Hook | None = None,
    ) -> None:
        self._engine = engine
        self._session = session
        self._weights = weights
        self._store = store
        self._calls = Calls(engine, session.owner)
        self._closing: asyncio.Future[tuple[str, ...]] | None = None
        self._steps = session.steps
        self._mail = Mail(engine, session.driver)
        session.driver.post.reader = weakref.ref(self._mail)  # what a subscriber holds may hold this
        self._uses = None if session.users is None else session.users.uses
        self._watch = Dial(engine, session.driver.watch_every, 0.0)
        self._limit = Dial(engine, session.limit, session.settings.max_bytes_per_second)
        self._listeners = Listeners()
        session.listeners = weakref.ref(self._listeners)
        if on_layer_applied is not None:
            self._listeners.add(on_layer_applied, "on_layer_applied")
        if session.emitter is not None:
            self._telemetry, owner = telemetry, weakref.ref(self)  # weakly, for the same reason
            session.emitter.find = lambda: None if (comm := owner()) is None else comm._telemetry

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
        on_layer_applied: AppliedCallback | None = None,
        telemetry: Hook | None = None,
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
            rendezvous: ``"tcp://host:port"``, ``"file://path"``, ``"env://"`` (torchrun's variables), a torch Store or
                ProcessGroup, or a ``Rendezvous`` object. A ProcessGroup is collective: every rank of it opens at once,
                in the same order, and after a failure it is out of step.
            group: Separates several models or pipeline stages on one rendezvous.
            node: Host label, for "same node first"; default the host's boot id.
            staging: Bytes of staging, or the caller's own flat uint8 buffer; default by ``settings.staging_layers``.
            settings: Every other number and switch; default from ``EPLB_ASYNC_*``.
            timeout: Deadline for each peer, in seconds; default ``settings.peer_timeout``.
            on_layer_applied: Called with each layer that was applied, and where the experts are then, before a step
                runs with it: refresh routing tables in place. It runs in the thread that copies, on the server's
                stream on CUDA, and holds the apply up. What it raises is logged and counted, and changes nothing.
            telemetry: Called with each event (``eplb_async.telemetry``), on the engine's thread, in the context of this
                call: it must be quick. What it raises is logged once and counted, and changes nothing.
            engine: Engine to live on; default one of its own. For tests.
            native: Makes the native agent. For tests.

        Returns:
            An awaitable that is also an asynchronous context manager.

        Raises:
            PlacementError: The placement is not one of ``ep_size`` ranks.
            ValueError: ``rank``, or what ``rendezvous`` is, cannot be; says what is supported.
            WeightsError: A tensor cannot be moved, or staging is too small; nothing native was touched.
            HandshakeError: Peers are missing or refused, or the group runs and does not have this rank back; lists
                each and why.
            NixlTransferFailed: NIXL makes no agent, or refuses the memory.
            EplbError: NIXL is not installed, or does not load.
        """
        chosen = settings or Settings.from_env()
        emitter = None if telemetry is None else Emitter(telemetry, group=group, rank=rank)

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
                emitter=emitter,
            )
            rows = opener.check()
            where = engine or Engine(f"eplb-async {group}/{rank}", use_uvloop=chosen.use_uvloop)
            session, store = await opener.open(where, rows, own=engine is None)
            return cls(where, session, rows, store, on_layer_applied, telemetry)

        return Opening(opened)

    async def migrate(
        self, placement: Placement, *, timeout: float | None = None, load_expert: LoadExpert | None = None
    ) -> MigrationReport:
        """Move to a new placement, together with every rank of the view; each calls this with the same one.

        Cancelled: ends at once; the epoch ends on all ranks at one layer, possibly the last, settles in the
        background, and the next ``migrate`` or ``aclose`` waits for that. Timed out: the same, and it says who was
        waited for. Failed: every layer is wholly old or wholly new, the same on all ranks of the view.

        Args:
            placement: Where the experts are to be.
            timeout: Seconds, queueing included; default ``settings.migrate_timeout``.
            load_expert: Supplies experts whose only copies were on ranks that are out: called with a layer and a
                logical expert, on each rank that needs it, it returns one tensor ``[...]`` (no expert
                dimension) for each of the layer's tensors, by name or in order. It runs in a thread of its own,
                one call at a time; an awaitable that it returns is awaited on this loop. Either every rank
                passes it or none.

        Returns:
            What was moved, and how fast.

        Raises:
            PlacementError: It does not fit the current one, or uses slots of ranks that are out; nothing was sent.
            ExpertsLost: No rank holds some experts, and this one has no ``load_expert``; nothing was read.
            ExpertLoadFailed: ``load_expert`` failed on this rank, or gave other tensors; the epoch was ended on all.
            WeightsError: A tensor moved since it was registered, or an update of weights did not end well; nothing
                was sent.
            NixlTransferFailed: A READ failed on this rank; the epoch was ended on all.
            IntegrityError: A READ brought other bytes than meant; the epoch was ended on all.
            MigrationAborted: Another rank ended the epoch, or the view changed (where no rank had begun the epoch,
                it is made again in the new view); ``MigrationTimeout``: this rank's deadline passed.
            MigrationInDoubt: This rank voted and cannot learn the decision.
            CommunicatorBusy: A migration is running already, weights are being updated, or it is suspended.
            CommunicatorClosed: It is closed, or was fenced by the others.
        """
        session = self._session
        _check_placement(placement)
        limit = seconds(timeout, session.settings.migrate_timeout)
        with self._calls.doing("migrate"):
            if half_written := session.owner.half_written:
                raise WeightsError(
                    f"layers {sorted(half_written)} were being rewritten when their update failed, so what their rows "
                    "hold is not known; write them again inside updating_weights()"
                )
            self._weights.moved()
            loader = None if load_expert is None else Loader(load_expert, self._engine)
            return await self._engine.run(lambda: session.migrate(placement, limit, loader))

    async def rebind(self, *, timeout: float | None = None) -> None:
        """Register the weights as they are now, after a reload moved their storage.

        Call it outside migrations; the bytes in the rows must be those of the current placement.

        Cancelled: either nothing has changed, and ``migrate`` says to rebind, or it goes on in the background and the
        next ``migrate`` waits for it. Calling it again is right in both cases.

        Args:
            timeout: Seconds to wait until an earlier migration has settled; default ``settings.migrate_timeout``.

        Raises:
            MigrationTimeout: It did not settle in time; ``MigrationInDoubt``: nor can it be known how it ends.
                Nothing has changed then.
            WeightsError: A tensor cannot be moved; nothing has changed then.
            NixlTransferFailed: NIXL refuses the memory; ``HandshakeError``: a member of the view is not known gone,
                and cannot be reached. Peers would read what was left, so this rank is out of the group then.
        """
        limit = seconds(timeout, self._session.settings.migrate_timeout)
        with self._calls.doing("rebind"):
            await self._engine.run(lambda: self._session.settled_within(limit, "rebind"))
            self._weights.rebind()  # the caller's callable runs on the caller's loop
            # From here on a cancel must not keep them from being registered: peers would read what was left.
            await self._engine.run(self._session.rebind, detach=True)

    @contextlib.asynccontextmanager
    async def updating_weights(
        self, layers: Iterable[int] | None = None, *, version: int | None = None, timeout: float | None = None
    ) -> AsyncIterator[Placement]:
        """Around the owner's own writes to the weights: a reload, an update from training.

        Entering ends the migration that runs, on all ranks, and what it had staged is discarded. Inside, no
        migration begins here, so none begins anywhere in the group: ranks may enter and leave at different times.
        Leaving well counts the weight version up, digests the layers anew (``verify="full"``), and registers
        tensors whose storage moved. Ranks with different versions refuse to migrate together, so do it on every
        rank. Allowed while suspended.

        Raised, or cancelled, inside or while leaving: what the rows of ``layers`` hold is not known. The version
        stays, and ``migrate`` raises `WeightsError` until these layers were written in an update that ended well. A
        cancel that comes when all is done changes nothing of that: ``health()`` says which version this rank has.
        Cancelled or timed out while entering: nothing has changed, but the migration may have been ended.

        Args:
            layers: Layers that are rewritten; default all.
            version: Number of these weights, the same on every rank; default one more than the present. Not lower
                than the present; the same again says that they are the same weights again.
            timeout: Seconds to wait until the running migration has ended; default ``settings.migrate_timeout``.

        Yields:
            Where the experts are now; write every slot by it. It does not change inside.

        Raises:
            ValueError: ``layers`` or ``version`` is wrong; nothing was done.
            MigrationTimeout: The running migration did not end in time; ``MigrationInDoubt``: nor can it be known
                how it ends. Nothing may be written then.
            WeightsError: A tensor that moved meanwhile cannot be moved, or is of another kind.
            CommunicatorBusy: Another operation than ``migrate`` is running.
            CommunicatorClosed: It is closed, or was fenced by the others.
        """
        owner, settings = self._session.owner, self._session.settings
        chosen = chosen_layers(layers, self._session.placement.num_layers)
        number = checked_version(version, self._session.version)
        limit = seconds(timeout, settings.migrate_timeout)
        with self._calls.owning("update of weights"):
            try:
                await self._engine.run(lambda: owner.begin_update(limit))
                owner.half_written |= chosen
                yield self._session.placement
                await self._take_moved()
                await self._engine.run(lambda: owner.end_update(chosen, number))
            finally:
                with contextlib.suppress(CommunicatorClosed):
                    self._engine.post(owner.release)

    def pause(self) -> None:
        """Post no READ any more until :meth:`resume`, so that requests have the network to themselves.

        Takes effect at once, also within a migration; between migrations, the next one waits at its first READ.
        READs in flight end, copies within the rank go on, and peers read from this rank as before. Deadlines run:
        every rank waits for this one's READs, so a pause longer than what is left of ``migrate``'s timeout ends the
        migration on all of them. Cheap, and paused already it does nothing.

        Raises:
            CommunicatorClosed: It is closed.
        """
        self._calls.check_usable()
        if not self._session.throttle.paused:
            self._session.throttle.paused = True
            _log.info("paused: no READ is posted until resume()")

    def limit(self, max_bytes_per_second: int) -> Callable[[], None]:
        """Limit what this rank's READs bring, from now on, as ``settings.max_bytes_per_second`` does from ``open`` on.

        READs that are made again count; copies within the rank, and what peers read from this rank, do not.

        Args:
            max_bytes_per_second: Bytes a second; 0 for no limit.

        Returns:
            Puts back what was before, unless it is closed, or was called again since.

        Raises:
            ValueError: It is no such number; nothing has changed.
            CommunicatorClosed: It is closed.
        """
        self._calls.check_usable()
        return self._limit.set(Settings(max_bytes_per_second=max_bytes_per_second).max_bytes_per_second)

    async def suspend(self, *, timeout: float | None = None) -> None:
        """Let go of all memory, weights and staging, so that it can be freed (sleep mode); :meth:`resume` comes back.

        The migration that runs is ended on all ranks. The agent gives way to one without memory, which goes on
        answering: the peers do not take this rank for dead, and none can read it. A ``migrate`` of theirs waits
        for this rank and times out, naming it. Once suspended, this returns at once.

        Cancelled: suspending may go on; call it again, and wait, before memory is freed, or call :meth:`resume`.

        Args:
            timeout: Seconds to wait for the running migration to end and READs to drain; default
                ``settings.close_timeout``. READs that have not ended then go with the agent.

        Raises:
            MigrationTimeout: The running migration did not end in time; ``MigrationInDoubt``: nor can it be known
                how it ends. It is not suspended then.
            NixlTransferFailed: NIXL makes no new agent; ``HandshakeError``: a member of the view is not known gone,
                and cannot be reached. It is not suspended then.
            CommunicatorBusy: Another operation than ``migrate`` is running.
            CommunicatorClosed: It is closed, or was fenced by the others.
        """
        owner = self._session.owner
        limit = seconds(timeout, self._session.settings.close_timeout)
        with self._calls.owning("suspend"):
            await self._engine.run(lambda: owner.suspend(limit))
            self._weights.release()

    async def resume(self) -> None:
        """End a :meth:`pause`, and come back from :meth:`suspend`.

        Paused: READs go on, at once. Suspended: register the weights as they are now, and allocate staging again.
        Tensors may have moved. The bytes must be those of the current placement: if they were written anew,
        :meth:`updating_weights` says so, before or after. Neither, this returns at once.

        Cancelled: the pause is over; resuming from a suspension goes on in the background; call it again to wait for
        it. Failed: the pause is over all the same.

        Raises:
            WeightsError: A tensor cannot be moved, is of another kind than before, or there is no memory for
                staging. It stays suspended.
            NixlTransferFailed: NIXL refuses the memory; ``HandshakeError``: a member of the view is not known gone,
                and cannot be reached. It stays suspended.
            CommunicatorBusy: Another operation is running.
            CommunicatorClosed: It is closed, or was fenced by the others.
        """
        owner = self._session.owner
        self._calls.check_usable()
        if self._session.throttle.paused:
            self._session.throttle.paused = False
            _log.info("no longer paused")
            self._engine.post(self._session.stir)
            if not owner.suspended:
                return
        with self._calls.owning("resume"):
            if await self._engine.run(owner.is_suspended):
                self._weights.rebind()  # the caller's callable runs on the caller's loop
                try:
                    await self._engine.run(owner.resume)
                except Exception:
                    self._weights.release()
                    raise

    async def exclude(self, rank: int) -> None:
        """Say that a rank is dead: the others go on without it, and it is fenced if it is not.

        Cancelled: it may have been said or not; say it again.

        Raises:
            ValueError: It is this rank, or no rank of the group.
            CommunicatorClosed: It is closed.
        """
        self._calls.check_usable()

        async def call() -> None:
            self._session.exclude(rank)

        await self._engine.run(call)

    async def reconnect(self, rank: int, *, timeout: float | None = None) -> None:
        """Have a rank back whose process started again and calls ``open``; every rank of the view calls this.

        It waits until the view has that rank again; then ``migrate`` works with all. The rank must be out of the
        view, as after its death or :meth:`exclude`. :attr:`placement` then says what its slots hold: what it said
        in ``open``, or nothing where the weights have changed version since.

        Cancelled, timed out or failed: this rank is as before, and it can be called again. The rank that opens is
        let in when all ranks have called it, with the same placement and weight version, and not before.

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
        with self._calls.doing("reconnect"):
            await self._engine.run(lambda: session.reconnect(rank, limit))

    def step(self, number: int | None = None) -> Steps:
        """Around each forward pass of an engine in lock-step: ``with comm.step(): …``, or ``async with``.

        Needs ``settings.activation == "step"``. Entering is the boundary between two steps: layers whose step has come
        are applied before it returns, and it waits where a decision about a layer must be known first. Both are
        bounded by ``settings.activation_timeout``: then the migration is given up, and after as long again it raises.
        Otherwise it takes about a microsecond. ``with`` may be used in any thread, one step at a time; in the thread
        of a loop it blocks that while it waits, and ``async with`` does not.

        All ranks must run the same steps with the same numbers. Tag what a step exchanges between ranks with its
        ``term``, so that a rank that was fenced cannot run one with the others.

        Cancelled while entering: the step has not begun.

        Args:
            number: The engine's own number of the step, above all before; default one more than the last. Give it
                where ranks come back into a group that has stepped on.

        Returns:
            What ``with`` needs; as the context it has ``number`` and ``term``.

        Raises:
            ActivationTimeout: On entering: what was waited for did not come. The step has not begun; enter it again.
            CommunicatorClosed: On entering: it is closed, or was fenced by the others.
            RuntimeError: A step is running, layers are applied at once, or ``with`` would wait for its own thread.
            ValueError: The number is not above the last one.
        """
        return self._stepping().next(number)

    def idle(self, number: int | None = None) -> None:
        """The engine stops stepping for now, on every rank after the same step; the next :meth:`step` ends that.

        Layers that are committed or voted for are then applied at once instead of at a step that may not come. Before
        its first step an engine is idle. Safe in the thread that steps, outside of a step.

        Args:
            number: The last step that the others have run, for a rank that came back and has not; default its own.

        Raises:
            RuntimeError: A step is running, or layers are applied at once.
            ValueError: The number is below the last step of this rank.
        """
        self._stepping().idle(number)

    def _stepping(self) -> Steps:
        if self._steps is None:
            raise RuntimeError("layers are applied at once; open with Settings(activation='step'), on every rank")
        return self._steps

    def using(self, layer: int) -> Use:
        """Around the use of a layer where layers are applied at once: ``async with comm.using(layer) as placement: …``.

        While inside, the rows of the layer do not change on this rank, and ``placement`` says what they hold; of other
        layers it says what was true on entering. A migration that is to apply the layer waits until all who are inside
        have left, and who comes meanwhile waits until it is applied: so stay for one forward pass of the layer, and do
        not keep rows beyond that. Two layers at once are fine. Nothing due, entering and leaving take about a
        microsecond. Needs ``settings.activation == "immediate"`` and weights on the CPU. It does not hold
        :meth:`updating_weights`, :meth:`suspend` or :meth:`rebind` off: what the owner does itself, it can time itself.

        ``with`` may be used in any thread; in the thread of a loop it blocks that while it waits, and ``async with``
        does not. Entering waits for ``settings.activation_timeout`` at most. Cancelled or raised while entering: not
        inside.

        Args:
            layer: The layer.

        Returns:
            What ``with`` and ``async with`` need; it may be kept, and entered any number of times at once. As the
            context it gives the placement.

        Raises:
            ValueError: There is no such layer.
            RuntimeError: Layers are applied at steps, or weights are on a CUDA device: kernels that were queued would
                outlive the ``with``. Use :meth:`step`. Or, on entering, ``with`` would wait for its own thread.
            ActivationTimeout: On entering: the apply of this layer did not end in time, because others did not leave
                it. One who is inside and enters again while an apply waits would wait for itself, and ends so, too.
            CommunicatorClosed: On entering: it is closed, or was fenced by the others.
        """
        self._engine.check_process()
        if self._uses is None:
            why = "layers are applied at steps" if self._steps is not None else "kernels outlive a `with` on CUDA"
            raise RuntimeError(f"using({layer!r}) is refused: {why}; open with activation='step' and use comm.step()")
        try:
            return self._uses[layer]
        except (KeyError, TypeError):
            last = len(self._uses) - 1
            raise ValueError(f"layer {layer!r} cannot be used: need a number from 0 to {last}") from None

    def on_applied(self, callback: AppliedCallback) -> Callable[[], None]:
        """Have one more callback told of each layer that is applied, as ``open(on_layer_applied=…)`` is.

        ``callback(layer, placement)`` runs in the thread that copies, on the server's stream on CUDA, after the rows
        and :attr:`placement` have changed and before a step or a user (:meth:`using`) comes to the layer. It holds the
        apply up, so it is short, and it must not wait for a migration or for a layer. Callbacks run in the order
        they were added, each in a copy of the context it was added in. What one raises is logged and counted
        (``health().callback_errors``), and the others run all the same. Thread-safe.

        Returns:
            Stops telling it. The call that runs in that moment is not waited for; again it does nothing.

        Raises:
            TypeError: It cannot be called.
        """
        return self._listeners.add(callback)

    @property
    def placement(self) -> Placement:
        """What is true now, layer by layer. Thread-safe."""
        return self._session.placement

    @property
    def activation(self) -> str:
        """``"immediate"`` or ``"step"``: when layers are applied, as the settings of ``open`` say. Thread-safe."""
        return self._session.settings.activation

    @property
    def view(self) -> View:
        """Who is in the group: term and members of the view. Thread-safe."""
        return self._session.driver.view

    @property
    def mail(self) -> Mail:
        """Small messages between members, for the layer above. Thread-safe."""
        return self._mail

    def watch(self, seconds: float) -> Callable[[], None]:
        """Send to every member at this interval also while nothing is waited for; 0 ends that, and is the default.

        So a process that has died is proven gone within one or two intervals, and the view changes without it, also
        while no migration runs. A member that is silent for two intervals and two of ``settings.idle_tick`` more is
        named in ``health().degraded`` until it is heard; silence is no proof, and changes nothing else. One that has
        not answered 64 pings gets one in 64, so its death is noticed that much later.

        Args:
            seconds: Between two messages to one member: 0, or 0.05 to 3600.

        Returns:
            Puts back what was before, unless it is closed, or was called again since.

        Raises:
            ValueError: It is none of these.
            CommunicatorClosed: It is closed.
        """
        self._calls.check_usable()
        return self._watch.set(checked_interval(seconds))

    def plan(self, placement: Placement, *, gbps: float | None = None, local_gbps: float | None = None) -> Forecast:
        """What :meth:`migrate` to this placement would move now: nothing is sent, and nothing changes.

        Of the last view, members and node labels, and the real sizes of the rows; so it answers at any time, also
        while a migration runs (of the layers as they are then) and after the end. Thread-safe. It takes
        milliseconds, tens of them for hundreds of ranks: a server calls it with ``asyncio.to_thread``.

        Args:
            placement: Where the experts would be.
            gbps: Gigabits per second of one rank's NIC, for ``seconds`` of what is returned.
            local_gbps: Gigabits per second that one rank moves within its node, for the same.

        Returns:
            What would move, in total, by kind and by rank. Experts without a source are in its ``lost``.

        Raises:
            PlacementError: It does not fit the current one, or uses slots of ranks that are out.
            ValueError: A rate is not above 0.
        """
        _check_placement(placement)
        return self._session.forecast(placement, gbps, local_gbps)

    def check_may_wait(self, what: str) -> None:
        """Refuse to block this thread for what the engine loop does, where that cannot be done. Thread-safe.

        Raises:
            RuntimeError: This is the engine's thread, which would wait for itself.
            CommunicatorClosed: This is a fork of the process that opened it.
        """
        self._engine.check_process()
        if threading.get_ident() == self._engine.thread_id:
            raise RuntimeError(f"{what} would wait for the engine loop in its own thread; call it from another one")

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

        Raises:
            CommunicatorBusy: Called from within a ``load_expert`` that a migration waits for.
        """
        self._calls.check_loop()
        refuse_inside(self._engine, "close")
        limit = seconds(timeout, self._session.settings.close_timeout)
        if self._closing is None:
            self._calls.closed = True
            self._mail.close()
            self._closing = asyncio.ensure_future(self._close(limit))
        return await asyncio.shield(self._closing)

    async def _close(self, limit: float) -> tuple[str, ...]:
        session, store, engine = self._session, self._store, self._engine

        async def close() -> tuple[str, ...]:
            try:
                return await session.close(limit)
            finally:
                await session.withdraw()
                if store is not None:
                    await engine.offload(store.close)
                if isinstance(engine, Engine):
                    engine.request_stop()

        left = await engine.run(close, detach=True)
        if isinstance(engine, Engine):
            await engine.astop()
        return left

    async def _take_moved(self) -> None:
        """Register tensors anew if their storage moved."""
        if await self._engine.run(self._session.owner.is_suspended):
            return  # resume() takes them
        try:
            self._weights.moved()
        except WeightsError:
            self._weights.rebind()
            await self._engine.run(self._session.rebind, detach=True)  # as in rebind()

    def __del__(self) -> None:
        calls = getattr(self, "_calls", None)
        if calls is None or calls.closed:
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


def _check_placement(placement: object) -> None:
    if not isinstance(placement, Placement):
        raise PlacementError(f"need a Placement, not {type(placement).__name__}")
