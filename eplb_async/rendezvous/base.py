"""What a rendezvous is: a small synchronous key-value store that all ranks of a job reach."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class Rendezvous(Protocol):
    """Where ranks leave their introductions for each other.

    Calls may block on the network, so they are made off the event loops; an implementation takes its timeout
    when it is made, and may be called from several threads. Keys carry the group already.

    Attributes:
        url: How messages name it, e.g. ``"tcp://10.0.0.1:29500"``.
        trusted: Only members of this job can read and write it, so that a job key may be kept in it when no
            ``EPLB_ASYNC_SECRET`` is set.

    An implementation may have ``lasting = False``: it ends with a rank, so that nothing is taken back there as another
    one closes, and it may be made anew, with another job's key, while ranks open. It may have ``one_time``, words that
    say why no rank can come back by it: each rank sets one value there, as it opens.
    """

    url: str
    trusted: bool

    def set(self, key: str, value: bytes) -> None:
        """Store ``value``, replacing what was there."""

    def get(self, key: str) -> bytes | None:
        """Return the value, or None if there is none; never wait for one to appear."""

    def add(self, key: str, amount: int) -> int:
        """Add to the counter ``key`` (0 at first), atomically, and return its new value."""

    def delete(self, key: str) -> None:
        """Remove ``key`` if the store can; best effort, never raises."""

    def close(self) -> None:
        """Let go of it; idempotent. Where this rank hosts the store, it ends for everybody."""
