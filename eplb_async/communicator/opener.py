"""What ``open`` does: check, find the rendezvous, make the session, meet every peer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch

from eplb_async.communicator.meetings import all_ended
from eplb_async.communicator.members import GENERATION_BITS, Identity
from eplb_async.communicator.session import Session
from eplb_async.core.placement import Placement
from eplb_async.engine import Engine, LoopEngine
from eplb_async.errors import CommunicatorClosed, HandshakeError, PlacementError, WeightsError
from eplb_async.nixl.endpoint import NativeFactory
from eplb_async.rendezvous import Rendezvous, job_key, join, resolve
from eplb_async.settings import Settings
from eplb_async.telemetry.emitter import Emitter
from eplb_async.threads import Inline, apart
from eplb_async.weights import CpuCopier, CudaCopier, ExpertWeights, WeightsLike, load_xxhash

_log = logging.getLogger("eplb_async.communicator")
_WATCH_SECONDS = 10.0
_KEY_SECONDS = 0.25
_GRACE_SECONDS = 1.0  # what ends at its own deadline says more


@dataclass(frozen=True, slots=True, kw_only=True)
class Opener:
    """The arguments of ``AsyncEplbCommunicator.open``; see there."""

    rank: int
    ep_size: int
    weights: WeightsLike
    placement: Placement
    rendezvous: object
    group: str
    node: str | None
    staging: int | torch.Tensor | None
    settings: Settings
    timeout: float
    native: NativeFactory
    emitter: Emitter | None = None

    def check(self) -> ExpertWeights:
        """Check the arguments and take the weights, before anything native is touched."""
        if not isinstance(self.placement, Placement) or self.placement.ep_size != self.ep_size:
            raise PlacementError(f"placement {self.placement!r} is not one of {self.ep_size} ranks")
        if not 0 <= self.rank < self.ep_size:
            raise ValueError(f"rank {self.rank} is not in [0, {self.ep_size})")
        if self.settings.verify == "full":
            load_xxhash()
        entries = self.settings.verify != "off"
        rows = ExpertWeights(self.weights, self.placement.num_local_experts, entries=entries)
        if rows.num_layers != self.placement.num_layers:
            raise WeightsError(f"weights of {rows.num_layers} layers, placement of {self.placement.num_layers}")
        return rows

    async def open(self, engine: LoopEngine, rows: ExpertWeights, *, own: bool) -> tuple[Session, Rendezvous | None]:
        """Open on an engine, from the user's loop; whatever was made is given back if that fails or is cancelled.

        Args:
            engine: The engine.
            rows: What :meth:`check` returned.
            own: Whether the engine ends with a failure, and gives back what was made when it does.

        Returns:
            The session, and the rendezvous if it is ours to close.
        """
        stream = _stream(rows)
        copier = CpuCopier(engine) if stream is None else CudaCopier(engine, lambda: stream)
        user_loop = asyncio.get_running_loop()
        made = _Made()

        async def start() -> None:
            engine.on_stop(unmake)
            deadline = time.monotonic() + self.timeout
            inline = engine.worker if isinstance(engine.worker, Inline) else None
            store = await self._find(made, engine, inline)

            async def enter() -> bool:
                """Join and meet all; False if the job's key changed meanwhile: another try has the right one."""
                joined = await join(
                    store,
                    group=self.group,
                    rank=self.rank,
                    secret=self.settings.secret,
                    timeout=max(0.0, deadline - time.monotonic()),
                    executor=inline,
                )
                incarnation = joined.incarnation << GENERATION_BITS
                node = self.node if self.node is not None else await engine.offload(_boot_id)
                session = made.session = Session(
                    Identity(self.rank, self.ep_size, self.group, node, incarnation),
                    engine=engine,
                    settings=self.settings,
                    key=joined.key,
                    weights=rows,
                    placement=self.placement,
                    copier=copier,
                    staging=self.staging,
                    native=self.native,
                    emitter=self.emitter,
                )
                meeting = asyncio.ensure_future(session.introduce(store, max(0.0, deadline - time.monotonic()), inline))
                changing = asyncio.ensure_future(self._key_changed(store, joined.key, engine, inline))
                async with all_ended(meeting, changing):
                    await asyncio.wait({meeting, changing}, return_when=asyncio.FIRST_COMPLETED)
                    if meeting.done():
                        meeting.result()
                        return True
                _log.warning("rank %d joins again: the group runs already, and has another key", self.rank)
                await session.close(0.0)
                return False

            while not await enter():
                pass
            assert made.session is not None
            await made.session.owner.digest_all()  # after it: the others need not wait for this
            engine.off_stop(unmake)
            engine.on_stop(made.session.wind_down)

        async def unmake() -> None:
            engine.off_stop(unmake)
            if made.session is not None:
                engine.off_stop(made.session.wind_down)
                await made.session.close(0.0)
                await made.session.withdraw()
            await engine.offload(made.close_store)

        try:
            await engine.run(start)
        except BaseException:
            with contextlib.suppress(CommunicatorClosed):
                if own and isinstance(engine, Engine):
                    engine.request_stop()
                else:
                    engine.post(lambda: engine.spawn(unmake(), "giving back a failed open"))
            raise
        assert made.session is not None
        session = made.session
        if isinstance(engine, Engine):
            engine.post(lambda: engine.spawn(_watch(user_loop, session, engine), "watch of the user's loop"))
        return session, made.store

    async def _key_changed(self, store: Rendezvous, key: bytes, engine: LoopEngine, inline: Inline | None) -> None:
        """Return when another job's key is at a rendezvous that a rank hosts anew; elsewhere never."""
        if self.settings.secret or getattr(store, "lasting", True):
            await engine.loop.create_future()

        def is_other() -> bool:
            found = job_key(store, group=self.group, rank=self.rank, secret=None)
            return found is not None and found != key

        while True:
            await asyncio.sleep(_KEY_SECONDS)
            with contextlib.suppress(Exception):  # whatever a Rendezvous raises: the meeting says it, too
                if await apart(engine.loop, is_other, name="eplb-key", executor=inline):
                    return

    async def _find(self, made: _Made, engine: LoopEngine, inline: Inline | None) -> Rendezvous:
        """Resolve the rendezvous, on a thread of its own: no stop of the engine waits for it, should it hang."""
        try:
            async with asyncio.timeout(self.timeout + _GRACE_SECONDS):
                return await apart(engine.loop, lambda: self._resolve(made), name="eplb-resolve", executor=inline)
        except TimeoutError:
            name = self.rendezvous if isinstance(self.rendezvous, str) else f"of {type(self.rendezvous).__name__}"
            raise HandshakeError(
                f"rank {self.rank} could not reach the rendezvous {name} in {self.timeout:g} s: the look-up of its "
                "host, or a call on its file, has not come back; does the name server (or the file system) answer?"
            ) from None

    def _resolve(self, made: _Made) -> Rendezvous:
        if self.timeout <= 0:
            raise HandshakeError(f"rank {self.rank} was given no time to meet its peers; give a timeout above 0")
        store = resolve(
            self.rendezvous,
            rank=self.rank,
            ep_size=self.ep_size,
            secret=self.settings.secret,
            timeout=self.timeout,
        )
        if store is not self.rendezvous:
            made.take(store)
        return store


