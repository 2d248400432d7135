"""One epoch's data on one rank: what is staged is voted for, and applied after COMMIT.

Layers are staged in order (``stager``), as many at once as staging holds, so that the READs of the next layers overlap
the apply of these. Nothing here decides: :class:`EpochRun` reports what is staged, and applies what it is told.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

from eplb_async.communicator.loading import Loader
from eplb_async.communicator.members import Member
from eplb_async.communicator.reads import Reads, Traffic
from eplb_async.communicator.stager import Stager
from eplb_async.communicator.steps import Steps
from eplb_async.communicator.using import Users
from eplb_async.core.plan import MigrationPlan
from eplb_async.core.throttle import Throttle
from eplb_async.engine import LoopEngine
from eplb_async.nixl.endpoint import Endpoint
from eplb_async.settings import Settings
from eplb_async.switching import shorter
from eplb_async.telemetry.emitter import Emit
from eplb_async.weights import Copier, Digester, ExpertWeights, Staging


class EpochRun:
    """Runs one epoch's data movement on the engine loop.

    Args:
        plan: What moves.
        rank: This rank.
        sources: Members by rank.
        engine: The engine loop.
        endpoint: This rank's agent.
        weights: This rank's rows.
        staging: Where READs land.
        copier: Copies rows.
        settings: Limits.
        throttle: What the owner of this rank lets its READs do.
        version: Weight version that every entry must carry.
        loader: Loads experts that no member holds; may be ``None`` if there are none.
        digester: Digests what was staged, where digests are checked.
        deadline: Loop time at which READs have failed.
        on_staged: Called with the number of leading layers that are staged and checked.
        on_failed: Called once, with the first failure.
        on_applied: Called with layers that have been applied together.
        on_retry: Called with a layer, the experts that failed, their source, the new one, and the failure.
        after_apply: Awaited with each layer once it is applied, before a step may run with it.
        emit: Told of each READ that has ended; ``None`` if nobody wants to know.
        steps: Where the engine stands, if layers are applied at its steps; ``None`` if at once.
        users: Who uses which layer, if layers are applied at once; ``None`` if an apply waits for nobody.
    """

    def __init__(
        self,
        *,
        plan: MigrationPlan,
        rank: int,
        sources: Mapping[int, Member],
        engine: LoopEngine,
        endpoint: Endpoint,
        weights: ExpertWeights,
        staging: Staging,
        copier: Copier,
        settings: Settings,
        throttle: Throttle,
        version: int,
        loader: Loader | None,
        digester: Digester | None,
        deadline: float,
        on_staged: Callable[[int], object],
        on_failed: Callable[[Exception], object],
        on_applied: Callable[[range], object],
        on_retry: Callable[[int, Sequence[int], int, int, Exception], object],
        after_apply: Callable[[int], Awaitable[object]],
        emit: Emit | None = None,
        steps: Steps | None = None,
        users: Users | None = None,
    ) -> None:
        self.rank = rank
        self.traffic = Traffic()
        self._engine = engine
        self._weights = weights
        self._staging = staging
        self._copier = copier
        self._settings = settings
        self._loader = loader
        self._on_staged = on_staged
        self._on_failed = on_failed
        self._on_applied = on_applied
        self._after_apply = after_apply
        self._steps = steps
        self._users = users
        self._turn = users if steps is None else steps
        # At steps a layer is voted for when those before it are applied here. A voter waits before its hold, and a rank
        # without staging for one layer more could not vote before a step that this one then would not begin.
        self._votes_ahead = plan.new.num_layers if steps is None else 1
        self._voted = self._applied = self._commit_to = 0
        self._failed = self._stopped = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._apply_task: asyncio.Task[Any] | None = None
        self._switching = contextlib.ExitStack()
        self._reads = Reads(
            plan=plan,
            rank=rank,
            sources=sources,
            engine=engine,
            endpoint=endpoint,
            settings=settings,
            throttle=throttle,
            deadline=deadline,
            traffic=self.traffic,
            spawn=self._spawn,
            emit=emit,
        )
        self._stager = Stager(
            plan=plan,
            rank=rank,
            engine=engine,
            endpoint=endpoint,
            weights=weights,
            staging=staging,
            copier=copier,
            settings=settings,
            version=version,
            loader=loader,
            digester=digester,
            deadline=deadline,
            reads=self._reads,
            traffic=self.traffic,
            spawn=self._spawn,
            on_staged=self._vote,
            on_retry=on_retry,
        )

    def start(self) -> None:
        """Begin to post READs; only after BEGIN."""
        self._switching.enter_context(shorter(self._settings.switch_interval))
        self._stager.start()

    def commit(self, upto: int, at: Sequence[int]) -> None:
        """Layers below ``upto`` are decided: apply them, in order, layer *l* before step ``at[l]``."""
        if self._steps is not None:
            for layer in range(self._commit_to, upto):
                self._steps.commit(layer, at[layer])
        self._commit_to = upto
        self._reads.decided(upto)
        if self._stopped:
            return
        if self._apply_task is not None and self._apply_task.done() and self._apply_task.exception() is not None:
            return  # a layer could not be applied: nothing after it may be
        if self._apply_task is None or self._apply_task.done():
            self._apply_task = self._engine.spawn(self._apply_layers(), f"apply on rank {self.rank}")
            self._apply_task.add_done_callback(self._done)

    async def finish(self, committed: int) -> None:
        """The epoch is over: stop what is under way, see the apply of layers below ``committed`` through.

        READs of other layers go to quarantine, and their staging stays held until they have ended (I-3).
        """
        await self._wind_up()
        if self._apply_task is not None and (error := self._apply_task.exception()) is not None:
            raise error
        if self._applied < committed and not self._stopped:
            raise AssertionError(f"I-7: {committed} layers committed, {self._applied} applied")

    async def stop(self) -> None:
        """Closing: as :meth:`finish`, and layers that are decided but not yet applied stay as they are."""
        self._stopped = True
        if self._turn is not None:
            self._turn.abandon()
        await self._wind_up()

    async def _wind_up(self) -> None:
        with self._switching:  # put back however this ends
            for task in list(self._tasks):
                task.cancel()
            # A copy that runs cannot be stopped, and it writes staging: it is waited for, never cancelled (I-3).
            await asyncio.gather(*self._tasks, *self._stager.copies, return_exceptions=True)
            while self._apply_task is not None and not self._apply_task.done():
                await asyncio.wait([self._apply_task])
            self._stager.let_go()
            if self._loader is not None:
                self._loader.close()

    def read_error(self) -> Exception | None:
        """The first failure of a READ that nothing took the place of, if there is one."""
        return self._stager.read_error()

    @property
    def due(self) -> range:
        """Layers that are committed and not applied."""
        return range(self._applied, self._commit_to)

    @property
    def waiting(self) -> str:
        """The caller's code that is waited for, in words; empty if none is."""
        return self._loader.waiting if self._loader is not None else ""

    @property
    def held(self) -> str:
        """Why the owner of this rank holds its READs back, in words; empty if none is held."""
        return self._reads.held

    def stir(self) -> None:
        """READs that waited may go now."""
        self._reads.stir()

    def _vote(self) -> None:
        upto = min(self._stager.staged, self._applied + self._votes_ahead)
        if upto > self._voted and not self._failed:
            self._voted = upto
            self._on_staged(upto)

    async def _apply_layers(self) -> None:
        while self._applied < self._commit_to and not self._stopped:
            if self._turn is not None and not await self._turn.reached(self._applied):
                return
            stretch = self._stager.holding(self._applied)
            layers = self._now(min(self._commit_to, stretch.layers.stop))
            copies = list(stretch.landing(layers, self._weights, self._staging))
            await self._copier.copy(copies)
            self.traffic.bytes_copied += sum(copy.nbytes for copy in copies)
            self._applied = layers.stop
            self._stager.applied(layers.stop)
            self._on_applied(layers)
            for layer in layers:
                await self._after_apply(layer)
                if self._turn is not None:
                    self._turn.applied(layer)
            if self._steps is not None:
                self._vote()

    def _now(self, upto: int) -> range:
        """The layers below ``upto`` that are applied together: at steps one, else all before the first that is used."""
        first = self._applied
        if self._steps is not None:
            return range(first, first + 1)
        users = self._users
        later = range(first + 1, upto)
        return range(first, upto if users is None else next((at for at in later if not users.shut_if_empty(at)), upto))

    # -------------------------------------------------------------------------------------------- within
    def _spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = self._engine.loop.create_task(coroutine, name=f"{name} on rank {self.rank}")
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception) and not self._failed:
            self._failed = True
            self._on_failed(error)
