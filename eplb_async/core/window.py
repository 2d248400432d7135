"""What may be in flight at once, and which of the READs that wait goes next."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, TypeVar

from eplb_async.core.schedule import Batch

__all__ = ["Outbox", "Waiting", "Window"]

T = TypeVar("T")


class Window:
    """Limits requests and bytes in flight, in total and per peer, and the peers that are read from at once.

    What is alone in its scope is always admitted, however large: nothing waits for room that cannot come.
    """

    def __init__(
        self,
        *,
        max_bytes: int,
        max_requests: int,
        max_peer_bytes: int,
        max_peer_requests: int,
        max_peers: int,
        few_bytes: int,
    ) -> None:
        """Starts empty.

        Args:
            max_bytes: Most bytes in flight.
            max_requests: Most requests in flight.
            max_peer_bytes: Most bytes in flight with one peer.
            max_peer_requests: Most requests in flight with one peer.
            max_peers: Most peers with requests in flight.
            few_bytes: While fewer bytes are in flight, there may be more peers: small READs crowd nobody, and
                each of them costs a round trip.

        Raises:
            ValueError: A limit is below 1.
        """
        limits = (max_requests, max_bytes, max_peer_requests, max_peer_bytes, max_peers, few_bytes)
        if min(limits) < 1:
            raise ValueError(f"limits of requests, bytes and peers must be 1 or more; they are {limits}")
        self._total_limit = (max_requests, max_bytes)
        self._peer_limit = (max_peer_requests, max_peer_bytes)
        self._max_peers = max_peers
        self._few_bytes = few_bytes
        self._total = (0, 0)
        self._peers: dict[Hashable, tuple[int, int]] = {}

    @property
    def requests(self) -> int:
        """Requests in flight."""
        return self._total[0]

    @property
    def nbytes(self) -> int:
        """Bytes in flight."""
        return self._total[1]

    @property
    def peers(self) -> int:
        """Peers with requests in flight."""
        return len(self._peers)

    @property
    def is_full(self) -> bool:
        """Whether nothing would be admitted, whatever its peer and size."""
        return self._total[0] >= self._total_limit[0]

    def admit(self, peer: Hashable, nbytes: int, *, sharers: int = 1, ahead: bool = False) -> bool:
        """Counts a request as in flight if it fits; says whether it did.

        Args:
            peer: Whom it reads from.
            nbytes: Its bytes.
            sharers: Readers that share the bytes which may be in flight with this peer, this one included.
            ahead: Nobody waits for it yet: it begins only with two thirds of the peers that there may be.
        """
        mine = self._peers.get(peer)
        if mine is None:
            most = max(1, 2 * self._max_peers // 3) if ahead else self._max_peers
            crowded = len(self._peers) >= most and self._total[1] >= self._few_bytes
            fits = not crowded and _fits(self._total, nbytes, self._total_limit)
        else:
            share = (self._peer_limit[0], self._peer_limit[1] // max(1, sharers))
            fits = _fits(self._total, nbytes, self._total_limit) and _fits(mine, nbytes, share)
        if fits:
            requests, held = mine or (0, 0)
            self._peers[peer] = (requests + 1, held + nbytes)
            self._total = (self._total[0] + 1, self._total[1] + nbytes)
        return fits

    def done(self, peer: Hashable, nbytes: int) -> None:
        """Takes an admitted request out, with the same ``nbytes``.

        Raises:
            ValueError: That much is not in flight with this peer.
        """
        requests, held = self._peers.get(peer, (0, 0))
        if requests < 1 or held < nbytes:
            raise ValueError(f"peer {peer!r} has {requests} requests of {held} bytes in flight; {nbytes} are not")
        self._total = (self._total[0] - 1, self._total[1] - nbytes)
        if requests == 1:
            del self._peers[peer]
        else:
            self._peers[peer] = (requests - 1, held - nbytes)


def _fits(held: tuple[int, int], nbytes: int, limit: tuple[int, int]) -> bool:
    return held[0] == 0 or (held[0] < limit[0] and held[1] + nbytes <= limit[1])


@dataclass(frozen=True, slots=True, eq=False)
class Waiting(Generic[T]):
    """A batch that waits to be posted.

    Attributes:
        layer: Layers go in order.
        batch: What it reads.
        sharers: Ranks that read from its source in this layer.
        owner: Whose it is.
    """

    layer: int
    batch: Batch
    sharers: int
    owner: T


class Outbox(Generic[T]):
    """Batches that wait to be posted, and which of them goes next.

    The first that the window admits goes: one whose source has enough to do waits, and what comes after it does not.
    Batches of one source never overtake each other.

    Staging is free again only when a layer is decided, and that takes every rank. So what is read ahead of that layer
    is held back a little: it shares the sources' NICs with READs that all ranks wait for.

    Args:
        window: Lets them out.

    Attributes:
        undecided: The first layer without COMMIT; READs of later ones are ahead.
    """

    def __init__(self, window: Window) -> None:
        self.window = window
        self.undecided = 0
        self._waiting: list[Waiting[T]] = []

    def __len__(self) -> int:
        """Batches that wait."""
        return len(self._waiting)

    def put(self, batches: Iterable[Waiting[T]]) -> None:
        """Adds batches: after those of earlier layers and of their own, before those of later layers."""
        self._waiting += batches
        self._waiting.sort(key=attrgetter("layer"))

    def take(self) -> Waiting[T] | None:
        """Takes out the next batch that the window admits; ``None`` if it admits none, or none waits."""
        refused: set[int] = set()
        for at, waiting in enumerate(self._waiting):
            if self.window.is_full:
                break
            source = waiting.batch.source
            if source in refused:
                continue
            ahead = waiting.layer > self.undecided
            if self.window.admit(source, waiting.batch.nbytes, sharers=waiting.sharers, ahead=ahead):
                del self._waiting[at]
                return waiting
            refused.add(source)
        return None

    def holds(self, owner: T) -> bool:
        """Whether batches of ``owner`` wait."""
        return any(waiting.owner is owner for waiting in self._waiting)

    def drop(self, owner: T) -> None:
        """Forgets the batches of ``owner``."""
        self._waiting = [waiting for waiting in self._waiting if waiting.owner is not owner]
