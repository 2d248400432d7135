"""One opened communicator as it lives on its engine loop: agent, protocol, weights and staging together."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor

import torch

from eplb_async.communicator.agents import Agents
from eplb_async.communicator.attempt import Attempt
from eplb_async.communicator.driver import Driver
from eplb_async.communicator.ending import Ending
from eplb_async.communicator.entrance import Entrance
from eplb_async.communicator.epoch import EpochRun
from eplb_async.communicator.introduction import Introducer
from eplb_async.communicator.job import room_for
from eplb_async.communicator.listeners import Listeners
from eplb_async.communicator.loading import Loader
from eplb_async.communicator.meetings import Meetings
from eplb_async.communicator.members import Identity, Roster, memory_of
from eplb_async.communicator.owner import Owner
from eplb_async.communicator.reconnect import Reconnector
from eplb_async.communicator.report import Health, MigrationReport
from eplb_async.communicator.steps import Steps
from eplb_async.communicator.using import Users
from eplb_async.communicator.watchdog import Watchdog
from eplb_async.core import events, messages
from eplb_async.core.events import Phase, Proof
from eplb_async.core.forecast import Forecast
from eplb_async.core.placement import Placement
from eplb_async.core.plan import PLAN_VERSION, MigrationPlan, plan
from eplb_async.core.throttle import Throttle
from eplb_async.engine import LoopEngine
from eplb_async.errors import (
    ActivationTimeout,
    CommunicatorClosed,
    MigrationAborted,
    MigrationInDoubt,
    MigrationTimeout,
    PlacementError,
    WeightsError,
    describe,
)
from eplb_async.nixl.endpoint import Endpoint, NativeFactory
from eplb_async.rendezvous import Rendezvous
from eplb_async.settings import Settings
from eplb_async.telemetry.emitter import Emitter
from eplb_async.weights import Copier, Digester, ExpertWeights, Staging, make_buffers, pack

_log = logging.getLogger("eplb_async.communicator")
_DRAIN_SECONDS = 0.5
_HAIR = 1e-4


class Session:
    """Everything native of one communicator. Every method runs on the engine loop.

    Args:
        identity: Who this rank is.
        engine: The engine loop.
        settings: Settings.
        key: The job's key.
        weights: This rank's rows.
        placement: Where the experts are.
        copier: Copies rows.
        staging: Bytes, or the caller's buffer; ``None`` for the default.
        native: Makes native agents.
        emitter: Tells a hook what happens; ``None`` if nobody wants to know.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        engine: LoopEngine,
        settings: Settings,
        key: bytes,
        weights: ExpertWeights,
        placement: Placement,
        copier: Copier,
        staging: int | torch.Tensor | None,
        native: NativeFactory,
        emitter: Emitter | None = None,
    ) -> None:
        self.placement = placement
        self.emitter = emitter
        self.settings = settings
        self.weights = weights
        self.version = 0
        self.met_seconds: dict[int, float] = {}
        self.throttle = Throttle(settings.max_bytes_per_second)
        self.listeners: Callable[[], Listeners | None] = lambda: None
        self.callback_errors = 0
        self._engine = engine
        self._copier = copier
        self._roster = Roster()
        self._read_failures: dict[int, str] = {}  # as noted in degraded, until the next migration begins
        self.steps = None if settings.activation == "immediate" else self._make_steps()
        self.users = self._make_users(identity.rank) if self.steps is None and not _on_cuda(weights) else None
        self.driver = Driver(
            identity,
            engine=engine,
            settings=settings,
            key=key,
            roster=self._roster,
            num_layers=placement.num_layers,
            emit=None if emitter is None else emitter.emit,
            steps=self.steps,
            users=self.users,
        )
        self.driver.on_standing = Watchdog(engine.loop, settings.watchdog_fraction, self.health).note
        self._introducer = Introducer(
            self.driver,
            self._roster,
            weights.layout,
            placement.digest(),
            key,
            settings,
            current=lambda: (self.placement, self.version),
        )
        self._given_staging = staging
        self._staging = Staging(self.make_staging())
        self._agents = Agents(
            engine=engine,
            settings=settings,
            native=native,
            driver=self.driver,
            roster=self._roster,
            introducer=self._introducer,
            weights=weights,
            staging=self._staging,
        )
        self.owner = Owner(
            self,
            engine=engine,
            driver=self.driver,
            agents=self._agents,
            weights=weights,
            staging=self._staging,
            copier=copier,
            digester=Digester(engine) if settings.verify == "full" else None,
        )
        self.owner.write_entries()
        self._meetings = Meetings(self.driver, self._introducer, engine=engine, endpoint=lambda: self.endpoint)
        self._reconnector = Reconnector(
            self.driver,
            self._introducer,
            self._meetings,
            engine=engine,
            current=lambda: (self.placement, self.version),
            adopt=self._adopt,
        )

    @property
    def endpoint(self) -> Endpoint:
        """This rank's agent."""
        return self._agents.current

    def make_staging(self) -> dict[str, torch.Tensor]:
        """Staging for the weights as they are, by memory type; the caller's own buffer if there is one."""
        weights = self.weights
        devices = {memory_of(str(t.device)): t.device for tensors in weights.layers for t in tensors.values()}
        devices["DRAM"] = torch.device("cpu")
        needed = _largest_layer(weights, self.placement)
        buffers = make_buffers(
            self._given_staging,
            needed,
            devices,
            layers=self.settings.staging_layers,
            num_layers=self.placement.num_layers,
        )
        _refuse_own_memory(weights, buffers)
        return buffers

    # ---------------------------------------------------------------------------------------------- open
    async def introduce(self, rendezvous: Rendezvous, timeout: float, executor: Executor | None) -> None:
        """Exchange introductions with all peers, or come back into a group that runs; each has ``timeout`` seconds.

        Raises:
            HandshakeError: Lists every peer that failed and why.
        """
        me = self.driver.identity
        await self._copier.fence()
        self._meetings.rendezvous, self._meetings.executor = rendezvous, executor
        entrance = Entrance(
            self.driver,
            self._introducer,
            self._meetings,
            engine=self._engine,
            current=lambda: (self.placement, self.version),
            adopt=self._adopt,
        )
        with self.endpoint.serving():
            self.met_seconds = await entrance.enter(timeout)
        slowest = max(self.met_seconds.items(), key=lambda met: met[1], default=None)
        if slowest is not None:
            _log.info("rank %d met %d peers; slowest was rank %d, %.3f s", me.rank, len(self.met_seconds), *slowest)

    # ------------------------------------------------------------------------------------------- migrate
    async def migrate(self, new: Placement, timeout: float, loader: Loader | None = None) -> MigrationReport:
        """Run one migration; see ``AsyncEplbCommunicator.migrate``."""
        if self.emitter is None:
            return await self._migrate(new, timeout, loader)
        with Ending(self.emitter.emit, self.driver, self._engine.loop, self.placement.num_layers) as ending:
            return await self._migrate(new, timeout, loader, ending)

    async def _migrate(
        self, new: Placement, timeout: float, loader: Loader | None, ending: Ending | None = None
    ) -> MigrationReport:
        deadline = self._engine.loop.time() + timeout
        ended: MigrationAborted | None = None
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    with self.owner.migration():
                        self.endpoint.look()  # an idle rank polls slowly: hear first what the others said meanwhile
                        wanted, planned = await self._prepare(new)
            except TimeoutError:
                raise (ended or self.unsettled("migration", timeout)) from None
            except PlacementError as error:
                if ended is not None:
                    raise ended from error  # in the view that is left it cannot be done
                raise
            self._check_open()
            refusal = wanted.lost_error() if loader is None else None
            if refusal is not None and len(wanted.members) == 1:
                raise refusal
            attempt = Attempt(
                wanted,
                deadline=deadline,
                endpoint=self.endpoint,
                loop=self._engine.loop,
                planned_seconds=planned,
                make_run=self._make_run,
                loader=loader,
                refusal=refusal,
                overdue=lambda attempt: self._overdue(attempt, timeout),
            )
            if ending is not None:
                ending.attempt = attempt
            try:
                return await self._see_through(attempt, timeout)
            except MigrationAborted as error:
                if not attempt.again:
                    raise
                _log.info("migration is made again: %s", error.reason)
                ended = error

    async def _see_through(self, attempt: Attempt, timeout: float) -> MigrationReport:
        """One attempt, from JOIN to its result."""
        timer = self._engine.loop.call_at(attempt.deadline, self._expire, attempt, timeout)
        try:
            self.driver.begin(attempt, self._digests(attempt.plan, refuses=attempt.cause is not None))
            return await asyncio.shield(attempt.result)
        except asyncio.CancelledError as error:
            why = f": {error.args[0]}" if error.args and isinstance(error.args[0], str) else ""
            self.driver.give_up(attempt, f"cancelled by its caller{why}")
            raise
        finally:
            timer.cancel()

    async def settled(self) -> None:
        """Wait until nothing of an earlier migration is under way."""
        await self._agents.settled()
        await self.driver.until(lambda: self.driver.settled)
        self._check_open()

    async def settled_within(self, timeout: float, what: str) -> None:
        """As :meth:`settled`, for ``what``, which is then not begun.

        Raises:
            MigrationTimeout: It takes longer; ``MigrationInDoubt``: and it is not known how it ends.
        """
        try:
            async with asyncio.timeout(timeout):
                await self.settled()
        except TimeoutError:
            raise self.unsettled(what, timeout) from None

    async def rebind(self) -> None:
        """Register the tensors as the weights say they are now; peers are introduced to a new incarnation."""
        self._check_open()
        try:
            await self._agents.recycle("weights were rebound")
        except Exception as error:  # peers would read the memory that was left
            self.driver.break_off(f"the weights could not be registered anew: {describe(error)}")
            raise

    def exclude(self, rank: int) -> None:
        """The caller says that a rank is dead."""
        self._check_open()
        self._check_other(rank)
        self.driver.gone(rank, Proof.EXCLUDED)

    async def reconnect(self, rank: int, timeout: float) -> None:
        """Have a rank that started again back; see ``AsyncEplbCommunicator.reconnect``."""
        self._check_open()
        self._check_other(rank)
        await self._reconnector.reconnect(rank, timeout, self.settled)

    def forecast(self, new: Placement, gbps: float | None, local_gbps: float | None) -> Forecast:
        """What a migration would move now; reads only, so any thread may call it.

        Raises:
            PlacementError: As `migrate` would.
        """
        layout = self.weights.layout
        sizes = tuple(layout.layer_bytes(layer) for layer in range(len(layout.layers)))
        return Forecast(self._plan(new), sizes, gbps=gbps, local_gbps=local_gbps)

    def stir(self) -> None:
        """The throttle was changed: READs that wait may go."""
        if self.driver.attempt is not None and self.driver.attempt.run is not None:
            self.driver.attempt.run.stir()

    def limit(self, bytes_per_second: int) -> None:
        """Another limit of this rank's READs; 0 for none."""
        self.throttle.limit(bytes_per_second, self._engine.loop.time())
        self.stir()

    def health(self) -> Health:
        """What is going on; reads only, so any thread may call it."""
        driver, protocol, endpoint = self.driver, self.driver.protocol, self.endpoint
        standing, stats, now = driver.standing, endpoint.stats(), self._engine.loop.time()
        moving = protocol.prepared if standing.phase in ("open", "settling", "in_doubt") else None
        dropped = Counter(dict(driver.dropped)) + Counter(dict(protocol.dropped))
        dropped["too many"] += endpoint.dropped
        return Health(
            phase="suspended" if standing.phase == "idle" and self.owner.suspended else standing.phase,
            seconds_in_phase=max(0.0, now - standing.since),
            seconds_left=None if standing.deadline is None else standing.deadline - now,
            rank=driver.identity.rank,
            term=protocol.term,
            members=tuple(sorted(protocol.members)),
            epoch=protocol.epoch,
            layer=moving if stats.oldest_layer is None else stats.oldest_layer,
            prepared=protocol.prepared,
            committed=protocol.committed,
            num_layers=self.placement.num_layers,
            waiting_for=tuple(sorted(protocol.waiting_for)),
            degraded=dict(driver.degraded),
            reads_in_flight=stats.in_flight + stats.quarantined,
            oldest_read_seconds=stats.oldest_seconds,
            oldest_read_peer=stats.oldest_peer,
            oldest_read_rank=stats.oldest_rank,
            oldest_read_layer=stats.oldest_layer,
            oldest_read_bytes=stats.oldest_bytes,
            quarantined_bytes=stats.quarantined_bytes,
            recycled=self._agents.recycled,
            weight_version=self.version,
            paused=self.throttle.paused,
            max_bytes_per_second=self.throttle.bytes_per_second,
            step=0 if self.steps is None else self.steps.number,
            due=(due := {} if self.steps is None else self.steps.waiting),
            behind=driver.strides.behind() if due else (),
            in_use={} if self.users is None else self.users.waiting,
            callback_errors=self.callback_errors,
            half_written=tuple(sorted(self.owner.half_written)),
            dropped={why: count for why, count in dropped.items() if count},
            last_error=driver.last_error,
            group=driver.identity.group,
            polls=self._agents.polls,
            telemetry_errors=0 if self.emitter is None else self.emitter.errors,
        )

    # --------------------------------------------------------------------------------------------- close
    async def close(self, timeout: float) -> tuple[str, ...]:
        """End what runs, leave, drain, destroy the agent before the memory goes (rule 10, I-4).

        Returns:
            What had not ended and went with the agent, in words.
        """
        deadline = self._engine.loop.time() + timeout
        self._engine.off_stop(self.wind_down)
        if self.endpoint.closed:
            return ()
        self._agents.begin_close()
        self.driver.close_by = deadline
        if self.steps is not None:
            self.steps.end("closed")  # nobody steps with this rank any more: what is due is applied now
        if self.users is not None:
            self.users.end("closed")
        if not self.driver.over:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    self.driver.feed(events.Close())
                    await self.driver.until(lambda: bool(self.driver.over) and self.driver.attempt is None)
        self.driver.stop()
        late: list[str] = []
        if self.steps is not None:
            waiting = self.steps.abandon()
            late = [f"layer {layer}, committed for step {at} and not applied" for layer, at in waiting.items()]
        in_use = {} if self.users is None else self.users.abandon()
        if self.driver.attempt is not None:
            self.driver.attempt.fail(CommunicatorClosed("closed while a migration was running"))
            if (run := self.driver.attempt.run) is not None:
                await run.stop()
                late += [] if self.steps is not None else _in_the_way(in_use, run.due)
        self.driver.over = self.driver.over or "closed"
        self.driver.note()
        left = await self._agents.close(max(0.0, deadline - self._engine.loop.time()))
        left += tuple(late)
        if self.emitter is not None:
            self.emitter.emit("closed", left=left)
        return left

    async def wind_down(self) -> None:
        """Close because the engine stops."""
        await self.close(self.settings.close_timeout)

    # -------------------------------------------------------------------------------------------- within
    def _plan(self, new: Placement) -> MigrationPlan:
        members = self.driver.protocol.members
        nodes = self._nodes(members)
        labels = [nodes.get(rank, "") for rank in range(self.driver.identity.ep_size)]
        return plan(self.placement, new, nodes=labels, members=members, load_lost=True)

    def _nodes(self, members: Collection[int]) -> dict[int, str]:
        """Host label of each member; of others not all ranks need know one."""
        me = self.driver.identity
        return {m.rank: m.node for m in self._roster if m.rank in members} | {me.rank: me.node}

    def _adopt(self, placement: Placement, version: int) -> None:
        """A rank came back, or this one did: where the experts are now."""
        self.placement, self.version = placement, version
        self.owner.write_entries()

    def _check_other(self, rank: int) -> None:
        me = self.driver.identity
        if type(rank) is not int or not 0 <= rank < me.ep_size or rank == me.rank:
            raise ValueError(f"rank {rank!r} is not another rank of this group of {me.ep_size}")

    def _digests(self, wanted: MigrationPlan, *, refuses: bool) -> messages.Digests:
        """Digests of JOIN; a rank that cannot load what is lost joins with one that no other rank has.

        So all ranks learn that it refuses, however late they join, and no READ is posted.
        """
        refuser = self.driver.identity.rank if refuses else -1
        margin = -1 if self.steps is None else self.settings.step_margin  # what is a hold to one must be one to all
        nodes = sorted(self._nodes(wanted.members).items())
        rest = (PLAN_VERSION, wanted.members, nodes, self.settings.verify, margin, refuser)
        digest = hashlib.blake2b(repr(rest).encode(), digest_size=16 - messages.VERSION_BYTES).digest()
        return (wanted.old.digest(), wanted.new.digest(), digest + self.version.to_bytes(messages.VERSION_BYTES))

    def _make_run(self, attempt: Attempt) -> EpochRun:
        def staged(upto: int) -> None:
            if self.driver.attempt is attempt:
                holds = None if self.steps is None else (self.steps.voted(upto - 1),) * self.placement.num_layers
                self.driver.feed(events.Staged(upto, holds))

        def failed(error: Exception) -> None:
            attempt.cause = error
            _log.error("migration fails on rank %d: %s", self.driver.identity.rank, describe(error))
            self.driver.give_up(attempt, describe(error))

        def applied(layers: range) -> None:
            self.placement = self.placement.with_layers(attempt.plan.new, layers.stop)
            if self.emitter is not None:
                for layer in layers:
                    self.emitter.emit("layer_applied", layer=layer, epoch=attempt.epoch)

        def retried(layer: int, experts: Sequence[int], source: int, instead: int, error: Exception) -> None:
            why = describe(error)
            what = f"rank {instead} serves experts {list(experts)} of layer {layer} instead of rank {source}"
            _log.warning("rank %d: %s: %s", self.driver.identity.rank, what, why)
            if source not in self.driver.degraded:
                self.driver.degraded[source] = self._read_failures[source] = f"a READ from it failed: {why}"

        for rank, why in self._read_failures.items():  # of an earlier migration
            if self.driver.degraded.get(rank) == why:
                del self.driver.degraded[rank]
        self._read_failures.clear()
        return EpochRun(
            plan=attempt.plan,
            rank=self.driver.identity.rank,
            sources={member.rank: member for member in self._roster},
            engine=self._engine,
            endpoint=self.endpoint,
            weights=self.weights,
            staging=self._staging,
            copier=self._copier,
            settings=self.settings,
            throttle=self.throttle,
            version=self.version,
            loader=attempt.loader,
            digester=self.owner.digester,
            deadline=attempt.deadline - _HAIR,  # a READ that is late is the cause, so it is late first
            on_staged=staged,
            on_failed=failed,
            on_applied=applied,
            on_retry=retried,
            after_apply=self._tell_applied,
            emit=None if self.emitter is None else self.emitter.emit,
            steps=self.steps,
            users=self.users,
        )

    async def _tell_applied(self, layer: int) -> None:
        """Have the caller's routing tables follow, before a step runs with the layer."""
        listeners, placement = self.listeners(), self.placement
        if not listeners:
            return
        failed: list[tuple[str, BaseException]] = []
        try:
            await self._copier.call(lambda: failed.extend(listeners.tell(layer, placement)))
        except Exception as error:  # what the callbacks have queued failed
            failed.append(("what on_layer_applied began", error))
        for name, why in failed:
            self.callback_errors += 1
            self.driver.last_error = f"{name} failed for layer {layer}: {describe(why)}"
            _log.error("%s failed for layer %d, which is applied", name, layer, exc_info=why)

    def _make_steps(self) -> Steps:
        settings = self.settings
        steps = Steps(
            self._engine, margin=settings.step_margin, timeout=settings.activation_timeout, mark=self._copier.mark
        )

        def give_up(reason: str) -> None:
            if self.driver.attempt is not None:
                self.driver.give_up(self.driver.attempt, reason)

        steps.give_up = give_up
        steps.awaited = lambda: self.driver.protocol.waiting_for
        return steps

    def _make_users(self, rank: int) -> Users:
        def changed() -> None:
            self.driver.note()
            if self.driver.attempt is not None and self.driver.attempt.late:  # they came in behind the deadline
                self.driver.attempt.fail_if_overdue()

        return Users(
            self._engine,
            rank=rank,
            num_layers=self.placement.num_layers,
            timeout=self.settings.activation_timeout,
            current=lambda: self.placement,
            changed=changed,
        )

    def _overdue(self, attempt: Attempt, timeout: float) -> ActivationTimeout | None:
        """The error of an epoch that is over, but for layers that cannot be applied by the deadline of ``migrate``."""
        if self.users is not None and (in_use := self.users.waiting) and attempt.run is not None:
            layer, count = min(in_use.items())
            rank = self.driver.identity.rank
            return ActivationTimeout(
                f"layer {layer} is committed, and its {count} users on rank {rank}, which it waits for, did not leave "
                f"within {timeout:g} s. It is applied when the last of them leaves using({layer}), and the next "
                "migrate waits for that",
                layer=layer,
                step=0,
                ranks=(rank,),
                epoch=self.driver.protocol.epoch,
                reason=_waits_for_users(in_use),
                committed_layers=attempt.run.due.stop,
            )
        if self.steps is None or not (due := self.steps.waiting):
            return None
        layer, at = min(due.items())
        behind = self.driver.strides.behind()
        committed = max(due) + 1
        return ActivationTimeout(
            f"layer {layer} is committed, and step {at}, before which it is to be applied, did not come within "
            f"{timeout:g} s; least far are ranks {list(behind)}, this rank began step {self.steps.number} last. It is "
            "applied when the step comes, and the next migrate waits for that. An engine that has stopped stepping "
            "says so with idle(), on every rank",
            layer=layer,
            step=at,
            ranks=behind,
            epoch=self.driver.protocol.epoch,
            reason=f"step {at} did not come",
            committed_layers=committed,
        )

    def _expire(self, attempt: Attempt, timeout: float) -> None:
        protocol = self.driver.protocol
        self.endpoint.look()  # completions before deadlines (I-11); a READ that is overdue is our own cause
        if attempt.cause is None and attempt.run is not None:
            attempt.cause = attempt.run.read_error()
        waiting = f", waiting for ranks {sorted(protocol.waiting_for)}" if protocol.waiting_for else ""
        if not protocol.has_majority:
            lost = sorted(protocol.gone & protocol.members)
            waiting += f", and without ranks {lost} there is no majority: say which are dead with exclude()"
        if attempt.run is not None and attempt.run.waiting:
            waiting += f", waiting for {attempt.run.waiting} of this rank"
        if self.users is not None and (in_use := self.users.waiting):
            waiting += f", and {_waits_for_users(in_use)}"
        if attempt.held:
            waiting += f"; {attempt.held}"
        undecided = f", layer {protocol.committed} undecided" if protocol.prepared > protocol.committed else ""
        attempt.late = True
        attempt.fail_if_overdue()
        self.driver.give_up(
            attempt,
            f"timed out after {timeout:g} s in phase {protocol.phase.value} with {protocol.prepared} of "
            f"{self.placement.num_layers} layers prepared{undecided}{waiting}",
        )

    def unsettled(self, what: str, timeout: float) -> MigrationTimeout | MigrationInDoubt:
        """The error of what could not begin because an earlier migration had not settled."""
        rank = self.driver.identity.rank
        if self.driver.protocol.phase is Phase.IN_DOUBT:
            return MigrationInDoubt(
                f"{what} not begun: an earlier migration is still in doubt: {self.driver.last_error}",
                origin=rank,
                reason=self.driver.last_error,
            )
        why = f"timed out after {timeout:g} s: an earlier migration or a view change had not settled"
        if self.steps is not None and (due := self.steps.waiting):
            waits = ", ".join(f"layer {layer} for step {at}" for layer, at in due.items())
            why += f" ({waits} waits; least far are ranks {list(self.driver.strides.behind())})"
        if self.users is not None and (in_use := self.users.waiting):
            why += f" ({_waits_for_users(in_use)})"
        return MigrationTimeout(f"{what} not begun: {why}", origin=rank, reason=why)

    async def _prepare(self, new: Placement) -> tuple[MigrationPlan, float]:
        """Plan, and make room for it; anew if the view changed meanwhile. Returns what planning took, too."""
        while True:
            await self.settled()
            before = self._engine.loop.time()
            wanted = await self._engine.offload(lambda: self._plan(new))
            planned = self._engine.loop.time() - before
            await self._make_room(wanted)
            await self._copier.fence()  # JOIN says that peers may read the rows (I-18)
            if self.driver.settled and wanted.members == tuple(sorted(self.driver.protocol.members)):
                return wanted, planned

    async def _make_room(self, wanted: MigrationPlan) -> None:
        """Recycle the agent if quarantine leaves too little staging for this plan (DESIGN §5)."""
        counts = wanted.num_moves(self.driver.identity.rank).tolist()
        kinds = {
            (tuple(place.spec for place in places), count)
            for places, count in zip(self.weights.layout.layers, counts, strict=True)
        }
        needs = [room_for(specs, count)[1] for specs, count in kinds]
        if all(map(self._staging.fits, needs)):
            return
        await self.endpoint.drained(_DRAIN_SECONDS)
        self._check_open()
        if not all(map(self._staging.fits, needs)):
            await self._agents.recycle(f"quarantine holds {self._staging.reclaim()} bytes of staging")

    def _check_open(self) -> None:
        if self.driver.over:
            raise CommunicatorClosed(f"the communicator is {self.driver.over}")


