"""Runs inside a rank's process: stops its engine thread at a named point of a migration, until it is let go.

A rank that stands still there is what SIGKILL and SIGSTOP meet, so a phase is hit without a sleep. The user's loop of
the rank goes on and tells the parent that the point was reached.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from eplb_async.communicator.reads import Reads
from eplb_async.communicator.stager import Stager
from eplb_async.core import events, messages
from eplb_async.nixl.transfer import Transfer
from eplb_async.weights import Copy

_PATIENCE = 60.0  # a held engine thread goes on by itself then, so that nothing hangs for ever


class Hold:
    """One point at which the engine thread stands still, once."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.go = threading.Event()

    def here(self) -> None:
        """Stand still, the first time."""
        if not self.reached.is_set():
            self.reached.set()
            self.go.wait(_PATIENCE)


_hold = Hold()
_votes = Hold()  # nothing stands still for it: votes are kept back meanwhile
_kept: list[events.Staged] = []


async def arm(comm: Any, point: str, layer: int, peer: int | None) -> None:
    """Have the engine thread stop at a point.

    Args:
        comm: The communicator.
        point: A key of ``POINTS``.
        layer: The layer that it is about.
        peer: The rank that it is about, where that matters; else any.
    """

    async def on_engine() -> None:
        POINTS[point](comm._session, layer, peer)

    await comm._engine.run(on_engine)


async def reached(comm: Any) -> str:
    """Answer when the engine thread stands still."""
    while not _hold.reached.is_set():
        await asyncio.sleep(0.001)
    return "reached"


async def kept(comm: Any) -> str:
    """Answer when a vote is kept back."""
    while not _votes.reached.is_set():
        await asyncio.sleep(0.001)
    return "kept"


async def cast(comm: Any) -> str:
    """Cast the votes that were kept back, and have the engine thread stand still right after; answer when it does."""

    def on_engine() -> None:
        _cast(comm)
        _hold.here()

    comm._engine.post(on_engine)
    await reached(comm)
    return "cast"


async def let_go(comm: Any) -> str:
    """Let the engine thread go on, and cast the votes that were kept back."""
    _hold.go.set()
    comm._engine.post(lambda: _cast(comm))
    return "let_go"


def _cast(comm: Any) -> None:
    _votes.go.set()
    while _kept:
        comm._session.driver.feed(_kept.pop(0))


async def prepared(comm: Any, upto: int) -> str:
    """Answer when this rank has voted for so many layers."""
    while comm.health().prepared < upto:
        await asyncio.sleep(0.001)
    return "prepared"


async def paint(comm: Any) -> int:
    """Fill the staging that nobody holds, as whoever gets it next would; returns how many bytes that is."""

    async def on_engine() -> int:
        staging = comm._session._staging
        staging.reclaim()
        comm._painted = []
        for memory, buffer in staging.buffers.items():
            taken = sorted(
                (p.start, p.start + p.nbytes) for p in (*staging._held, *staging._used) if p.memory == memory
            )
            at = 0
            for start, end in (*taken, (buffer.numel(), buffer.numel())):
                if start > at:
                    buffer[at:start].fill_(0xEE)
                    comm._painted.append(buffer[at:start])
                at = max(at, end)
        return sum(part.numel() for part in comm._painted)

    return int(await comm._engine.run(on_engine))


async def smudged(comm: Any) -> int:
    """How many of the bytes that :func:`paint` filled are others now."""
    return sum(int((part != 0xEE).sum()) for part in comm._painted)


# ------------------------------------------------------------------------------------------------------ points
def _begin(session: Any, layer: int, peer: int | None) -> None:
    """BEGIN was handled (a coordinator has sent it to all), no READ is posted."""
    original = Stager._stage_layers

    async def stage_layers(stager: Stager, first: int) -> None:
        _hold.here()
        await original(stager, first)

    Stager._stage_layers = stage_layers  # type: ignore[method-assign]


def _reading(session: Any, layer: int, peer: int | None) -> None:
    """A READ of the layer (from ``peer``) has just been posted, and on tcp it is under way."""
    original = Reads._post_batch
    ends_in_post = "tcp" not in os.environ.get("UCX_TLS", "")

    def post_batch(reads: Reads, job: Any, batch: Any, memory: str) -> Transfer:
        transfer = original(reads, job, batch, memory)
        under_way = ends_in_post or not transfer.future.done()
        if layer in job.layers and peer in (None, batch.source) and under_way:
            _hold.here()
        return transfer

    Reads._post_batch = post_batch  # type: ignore[method-assign]


def _staged(session: Any, layer: int, peer: int | None) -> None:
    """The layer is staged and checked; the vote for it is kept back. The engine thread goes on serving READs."""
    driver = session.driver
    original = driver.feed

    def feed(event: events.Event) -> None:
        if isinstance(event, events.Staged) and event.upto > layer and not _votes.go.is_set():
            _kept.append(event)
            _votes.reached.set()
        else:
            original(event)

    driver.feed = feed


def _voted(session: Any, layer: int, peer: int | None) -> None:
    """The vote for the layer is cast, and sent."""
    driver = session.driver
    original = driver.feed

    def feed(event: events.Event) -> None:
        original(event)
        if isinstance(event, events.Staged) and event.upto > layer:
            _hold.here()

    driver.feed = feed


def _told(session: Any, layer: int, peer: int | None) -> None:
    """COMMIT of the layer has come, and is not looked at."""
    driver = session.driver
    original = driver.feed

    def feed(event: events.Event) -> None:
        match event:
            case events.Received(messages.Commit(upto=upto)) if upto > layer:
                _hold.here()
        original(event)

    driver.feed = feed


def _telling(session: Any, layer: int, peer: int | None) -> None:
    """COMMIT of the layer is decided, and about to be sent to ``peer``."""
    driver = session.driver
    original = driver.send

    def send(to: int, message: messages.Message) -> None:
        if to == peer and isinstance(message, messages.Commit) and message.upto > layer:
            _hold.here()
        original(to, message)

    driver.send = send


def _applying(session: Any, layer: int, peer: int | None) -> None:
    """Half of the layer's rows are copied into place (none, where it has none)."""
    copier, rows = session.copier, session.weights.rows(layer, 0)
    original = copier.copy
    applied = -1

    async def copy(copies: Sequence[Copy]) -> None:
        nonlocal applied
        if not copies:
            applied += 1  # only an apply copies nothing
        elif copies[0].target.data_ptr() == rows.data_ptr():
            half = [Copy(c.target, c.to[: len(c.to) // 2], c.source, c.frm[: len(c.to) // 2]) for c in copies]
            await original(half)
            applied = layer
        if applied == layer:
            _hold.here()
        await original(copies)

    copier.copy = copy


POINTS: dict[str, Callable[[Any, int, int | None], None]] = {
    "begin": _begin,
    "reading": _reading,
    "staged": _staged,
    "voted": _voted,
    "told": _told,
    "telling": _telling,
    "applying": _applying,
}
