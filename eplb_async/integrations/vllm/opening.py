"""The collective constructor: ranks meet over the process group that vLLM gives; it works for all, or fails for all.

Three exchanges, each of which carries what went wrong on a rank, so that nobody waits for one that has given up:
the tensors are good, and rank 0's fresh key; introductions, sealed with that key; peers were added.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec

from eplb_async._types import Hidden
from eplb_async.core.layout import Layout, compare
from eplb_async.core.text import one_line
from eplb_async.engine import Engine
from eplb_async.errors import HandshakeError, describe
from eplb_async.integrations.vllm.fence import Fence
from eplb_async.integrations.vllm.messages import KEY_SIZE, Codec
from eplb_async.integrations.vllm.tensors import Tensors
from eplb_async.nixl.endpoint import Endpoint, NativeFactory, Peer
from eplb_async.rendezvous.group import gather
from eplb_async.settings import Settings
from eplb_async.waiting import run_on

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Group", "open_group"]

T = TypeVar("T")
Prepared = tuple[Settings, float, Tensors]
_VERSION = 1
_SHOWN = 4
_REASON = 2000


class _Word(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """What a rank says in one exchange: what went wrong on it, or else its part."""

    version: int
    error: Annotated[str, msgspec.Meta(max_length=_REASON)] = ""
    key: Annotated[bytes, msgspec.Meta(max_length=KEY_SIZE)] = b""
    metadata: bytes = b""
    layout: Any = ()

    def __repr__(self) -> str:
        return f"<word of a rank, error {self.error!r}>"  # without the key, whatever shows it


@dataclass(frozen=True, slots=True)
class Group:
    """A communicator's parts, once all ranks have met."""

    rank: int
    size: int
    engine: Engine
    endpoint: Endpoint
    fence: Fence
    layouts: dict[int, Layout]


def open_group(
    cpu_group: ProcessGroup,
    prepare: Callable[[], Prepared],
    *,
    native: NativeFactory,
    arrival: float,
) -> tuple[Group, Prepared]:
    """Meet all ranks of a group; blocks.

    Args:
        cpu_group: The process group; trusted as it is given, and used for nothing else meanwhile.
        prepare: Checks what this rank was given: settings, the timeout of its calls, tensors.
        native: Makes the native agent.
        arrival: Seconds until the last rank must have come.

    Raises:
        HandshakeError: It failed on a rank, on every rank; names that rank and its reason.
    """
    meeting = _Meeting(cpu_group)
    prepared, failure = _attempt(prepare)
    word = _Word(_VERSION, failure, secrets.token_bytes(KEY_SIZE) if meeting.rank == 0 else b"")
    words = meeting.exchange(word, arrival)
    assert prepared is not None
    settings, _, tensors = prepared
    settings = replace(settings, secret=_job_key(words[0].key, settings.secret))
    made: list[Engine] = []
    try:
        parts, failure = _attempt(lambda: _make(meeting, tensors, settings, native, made))
        word = _Word(_VERSION, failure)
        if parts is not None:
            word = _Word(_VERSION, metadata=parts[2], layout=tensors.layout.to_plain())
        words = meeting.exchange(word, settings.peer_timeout)
        assert parts is not None
        endpoint, fence, _ = parts
        layouts, failure = _attempt(lambda: _meet(meeting, words, tensors, made[0], endpoint, fence, settings))
        meeting.exchange(_Word(_VERSION, failure), settings.peer_timeout)
        assert layouts is not None
    except BaseException:
        for engine in made:
            engine.stop()
        raise
    return Group(meeting.rank, meeting.size, made[0], endpoint, fence, layouts), prepared


class _Meeting:
    """The exchanges over one process group."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self.rank = int(group.rank())
        self.size = int(group.size())

    def exchange(self, word: _Word, timeout: float) -> list[_Word]:
        """Every rank's word.

        Raises:
            HandshakeError: Something went wrong on a rank, or one did not come.
        """
        answers = gather(self._group, msgspec.msgpack.encode(word), timeout=timeout)
        words, failures = [], dict[int | str, str]()
        for rank, data in enumerate(answers):
            try:
                said = msgspec.msgpack.decode(data, type=_Word)
                if said.version != _VERSION:
                    failures[rank] = f"it has version {said.version} of this exchange, rank {self.rank} {_VERSION}"
                elif said.error:
                    failures[rank] = one_line(said.error)
                words.append(said)
            except msgspec.MsgspecError as problem:
                failures[rank] = f"what it says is unreadable: {one_line(str(problem))}"
        if failures:
            raise HandshakeError("the ranks could not open their communicator", failures=failures)
        return words


def _attempt(work: Callable[[], T]) -> tuple[T | None, str]:
    """The result, or what went wrong."""
    try:
        return work(), ""
    except Exception as error:
        return None, describe(error)[:_REASON]


def _make(
    meeting: _Meeting, tensors: Tensors, settings: Settings, native: NativeFactory, made: list[Engine]
) -> tuple[Endpoint, Fence, bytes]:
    engine = Engine(f"eplb-async vllm/{meeting.rank}", use_uvloop=settings.use_uvloop)
    made.append(engine)
    key = settings.secret or b""
    fences: list[Fence] = []

    async def make() -> tuple[Endpoint, Fence, bytes]:
        endpoint = Endpoint(
            f"eplb-vllm/{meeting.rank}.{time.time_ns():x}-{secrets.token_hex(4)}",
            engine,
            settings,
            native,
            on_notification=lambda peer, data: fences[0].on_notification(peer, data),
            on_disconnect=lambda peer: fences[0].on_disconnect(peer),
        )
        fence = Fence(meeting.rank, meeting.size, Codec(key, meeting.size), endpoint)
        fences.append(fence)
        engine.on_stop(endpoint.close)
        endpoint.register_many(tensors.regions())
        return endpoint, fence, endpoint.metadata()

    return run_on(engine.loop, make, what="open", limit=settings.peer_timeout)


def _meet(
    meeting: _Meeting,
    words: list[_Word],
    tensors: Tensors,
    engine: Engine,
    endpoint: Endpoint,
    fence: Fence,
    settings: Settings,
) -> dict[int, Layout]:
    layouts: dict[int, Layout] = {}
    for rank, word in enumerate(words):
        if rank == meeting.rank:
            continue
        try:
            theirs = layouts[rank] = Layout.from_plain(word.layout, like=tensors.layout)
        except ValueError as error:
            raise HandshakeError(f"rank {rank}: its layout is refused: {error}") from error
        if differences := compare(tensors.layout, theirs):
            more = f"; and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
            raise HandshakeError(f"rank {rank} has another layout: {'; '.join(differences[:_SHOWN])}{more}")

    async def meet() -> None:
        peers: dict[int, Peer] = {}
        for turn in range(1, meeting.size):  # not all of them to the same one at once
            rank = (meeting.rank + turn) % meeting.size
            peers[rank] = endpoint.add_peer(words[rank].metadata)
        fence.meet(peers)
        engine.on_stop(lambda: fence.close(settings.close_timeout))

    run_on(engine.loop, meet, what="open", limit=settings.peer_timeout)
    return layouts


def _job_key(fresh: bytes, secret: bytes | None) -> bytes:
    """The key of this communicator: rank 0's fresh one, and the job's secret where there is one."""
    if len(fresh) != KEY_SIZE:
        raise HandshakeError(f"rank 0 sent a key of {len(fresh)} bytes instead of {KEY_SIZE}")
    return Hidden(hashlib.blake2b(secret or b"", key=fresh, digest_size=KEY_SIZE, person=b"eplb-vllm-key").digest())