def _on_cuda(weights: ExpertWeights) -> bool:
    return any(tensor.is_cuda for tensors in weights.layers for tensor in tensors.values())


def _waits_for_users(in_use: Mapping[int, int]) -> str:
    return ", ".join(f"layer {layer} is committed and waits for {n} users to leave it" for layer, n in in_use.items())


def _in_the_way(in_use: Mapping[int, int], due: range) -> list[str]:
    """What was not applied, in words: the layer whose users did not leave, and those after it."""
    users = [f": {count} users of layer {layer} had not left" for layer, count in in_use.items()]
    return [f"layer {layer}, committed and not applied{''.join(users)}" for layer in due]


def _refuse_own_memory(weights: ExpertWeights, buffers: dict[str, torch.Tensor]) -> None:
    """Staging that is (part of) the weights would be overwritten by what is read into it."""
    for rows, name in weights.regions():
        for buffer in buffers.values():
            start, end = buffer.data_ptr(), buffer.data_ptr() + buffer.numel()
            if rows.device == buffer.device and rows.data_ptr() < end and start < rows.data_ptr() + rows.nbytes:
                raise WeightsError(f"staging shares memory with the weights (region {name}); give it its own")


def _largest_layer(weights: ExpertWeights, placement: Placement) -> dict[str, int]:
    """Bytes of the largest layer that one rank can receive, by memory type: every local slot new."""
    needed: dict[str, int] = {}
    for places in weights.layout.layers:
        parts = [(memory_of(p.spec.device), p.spec.row_bytes * placement.num_local_experts) for p in places]
        _, sizes = pack(parts)
        for memory, size in sizes.items():
            needed[memory] = max(needed.get(memory, 0), size)
    return needed
