"""The exchange of introductions with all peers at once.

Each peer is looked for by a task of its own, so a slow, broken or missing one delays nobody else; only the
calls into the store itself queue up. A store may still hold introductions of an earlier run, which nothing in
their bytes gives away. So no introduction is final until ``on_peer`` has met its owner: while it tries, and
after it failed, the task goes on looking, and a newer introduction replaces the one before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import Executor
from typing import Any

from eplb_async.errors import HandshakeError
from eplb_async.rendezvous.base import Rendezvous
from eplb_async.threads import DaemonExecutor

OnPeer = Callable[[int, bytes], Awaitable[None]]

logger = logging.getLogger(__name__)

_FASTEST, _SLOWEST = 0.005, 0.05
_STORE_CALLS_PER_SECOND = 20_000  # what one TCPStore host can bear; n ranks look for up to n/2 peers each
_RECHECK, _SLOWEST_RECHECK = 0.25, 2.0  # while on_peer runs; each look reads the whole introduction again
_MAX_THREADS = 32
_SILENT = "the rendezvous did not answer; is the process that hosts it running?"


async def exchange(
    rendezvous: Rendezvous,
    *,
    group: str,
    rank: int,
    ep_size: int,
    sealed: bytes,
    deadline_per_peer: float,
    on_peer: OnPeer,
    executor: Executor | None = None,
    peers: Collection[int] | None = None,
) -> dict[int, float]:
    """Publish our introduction and meet every peer, concurrently.

    Runs on any loop and calls nothing native; the store is called in ``executor``. The rendezvous must stay
    open until all ranks are done: they may still look for each other when this rank has met everybody.

    Args:
        rendezvous: Where introductions are left.
        group: Group on it.
        rank: This rank.
        ep_size: Size of the group.
        sealed: Our introduction.
        deadline_per_peer: Seconds from now until each peer must be met.
        on_peer: Called with rank and introduction for each one found; checks it and meets its owner, or
            raises. It is called again for a peer only with other bytes; if it is running then, it is
            cancelled first.
        executor: Where to call the store; default a pool of our own, whose threads are never waited for.
        peers: Whom to meet; default all others.

    Returns:
        For each peer the seconds until it was met.

    Raises:
        HandshakeError: Lists every peer that was not met and why; ``__cause__`` is one of the reasons. All
            others have been met by then.
    """
    loop = asyncio.get_running_loop()
    started = loop.time()
    deadline = started + deadline_per_peer
    pool = executor or DaemonExecutor(min(_MAX_THREADS, ep_size), name="eplb-exchange")
    try:
        await _publish(rendezvous, pool, f"{group}/blob/{rank}", sealed, deadline, deadline_per_peer)
        slowest = max(_SLOWEST, ep_size**2 / 4 / _STORE_CALLS_PER_SECOND)
        meetings = [
            _Meeting(rendezvous, pool, peer, f"{group}/blob/{peer}", on_peer, slowest)
            for peer in (range(ep_size) if peers is None else peers)
            if peer != rank
        ]
        async with asyncio.TaskGroup() as tasks:
            for meeting in meetings:
                tasks.create_task(meeting.run(deadline), name=f"eplb-meet-{meeting.peer}")
    finally:
        if executor is None:
            pool.shutdown(wait=False, cancel_futures=True)
    failed: dict[int | str, str] = {meeting.peer: meeting.reason() for meeting in meetings if meeting.met_at is None}
    if failed:
        causes = [meeting.failure for meeting in meetings if meeting.met_at is None and meeting.failure]
        raise HandshakeError(
            f"rank {rank} met {len(meetings) - len(failed)} of {len(meetings)} peers of group {group!r} in "
            f"{deadline_per_peer:.3g} s at {rendezvous.url}; start or repair the others and open again:",
            failures=failed,
        ) from (causes[0] if causes else None)
    return {meeting.peer: meeting.met_at - started for meeting in meetings if meeting.met_at is not None}


def withdraw(rendezvous: Rendezvous, *, group: str, rank: int, sealed: bytes) -> None:
    """Take our introduction back, unless a newer start of this rank has replaced it; blocks.

    The key stays, with nothing: a rank that asks for a key just as it is removed would wait in some stores.

    Args:
        rendezvous: Where it was left.
        group: Group on it.
        rank: This rank.
        sealed: What was published last.
    """
    key = f"{group}/blob/{rank}"
    if rendezvous.get(key) == sealed:
        rendezvous.set(key, b"")


async def _publish(
    rendezvous: Rendezvous, pool: Executor, key: str, sealed: bytes, deadline: float, timeout: float
) -> None:
    """Leave our introduction, trying again until the deadline where that can help."""
    loop = asyncio.get_running_loop()
    failure: Exception | None = None
    pause = _FASTEST
    try:
        async with asyncio.timeout_at(deadline):
            while True:
                try:
                    await loop.run_in_executor(pool, rendezvous.set, key, sealed)
                except Exception as error:  # whatever a caller's Rendezvous raises
                    failure = error
                else:
                    return
                if getattr(rendezvous, "one_time", ""):
                    break
                await asyncio.sleep(pause)
                pause = min(_SLOWEST_RECHECK, 2 * pause)  # a store that is gone may log every call
    except TimeoutError:
        pass
    raise HandshakeError(
        f"could not publish this rank's introduction at {rendezvous.url} in {timeout:.3g} s: "
        f"{_text(failure) if failure else _SILENT}"
    ) from failure


class _Meeting:
    """The search for one peer.

    Attributes:
        peer: Its rank.
        met_at: Loop time at which ``on_peer`` succeeded, or None.
        failure: Why the last introduction failed, or None.
    """

    def __init__(
        self, rendezvous: Rendezvous, pool: Executor, peer: int, key: str, on_peer: OnPeer, slowest: float
    ) -> None:
        self.peer = peer
        self.met_at: float | None = None
        self.failure: Exception | None = None
        self._rendezvous = rendezvous
        self._pool = pool
        self._key = key
        self._on_peer = on_peer
        self._slowest = slowest
        self._tried: bytes | None = None
        self._attempt: asyncio.Task[Exception | None] | None = None
        self._answered = False
        self._trouble: Exception | None = None

    async def run(self, deadline: float) -> None:
        """Look and try until met or out of time; raises nothing but cancellation."""
        try:
            async with asyncio.timeout_at(deadline):
                pause = _FASTEST
                while self.met_at is None:
                    blob = await self._look()
                    self._collect()
                    if self.met_at is None and blob is not None and blob != self._tried:
                        await self._cancel()
                        if self._is_met():
                            break
                        if self._tried is not None:
                            logger.info("rank %d has published a newer introduction", self.peer)
                        self._tried, self.failure = blob, None
                        self._attempt = asyncio.create_task(self._try(blob), name=f"eplb-try-{self.peer}")
                        pause = _RECHECK
                    if self._attempt is None:
                        await asyncio.sleep(pause)
                        pause = min(self._slowest, 2 * pause)
                        continue
                    await asyncio.wait({self._attempt}, timeout=pause)
                    pause = min(_SLOWEST_RECHECK, 2 * pause)
                    if self._collect():
                        pause = self._slowest
        except TimeoutError:
            pass
        finally:
            await self._cancel()

    def reason(self) -> str:
        """Why it was not met."""
        if self.failure is not None:
            return _text(self.failure)
        if self._tried is not None:
            return (
                "it published an introduction but did not answer: dead, stopped, left from an earlier run, or its UCX "
                "cannot be reached from here (UCX_NET_DEVICES, a firewall)"
            )
        if self._trouble is not None:
            return f"the rendezvous could not be asked: {_text(self._trouble)}"
        if not self._answered:
            return _SILENT
        return "never published its introduction: is it running, with the same group and rendezvous?"

    async def _look(self) -> bytes | None:
        """Ask the store once; returns early, with nothing, when the running attempt ends."""
        loop = asyncio.get_running_loop()
        try:
            asked = loop.run_in_executor(self._pool, self._rendezvous.get, self._key)
            awaited: set[asyncio.Future[Any]] = {asked} if self._attempt is None else {asked, self._attempt}
            try:
                await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
                blob = (asked.result() or None) if asked.done() else None  # an empty one was withdrawn
            finally:
                asked.cancel()
        except Exception as error:  # whatever a caller's Rendezvous raises
            self._trouble = error
            return None
        self._answered, self._trouble = True, None
        return blob

    def _is_met(self) -> bool:
        return self.met_at is not None

    async def _try(self, blob: bytes) -> Exception | None:
        try:
            await self._on_peer(self.peer, blob)
        except Exception as error:  # of any kind: it fails this introduction, not the other peers
            return error
        return None

    def _collect(self) -> bool:
        """Take the attempt's outcome, if it has one."""
        if self._attempt is None or not self._attempt.done():
            return False
        attempt, self._attempt = self._attempt, None
        if not attempt.cancelled():
            self.failure = attempt.result()
            if self.failure is None:
                self.met_at = asyncio.get_running_loop().time()
            else:
                logger.info("introduction of rank %d refused: %s", self.peer, self.failure)
        return True

    async def _cancel(self) -> None:
        """End the running attempt; one that succeeded meanwhile counts."""
        if self._attempt is not None:
            self._attempt.cancel()
            await asyncio.wait({self._attempt})
            self._collect()


def _text(error: Exception) -> str:
    if isinstance(error, HandshakeError | ValueError | TimeoutError) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
