"""The rendezvous tried as a rank, and every peer read from."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

from eplb_async.doctor.probes.meeting import Hello, Meeting, nonce
from eplb_async.doctor.probes.reads import Memory, measure
from eplb_async.errors import EplbError, HandshakeError
from eplb_async.nixl import AsyncNixlAgent
from eplb_async.rendezvous import Rendezvous
from eplb_async.rendezvous.keys import join
from eplb_async.rendezvous.resolve import resolve
from eplb_async.settings import Settings
from eplb_async.threads import DaemonExecutor

_MEETING_SHARE = 0.6  # of the time, for everything up to the first READ
_CLOSE_SECONDS = 1.0
_THREADS = 8


def peers(
    *, rendezvous: str, rank: int, ep_size: int, group: str, node: str, seconds: float, memory: str | None
) -> Iterator[dict[str, Any]]:
    """Join a rendezvous, meet all ranks, and with ``memory`` read from each.

    Every answer has what the one before had, and ``stage``: what is being done, ``reach``, ``key``, ``meet`` or
    ``read``, in the end ``done``. So one that comes to no end still says where it was.
    """
    begun = time.monotonic()
    meet_until = begun + seconds * _MEETING_SHARE
    secret = Settings.from_env().secret
    found: dict[str, Any] = {"stage": "reach"}
    yield found
    store = resolve(rendezvous, rank=rank, ep_size=ep_size, secret=secret, timeout=meet_until - time.monotonic())
    found |= {"stage": "key", "url": store.url, "reached_seconds": round(time.monotonic() - begun, 3)}
    yield found
    where = f"{group}/doctor"
    has_secret = b"set" if secret else b"unset"
    store.set(f"{where}/secret/{rank}", has_secret)
    pool = DaemonExecutor(_THREADS, name="doctor-rendezvous")
    with asyncio.Runner() as runner:
        left = max(0.1, meet_until - time.monotonic())
        try:
            joined = runner.run(join(store, group=where, rank=rank, secret=secret, timeout=left, executor=pool))
        except HandshakeError as error:
            raise _lacks_secret(store, f"{where}/secret/0", has_secret) or error from error
        found |= {"stage": "meet"}
        yield found
        reader = _Reader(memory)
        hello = Hello(rank, ep_size, nonce(), node, runner.run(reader.open()))
        meeting = Meeting(store, group=where, hello=hello, key=joined.key, pool=pool)
        missed = runner.run(meeting.meet(max(0.1, meet_until - time.monotonic())))
        found |= {
            "stage": "read",
            "agent_error": reader.error,
            "met": {peer: met.node for peer, met in meeting.met.items()},
            "missed": {peer: _trouble(meeting, store, where, peer, why, has_secret) for peer, why in missed.items()},
        }
        yield found
        end = begun + seconds - 2 * _CLOSE_SECONDS
        found |= {"reads": runner.run(reader.read_all(meeting.met, rank, end)) if memory else {}, "stage": "done"}
        yield found
        runner.run(meeting.leave(max(0.1, end - time.monotonic())))
        runner.run(reader.close())
    store.close()


def _trouble(meeting: Meeting, store: Rendezvous, where: str, peer: int, why: str, has_secret: bytes) -> dict[str, str]:
    kind = meeting.kind(peer)
    if kind != "silent" and (lacks := _lacks_secret(store, f"{where}/secret/{peer}", has_secret)):
        return {"kind": "secret", "why": str(lacks)}
    return {"kind": kind, "why": why}


def _lacks_secret(store: Rendezvous, key: str, has_secret: bytes) -> HandshakeError | None:
    """What to say where that rank has said that it has a secret and we have none, or the other way round."""
    said = None
    with contextlib.suppress(EplbError):
        said = store.get(key)
    if said not in (b"set", b"unset") or said == has_secret:
        return None
    rank = key.rpartition("/")[2]
    who, whom = ("this rank", f"rank {rank}") if said == b"set" else (f"rank {rank}", "this rank")
    return HandshakeError(f"{who} has no EPLB_ASYNC_SECRET, {whom} has")


class _Reader:
    """Our agent: read from while the others measure, reading while we do."""

    def __init__(self, where: str | None) -> None:
        self.error = ""
        self._where = where
        self._target: Memory | None = None
        self._agent: AsyncNixlAgent | None = None
        self._stack = contextlib.AsyncExitStack()

    async def open(self) -> bytes:
        """Our agent's card; empty where there is none: not asked for, or :attr:`error` says why."""
        if self._where is None:
            return b""
        try:
            self._agent = await AsyncNixlAgent.open(f"doctor-{os.getpid()}-{nonce().hex()}", Settings())
            self._stack.push_async_callback(self._agent.aclose, _CLOSE_SECONDS)
            source, self._target = Memory(self._where, filled=True), Memory(self._where, filled=False)
            await source.register(self._agent)
            await self._target.register(self._agent)
            await self._stack.enter_async_context(self._agent.serving())
            return await self._agent.metadata()
        except EplbError as error:
            self.error = str(error)
            return b""

    async def read_all(self, met: Mapping[int, Hello], rank: int, end: float) -> dict[int, dict[str, Any]]:
        """What :func:`measure` says of each, or ``error``; each begins with the one behind it, so that few collide."""
        found: dict[int, dict[str, Any]] = {}
        order = sorted(met, key=lambda peer: (peer < rank, peer))
        for number, peer in enumerate(order):
            seconds = max(0.1, (end - time.monotonic()) / (len(order) - number))
            try:
                found[peer] = await self._read(met[peer], seconds)
            except EplbError as error:
                found[peer] = {"error": str(error)}
        return found

    async def _read(self, hello: Hello, seconds: float) -> dict[str, Any]:
        if self._agent is None or self._target is None:
            return {"error": "this rank has no NIXL agent"}
        if not hello.card:
            return {"error": "it has no NIXL agent, or runs without --peers; see what it says itself"}
        peer = await self._agent.add_peer(hello.card)
        return await measure(self._agent, self._target, peer, seconds=seconds)

    async def close(self) -> None:
        """Close the agent."""
        await self._stack.aclose()