class _Made:
    """What an ``open`` has made so far."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self.store: Rendezvous | None = None
        self._lock = threading.Lock()
        self._given_back = False

    def take(self, store: Rendezvous) -> None:
        """Note a rendezvous that is ours to close; closed at once if ``open`` has ended meanwhile."""
        with self._lock:
            self.store = store
            if not self._given_back:
                return
        store.close()

    def close_store(self) -> None:
        """Close the rendezvous if it is ours, also one that is only found later."""
        with self._lock:
            self._given_back = True
        if self.store is not None:
            self.store.close()


async def _watch(loop: asyncio.AbstractEventLoop, session: Session, engine: Engine) -> None:
    """Close when the user's loop is closed: nobody is left to await anything."""
    while not loop.is_closed():
        await asyncio.sleep(_WATCH_SECONDS)
        if session.driver.over:
            return
    _log.warning("the loop that opened the communicator is closed; leaving the group")
    engine.request_stop()


def _stream(weights: ExpertWeights) -> Any:
    """The CUDA stream that is current where ``open`` was called; ``None`` without CUDA weights."""
    tensors = (tensor for tensors in weights.layers for tensor in tensors.values() if tensor.is_cuda)
    on_device = next(tensors, None)
    return None if on_device is None else torch.cuda.current_stream(on_device.device)


def _boot_id() -> str:
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return socket.gethostname()
