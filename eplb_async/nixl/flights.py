"""The READs of one agent, from post to end.

The rules:

1. A READ is posted on leased memory; the lease ends with the READ, not with its awaiter (I-3).
2. A handle is released only when terminal: ``DONE``, or a disconnect (I-4). A READ that was cancelled or timed
   out is in quarantine and goes on being polled until it is. Any other error is no proof of quiescence either,
   and the handle is not polled any more: handle and memory are kept until the agent goes (NIXL.md, 17-19).
3. A completion is looked for before a deadline is (I-11).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from eplb_async.errors import NixlPeerDisconnected, NixlTransferFailed, NixlTransferTimeout
from eplb_async.nixl.blocks import Blocks
from eplb_async.nixl.leases import Intervals, Leases, intervals_of
from eplb_async.nixl.native import Native, State
from eplb_async.nixl.peers import Peer
from eplb_async.nixl.transfer import Fate, Origin, Transfer

_log = logging.getLogger("eplb_async.agent")
_STALE_SECONDS = 0.05


class Flights:
    """READs that have not ended, and the leases of the memory that they may write.

    Args:
        native: The agent that they are posted with.
        loop: The engine loop.
        on_end: Called when a READ has ended and its memory is free.
        on_lost: Called with a peer's name when a READ says that the peer is gone.
    """

    def __init__(
        self,
        native: Native,
        loop: asyncio.AbstractEventLoop,
        *,
        on_end: Callable[[], object],
        on_lost: Callable[[str], object],
    ) -> None:
        self.leases = Leases()
        self._native = native
        self._loop = loop
        self._on_end = on_end
        self._on_lost = on_lost
        self._transfers: dict[Transfer, None] = {}
        self._changed = asyncio.Event()
        self._stirred = 0.0
        self._laps = 0

    def post(
        self, blocks: Blocks, peer: Peer, *, timeout: float, origin: Origin, notif: bytes, within: object
    ) -> Transfer:
        """Post one READ; see :meth:`Endpoint.post <eplb_async.nixl.endpoint.Endpoint.post>`."""
        now = self._loop.time()
        transfer = Transfer(
            peer=peer.name,
            nbytes=blocks.nbytes,
            started=now,
            deadline=now + timeout,
            origin=origin,
            future=self._loop.create_future(),
        )
        if peer.gone:
            raise transfer.explain(NixlPeerDisconnected("it was gone before", phase="post"), now)
        self.leases.acquire(transfer, intervals_of(blocks.local), f"READ from {peer.name}", within=within)
        try:
            transfer.handle = self._native.make_read(
                blocks.local, blocks.local_memory, blocks.remote, blocks.remote_memory, peer.name
            )
        except NixlTransferFailed as error:
            self.leases.release(transfer)
            raise transfer.explain(error, now) from error.__cause__
        self._transfers[transfer] = None
        try:
            state = self._native.post(transfer.handle, notif)
        except NixlTransferFailed as error:
            self._failed(transfer, error)
            raise error from error.__cause__
        self._see(transfer, state)
        if transfer.error is not None:
            raise transfer.error
        self.stir()
        return transfer

    def lap(self) -> bool:
        """Ask for the state of each READ; returns whether any has ended.

        Once nothing has ended for long they are asked one after the other, one every second lap, or many READs
        on a stopped peer would cost that many polls a lap. Taking notifications makes progress for all of them.
        """
        now = self._loop.time()
        self._laps += 1
        stale = now - self._stirred > _STALE_SECONDS and not self._native.moved
        turn = -1 if self._laps % 2 else self._laps // 2 % max(1, len(self._transfers))
        ended = False
        for i, transfer in enumerate(self.transfers):
            if transfer.handle is None or not transfer.pollable:
                continue
            if stale and i != turn and not transfer.is_overdue(now):
                continue
            try:
                self._see(transfer, self._native.check(transfer.handle))
            except NixlTransferFailed as error:
                self._failed(transfer, error)
            ended |= transfer.fate is Fate.ENDED
        if ended:
            self.stir()
        return ended

    def stir(self) -> None:
        """Something goes on: have the next laps ask for every READ."""
        self._stirred = self._loop.time()

    def abandon(self, transfer: Transfer) -> None:
        """Its awaiter is gone: keep handle and memory until the READ has ended (I-3)."""
        if transfer.fate is Fate.ACTIVE:
            transfer.abandon()
            _log.info("quarantined %s", transfer)

    async def drained(self, timeout: float, *, of: Callable[[Transfer], bool] = lambda _: True) -> bool:
        """Wait until no transfer that ``of`` selects is left; returns whether that happened in time."""
        return await self._until(lambda: not any(of(t) for t in self._transfers), timeout)

    async def released(self, wanted: Intervals, timeout: float) -> bool:
        """Wait until nobody holds a lease that overlaps; returns whether that happened in time."""
        return await self._until(lambda: self.leases.holder(wanted) is None, timeout)

    def end_lease(self, owner: object) -> None:
        """End the lease of ``owner``."""
        self.leases.release(owner)
        self._changed.set()

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """READs that have not ended, in the order they were posted."""
        return tuple(self._transfers)

    @property
    def is_active(self) -> bool:
        """Whether somebody awaits one."""
        return any(t.fate is Fate.ACTIVE for t in self._transfers)

    def is_read(self, peer: str) -> bool:
        """Whether READs from the peer of that name have not ended."""
        return any(t.peer == peer for t in self._transfers)

    def give_up(self) -> tuple[str, ...]:
        """Take handles from all that have not ended, right before the agent is destroyed; returns them in words."""
        for transfer in self._transfers:
            transfer.future.cancel()
            if transfer.handle is not None:
                self._native.abandon(transfer.handle)
                transfer.handle = None
        return tuple(map(str, self._transfers))

    def forget(self) -> None:
        """End all, after the agent is gone: nothing lands any more."""
        for transfer in self.transfers:
            self._end(transfer)

    async def _until(self, condition: Callable[[], bool], timeout: float) -> bool:
        deadline = self._loop.time() + timeout
        while not condition():
            left = deadline - self._loop.time()
            if left <= 0:
                return False
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._changed.wait()
        return True

    def _see(self, transfer: Transfer, state: State) -> None:
        now = self._loop.time()
        if state is State.DONE:
            self._release(transfer)
            if not transfer.future.done():
                transfer.future.set_result(None)
        elif state is State.ERR:
            self._failed(transfer, NixlTransferFailed(phase="poll"))
        elif transfer.is_overdue(now):
            late = NixlTransferTimeout("it may still land; its memory stays leased until it ends", phase="poll")
            transfer.fail(late, now)

    def _failed(self, transfer: Transfer, error: NixlTransferFailed) -> None:
        if isinstance(error, NixlPeerDisconnected):  # terminal: nothing lands after it (NIXL.md, 39)
            self._release(transfer)
            transfer.fail(error, self._loop.time())
            self._on_lost(transfer.peer)
        else:
            transfer.pollable = False
            transfer.fail(error, self._loop.time())
            self._changed.set()

    def _release(self, transfer: Transfer) -> None:
        handle, transfer.handle = transfer.handle, None
        if handle is not None:
            with contextlib.suppress(NixlTransferFailed):
                self._native.release(handle)
        self._end(transfer)

    def _end(self, transfer: Transfer) -> None:
        transfer.fate = Fate.ENDED
        self._transfers.pop(transfer, None)
        self.leases.release(transfer)
        self._changed.set()
        self._on_end()
