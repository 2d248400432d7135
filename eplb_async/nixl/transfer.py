"""One posted READ, from post to its end."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import Enum

from eplb_async.errors import NixlTransferFailed
from eplb_async.nixl.native import Handle


class Fate(Enum):
    """Where a transfer stands.

    ``QUARANTINED``: its awaiter is gone, or NIXL reported an error that is no proof of quiescence; handle and
    memory are kept until it is terminal. ``ENDED``: terminal, handle released, memory free.
    """

    ACTIVE = "active"
    QUARANTINED = "quarantined"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Origin:
    """What a transfer belongs to; goes into errors and health."""

    rank: int | None = None
    layer: int | None = None
    experts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TransferStats:
    """How a READ went.

    Attributes:
        nbytes: Bytes read.
        seconds: From the first post to the last completion.
        posts: Requests posted.
    """

    nbytes: int
    seconds: float
    posts: int

    @property
    def gb_per_s(self) -> float:
        """Gigabytes (1e9) per second."""
        return self.nbytes / self.seconds / 1e9 if self.seconds > 0 else 0.0


class Transfer:
    """A READ that was posted. Owned by its endpoint; awaiters hold :attr:`future`.

    ``pollable`` ends with an error that is no proof of quiescence: NIXL has no more to say of the handle.
    """

    __slots__ = (
        "deadline",
        "error",
        "fate",
        "future",
        "handle",
        "nbytes",
        "origin",
        "peer",
        "pollable",
        "started",
    )

    def __init__(
        self,
        *,
        peer: str,
        nbytes: int,
        started: float,
        deadline: float,
        origin: Origin,
        future: asyncio.Future[None],
    ) -> None:
        self.peer = peer
        self.nbytes = nbytes
        self.started = started
        self.deadline = deadline
        self.origin = origin
        self.future = future
        self.handle: Handle | None = None
        self.fate = Fate.ACTIVE
        self.pollable = True
        self.error: NixlTransferFailed | None = None
        future.add_done_callback(_retrieve)

    def explain(self, error: NixlTransferFailed, now: float) -> NixlTransferFailed:
        """Add to a native error what this transfer was."""
        error.peer = self.peer
        error.rank = self.origin.rank
        error.layer = self.origin.layer
        error.experts = self.origin.experts
        error.nbytes = self.nbytes
        error.elapsed = now - self.started
        return error

    def is_overdue(self, now: float) -> bool:
        """Whether somebody awaits it and its deadline has passed."""
        return self.fate is Fate.ACTIVE and now >= self.deadline

    def fail(self, error: NixlTransferFailed, now: float) -> None:
        """Tell the awaiter; what has not ended is in quarantine from now on."""
        self.error = self.explain(error, now)
        if self.fate is Fate.ACTIVE:
            self.fate = Fate.QUARANTINED
        if not self.future.done():
            self.future.set_exception(error)

    def abandon(self) -> None:
        """Into quarantine: nobody awaits it any more."""
        self.fate = Fate.QUARANTINED
        self.future.cancel()

    def __str__(self) -> str:
        where = f" of layer {self.origin.layer}" if self.origin.layer is not None else ""
        return f"a {self.fate.value} READ of {self.nbytes} bytes from {self.peer}{where}"


def _retrieve(future: asyncio.Future[None]) -> None:
    """Look at the outcome, so that a READ whose awaiter is gone is no "exception was never retrieved"."""
    if not future.cancelled():
        future.exception()
