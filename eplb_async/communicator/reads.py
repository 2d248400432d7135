"""One epoch's READs on one rank: posted in batches under limits, and what became of them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb_async.communicator.job import Job, Sent
from eplb_async.communicator.members import Member
from eplb_async.core.layout import Layout
from eplb_async.core.plan import MigrationPlan
from eplb_async.core.schedule import ALIGNMENT, Batch, pieces, turns
from eplb_async.core.throttle import Throttle
from eplb_async.core.window import Outbox, Waiting, Window
from eplb_async.engine import LoopEngine
from eplb_async.errors import NixlPeerDisconnected, NixlTransferFailed, NixlTransferTimeout
from eplb_async.nixl.devices import device_index, memory_of
from eplb_async.nixl.endpoint import Endpoint
from eplb_async.nixl.native import Descriptors
from eplb_async.nixl.transfer import Origin, Transfer
from eplb_async.settings import Settings
from eplb_async.telemetry.emitter import Emit
from eplb_async.weights import Piece


@dataclass(slots=True)
class Traffic:
    """Counters of one epoch."""

    bytes_read: int = 0
    bytes_copied: int = 0
    reads: int = 0
    retries: int = 0
    loads: int = 0
    by_peer: dict[int, list[float]] = field(default_factory=dict)  # rank -> [bytes, first post, last end]


class Reads:
    """Posts READs into staging.

    Batches of all jobs wait in one outbox; one task posts those that the window and the throttle let out, one at a
    time, so that a lap of the poller comes between two posts.

    Args:
        plan: What moves.
        rank: This rank.
        sources: Members by rank.
        engine: The engine loop.
        endpoint: This rank's agent.
        settings: Limits.
        throttle: What the owner of this rank lets it do.
        deadline: Loop time at which READs have failed.
        traffic: Counts what is read.
        spawn: Starts a task that ends with the epoch, and whose failure is the epoch's.
        emit: Told of each READ that has ended; ``None`` if nobody wants to know.
    """

    def __init__(
        self,
        *,
        plan: MigrationPlan,
        rank: int,
        sources: Mapping[int, Member],
        engine: LoopEngine,
        endpoint: Endpoint,
        settings: Settings,
        throttle: Throttle,
        deadline: float,
        traffic: Traffic,
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
        emit: Emit | None = None,
    ) -> None:
        self._plan = plan
        self._rank = rank
        self._sources = sources
        self._engine = engine
        self._endpoint = endpoint
        self._settings = settings
        self._throttle = throttle
        self._deadline = deadline
        self._traffic = traffic
        self._spawn = spawn
        self._emit = emit
        self._window = Window(
            max_bytes=settings.max_bytes_in_flight,
            max_requests=settings.max_requests_in_flight,
            max_peer_bytes=settings.max_peer_bytes_in_flight,
            max_peer_requests=settings.max_peer_requests_in_flight,
            max_peers=settings.max_peers_in_flight,
            few_bytes=settings.max_post_bytes,
        )
        self._outbox: Outbox[Job] = Outbox(self._window)
        self._poster: asyncio.Task[None] | None = None
        self._room = asyncio.Event()
        self._taken: tuple[int, tuple[int, ...]] = (0, ())  # the layer that is next, and turns of those before it

    async def post(self, job: Job) -> None:
        """Post all READs of a job, as window and throttle let them out; its pieces are allocated.

        Cancelled: those that wait are not posted.
        """
        self._outbox.put(self._batches(job))
        if not self._outbox.holds(job):
            return
        self.stir()  # its sources may have room where those of what waits have none
        if self._poster is None or self._poster.done():
            self._poster = self._spawn(self._post_waiting(), "posts")
        try:
            await job.posted.wait()
        finally:
            self._outbox.drop(job)

    def stir(self) -> None:
        """Look again at what waits: something else may be let out now."""
        self._room.set()

    def decided(self, upto: int) -> None:
        """Layers below ``upto`` are decided: READs of the next are not ahead any more."""
        self._outbox.undecided = upto
        self.stir()

    @property
    def held(self) -> str:
        """Why the owner's throttle holds READs back, in words; empty if it does not."""
        return self._throttle.words if len(self._outbox) and self._delay() else ""

    def _batches(self, job: Job) -> list[Waiting[Job]]:
        reader, source = self._plan.reads(job.layers)
        most = self._throttle.post_bytes(self._settings.max_post_bytes, ALIGNMENT)
        follows = job.layers.start == self._taken[0]  # or it is read once again, in whatever order
        ours = turns(
            reader,
            source,
            rank=self._rank,
            ep_size=self._plan.new.ep_size,
            expert_bytes=int(job.row_bytes.sum()),
            max_bytes=most,
            taken=self._taken[1] if follows else (),
        )
        if follows:
            self._taken = (job.layers.stop, ours.taken)
        return [
            Waiting(job.layers.start, batch, ours.readers[batch.source], job)
            for memory in job.sizes
            for whole in pieces(
                job.moves.source,
                [spec.row_bytes if memory_of(spec.device) == memory else 0 for spec in job.specs],
                max_bytes=most,
                max_descriptors=self._settings.max_post_descriptors,
                rank=self._rank,
                ep_size=self._plan.new.ep_size,
                order=ours.order,
            )
            for batch in by_device(whole, job.moves.layer[whole.move], self._sources[whole.source].layout)
        ]

    async def _post_waiting(self) -> None:
        """Post what waits, until nothing does.

        Raises:
            NixlTransferFailed: One failed at once, and another source would not help.
        """
        while len(self._outbox):
            delay = self._delay()
            waiting = self._outbox.take() if not delay else None
            if waiting is None:
                await self._until_stirred(delay)
                continue
            job, batch = waiting.owner, waiting.batch
            memory = memory_of(job.specs[int(batch.tensor[0])].device)  # tensors of one batch share it
            self._throttle.spend(batch.nbytes, self._engine.loop.time())
            try:
                job.sent.append(Sent(batch, self._post_batch(job, batch, memory)))
            except NixlTransferFailed as error:
                if not self.may_retry(error):
                    raise
                job.sent.append(Sent(batch, error=error))
            if not self._outbox.holds(job):
                job.posted.set()
            await asyncio.sleep(0)

    def _delay(self) -> float:
        return self._throttle.delay(self._engine.loop.time())

    async def _until_stirred(self, delay: float) -> None:
        """Wait until :meth:`stir`, at most ``delay`` seconds if that is neither 0 nor infinite."""
        self._room.clear()
        timer = self._engine.loop.call_later(delay, self._room.set) if 0 < delay < math.inf else None
        try:
            await self._room.wait()
        finally:
            if timer is not None:
                timer.cancel()

    async def outcome(self, job: Job) -> dict[int, Exception]:
        """Wait until every READ of a job is over.

        Returns:
            Moves that were not brought, and why; another source may.

        Raises:
            NixlTransferFailed: One failed, and another source would not help.
        """
        failed: dict[int, Exception] = {}
        for sent in job.sent:
            error = sent.error
            if sent.transfer is not None:
                try:
                    await sent.transfer.future
                except NixlTransferFailed as late:
                    error = late
            if error is not None:
                if not self.may_retry(error):
                    raise error
                for move in _moves_of(sent.batch):
                    failed.setdefault(move, error)
        return failed

    def may_retry(self, error: NixlTransferFailed) -> bool:
        """Whether another source may help.

        Not after a timeout: the deadline is the migration's. Not after a disconnect: it ends the view, and with
        it the epoch.
        """
        hopeless = isinstance(error, NixlTransferTimeout | NixlPeerDisconnected)
        return self._settings.retry_reads and not hopeless

    def _post_batch(self, job: Job, batch: Batch, memory: str) -> Transfer:
        source = self._sources[batch.source]
        local, remote, remote_memory = _descriptors(job, batch, job.pieces[memory], source)
        now = self._engine.loop.time()
        origin = _origin(job, batch)
        began = 0.0 if self._emit is None else self._engine.now()
        try:
            if source.peer.bare:  # its word that it wants out of the epoch is slower than its new agent's
                raise NixlTransferFailed(
                    "that rank has let go of its memory: it is suspended; migrate again when it has resumed",
                    peer=source.peer.name,
                    rank=source.rank,
                    layer=origin.layer,
                    experts=origin.experts,
                    nbytes=batch.nbytes,
                    phase="make",
                )
            transfer = self._endpoint.post(
                local,
                remote,
                source.peer,
                timeout=max(0.0, self._deadline - now),
                local_memory=memory,
                remote_memory=remote_memory,
                origin=origin,
            )
        except BaseException as error:
            self._window.done(batch.source, batch.nbytes)
            if self._emit is not None:
                self._tell(origin, batch, began, error)
            raise
        self._traffic.reads += 1
        peer = self._traffic.by_peer.setdefault(source.rank, [0.0, now, now])

        def ended(future: asyncio.Future[None]) -> None:
            self._window.done(batch.source, batch.nbytes)
            self.stir()
            if not future.cancelled() and future.exception() is None:
                self._traffic.bytes_read += batch.nbytes
                peer[0] += batch.nbytes
                peer[2] = self._engine.loop.time()
            if self._emit is not None:
                failure = asyncio.CancelledError() if future.cancelled() else future.exception()
                self._tell(origin, batch, began, failure)

        transfer.future.add_done_callback(ended)
        return transfer

    def _tell(self, origin: Origin, batch: Batch, began: float, error: BaseException | None) -> None:
        assert self._emit is not None
        took = self._engine.now() - began
        self._emit(
            "read_ended", peer=batch.source, layer=origin.layer, bytes=batch.nbytes, seconds=took, state=_state(error)
        )


