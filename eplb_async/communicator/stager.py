"""One epoch's layers on their way into staging: READ, copied or loaded, and checked, stretch after stretch.

Stretches are posted in order, as many at once as staging holds. A READ that fails is made again from another rank
that holds the expert, in other memory (I-3); if there is no room for it, later stretches give theirs back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import numpy as np

from eplb_async.communicator.job import Job
from eplb_async.communicator.loading import Loader
from eplb_async.communicator.reads import Reads, Traffic
from eplb_async.communicator.stretch import Stretch, Stretches
from eplb_async.core.detours import Detours
from eplb_async.core.incoming import Incoming
from eplb_async.core.plan import MigrationPlan, Move
from eplb_async.engine import LoopEngine
from eplb_async.errors import NixlTransferFailed
from eplb_async.nixl.endpoint import Endpoint
from eplb_async.settings import Settings
from eplb_async.weights import ENTRY_NAME, Copier, Copy, Digester, ExpertWeights, Staging, wrong_rows
from eplb_async.weights.entries import entry_rows


class Stager:
    """Brings what one rank receives in one epoch into staging.

    Args:
        plan: What moves.
        rank: This rank.
        engine: The engine loop.
        endpoint: This rank's agent.
        weights: This rank's rows.
        staging: Where READs land.
        copier: Copies rows.
        settings: Limits.
        version: Weight version that every entry must carry.
        loader: Loads experts that no member holds; may be ``None`` if there are none.
        digester: Digests what was staged, where digests are checked.
        deadline: Loop time at which READs have failed.
        reads: Posts READs.
        traffic: Counts what is made again, and loaded.
        spawn: Starts a task that ends with the epoch, and whose failure is the epoch's.
        on_staged: Called when more leading layers are staged and checked.
        on_retry: Called with a layer, the experts that failed, their source, the new one, and the failure.

    Attributes:
        staged: Leading layers that are staged and checked.
        copies: Copies under way: each writes staging, and is waited for, never cancelled (I-3).
    """

    def __init__(
        self,
        *,
        plan: MigrationPlan,
        rank: int,
        engine: LoopEngine,
        endpoint: Endpoint,
        weights: ExpertWeights,
        staging: Staging,
        copier: Copier,
        settings: Settings,
        version: int,
        loader: Loader | None,
        digester: Digester | None,
        deadline: float,
        reads: Reads,
        traffic: Traffic,
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
        on_staged: Callable[[], object],
        on_retry: Callable[[int, Sequence[int], int, int, Exception], object],
    ) -> None:
        self.staged = 0
        self.copies: set[asyncio.Task[None]] = set()
        self._rank = rank
        self._num_layers = plan.new.num_layers
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
        self._reads = reads
        self._traffic = traffic
        self._spawn = spawn
        self._on_staged = on_staged
        self._on_retry = on_retry
        self._moves = Incoming.of(plan, rank)
        self._detours = Detours(plan)
        self._together = Stretches(
            self._moves,
            weights.layout,
            staging={memory: buffer.numel() for memory, buffer in staging.buffers.items()},
            max_bytes=settings.max_stretch_bytes,
        )
        self._stretches: list[Stretch] = []  # those that hold staging, in order
        self._ready: dict[int, int] = {}  # stretches that are staged: first layer -> the layer after the last
        self._applied = 0
        self._freed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, first: int = 0) -> None:
        """Begin to post READs, from a layer on."""
        self._task = self._spawn(self._stage_layers(first), "staging")

    def holding(self, layer: int) -> Stretch:
        """The stretch of a layer that is staged and not applied."""
        return next(stretch for stretch in self._stretches if layer in stretch.layers)

    def applied(self, upto: int) -> None:
        """Layers below ``upto`` are applied: staging that only they held is free."""
        self._applied = upto
        while self._stretches and self._stretches[0].layers.stop <= upto:
            for job in self._stretches.pop(0).jobs:
                self._staging.free(tuple(job.pieces.values()))
        self._freed.set()

    def let_go(self) -> None:
        """Give back what is held: READs that have not ended go to quarantine, and hold theirs until they have (I-3)."""
        stretches, self._stretches = self._stretches, []
        self._let_go(stretches)

    def read_error(self) -> Exception | None:
        """The first failure of a READ that nothing took the place of, if there is one."""
        errors = (transfer.error for stretch in self._stretches for transfer in stretch.jobs[-1].transfers)
        return next((error for error in errors if error is not None), None)

    # ------------------------------------------------------------------------------------------ one stretch
    async def _stage_layers(self, first: int) -> None:
        while first < self._num_layers:
            stretch = await self._next(first)
            (job,) = stretch.jobs
            self._stretches.append(stretch)
            local = self._copy_local(job)
            loads = self._spawn(self._load(job), f"loads of layers {job.layers}") if self._lacks(job) else None
            stretch.tasks += [loads] if loads is not None else []
            stretch.tasks.append(self._spawn(self._complete(stretch, local, loads), f"layers {job.layers}"))
            first = job.layers.stop
            await asyncio.sleep(0)  # its READs go before the next is made ready

    async def _next(self, first: int) -> Stretch:
        """The stretch that begins with a layer, once there is room for it."""
        layers, alone = self._together.widest(first), range(first, first + 1)
        nth, pieces = await self._staging.allocate(self._together.sizes(layers), self._together.sizes(alone))
        layers = (layers, alone)[nth]
        moves = self._moves.part(layers)
        if not self._detours.needless:
            around = [(layer, self._detours.around(layer, move)) for layer, move in moves.moves()]
            moves = Incoming.of_moves(self._rank, around)
        job = Job(layers, moves, self._weights.layout)
        job.pieces = {piece.memory: piece for piece in pieces}
        return Stretch(layers, [job])

    def _copy_local(self, job: Job) -> asyncio.Task[None] | None:
        moves = job.moves
        own = np.flatnonzero(moves.source == self._rank)
        if not own.size or not job.sizes:
            return None
        ends = np.searchsorted(moves.layer[own], (*job.layers, job.layers.stop)).tolist()
        copies = [
            Copy(
                target=job.rows(tensor, self._staging),
                to=own[low:high],
                source=self._weights.rows(layer, tensor),
                frm=moves.source_slot[own[low:high]],
            )
            for layer, low, high in zip(job.layers, ends, ends[1:], strict=False)
            for tensor, spec in enumerate(job.specs)
            if spec.row_bytes and low < high
        ]
        return self._copy(copies, f"local copies of layers {job.layers}")

    def _lacks(self, job: Job) -> bool:
        return bool((job.moves.source < 0).any())

    async def _load(self, job: Job) -> None:
        """Experts that no member holds: the caller's tensors, and an entry that says what they are (I-16)."""
        tensors = [i for i, spec in enumerate(job.specs) if spec.name != ENTRY_NAME]
        for i in np.flatnonzero(job.moves.source < 0).tolist():
            layer, expert = int(job.moves.layer[i]), int(job.moves.expert[i])
            assert self._loader is not None, "a plan with lost experts began without load_expert"
            rows = await self._loader.rows(layer, expert, [job.specs[tensor] for tensor in tensors])
            digests = None
            if self._digester is not None:
                digests = await self._digester.digests(layer, [row for row in rows if row.numel()], [0])
            row_of = dict(zip(tensors, rows, strict=True))
            copies = [
                Copy(
                    target=job.rows(tensor, self._staging),
                    to=[i],
                    source=row_of[tensor] if tensor in row_of else entry_rows([expert], self._version, digests),
                    frm=[0],
                )
                for tensor, spec in enumerate(job.specs)
                if spec.row_bytes
            ]
            await asyncio.shield(self._copy(copies, f"loaded expert {expert} of layer {layer}"))
            self._traffic.loads += 1

    def _copy(self, copies: list[Copy], name: str) -> asyncio.Task[None]:
        task = self._engine.loop.create_task(self._copier.copy(copies), name=name)
        self.copies.add(task)
        return task

    async def _complete(
        self, stretch: Stretch, local: asyncio.Task[None] | None, loads: asyncio.Task[None] | None
    ) -> None:
        job = stretch.jobs[0]
        await self._reads.post(job)
        failed = await self._reads.outcome(job)
        if local is not None:
            await asyncio.shield(local)
        if loads is not None:
            await loads
        while failed := await self._verify(job, failed):
            job = await self._read_again(stretch, job, failed)
            failed = await self._reads.outcome(job)
        self._ready[stretch.layers.start] = stretch.layers.stop
        while self.staged in self._ready:
            self.staged = self._ready.pop(self.staged)
        self._on_staged()

    async def _verify(self, job: Job, failed: Mapping[int, Exception]) -> dict[int, Exception]:
        """I-16: what is staged, however it came, is the experts, of the version and with the bytes, that were meant.

        Returns:
            ``failed``, and moves that brought something else.
        """
        at = next((i for i, spec in enumerate(job.specs) if spec.name == ENTRY_NAME), None)
        if at is None or not len(job.moves):
            return dict(failed)
        looked_at = job.specs if self._digester is not None else ()
        rows = [job.rows(i, self._staging) for i, spec in enumerate(looked_at) if i != at and spec.row_bytes]
        entries = job.rows(at, self._staging)
        return {**await wrong_rows(job.moves, self._version, entries, rows, self._digester), **failed}

    # ------------------------------------------------------------------------------------------- once again
    async def _read_again(self, stretch: Stretch, job: Job, failed: Mapping[int, Exception]) -> Job:
        """Post READs of what was not brought from other sources, each expert whole.

        Raises:
            Exception: The failure of an expert that no source is left for, or no staging.
        """
        before = [(int(job.moves.layer[i]), job.moves.move(i)) for i in sorted(failed)]
        errors = [failed[i] for i in sorted(failed)]
        again = [self._elsewhere(*old, error) for old, error in zip(before, errors, strict=True)]
        new = Job(job.layers, Incoming.of_moves(self._rank, again), self._weights.layout)
        # A READ that failed may still write its rows (N-19), so what takes its place lands elsewhere (I-3).
        if not await self._find_room(stretch, new):
            errors[0].add_note("not read again from another rank: no staging was free for it")
            raise errors[0]
        job.kept[list(failed)] = False
        # (layer, source that failed, the one instead) -> experts, and why
        served: dict[tuple[int, int, int], tuple[list[int], Exception]] = {}
        for (layer, move), (_, instead), error in zip(before, again, errors, strict=True):
            served.setdefault((layer, move.source, instead.source), ([], error))[0].append(move.expert)
        for (layer, source, other), (experts, error) in served.items():
            self._on_retry(layer, experts, source, other, error)
        self._traffic.retries += len(again)
        await self._reads.post(new)
        return new

    def _elsewhere(self, layer: int, move: Move, error: Exception) -> tuple[int, Move]:
        """The move that takes the place of one that failed, with its layer."""
        instead = self._detours.instead(layer, move) if self._settings.retry_reads else None
        if instead is not None:
            return layer, instead
        if isinstance(error, NixlTransferFailed):  # a post can be of several layers
            error.layer, error.experts = layer, (move.expert,)
        raise error

    async def _find_room(self, stretch: Stretch, new: Job) -> bool:
        """Staging for a job that takes the place of READs that failed; returns whether there is any."""
        rewound = False
        while (pieces := self._staging.try_allocate(new.sizes)) is None:
            if self._applied < stretch.layers.start:  # what earlier layers hold comes back
                self._freed.clear()
                await self._freed.wait()
            elif self._stretches[-1] is not stretch:  # what later layers hold does not: they wait for these
                rewound = True
                await self._rewind(stretch)
            else:
                return False
        new.pieces = {piece.memory: piece for piece in pieces}
        stretch.jobs.append(new)
        if rewound:
            self.start(stretch.layers.stop)
        return True

    async def _rewind(self, last: Stretch) -> None:
        """Take back what is staged of later layers, none of which has been voted for, and stop staging."""
        later = [stretch for stretch in self._stretches if stretch.layers.start >= last.layers.stop]
        tasks = [task for stretch in later for task in stretch.tasks]
        tasks += [self._task] if self._task is not None else []
        for task in tasks:
            task.cancel()
        if waited := {*tasks, *self.copies}:
            await asyncio.wait(waited)  # gather would pass a cancel of this task on to the copies, which write staging
        for stretch in later:
            self._stretches.remove(stretch)
            self._ready.pop(stretch.layers.start, None)
        self._let_go(later)
        ending = {transfer for stretch in later for job in stretch.jobs for transfer in job.transfers}
        left = max(0.0, self._deadline - self._engine.loop.time())
        await self._endpoint.drained(left, of=lambda transfer: transfer.pollable and transfer in ending)

    def _let_go(self, stretches: Sequence[Stretch]) -> None:
        for job in (job for stretch in stretches for job in stretch.jobs):
            for transfer in job.transfers:
                self._endpoint.abandon(transfer)
            self._staging.free(tuple(job.pieces.values()))
