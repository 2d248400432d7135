"""What an agent needs of NIXL, as an interface: the real one and the in-memory one of ``testing`` implement it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NewType, Protocol

import numpy as np
import numpy.typing as npt

Handle = NewType("Handle", object)
"""One transfer request; opaque."""

Descriptors = npt.NDArray[np.uint64]
"""Blocks of memory, uint64 ``[n, 3]``; each has an address, a length in bytes and a device index."""


class State(Enum):
    """State of a transfer request."""

    DONE = "DONE"
    PROC = "PROC"
    ERR = "ERR"


@dataclass(frozen=True, slots=True)
class Extent:
    """One stretch of registered memory, as rows at a constant stride.

    Attributes:
        name: Name of the region.
        address: Address of the first byte.
        row_bytes: Bytes of one row.
        row_stride: Bytes from one row to the next.
        num_rows: Rows.
        memory: NIXL's memory type: ``"DRAM"`` or ``"VRAM"``.
        device: Device index.
    """

    name: str
    address: int
    row_bytes: int
    row_stride: int
    num_rows: int
    memory: str = "DRAM"
    device: int = 0

    @property
    def length(self) -> int:
        """Bytes from the first byte of the first row to the last byte of the last."""
        return (self.num_rows - 1) * self.row_stride + self.row_bytes if self.num_rows else 0

    @property
    def end(self) -> int:
        """Address after the last byte."""
        return self.address + self.length


class Native(Protocol):
    """One NIXL agent. Every method is called on the engine loop's thread; none may be called after ``destroy``.

    Methods raise :class:`~eplb_async.errors.NixlTransferFailed` (or a subclass) with ``status`` and ``phase``
    set, and nothing else.

    Attributes:
        name: Agent name.
        polls: Native polls so far.
        moved: A poll since this was last cleared took long enough to have moved bytes.
        longest_call: Longest call so far: seconds, and what it was.
        bells: File descriptors that become readable when something has come over some of the transports, tcp among
            them; empty if none is known. Hints: what comes over others rings none, and one may ring for nothing.
    """

    name: str
    polls: int
    moved: bool
    longest_call: tuple[float, str]
    bells: tuple[int, ...]

    def register(self, extents: Sequence[Extent]) -> Any:
        """Register memory; returns a token for :meth:`deregister`."""
        ...

    def deregister(self, token: Any) -> None:
        """Deregister what :meth:`register` registered."""
        ...

    def metadata(self) -> bytes:
        """NIXL's opaque metadata of this agent."""
        ...

    def add_remote(self, metadata: bytes) -> str:
        """Load a peer's metadata; returns its agent name."""
        ...

    def connect(self, peer: str) -> None:
        """Wire up to a peer ahead of the first transfer."""
        ...

    def remove_remote(self, peer: str) -> None:
        """Forget a peer."""
        ...

    def make_read(
        self, local: Descriptors, local_memory: str, remote: Descriptors, remote_memory: str, peer: str
    ) -> Handle:
        """Make a READ request from two descriptor lists of equal shape."""
        ...

    def post(self, handle: Handle, notif: bytes = b"") -> State:
        """Post a request; can block for the whole copy."""
        ...

    def check(self, handle: Handle) -> State:
        """Ask for a request's state; can block for copies that are due."""
        ...

    def release(self, handle: Handle) -> None:
        """Free a terminal request. Never called on one that may still be written by (I-4)."""
        ...

    def abandon(self, handle: Handle) -> None:
        """Let go of a request that is not terminal, right before :meth:`destroy`."""
        ...

    def notify(self, peer: str, message: bytes) -> None:
        """Send a notification."""
        ...

    def notifications(self) -> list[tuple[str, bytes]]:
        """Make progress, and take the notifications that have come: (peer, message)."""
        ...

    def destroy(self) -> None:
        """Destroy the agent: nothing lands afterwards."""
        ...
