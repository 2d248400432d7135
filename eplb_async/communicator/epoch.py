"""One epoch's data on one rank: READs into staging, votes, and the apply after COMMIT.

Layers are posted in order, as many at once as staging holds, so that the READs of the next layers overlap the
apply of this one. Nothing here decides: :class:`EpochRun` reports what is staged, and applies what it is told.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

from eplb_async.communicator.job import LayerJob
from eplb_async.communicator.loading import Loader
from eplb_async.communicator.members import Member, memory_of
from eplb_async.communicator.reads import Reads, Traffic
from eplb_async.communicator.steps import Steps
from eplb_async.communicator.using import Users
from eplb_async.core.detours import Detours
from eplb_async.core.plan import MigrationPlan, Move
from eplb_async.core.throttle import Throttle
from eplb_async.engine import LoopEngine
from eplb_async.nixl.endpoint import Endpoint
from eplb_async.settings import Settings
from eplb_async.switching import shorter
from eplb_async.telemetry.emitter import Emit
from eplb_async.weights import ENTRY_NAME, Copier, Copy, Digester, ExpertWeights, Staging, Wanted, wrong_rows
from eplb_async.weights.entries import entry_rows


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
        on_applied: Called with each layer that has been applied.
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
        on_applied: Callable[[int], object],
        on_retry: Callable[[int, Sequence[int], int, int, Exception], object],
        after_apply: Callable[[int], Awaitable[object]],
        emit: Emit | None = None,
        steps: Steps | None = None,
        users: Users | None = None,
    ) -> None:
        self.plan = plan
        self.rank = rank
        self.traffic = Traffic()
        self._engine = engine
        self._endpoint = endpoint
        self._weights = weights
        self._staging = staging
        self._copier = copier
        self._settings = settings
        self._version = version
        self._loader = loader
        self._digester = digester
        self._deadline = deadline
        self._on_staged = on_staged
        self._on_failed = on_failed
        self._on_applied = on_applied
        self._on_retry = on_retry
        self._after_apply = after_apply
        self._steps = steps
        self._turn = users if steps is None else steps
        # At steps a layer is voted for when those before it are applied here. A voter waits before its hold, and a rank
        # without staging for one layer more could not vote before a step that this one then would not begin.
        self._votes_ahead = plan.new.num_layers if steps is None else 1
        self._jobs: dict[int, list[LayerJob]] = {}  # a layer's first job, then those that READ again
        self._detours = Detours(plan)
        self._ready = [False] * plan.new.num_layers
        self._staged = self._voted = 0
        self._applied = self._commit_to = 0
        self._failed = self._stopped = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._stager: asyncio.Task[None] | None = None
        self._at_work: dict[int, list[asyncio.Task[None]]] = {}  # by layer
        self._copies: set[asyncio.Task[None]] = set()
        self._apply_task: asyncio.Task[Any] | None = None
        self._freed = asyncio.Event()
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

    def start(self) -> None:
        """Begin to post READs; only after BEGIN."""
        self._switching.enter_context(shorter(self._settings.switch_interval))
        self._stage_from(0)

    def commit(self, upto: int, at: Sequence[int]) -> None:
        """Layers below ``upto`` are decided: apply them, in order, layer *l* before step ``at[l]``."""
        if self._steps is not None:
            for layer in range(self._commit_to, upto):
                self._steps.commit(layer, at[layer])
        self._commit_to = upto
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
            await asyncio.gather(*self._tasks, *self._copies, return_exceptions=True)
            while self._apply_task is not None and not self._apply_task.done():
                await asyncio.wait([self._apply_task])
            self._let_go([job for jobs in self._jobs.values() for job in jobs])
            self._jobs.clear()
            if self._loader is not None:
                self._loader.close()

    def read_error(self) -> Exception | None:
        """The first failure of a READ that nothing took the place of, if there is one."""
        errors = (transfer.error for jobs in self._jobs.values() for transfer in jobs[-1].transfers)
        return next((error for error in errors if error is not None), None)

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

    # ------------------------------------------------------------------------------------------- staging
    def _stage_from(self, first: int) -> None:
        self._stager = self._spawn(self._stage_layers(first), "staging")

    async def _stage_layers(self, first: int) -> None:
        for layer in range(first, self.plan.new.num_layers):
            moves = (self._detours.around(layer, move) for move in self.plan.moves(layer, self.rank))
            job = LayerJob(layer, moves, self._weights.layout)
            if job.sizes:
                job.pieces = {piece.memory: piece for piece in await self._staging.allocate(job.sizes)}
            self._jobs[layer] = [job]
            local = self._copy_local(job)
            loads = self._spawn(self._load(job), f"loads of layer {layer}") if self._lacks(job) else None
            self._at_work[layer] = [task for task in (loads,) if task is not None]
            self._at_work[layer].append(self._spawn(self._complete(job, local, loads), f"layer {layer}"))

    def _copy_local(self, job: LayerJob) -> asyncio.Task[None] | None:
        own = [(i, move) for i, move in enumerate(job.moves) if move.is_local]
        if not own or not job.sizes:
            return None
        copies = [
            Copy(
                target=self._staged_rows(job, tensor),
                to=[i for i, _ in own],
                source=self._weights.rows(job.layer, tensor),
                frm=[move.source_slot for _, move in own],
            )
            for tensor, spec in enumerate(job.specs)
            if spec.row_bytes
        ]
        return self._copy(copies, f"local copies of layer {job.layer}")

    def _lacks(self, job: LayerJob) -> bool:
        return any(move.is_loaded for move in job.moves)

    async def _load(self, job: LayerJob) -> None:
        """Experts that no member holds: the caller's tensors, and an entry that says what they are (I-16)."""
        tensors = [i for i, spec in enumerate(job.specs) if spec.name != ENTRY_NAME]
        for i, move in enumerate(job.moves):
            if not move.is_loaded:
                continue
            assert self._loader is not None, "a plan with lost experts began without load_expert"
            rows = await self._loader.rows(job.layer, move.expert, [job.specs[tensor] for tensor in tensors])
            digests = None
            if self._digester is not None:
                digests = await self._digester.digests(job.layer, [row for row in rows if row.numel()], [0])
            row_of = dict(zip(tensors, rows, strict=True))
            copies = [
                Copy(
                    target=self._staged_rows(job, tensor),
                    to=[i],
                    source=row_of[tensor] if tensor in row_of else entry_rows([move.expert], self._version, digests),
                    frm=[0],
                )
                for tensor, spec in enumerate(job.specs)
                if spec.row_bytes
            ]
            await asyncio.shield(self._copy(copies, f"loaded expert {move.expert} of layer {job.layer}"))
            self.traffic.loads += 1

    def _copy(self, copies: list[Copy], name: str) -> asyncio.Task[None]:
        task = self._engine.loop.create_task(self._copier.copy(copies), name=name)
        self._copies.add(task)
        return task

    async def _complete(
        self, job: LayerJob, local: asyncio.Task[None] | None, loads: asyncio.Task[None] | None
    ) -> None:
        await self._reads.post(job)
        failed = await self._reads.outcome(job)
        if local is not None:
            await asyncio.shield(local)
        if loads is not None:
            await loads
        while failed := await self._verify(job, failed):
            job = await self._read_again(job, failed)
            failed = await self._reads.outcome(job)
        self._ready[job.layer] = True
        while self._staged < len(self._ready) and self._ready[self._staged]:
            self._staged += 1
        self._vote()

    def _vote(self) -> None:
        upto = min(self._staged, self._applied + self._votes_ahead)
        if upto > self._voted and not self._failed:
            self._voted = upto
            self._on_staged(upto)

    async def _read_again(self, job: LayerJob, failed: Mapping[int, Exception]) -> LayerJob:
        """Post READs of what was not brought from other sources, each expert whole.

        Raises:
            Exception: The failure of an expert that no source is left for, or no staging.
        """
        again = [self._elsewhere(job.layer, job.moves[i], error) for i, error in failed.items()]
        new = LayerJob(job.layer, again, self._weights.layout)
        # A READ that failed may still write its rows (N-19), so what takes its place lands elsewhere (I-3).
        if not await self._find_room(new):
            error = next(iter(failed.values()))
            error.add_note("not read again from another rank: no staging was free for it")
            raise error
        job.kept = [i for i in job.kept if i not in failed]
        served: dict[tuple[int, int], list[int]] = {}  # (source that failed, the one instead) -> moves
        for i, move in zip(failed, again, strict=True):
            served.setdefault((job.moves[i].source, move.source), []).append(i)
        for (source, instead), rows in served.items():
            self._on_retry(job.layer, [job.moves[i].expert for i in rows], source, instead, failed[rows[0]])
        self.traffic.retries += len(again)
        await self._reads.post(new)
        return new

    async def _find_room(self, new: LayerJob) -> bool:
        """Staging for a job that takes the place of READs that failed; returns whether there is any."""
        rewound = False
        while (pieces := self._staging.try_allocate(new.sizes)) is None:
            if self._applied < new.layer:  # what earlier layers hold comes back
                self._freed.clear()
                await self._freed.wait()
            elif max(self._jobs) > new.layer:  # what later layers hold does not: they wait for this one
                rewound = True
                await self._rewind(new.layer)
            else:
                return False
        new.pieces = {piece.memory: piece for piece in pieces}
        self._jobs[new.layer].append(new)
        if rewound:
            self._stage_from(new.layer + 1)
        return True

    async def _rewind(self, layer: int) -> None:
        """Take back what is staged of later layers, none of which has been voted for, and stop staging."""
        tasks = [task for at, tasks in self._at_work.items() if at > layer for task in tasks]
        tasks += [self._stager] if self._stager is not None else []
        for task in tasks:
            task.cancel()
        if waited := {*tasks, *self._copies}:
            await asyncio.wait(waited)  # gather would pass a cancel of this task on to the copies, which write staging
        dropped = [job for at in sorted(self._jobs) if at > layer for job in self._jobs.pop(at)]
        self._ready[layer + 1 :] = [False] * (len(self._ready) - layer - 1)
        self._let_go(dropped)
        ending = {transfer for job in dropped for transfer in job.transfers}
        left = max(0.0, self._deadline - self._engine.loop.time())
        await self._endpoint.drained(left, of=lambda transfer: transfer.pollable and transfer in ending)

    def _let_go(self, jobs: list[LayerJob]) -> None:
        for job in jobs:
            for transfer in job.transfers:
                self._endpoint.abandon(transfer)
            self._staging.free(tuple(job.pieces.values()))

    def _elsewhere(self, layer: int, move: Move, error: Exception) -> Move:
        """The move that takes the place of one that failed."""
        instead = self._detours.instead(layer, move) if self._settings.retry_reads else None
        if instead is None:
            raise error
        return instead

    async def _verify(self, job: LayerJob, failed: Mapping[int, Exception]) -> dict[int, Exception]:
        """I-16: what is staged, however it came, is the experts, of the version and with the bytes, that were meant.

        Returns:
            ``failed``, and moves that brought something else.
        """
        at = next((i for i, spec in enumerate(job.specs) if spec.name == ENTRY_NAME), None)
        if at is None or not job.moves:
            return dict(failed)
        wanted = [Wanted(job.layer, m.expert, self._version, m.source, m.source_slot) for m in job.moves]
        looked_at = job.specs if self._digester is not None else ()
        rows = [self._staged_rows(job, i) for i, spec in enumerate(looked_at) if i != at and spec.row_bytes]
        return {**await wrong_rows(wanted, self._staged_rows(job, at), rows, self._digester), **failed}

    # --------------------------------------------------------------------------------------------- apply
    async def _apply_layers(self) -> None:
        while self._applied < self._commit_to and not self._stopped:
            layer = self._applied
            if self._turn is not None and not await self._turn.reached(layer):
                return
            jobs = self._jobs.pop(layer)
            copies = [
                Copy(target=self._weights.rows(layer, tensor), to=to, source=self._staged_rows(job, tensor), frm=frm)
                for job in jobs
                for to, frm in [job.landing()]
                for tensor, spec in enumerate(job.specs)
                if spec.row_bytes and to
            ]
            await self._copier.copy(copies)
            self.traffic.bytes_copied += sum(copy.nbytes for copy in copies)
            for job in jobs:
                self._staging.free(tuple(job.pieces.values()))
            self._applied += 1
            self._freed.set()
            self._on_applied(layer)
            await self._after_apply(layer)
            if self._turn is not None:
                self._turn.applied(layer)
            if self._steps is not None:
                self._vote()

    # -------------------------------------------------------------------------------------------- within
    def _staged_rows(self, job: LayerJob, tensor: int) -> Any:
        spec = job.specs[tensor]
        piece = job.pieces[memory_of(spec.device)]
        return self._staging.view(piece, job.offsets[tensor], len(job.moves), spec.row_bytes)

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
