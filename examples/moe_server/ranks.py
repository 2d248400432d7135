"""What the ranks exchange in a step: a socket pair between any two, whole messages, bounded waits, checked tags.

Rank 0 tells the others what comes next. In a step they add up, layer by layer, what their experts say. A rank that
dies ends its sockets, so the others notice at once; one that is stopped is named when the time is over.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch

MAX_BATCH = 64
_HEADER = struct.Struct("<iQQI")  # kind or layer, term, step, rows
_MOST_QUEUED = 64
_MAX_BYTES = 1 << 17  # of one message: below what a socket takes at once, so a send never waits for a receive


class ExchangeFailed(RuntimeError):
    """A rank is gone, silent or out of step; nothing more can be computed with it.

    Attributes:
        rank: That rank.
    """

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(f"rank {rank} {why}")
        self.rank = rank


class Kind(IntEnum):
    """What rank 0 tells the others."""

    STEP = -1  # run a step with this batch
    IDLE = -2  # there is no batch after this step
    REARRANGE = -3  # stop and move experts, after this step
    STOP = -4  # that was the last step
    FAILED = -5  # a rank is lost: its number is in place of the step. Any rank says it to all


class Word(NamedTuple):
    """What rank 0 told: the step, and its batch ``[n, width]``."""

    kind: Kind
    step: int
    x: torch.Tensor


class Ranks:
    """This rank's end of all exchanges. Used by one thread at a time.

    Args:
        rank: This rank.
        sockets: A socket to each other rank.
        width: Values of one token.
        timeout: Seconds that another rank may keep this one waiting.
    """

    def __init__(self, rank: int, sockets: dict[int, socket.socket], *, width: int, timeout: float) -> None:
        if MAX_BATCH * width * 4 + _HEADER.size > _MAX_BYTES:
            raise ValueError(f"width={width} is too wide for batches of {MAX_BATCH}")
        self.rank = rank
        self._sockets = sockets
        self._width, self._timeout = width, timeout
        self._room = bytearray(_MAX_BYTES)
        for one in sockets.values():
            one.settimeout(timeout)

    @staticmethod
    def connect(size: int) -> list[dict[int, socket.socket]]:
        """The sockets of each rank, to be given to its process."""
        ends: list[dict[int, socket.socket]] = [{} for _ in range(size)]
        for one in range(size):
            for other in range(one + 1, size):
                ends[one][other], ends[other][one] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return ends

    def tell(self, kind: Kind, step: int, x: torch.Tensor | None = None) -> None:
        """Tell all others what comes next; rank 0 does."""
        rows = torch.zeros(0, self._width) if x is None else x
        for peer in self._sockets:
            self._send(peer, kind, 0, step, rows.to(torch.int8).numpy())

    def hear(self, is_over: Callable[[], bool]) -> Word | None:
        """Wait for what comes next, looking now and then whether it is over; None then."""
        while not is_over():
            try:
                kind, _, step, rows, body = self._receive(0)
            except TimeoutError:
                continue  # idle
            x = np.frombuffer(body, np.int8).reshape(rows, self._width)
            return Word(Kind(kind), step, torch.from_numpy(x.astype(np.float32)))
        return None

    def add_up(self, y: torch.Tensor, *, term: int, step: int, layer: int) -> torch.Tensor:
        """The sum over all ranks of ``[n, width]``, of one layer of one step.

        Raises:
            ExchangeFailed: A rank is gone or silent, or is in another term, step or layer.
        """
        mine = y.numpy()
        for peer in self._sockets:
            self._send(peer, layer, term, step, mine)
        for peer in self._sockets:
            try:
                found = self._receive(peer)
            except TimeoutError:
                raise ExchangeFailed(peer, f"said nothing for {self._timeout:g} s in step {step}") from None
            if found[:4] != (layer, term, step, len(mine)):
                tag = "layer {}, term {}, step {}, {} rows".format(*found[:4])
                raise ExchangeFailed(peer, f"is out of step: it is in {tag}; here is step {step} of term {term}")
            mine = mine + np.frombuffer(found[4], np.float32).reshape(mine.shape)
        return torch.from_numpy(mine)

    def gather(self, payload: bytes) -> list[bytes]:
        """What every rank gives, outside of steps, by rank: also a barrier."""
        for peer in self._sockets:
            self._send(peer, 0, 0, 0, np.frombuffer(payload, np.uint8)[None])
        given = {self.rank: payload}
        for peer in self._sockets:
            try:
                given[peer] = bytes(self._receive(peer)[4])
            except TimeoutError:
                raise ExchangeFailed(peer, f"said nothing for {self._timeout:g} s between two steps") from None
        return [given[rank] for rank in sorted(given)]

    def check(self) -> None:
        """On rank 0, while idle, so that nobody speaks to it: raise if a rank has failed or is gone."""
        while ready := select.select(list(self._sockets.values()), [], [], 0)[0]:
            self._receive(next(peer for peer, one in self._sockets.items() if one is ready[0]))

    def close(self, lost: int | None = None) -> None:
        """End all exchanges, at once for the others; ``lost`` is the rank that is to blame."""
        for peer, one in self._sockets.items():
            if lost is not None and peer != lost:
                with contextlib.suppress(OSError):  # it has ended, too
                    one.send(_HEADER.pack(Kind.FAILED, 0, lost, 0))
            one.close()

    def _send(self, peer: int, kind: int, term: int, step: int, body: np.ndarray) -> None:
        try:
            self._sockets[peer].sendmsg([_HEADER.pack(kind, term, step, len(body)), body.tobytes()])
        except TimeoutError:
            raise ExchangeFailed(peer, f"took nothing for {self._timeout:g} s in step {step}") from None
        except OSError as error:
            raise self._blame(peer, f"is gone ({error.strerror or error})") from None

    def _receive(self, peer: int) -> tuple[int, int, int, int, memoryview]:
        try:
            size = self._sockets[peer].recv_into(self._room)
        except TimeoutError:
            raise
        except OSError as error:
            raise self._blame(peer, f"is gone ({error.strerror or error})") from None
        if not size:
            raise self._blame(peer, "is gone (its connection has ended)")
        kind, term, step, rows = _HEADER.unpack_from(self._room)
        if kind == Kind.FAILED:
            raise _named(step, by=peer)
        return kind, term, step, rows, memoryview(self._room)[_HEADER.size : size]

    def _blame(self, peer: int, why: str) -> ExchangeFailed:
        """The rank that another has named before it ended its sockets, too; else the one whose socket has ended."""
        for other, one in self._sockets.items():
            one.setblocking(False)  # nothing is exchanged any more
            for _ in range(_MOST_QUEUED):
                try:
                    size = one.recv_into(self._room)
                except ConnectionResetError:
                    continue  # said once; what was sent before is still there
                except OSError:
                    break
                if not size:
                    break
                kind, _, lost, _ = _HEADER.unpack_from(self._room)
                if kind == Kind.FAILED:
                    return _named(lost, by=other)
        return ExchangeFailed(peer, why)


def _named(lost: int, *, by: int) -> ExchangeFailed:
    return ExchangeFailed(lost, "failed" if lost == by else f"is lost, says rank {by}")
