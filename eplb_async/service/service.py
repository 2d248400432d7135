"""``EplbService``: what keeps the experts of a server balanced while it answers."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb_async.communicator import MAX_MAIL, AsyncEplbCommunicator, MigrationReport
from eplb_async.communicator.loading import LoadExpert
from eplb_async.core.placement import Placement
from eplb_async.errors import CommunicatorClosed, RebalanceTimeout, describe
from eplb_async.service.actions import End
from eplb_async.service.counter import AttachedCounter
from eplb_async.service.decision import Policy, misplaced
from eplb_async.service.ending import Endings, failure_of, report_of
from eplb_async.service.forward import Forward
from eplb_async.service.gates import NEVER, Gates
from eplb_async.service.report import RebalanceReport, ServiceHealth
from eplb_async.service.rounds import AUTOMATIC
from eplb_async.service.runner import Runner
from eplb_async.service.sync import SyncService
from eplb_async.service.window import LoadWindow
from eplb_async.service_settings import ServiceSettings
from eplb_async.settings import seconds
from eplb_async.telemetry.emitter import Emitter
from eplb_async.telemetry.event import Hook
from eplb_async.threads import DaemonExecutor

__all__ = ["EplbService"]

_log = logging.getLogger("eplb_async.service")
_GONE = ("closing", "closed", "fenced")
_ROOM = 4096  # of a mail, for what is neither loads nor placement


class EplbService:
    """Load balancing of one rank: ``async with EplbService(comm) as service``. One on each rank of the group.

    The lowest rank of the view coordinates: every ``step_interval`` steps, after a change of the members, and when any
    rank calls :meth:`rebalance`, it sums the loads of all ranks, runs the policy, and tells all ranks the placement,
    which they migrate to. A failed round is logged, counted, and tried again after a back-off; it never ends the
    service.

    Bound to the loop that the communicator is bound to. :meth:`record`, :meth:`forward`, :meth:`idle`, :meth:`pause`,
    :meth:`resume` and :meth:`health` may be called in any thread.

    Args:
        comm: The communicator, which the service does not close.
        policy: ``policy(loads, placement)`` with loads float64 ``[num_layers, num_logical]``, summed over the ranks,
            gives the placement to move to. Called in a thread, on the coordinator. Default `rebalance_experts` from
            the placement as it is.
        settings: Default from ``EPLB_ASYNC_SERVICE_*``.
        load_expert: For ``comm.migrate``: supplies experts whose only copies were on ranks that are out. Either every
            rank has one or none.
        telemetry: Called with each event, on this loop, in the context of this call.

    Raises:
        ValueError: The group has more experts than fit in one message.
        RuntimeError: There is no running loop.
    """

    def __init__(
        self,
        comm: AsyncEplbCommunicator,
        *,
        policy: Policy | None = None,
        settings: ServiceSettings | None = None,
        load_expert: LoadExpert | None = None,
        telemetry: Hook | None = None,
    ) -> None:
        self._closed = "not entered yet; use `async with`"
        self.comm = comm
        self.settings = settings or ServiceSettings.from_env()
        health, placement = comm.health(), comm.placement
        _check_room(placement)
        self._rank = health.rank
        self._lockstep = comm.activation == "step"
        self._window = LoadWindow(placement, steps=self.settings.window_steps, rank=self._rank)
        self._counter: AttachedCounter | None = None
        self._uncount: Callable[[], None] = lambda: None
        self._put_back: list[Callable[[], None]] = []  # what the communicator was told
        self._collected = 0
        self._collecting = threading.Lock()
        self._aside: asyncio.Future[None] | None = None
        self._gates = Gates(self.settings)
        self._forward = Forward(comm, self._wake)
        self._alarm = NEVER  # of the steps recorded
        self._waiters: dict[int, asyncio.Future[RebalanceReport]] = {}
        self._tickets = itertools.count(AUTOMATIC + 1)
        self._closing: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._phase = ("idle", 0.0)
        self._thread = threading.get_ident()
        emitter = None if telemetry is None else Emitter(telemetry, group=health.group, rank=self._rank)
        self._endings = Endings(self._rank, automatic=self.settings.step_interval > 0, emitter=emitter)
        self._workers = self._make_workers(f"eplb-async service {self._rank}")
        self._runner = Runner(
            comm,
            self,
            rank=self._rank,
            settings=self.settings,
            policy=policy,
            load_expert=load_expert,
            workers=self._workers,
        )

    _make_workers = staticmethod(lambda name: DaemonExecutor(2, name=name))  # loads beside a policy that hangs
    """Gives the threads that sum loads and run the policy; a loop without threads has another."""

    async def __aenter__(self) -> EplbService:
        """Start; automatic rounds begin from now on.

        Raises:
            CommunicatorClosed: The communicator is closed, or was fenced.
            CommunicatorBusy: There is a service of this communicator already.
        """
        if self._closing is not None:
            raise CommunicatorClosed("the service is closed; make a new one")
        self._runner.start()
        try:
            if self.settings.watch_interval:
                self._put_back.append(self.comm.watch(self.settings.watch_interval))
            if self.settings.max_bytes_per_second:
                self._put_back.append(self.comm.limit(self.settings.max_bytes_per_second))
        except BaseException:
            self._let_go()
            raise
        self._closed = ""
        self._phase = ("idle", self._runner.loop.time())
        if misplaced(self.comm.placement, self.comm.view.members):
            self._gates.urge()  # as after a change of the members, which this rank may not have seen
        self._review()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # ------------------------------------------------------------------------------------------ any thread
    def record(self, counts: Any, *, by: str | None = None, placement: Placement | None = None) -> None:
        """Add the counts of one step to the window; takes microseconds.

        Over all ranks each token counts once for each expert that it goes to: count what arrives at the own slots, or
        what this rank sends. Leave padding tokens out, and do not call it for a dummy step.

        Args:
            counts: Tokens, integers or floats, numpy or torch in CPU memory: ``[num_layers, num_physical]``,
                ``[num_layers, num_logical]`` or ``[num_layers, num_local_experts]``. They are copied.
            by: ``"slots"``, ``"experts"`` or ``"local"``; default by the width.
            placement: Where the experts were in that step; default as in the last :meth:`forward`, else as they are.

        Raises:
            ValueError: The counts cannot be counted, or are of several kinds by their width; nothing was.
            PlacementError: The placement is of other sizes; nothing was counted.
        """
        self._window.record(counts, placement or self._forward.placement or self.comm.placement, by)
        if self._window.recorded >= self._alarm:
            self._alarm = NEVER
            self._wake()

    def forward(self, number: int | None = None) -> Forward:
        """Around each forward pass of an engine in lock-step, ``with`` or ``async with``: a step of the communicator.

        As ``comm.step(number)``, whose context it gives, and about a microsecond more: :meth:`record` goes by the
        placement of this step, and the step counts for ``step_interval``.

        Raises:
            ActivationTimeout: On entering, as ``comm.step()`` does, and likewise the next two.
            CommunicatorClosed: On entering: the communicator is closed, or was fenced.
            ValueError: The number is not above the last one.
            RuntimeError: A step is running, or layers are applied at once: there ``comm.using(layer)`` is the way.
        """
        if not self._lockstep:
            raise RuntimeError(
                "forward() is for engines in lock-step, opened with Settings(activation='step') on every rank; here "
                "layers are applied at once: enter comm.using(layer) around the use of each layer, and call record()"
            )
        self._forward.step = self.comm.step(number)
        return self._forward

    def idle(self, number: int | None = None) -> None:
        """The engine stops stepping for now, on every rank after the same step: ``comm.idle(number)``."""
        self.comm.idle(number)

    def stepped(self, steps: int = 1) -> None:
        """Say that steps were run, where neither :meth:`record` nor :meth:`forward` does; from one thread at a time.

        For engines that count in an attached counter, and whose layers are applied at once.

        Args:
            steps: How many.
        """
        self._forward.stepped(steps)

    def pause(self) -> None:
        """Take part in no round until :meth:`resume`, so that rounds end ``paused``; one that moves already goes on.

        ``comm.pause()`` is another thing: it holds up the READs of this rank.
        """
        self._on_loop(self._pause)

    def resume(self) -> None:
        """End a :meth:`pause`."""
        self._on_loop(self._resume)

    def health(self) -> ServiceHealth:
        """What is going on now."""
        rounds, now = self._runner.rounds, self._runner.loop.time()
        steps, leads = self._count(), rounds.coordinator == self._rank
        phase, since = self._phase
        return ServiceHealth(
            phase=phase,
            seconds_in_phase=max(0.0, now - since),
            round=rounds.number,
            rank=self._rank,
            coordinator=rounds.coordinator,
            members=rounds.members,
            waiting_for=rounds.waiting_for,
            paused=rounds.paused,
            steps=steps,
            steps_left=None if self._closed else self._gates.steps_left(steps, leads=leads),
            seconds_left=max(self._gates.wait(now), rounds.open_before(now)),
            rounds=dict(self._endings.outcomes),
            failures=self._gates.failures,
            dropped=dict(rounds.dropped),
            last_error=self._endings.last_error,
            last_report=self._endings.last_report,
            closed=self._closed or self._over(),
        )

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that it lives on."""
        return self._runner.loop

    @property
    def sync(self) -> SyncService:
        """The same calls for plain threads, which wait for this service's loop."""
        return SyncService(self)

    # -------------------------------------------------------------------------------------------- the loop
    def attach(self, counter: Any, *, by: str | None = None) -> None:
        """Read loads from a tensor that the engine's kernels add to, instead of :meth:`record`; replaces the last one.

        It is copied out beside the engine, eight times within ``window_steps`` steps, and before each round; steps are
        those of :meth:`forward`, or what :meth:`stepped` says. See `AttachedCounter` for what it may be.

        Args:
            counter: int32 or int64, torch or numpy, that only grows: as ``counts`` of :meth:`record`.
            by: As there.

        Raises:
            ValueError: It cannot be read, or is of several kinds by its width; the last one stays.
            CommunicatorClosed: The service is closed, or the communicator is closed or fenced.
        """
        self._check()
        comm = self.comm  # which holds the counter: it must not hold this
        made = AttachedCounter(counter, lambda: comm.placement, by=by, rank=self._rank)
        self._uncount()
        self._uncount, self._counter = self.comm.on_applied(made.applied), made
        self._collected = self._forward.count
        self._set_alarms()

    async def rebalance(self, *, force: bool = False, timeout: float | None = None) -> RebalanceReport:
        """Have a round now, and wait for its end on this rank. Any rank may ask; one round serves all who do.

        Cancelled or timed out: the round goes on in the background.

        Args:
            force: Move for any gain, and also within ``min_interval``. A rank that is paused is not moved.
            timeout: Seconds to wait; default what all deadlines of a round, and of one before it, add up to.

        Returns:
            How the round ended; never ``failed``.

        Raises:
            RebalanceTimeout: The timeout passed.
            RebalanceFailed: The round failed for a reason of another rank.
            CommunicatorClosed: The service is closed, or the communicator is closed or fenced.
            Exception: What failed on this rank: the policy, or ``migrate``.
        """
        self._check()
        limit = seconds(timeout, self.settings.rebalance_timeout)
        ticket = next(self._tickets)
        future: asyncio.Future[RebalanceReport] = self._runner.loop.create_future()
        self._waiters[ticket] = future
        try:
            self._runner.want(ticket, force=force)
            async with asyncio.timeout(limit):
                return await future
        except TimeoutError as error:
            if future.done() and not future.cancelled() and future.exception() is error:
                raise  # what the round failed of
            raise RebalanceTimeout(
                f"the round was not over within {limit:g} s and goes on: {self.health()}",
                round=self._runner.rounds.number,
            ) from None
        finally:
            self._waiters.pop(ticket, None)

    async def aclose(self) -> None:
        """Take part in no round any more; one that runs is ended, on all ranks. The communicator stays open.

        Its watch and its limit are again what they were before, unless somebody has changed them since.

        Idempotent: every call returns when it is closed. Cancelled: closing goes on in the background.
        """
        self._check_loop()
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    # ------------------------------------------------------------------------------- for what runs the rounds
    def loads(self) -> tuple[NDArray[np.float64], int]:
        """This rank's loads and the steps they are of; called in a thread."""
        self._collect()
        return self._window.loads()

    def began(self) -> None:
        """A round was begun here."""
        self._gates.began(self._count())
        self._set_alarms()

    def ended(self, end: End, cause: Exception | None, migration: MigrationReport | None) -> None:
        """A round, or the wish for one, is over here."""
        report, gates, now = report_of(end, migration), self._gates, self._runner.loop.time()
        if end.round or AUTOMATIC in end.tickets:
            gates.ended(report.outcome, now)
        self._endings.take(end, report, failures=gates.failures, wait=gates.wait(now), closed=bool(self._closed))
        for ticket in end.tickets:
            waiter = self._waiters.get(ticket)
            if waiter is None or waiter.done():
                continue
            if report.outcome != "failed":
                waiter.set_result(report)
            elif self._closed:
                waiter.set_exception(CommunicatorClosed(f"the service is over: {self._closed}"))
            else:
                waiter.set_exception(cause or failure_of(end))
        if not self._closed:
            self._runner.post(self._review)

    def viewed(self, *, changed: bool) -> None:
        """There may be another view; with other members, slots are empty, or hold what nobody can use."""
        if changed:
            self._gates.urge()
        self._runner.post(self._review)

    def note(self) -> None:
        """Where the rounds stand has changed, or not."""
        rounds = self._runner.rounds
        phase = "closed" if self._closed else rounds.stage
        phase = "paused" if phase == "idle" and rounds.paused else phase
        if phase != self._phase[0]:
            self._phase = (phase, self._runner.loop.time())

    def lost(self) -> None:
        """The communicator is out of the group: the service is over."""
        if self._closed or self._closing is not None:
            return
        self._closed = why = self._over() or "the communicator is closed"
        level = logging.ERROR if _is_bad(why) else logging.INFO
        _log.log(level, "rank %d: the service is over, since %s; open both anew", self._rank, why)
        self._runner.post(self._begin_close)

    # ---------------------------------------------------------------------------------------------- within
    def _begin_close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())

    async def _close(self) -> None:
        self._closed = self._closed or "closed"
        if self._timer is not None:
            self._timer.cancel()
        self._alarm = self._forward.alarm = NEVER
        await self._runner.close("its service closes")
        self._let_go()
        for waiter in self._waiters.values():
            if not waiter.done():
                waiter.set_exception(CommunicatorClosed(f"the service is over: {self._closed}"))
        self._workers.shutdown()
        self.note()

    def _let_go(self) -> None:
        """Leave the communicator as it was; from any thread."""
        self._runner.forget()
        self._uncount()
        for put_back in self._put_back:
            put_back()
        self._put_back.clear()

    def _count(self) -> int:
        """Steps so far: recorded, or run, whichever are more."""
        return max(self._window.recorded, self._forward.count)

    def _collect(self) -> None:
        with self._collecting:
            if self._counter is not None:
                loads = self._counter.collect(timeout=self.settings.round_timeout)
                steps, self._collected = self._forward.count - self._collected, self._forward.count
                self._window.add(loads, steps)

    def _wake(self) -> None:
        self._runner.post(self._review)

    def _review(self) -> None:
        """Steps have passed, or time, or a round: is the next one due?"""
        if self._closed:
            return
        if self._over():
            self.lost()
            return
        rounds, now = self._runner.rounds, self._runner.loop.time()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        behind = self._forward.count - self._collected
        if self._counter is not None and behind >= self._pace() and (self._aside is None or self._aside.done()):
            self._aside = self._runner.loop.run_in_executor(self._workers, self._collect_aside)
        left = self._gates.steps_left(self._count(), leads=rounds.coordinator == self._rank)
        if left == 0 and rounds.stage == "idle" and not rounds.paused:
            wait = max(self._gates.wait(now), rounds.open_before(now))
            if wait > 0:
                self._timer = self._runner.loop.call_later(wait, self._review)
            else:
                self._gates.began(self._count())
                self._runner.want(AUTOMATIC)
        self._set_alarms()

    def _set_alarms(self) -> None:
        """At which step to look again. What is due already is looked at when a round or a pause ends, or by time."""
        left = self._gates.steps_left(self._count(), leads=self._runner.rounds.coordinator == self._rank)
        at = self._count() + left if left and not self._closed else NEVER
        self._alarm = self._forward.alarm = at
        if self._counter is not None and not self._closed:
            self._forward.alarm = min(at, max(self._forward.count + 1, self._collected + self._pace()))

    def _pace(self) -> int:
        """Steps between two copies of the counter."""
        return max(1, self.settings.window_steps // 8)

    def _collect_aside(self) -> None:
        try:
            self._collect()
        except Exception as error:
            self._endings.last_error = f"the attached counter cannot be read: {describe(error)}"
            _log.exception("rank %d: the attached counter cannot be read; attach it anew", self._rank)

    def _pause(self) -> None:
        if not self._runner.rounds.paused:
            self._runner.do(self._runner.rounds.pause())
            _log.info("rank %d: rebalancing is paused until resume(), on all ranks", self._rank)
            self._endings.emit("rebalancing_paused")

    def _resume(self) -> None:
        if self._runner.rounds.paused:
            self._runner.rounds.paused = False
            _log.info("rank %d: rebalancing goes on", self._rank)
            self._endings.emit("rebalancing_resumed")
            self.note()
            self._review()

    def _over(self) -> str:
        """Why the communicator is of no use any more; empty while it is."""
        health = self.comm.health()
        if health.phase not in _GONE:
            return ""
        return f"the communicator is {health.last_error if _is_bad(health.last_error) else health.phase}"

    def _on_loop(self, call: Callable[[], object]) -> None:
        if threading.get_ident() == self._thread:
            call()
        else:
            self._runner.post(call)

    def _check(self) -> None:
        self._check_loop()
        if why := self._closed or self._over():
            raise CommunicatorClosed(f"the service is over: {why}")

    def _check_loop(self) -> None:
        if threading.get_ident() != self._thread or asyncio.get_running_loop() is not self._runner.loop:
            raise RuntimeError("the service is bound to the event loop that made it; elsewhere use service.sync")

    def __del__(self) -> None:
        if getattr(self, "_closed", "not made"):
            return
        self._let_go()
        self._workers.shutdown()
        warnings.warn(f"rank {self._rank}'s service was never closed; use `async with`", ResourceWarning, stacklevel=2)

    def __repr__(self) -> str:
        return f"<EplbService of rank {self._rank}: {self._closed or self._phase[0]}>"


def _is_bad(why: str) -> bool:
    """Whether a communicator did not end as its owner wanted."""
    return "fenced: " in why or "broken: " in why


def _check_room(placement: Placement) -> None:
    largest = max(8 * placement.num_layers * placement.num_logical, 4 * placement.num_layers * placement.num_physical)
    if largest + _ROOM > MAX_MAIL:
        raise ValueError(f"loads of {largest} bytes do not fit in a message of {MAX_MAIL}: too many layers and experts")
