"""``AsyncNixlEplbCommunicator``: what vLLM's ``NixlEplbCommunicator`` is asked to do, done by this library's agent."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np
import torch

from eplb_async.errors import (
    CommunicatorClosed,
    NixlTransferFailed,
    NixlTransferTimeout,
    WeightsError,
    describe,
)
from eplb_async.integrations.vllm.call import Call
from eplb_async.integrations.vllm.messages import Cause
from eplb_async.integrations.vllm.opening import open_group
from eplb_async.integrations.vllm.posts import Post, posts_of, read_all
from eplb_async.integrations.vllm.streams import wait_for_streams
from eplb_async.integrations.vllm.tensors import Fetch, Tensors
from eplb_async.integrations.vllm.turn import Turn
from eplb_async.nixl.agent import real
from eplb_async.nixl.endpoint import NativeFactory
from eplb_async.settings import Settings, seconds
from eplb_async.waiting import run_on

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["AsyncNixlEplbCommunicator"]

T = TypeVar("T")
_log = logging.getLogger("eplb_async.vllm")
_ARRIVAL_SECONDS = 1800.0


class AsyncNixlEplbCommunicator:
    """Moves expert rows between the ranks of vLLM's expert load balancer: its ``EplbCommunicator``, interface and all.

    Made on all ranks at once. Then, for each layer or batch, on every rank: :meth:`set_transfer_context`,
    :meth:`add_recv` for each expert to receive, :meth:`execute`. One thread at a time may use it; which one may change.

    Every failure is a `NixlTransferFailed`, on every rank: `NixlTransferTimeout` where a rank did not come or a READ
    did not end in time, `NixlPeerDisconnected` where a rank is gone. After one, the next call works again where all
    ranks are still there. With a rank gone every call fails at once, naming it.

    Args:
        cpu_group: Process group of the ranks, with a CPU backend. It is trusted as it is: a fresh key travels through
            it, and is what later messages are authenticated with. Used by the constructor only.
        all_expert_weights: For each layer its tensors ``[num_local_experts, ...]``, on the CPU or one CUDA device. Each
            expert's row is one dense block, in whatever order of its dimensions. They must stay where they are.
        expert_buffer: For each of a layer's tensors one of like rows, into which experts are received.
        settings: Limits and pace; default from ``EPLB_ASYNC_*`` variables.
        timeout: Seconds for each ``execute``; default ``settings.read_timeout``.
        arrival_timeout: Seconds until the last rank must have come to the constructor.
        native: Makes the native agent. For tests.

    Raises:
        HandshakeError: On every rank: a tensor cannot be moved, a setting is wrong, NIXL is missing, or the ranks'
            tensors differ, on some rank; names rank and reason.
        ValueError: ``cpu_group`` is no group with a CPU backend.
    """

    def __init__(
        self,
        cpu_group: ProcessGroup,
        all_expert_weights: Sequence[Iterable[torch.Tensor]],
        expert_buffer: Sequence[torch.Tensor],
        *,
        settings: Settings | None = None,
        timeout: float | None = None,
        arrival_timeout: float = _ARRIVAL_SECONDS,
        native: NativeFactory = real,
    ) -> None:
        self._stream: Any = None
        self._next = Call()
        self._tainted: dict[int, int] = {}
        _register()

        def prepare() -> tuple[Settings, float, Tensors]:
            given = settings or Settings.from_env()
            return given, seconds(timeout, given.read_timeout), Tensors(all_expert_weights, expert_buffer)

        self._group, (self._settings, self._timeout, self._tensors) = open_group(
            cpu_group, prepare, native=native, arrival=arrival_timeout
        )
        self._turn = Turn(self._group.engine.check_process)
        _log.info(
            "%r: %d layers, %d experts a rank, agent %s",
            self,
            self._tensors.weights.num_layers,
            self._tensors.num_local_experts,
            self._group.endpoint.name,
        )

    @property
    def needs_profile_buffer_reservation(self) -> bool:
        """False: nothing has to be reserved by a collective in vLLM's profile run."""
        return False

    def set_stream(self, stream: Any) -> None:
        """The stream that this rank's copies are queued on, beside the current one; ``None`` for no other."""
        self._stream = stream

    def set_transfer_context(self, old_indices: np.ndarray, layer_idx: int) -> None:
        """Say what is moved next.

        Args:
            old_indices: Where the experts are: logical expert of each physical slot ``[>= num_ranks *
                num_local_experts]``, -1 for none; what is longer is not looked at. Where a rank holds an expert more
                than once, its last row is read.
            layer_idx: The layer.

        Raises:
            NixlTransferFailed: It is no such layer, or these are no such indices, or the last context was not executed.
        """
        with self._turn:
            if self._next.fetches:
                self._refuse(f"layer {self._next.layer} was given experts to receive, but never executed")
            count = self._group.size * self._tensors.num_local_experts
            old = np.asarray(old_indices)
            if old.ndim != 1 or old.dtype.kind not in "iu" or len(old) < count:
                self._refuse(f"old_indices must be {count} or more whole numbers, not {old.dtype} {list(old.shape)}")
            if not 0 <= layer_idx < self._tensors.weights.num_layers:
                self._refuse(f"there is no layer {layer_idx}, only {self._tensors.weights.num_layers} of them")
            self._next = Call(int(layer_idx), np.array(old[:count], dtype=np.int64).reshape(self._group.size, -1))

    def add_send(self, tensors: Sequence[torch.Tensor], dst_rank: int, expert_id: int) -> None:
        """Nothing is sent: whoever needs rows reads them. It is checked that these are the rows that will be read.

        Args:
            tensors: A row of each of the layer's tensors.
            dst_rank: Who will read them.
            expert_id: The logical expert.

        Raises:
            NixlTransferFailed: They are not where they were registered, or this rank does not hold the expert.
        """
        with self._turn:
            layer = self._next.layer
            if layer is None:
                return
            rows = self._next.rows(self._group.rank, expert_id)
            if not rows:
                self._refuse(f"this rank does not hold expert {expert_id} by old_indices")
            try:
                self._tensors.check_source(layer, rows, tensors)
            except WeightsError as error:
                self._refuse(str(error), error)

    def add_recv(self, tensors: Sequence[torch.Tensor], src_rank: int, expert_id: int) -> None:
        """Have an expert received by :meth:`execute`.

        Where a READ that failed may still write into this row, it waits for that to end.

        Args:
            tensors: A row of each tensor of ``expert_buffer``, the same row of all.
            src_rank: Whom to read from.
            expert_id: The logical expert.

        Raises:
            NixlTransferFailed: There is no context, that rank does not hold the expert, or these are no such rows.
            NixlTransferTimeout: The row is still leased; names row and peer.
        """
        with self._turn:
            call = self._next
            if call.layer is None:
                self._refuse("add_recv() before set_transfer_context()")
            if src_rank == self._group.rank or not 0 <= src_rank < self._group.size:
                self._refuse(f"rank {src_rank} cannot be read from by rank {self._group.rank} of {self._group.size}")
            rows = call.rows(src_rank, expert_id)
            if not rows:
                self._refuse(f"rank {src_rank} does not hold expert {expert_id} by old_indices")
            try:
                row = self._tensors.row_of(tensors)
            except WeightsError as error:
                self._refuse(str(error), error)
            if row in call.fetches:
                self._refuse(f"row {row} of expert_buffer is to receive two experts")
            if row in self._tainted:
                self._await_lease(row, time.monotonic() + self._timeout)
            call.fetches[row] = Fetch(int(src_rank), int(expert_id), rows[-1], row)

    def execute(self) -> None:
        """Receive what was added, and return when every rank has: then rows and buffers may be written again.

        On every rank the same number of times, also where nothing is to be received. It ends within the timeout.
        Interrupted: the others are told, and fail.

        Raises:
            NixlTransferFailed: It failed, on this or another rank; nothing that was received may be used.
            NixlTransferTimeout: A rank did not come, or a READ did not end.
            NixlPeerDisconnected: A rank is gone.
            CommunicatorBusy: Another thread is in it.
        """
        with self._turn:
            deadline = time.monotonic() + self._timeout
            call = self._next
            try:
                self._run(call, self._ready(call, deadline), deadline)
            finally:
                self._next = Call()

    def close(self, timeout: float | None = None) -> None:
        """Leave, drain, and end the engine thread. Idempotent. vLLM does not call it; the last reference does.

        Args:
            timeout: Seconds for the other ranks to hear of the last round's end; default ``settings.close_timeout``.
        """
        limit, group = seconds(timeout, self._settings.close_timeout), self._group
        with contextlib.suppress(CommunicatorClosed):
            run_on(group.engine.loop, lambda: group.fence.close(limit), what="close", limit=limit)
        if not group.engine.stop():
            _log.error("the engine thread of %r did not end; see where it is stuck", self)

    def _ready(self, call: Call, deadline: float) -> list[Post]:
        """What to read, once this rank may join; whatever ends this, the others are told."""
        group, fetches = self._group, call.fetches.values()
        try:
            self._await_streams(deadline)
            if call.layer is not None:
                self._check_moved(call.layer)
            self._check_tainted(deadline)
            return posts_of(
                fetches, call.number, self._tensors, group.layouts, rank=group.rank, settings=self._settings
            )
        except NixlTransferFailed:
            raise  # they have been told
        except Exception as error:  # CUDA's, for one
            self._refuse(describe(error), error)
        except BaseException:
            self._tell("its call was interrupted")
            raise

    def _run(self, call: Call, posts: Sequence[Post], deadline: float) -> None:
        group, layer = self._group, call.number
        left = max(0.0, deadline - time.monotonic())

        async def run() -> None:
            until = group.engine.loop.time() + left
            await group.fence.run(
                layer,
                call.digest,
                lambda: read_all(group.endpoint, posts, group.fence.peers, deadline=until),
                deadline=until,
                patience=self._timeout,
            )

        try:
            run_on(group.engine.loop, run, what="execute", limit=left)
        except BaseException as error:
            if call.fetches:
                self._tainted.update(self._leased(call.fetches))
            if isinstance(error, NixlTransferFailed) or not isinstance(error, Exception):
                raise
            kind = NixlTransferTimeout if isinstance(error, TimeoutError) else NixlTransferFailed
            raise kind(f"rank {group.rank}: {describe(error)}", layer=layer, phase="fence") from error

    def _await_streams(self, deadline: float) -> None:
        try:
            wait_for_streams(self._tensors.device, self._stream, deadline=deadline)
        except NixlTransferTimeout as error:
            self._tell(error.detail, Cause.TIMEOUT)
            raise

    def _check_moved(self, layer: int) -> None:
        try:
            self._tensors.check_place(layer)
        except WeightsError as error:
            self._refuse(str(error), error)

    def _check_tainted(self, deadline: float) -> None:
        """Rows that a READ of a failed call wrote later than that call, and that are not received anew: not to be used.

        vLLM copies local experts into the buffer before it says anything, so a late READ may have overwritten one.
        """
        late = sorted(set(self._tainted) - set(self._next.fetches))
        if not late:
            return
        for row in late:
            self._await_lease(row, deadline)
        self._tainted.clear()
        self._refuse(
            f"READs of a call that had failed ended after it, and wrote rows {late} of expert_buffer; what was copied "
            "there meanwhile may be lost. They are over now: move the layer again"
        )

    def _await_lease(self, row: int, deadline: float) -> None:
        """Wait until no READ may write a row any more."""
        group, intervals = self._group, self._tensors.intervals(row)
        left = max(0.0, deadline - time.monotonic())

        async def released() -> bool:
            return await group.endpoint.released(intervals, left)

        try:
            free = self._call(released)
        except (CommunicatorClosed, TimeoutError) as error:
            self._refuse(describe(error), error)
        if not free:
            source = self._tainted[row]
            what = f"a READ from rank {source} may still write into row {row} of expert_buffer, {self._timeout:g} s on"
            self._tell(what, Cause.TIMEOUT)  # the others may stand still: they owe this call no failure
            layer, self._next = self._next.layer, Call()
            raise NixlTransferTimeout(what, rank=source, layer=layer, phase="make")
        self._tainted.pop(row, None)

    def _leased(self, fetches: dict[int, Fetch]) -> dict[int, int]:
        """Rows that a READ may still write, and whom it reads from; all of them where the engine does not say."""
        rows = {row: fetch.source for row, fetch in fetches.items()}

        async def leased() -> dict[int, int]:
            leases, intervals = self._group.endpoint.leases, self._tensors.intervals
            return {row: source for row, source in rows.items() if leases.holder(intervals(row)) is not None}

        try:
            return self._call(leased)
        except (CommunicatorClosed, TimeoutError):
            return rows

    def _call(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return run_on(self._group.engine.loop, call, what="execute", limit=self._timeout)

    def _refuse(self, detail: str, cause: Exception | None = None) -> NoReturn:
        """Fail this rank's call before it has begun, on all ranks."""
        layer, self._next = self._next.layer, Call()
        self._tell(detail if cause is None else describe(cause))
        raise NixlTransferFailed(detail, rank=self._group.rank, layer=layer, phase="make") from cause

    def _tell(self, text: str, cause: Cause = Cause.FAILED) -> None:
        """This rank's call has failed before it began."""
        with contextlib.suppress(CommunicatorClosed):
            self._group.engine.post(lambda: self._group.fence.refuse(text, cause))

    def __del__(self) -> None:
        group = getattr(self, "_group", None)
        if group is not None:
            with contextlib.suppress(Exception):
                group.engine.request_stop()

    def __repr__(self) -> str:
        group = getattr(self, "_group", None)
        where = "" if group is None else f" rank {group.rank} of {group.size}"
        return f"<{type(self).__name__}{where}>"


def _register() -> None:
    """Where vLLM's interface is loaded, be one of its implementations."""
    module = sys.modules.get("vllm.distributed.eplb.eplb_communicator")
    interface = getattr(module, "EplbCommunicator", None)
    register = getattr(interface, "register", None)
    if callable(register):
        register(AsyncNixlEplbCommunicator)
