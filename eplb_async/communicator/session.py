"""One opened communicator as it lives on its engine loop: agent, protocol, weights and staging together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import Executor

import torch

from eplb_async.communicator.agents import Agents
from eplb_async.communicator.delays import Delays, not_applied
from eplb_async.communicator.driver import Driver
from eplb_async.communicator.entrance import Entrance
from eplb_async.communicator.health import health_of
from eplb_async.communicator.introduction import Introducer
from eplb_async.communicator.listeners import Listeners
from eplb_async.communicator.loading import Loader
from eplb_async.communicator.meetings import Meetings
from eplb_async.communicator.members import Identity, Roster
from eplb_async.communicator.migrations import Migrations
from eplb_async.communicator.owner import Owner
from eplb_async.communicator.reconnect import Reconnector
from eplb_async.communicator.report import Health, MigrationReport
from eplb_async.communicator.room import make_staging
from eplb_async.communicator.runs import Runs
from eplb_async.communicator.steps import Steps
from eplb_async.communicator.using import Users
from eplb_async.communicator.watchdog import Watchdog
from eplb_async.core import events
from eplb_async.core.events import Proof
from eplb_async.core.forecast import Forecast
from eplb_async.core.placement import Placement
from eplb_async.core.throttle import Throttle
from eplb_async.engine import LoopEngine
from eplb_async.errors import (
    CommunicatorClosed,
    describe,
)
from eplb_async.nixl.endpoint import Endpoint, NativeFactory
from eplb_async.rendezvous import Rendezvous
from eplb_async.settings import Settings
from eplb_async.telemetry.emitter import Emitter
from eplb_async.weights import Copier, Digester, ExpertWeights, Staging

_log = logging.getLogger("eplb_async.communicator")


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
        self.copier = copier
        self.version = 0
        self.met_seconds: dict[int, float] = {}
        self.throttle = Throttle(settings.max_bytes_per_second)
        self.listeners: Callable[[], Listeners | None] = lambda: None
        self._engine = engine
        self._roster = Roster()
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
        self.delays = Delays(self.driver, placement.num_layers)
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
        self.runs = Runs(
            self, engine=engine, driver=self.driver, roster=self._roster, weights=weights, staging=self._staging
        )
        self._migrations = Migrations(
            self,
            engine=engine,
            driver=self.driver,
            agents=self._agents,
            roster=self._roster,
            weights=weights,
            staging=self._staging,
            delays=self.delays,
            runs=self.runs,
        )
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
        return make_staging(self.weights, self.placement, self.settings, self._given_staging)

    # ---------------------------------------------------------------------------------------------- open
    async def introduce(self, rendezvous: Rendezvous, timeout: float, executor: Executor | None) -> None:
        """Exchange introductions with all peers, or come back into a group that runs; each has ``timeout`` seconds.

        Raises:
            HandshakeError: Lists every peer that failed and why.
        """
        me = self.driver.identity
        await self.copier.fence()
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

    async def withdraw(self) -> None:
        """Take our introduction back, where the rendezvous outlives us; best effort, bounded, never raises."""
        await self._meetings.withdraw()

    # ------------------------------------------------------------------------------------------- migrate
    async def migrate(self, new: Placement, timeout: float, loader: Loader | None = None) -> MigrationReport:
        """Run one migration; see ``AsyncEplbCommunicator.migrate``."""
        return await self._migrations.run(new, timeout, loader)

    async def settled(self) -> None:
        """Wait until nothing of an earlier migration is under way."""
        await self._agents.settled()
        await self.driver.until(lambda: self.driver.settled)
        self.check_open()

    async def settled_within(self, timeout: float, what: str) -> None:
        """As :meth:`settled`, for ``what``, which is then not begun.

        Raises:
            MigrationTimeout: It takes longer; ``MigrationInDoubt``: and it is not known how it ends.
        """
        try:
            async with asyncio.timeout(timeout):
                await self.settled()
        except TimeoutError:
            raise self.delays.unsettled(what, timeout) from None

    async def rebind(self) -> None:
        """Register the tensors as the weights say they are now; peers are introduced to a new incarnation."""
        self.check_open()
        try:
            await self._agents.recycle("weights were rebound")
        except Exception as error:  # peers would read the memory that was left
            self.driver.break_off(f"the weights could not be registered anew: {describe(error)}")
            raise

    def exclude(self, rank: int) -> None:
        """The caller says that a rank is dead."""
        self.check_open()
        self._check_other(rank)
        self.driver.gone(rank, Proof.EXCLUDED)

    async def reconnect(self, rank: int, timeout: float) -> None:
        """Have a rank that started again back; see ``AsyncEplbCommunicator.reconnect``."""
        self.check_open()
        self._check_other(rank)
        await self._reconnector.reconnect(rank, timeout, self.settled)

    def forecast(self, new: Placement, gbps: float | None, local_gbps: float | None) -> Forecast:
        """What a migration would move now; reads only, so any thread may call it.

        Raises:
            PlacementError: As `migrate` would.
        """
        layout = self.weights.layout
        sizes = tuple(layout.layer_bytes(layer) for layer in range(len(layout.layers)))
        return Forecast(self._migrations.plan(new), sizes, gbps=gbps, local_gbps=local_gbps)

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
        return health_of(self, self._agents, self._engine.loop.time())

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
                late += [] if self.steps is not None else not_applied(in_use, run.due)
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
    def _adopt(self, placement: Placement, version: int) -> None:
        """A rank came back, or this one did: where the experts are now."""
        self.placement, self.version = placement, version
        self.owner.write_entries()

    def _check_other(self, rank: int) -> None:
        me = self.driver.identity
        if type(rank) is not int or not 0 <= rank < me.ep_size or rank == me.rank:
            raise ValueError(f"rank {rank!r} is not another rank of this group of {me.ep_size}")

    def _make_steps(self) -> Steps:
        settings = self.settings
        steps = Steps(
            self._engine, margin=settings.step_margin, timeout=settings.activation_timeout, mark=self.copier.mark
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

    def check_open(self) -> None:
        """Refuse what needs a member of the group.

        Raises:
            CommunicatorClosed: It is closed, or was fenced by the others.
        """
        if self.driver.over:
            raise CommunicatorClosed(f"the communicator is {self.driver.over}")


def _on_cuda(weights: ExpertWeights) -> bool:
    return any(tensor.is_cuda for tensors in weights.layers for tensor in tensors.values())
