"""One epoch's data on one rank: READs into staging, votes, and the apply after COMMIT.

Layers are posted in order, as many at once as staging holds, so that the READs of the next layers overlap the
apply of this one. Nothing here decides: :class:`EpochRun` reports what is staged, and applies what it is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eplb_async.communicator.members import Member, device_index, memory_of
from eplb_async.core.layout import Layout
from eplb_async.core.plan import MigrationPlan, Move
from eplb_async.core.schedule import Batch, Window, pieces
from eplb_async.engine import LoopEngine
from eplb_async.errors import TransferError
from eplb_async.nixl.endpoint import Endpoint
from eplb_async.nixl.transfer import Origin, Transfer
from eplb_async.settings import Settings
from eplb_async.weights import (
    ENTRY_NAME,
    Copier,
    Copy,
    Digester,
    ExpertWeights,
    Piece,
    Staging,
    Wanted,
    pack,
    wrong_rows,
)


@dataclass(slots=True)
class Traffic:
    """Counters of one epoch."""

    bytes_read: int = 0
    bytes_copied: int = 0
    reads: int = 0
    by_peer: dict[int, list[float]] = field(default_factory=dict)  # rank -> [bytes, first post, last end]


class LayerJob:
    """One layer on its way: its moves, where they are staged, and what is still under way."""

    def __init__(self, layer: int, moves: tuple[Move, ...], layout: Layout) -> None:
        self.layer = layer
        self.moves = moves
        self.specs = [place.spec for place in layout.layers[layer]]
        self.pieces: dict[str, Piece] = {}
        self.transfers: list[Transfer] = []
        self.offsets, sizes = pack([(memory_of(s.device), s.row_bytes * len(moves)) for s in self.specs])
        self.sizes = {memory: size for memory, size in sizes.items() if size and moves}


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
        version: Weight version that every entry must carry.
        digester: Digests what was staged, where digests are checked.
        deadline: Loop time at which READs have failed.
        on_staged: Called with the number of leading layers that are staged and checked.
        on_failed: Called once, with the first failure.
        on_applied: Called with each layer that has been applied.
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
        version: int,
        digester: Digester | None,
        deadline: float,
        on_staged: Callable[[int], object],
        on_failed: Callable[[Exception], object],
        on_applied: Callable[[int], object],
    ) -> None:
        self.plan = plan
        self.rank = rank
        self.traffic = Traffic()
        self._sources = sources
        self._engine = engine
        self._endpoint = endpoint
        self._weights = weights
        self._staging = staging
        self._copier = copier
        self._settings = settings
        self._version = version
        self._digester = digester
        self._deadline = deadline
        self._on_staged = on_staged
        self._on_failed = on_failed
        self._on_applied = on_applied
        self._jobs: dict[int, LayerJob] = {}
        self._ready = [False] * plan.new.num_layers
        self._staged = 0
        self._applied = self._commit_to = 0
        self._failed = self._stopped = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._copies: set[asyncio.Task[None]] = set()
        self._apply_task: asyncio.Task[Any] | None = None
        self._window = Window(
            max_bytes=settings.max_bytes_in_flight,
            max_requests=settings.max_requests_in_flight,
            max_peer_bytes=settings.max_bytes_in_flight,
            max_peer_requests=settings.max_peer_requests_in_flight,
        )
        self._room = asyncio.Event()

    def start(self) -> None:
        """Begin to post READs; only after BEGIN."""
        self._spawn(self._stage_layers(), "staging")

    def commit(self, upto: int) -> None:
        """Layers below ``upto`` are decided: apply them, in order."""
        self._commit_to = upto
        if self._stopped:
            return
        if self._apply_task is not None and self._apply_task.done() and self._apply_task.exception() is not None:
            return  # a layer could not be applied: nothing after it may be
        if self._apply_task is None or self._apply_task.done():
            self._apply_task = self._engine.spawn(self._apply_layers(), f"apply on rank {self.rank}")

    async def finish(self, committed: int) -> None:
        """The epoch is over: stop what is under way, see the apply of layers below ``committed`` through.

        READs of other layers go to quarantine, and their staging stays held until they have ended (I-3).
        """
        await self._wind_up()
        if self._apply_task is not None and (error := self._apply_task.exception()) is not None:
            raise error
        if self._applied < committed:
            raise AssertionError(f"I-7: {committed} layers committed, {self._applied} applied")

    async def stop(self) -> None:
        """Closing: as :meth:`finish`, and layers that are decided but not yet applied stay as they are."""
        self._stopped = True
        await self._wind_up()

    async def _wind_up(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        # A copy that runs cannot be stopped, and it writes staging: it is waited for, never cancelled (I-3).
        await asyncio.gather(*self._tasks, *self._copies, return_exceptions=True)
        while self._apply_task is not None and not self._apply_task.done():
            await asyncio.wait([self._apply_task])
        for job in self._jobs.values():
            for transfer in job.transfers:
                self._endpoint.abandon(transfer)
            self._staging.free(tuple(job.pieces.values()))
        self._jobs.clear()

    def read_error(self) -> Exception | None:
        """The first READ's failure, if one has failed."""
        errors = (transfer.error for job in self._jobs.values() for transfer in job.transfers)
        return next((error for error in errors if error is not None), None)

    # ------------------------------------------------------------------------------------------- staging
    async def _stage_layers(self) -> None:
        for layer in range(self.plan.new.num_layers):
            moves = self.plan.moves(layer, self.rank)
            job = LayerJob(layer, moves, self._weights.layout)
            if job.sizes:
                job.pieces = {piece.memory: piece for piece in await self._staging.allocate(job.sizes)}
            self._jobs[layer] = job
            local = self._copy_local(job)
            await self._post(job)
            self._spawn(self._complete(job, local), f"layer {layer}")

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
        task = self._engine.loop.create_task(self._copier.copy(copies), name=f"local copies of layer {job.layer}")
        self._copies.add(task)
        return task

    async def _post(self, job: LayerJob) -> None:
        for memory in job.sizes:
            row_bytes = [s.row_bytes if memory_of(s.device) == memory else 0 for s in job.specs]
            for batch in pieces(
                job.moves,
                row_bytes,
                max_bytes=self._settings.max_post_bytes,
                max_descriptors=self._settings.max_post_descriptors,
                rank=self.rank,
                ep_size=self.plan.new.ep_size,
            ):
                while not self._window.admit(batch.source, batch.nbytes):
                    self._room.clear()
                    await self._room.wait()
                self._post_batch(job, batch, memory)
                await asyncio.sleep(0)

    def _post_batch(self, job: LayerJob, batch: Batch, memory: str) -> None:
        source = self._sources[batch.source]
        theirs_at = source.layout.layers[job.layer]
        used = sorted(set(batch.tensor.tolist()))
        remote_memory = {memory_of(theirs_at[tensor].spec.device) for tensor in used}
        if len(remote_memory) != 1:
            raise TransferError(f"rank {source.rank} keeps tensors of layer {job.layer} on unlike devices")
        local = np.empty((len(batch.move), 3), dtype=np.uint64)
        remote = np.empty_like(local)
        slots = np.array([move.source_slot for move in job.moves], dtype=np.int64)
        for tensor in used:
            mine = batch.tensor == tensor
            place, piece, spec = theirs_at[tensor], job.pieces[memory], job.specs[tensor]
            rows = batch.move[mine]
            base = piece.address + job.offsets[tensor]
            local[mine, 0] = base + rows * spec.row_bytes + batch.offset[mine]
            remote[mine, 0] = place.address + slots[rows] * place.spec.row_stride + batch.offset[mine]
            local[mine, 2] = device_index(spec.device)
            remote[mine, 2] = device_index(place.spec.device)
        local[:, 1] = remote[:, 1] = batch.length
        now = self._engine.loop.time()
        experts = tuple(job.moves[i].expert for i in sorted(set(batch.move.tolist())))
        try:
            transfer = self._endpoint.post(
                local,
                remote,
                source.peer,
                timeout=max(0.0, self._deadline - now),
                local_memory=memory,
                remote_memory=remote_memory.pop(),
                origin=Origin(rank=source.rank, layer=job.layer, experts=experts),
            )
        except BaseException:
            self._window.done(batch.source, batch.nbytes)
            raise
        job.transfers.append(transfer)
        self.traffic.reads += 1
        peer = self.traffic.by_peer.setdefault(source.rank, [0.0, now, now])

        def ended(future: asyncio.Future[None]) -> None:
            self._window.done(batch.source, batch.nbytes)
            self._room.set()
            if not future.cancelled() and future.exception() is None:
                self.traffic.bytes_read += batch.nbytes
                peer[0] += batch.nbytes
                peer[2] = self._engine.loop.time()

        transfer.future.add_done_callback(ended)

    async def _complete(self, job: LayerJob, local: asyncio.Task[None] | None) -> None:
        for transfer in job.transfers:
            await transfer.future
        if local is not None:
            await asyncio.shield(local)
        await self._verify(job)
        self._ready[job.layer] = True
        before = self._staged
        while self._staged < len(self._ready) and self._ready[self._staged]:
            self._staged += 1
        if self._staged > before and not self._failed:
            self._on_staged(self._staged)

    async def _verify(self, job: LayerJob) -> None:
        """I-16: what is staged, read or copied, is the experts, of the version and with the bytes, that were meant."""
        at = next((i for i, spec in enumerate(job.specs) if spec.name == ENTRY_NAME), None)
        if at is None or not job.moves:
            return
        wanted = [Wanted(job.layer, m.expert, self._version, m.source, m.source_slot) for m in job.moves]
        rows = [self._staged_rows(job, i) for i, spec in enumerate(job.specs) if i != at and spec.row_bytes]
        for error in (await wrong_rows(wanted, self._staged_rows(job, at), rows, self._digester)).values():
            raise error

    # --------------------------------------------------------------------------------------------- apply
    async def _apply_layers(self) -> None:
        while self._applied < self._commit_to and not self._stopped:
            layer = self._applied
            job = self._jobs.pop(layer)
            copies = [
                Copy(
                    target=self._weights.rows(layer, tensor),
                    to=[slot for move in job.moves for slot in move.targets],
                    source=self._staged_rows(job, tensor),
                    frm=[i for i, move in enumerate(job.moves) for _ in move.targets],
                )
                for tensor, spec in enumerate(job.specs)
                if spec.row_bytes and job.moves
            ]
            await self._copier.copy(copies)
            self.traffic.bytes_copied += sum(copy.nbytes for copy in copies)
            self._staging.free(tuple(job.pieces.values()))
            self._applied += 1
            self._on_applied(layer)

    # -------------------------------------------------------------------------------------------- within
    def _staged_rows(self, job: LayerJob, tensor: int) -> Any:
        spec = job.specs[tensor]
        piece = job.pieces[memory_of(spec.device)]
        return self._staging.view(piece, job.offsets[tensor], len(job.moves), spec.row_bytes)

    def _spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        task = self._engine.loop.create_task(coroutine, name=f"{name} on rank {self.rank}")
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception) and not self._failed:
            self._failed = True
            self._on_failed(error)