def by_device(batch: Batch, layer: NDArray[np.int64], layout: Layout) -> list[Batch]:
    """A batch, in parts if its source keeps what it reads on several devices: a READ is of one.

    Args:
        batch: It.
        layer: Layer of each of its descriptors ``[D]``.
        layout: Its source's.
    """
    read = set(batch.tensor.tolist())
    near = layout.layers[int(layer.min()) : int(layer.max()) + 1]
    if len({places[tensor].spec.device for places in near for tensor in read}) == 1:
        return [batch]
    places = zip(layer.tolist(), batch.tensor.tolist(), strict=True)
    devices = np.array([layout.layers[of][tensor].spec.device for of, tensor in places])
    return [batch.part(devices == device) for device in dict.fromkeys(devices.tolist())]


def _state(error: BaseException | None) -> str:
    """How a READ ended, in a word."""
    match error:
        case None:
            return "done"
        case NixlPeerDisconnected():
            return "disconnected"
        case NixlTransferTimeout():
            return "timeout"
        case asyncio.CancelledError():
            return "cancelled"
    return "failed"


def _moves_of(batch: Batch) -> list[int]:
    """The moves that a batch is of, ascending."""
    return sorted(set(batch.move.tolist()))


def _origin(job: Job, batch: Batch) -> Origin:
    """What errors and health say of a batch: its first layer, and which experts of that it reads."""
    layers = job.moves.layer[batch.move]
    experts = job.moves.expert[batch.move[layers == layers[0]]]
    return Origin(rank=batch.source, layer=int(layers[0]), experts=tuple(dict.fromkeys(experts.tolist())))


def _descriptors(job: Job, batch: Batch, piece: Piece, source: Member) -> tuple[Descriptors, Descriptors, str]:
    """Where a batch goes and where it comes from; rows that are neighbours on both sides are one descriptor.

    Layers stay apart even where one begins behind the other: each is registered by itself, and NIXL reads no further.

    Returns:
        Two lists ``[n, 3]``, and NIXL's memory type of the source's side.
    """
    by_tensor = np.argsort(batch.tensor, kind="stable")  # neighbours are of one tensor
    move, tensor, offset, length = (c[by_tensor] for c in (batch.move, batch.tensor, batch.offset, batch.length))
    layer = job.moves.layer[move]
    low, high = int(layer.min()), int(layer.max()) + 1
    device = source.layout.layers[int(layer[0])][int(tensor[0])].spec.device  # all of a batch share it
    places = np.array(
        [[(p.address, p.spec.row_stride) for p in places] for places in source.layout.layers[low:high]], dtype=np.int64
    )
    start, stride = places[layer - low, tensor].T
    ours = piece.address + job.offsets[tensor] + move * job.row_bytes[tensor] + offset
    theirs = start + job.moves.source_slot[move] * stride + offset
    first = np.ones(len(move), dtype=np.bool_)
    first[1:] = (ours[1:] != ours[:-1] + length[:-1]) | (theirs[1:] != theirs[:-1] + length[:-1])
    first[1:] |= (tensor[1:] != tensor[:-1]) | (layer[1:] != layer[:-1])
    at = np.flatnonzero(first)
    local, remote = np.empty((2, len(at), 3), dtype=np.uint64)
    local[:, 0], remote[:, 0] = ours[at], theirs[at]
    local[:, 1] = remote[:, 1] = np.add.reduceat(length, at)
    local[:, 2] = device_index(job.specs[int(tensor[0])].device)
    remote[:, 2] = device_index(device)
    return local, remote, memory_of(device)
