"""Who takes part, and where their rows are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from eplb_async.core.layout import Layout
from eplb_async.nixl.endpoint import Peer

GENERATION_BITS = 16
"""An incarnation is the rank's start (the store's counter) and, below it, the generation of its agent."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this rank is.

    Attributes:
        rank: Its rank.
        ep_size: Ranks in the group.
        group: Name of the group.
        node: Label of its host.
        incarnation: Identity of this start and agent; later ones compare greater.
    """

    rank: int
    ep_size: int
    group: str
    node: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Member:
    """A rank that was introduced to us.

    Attributes:
        rank: Its rank.
        incarnation: The start and agent that was introduced.
        node: Label of its host.
        peer: Its agent, as known to ours.
        layout: Where its rows are.
    """

    rank: int
    incarnation: int
    node: str
    peer: Peer
    layout: Layout


class Roster:
    """The members introduced so far; the newest incarnation of a rank is the one that counts (I-13)."""

    def __init__(self) -> None:
        self._by_rank: dict[int, Member] = {}

    def put(self, member: Member) -> Member | None:
        """Note a member; returns the one it replaces."""
        old = self._by_rank.get(member.rank)
        self._by_rank[member.rank] = member
        return old

    def get(self, rank: int) -> Member | None:
        """The member of that rank, if introduced."""
        return self._by_rank.get(rank)

    def by_agent(self, name: str) -> Member | None:
        """The member whose current agent has that name."""
        return next((m for m in self._by_rank.values() if m.peer.name == name), None)

    def same_start(self, rank: int, incarnation: int) -> bool:
        """Whether ``incarnation`` belongs to the start of the rank that we know."""
        member = self._by_rank.get(rank)
        return member is not None and start_of(member.incarnation) == start_of(incarnation)

    def __iter__(self) -> Iterator[Member]:
        return iter(tuple(self._by_rank.values()))

    def __len__(self) -> int:
        return len(self._by_rank)


def start_of(incarnation: int) -> int:
    """The start that an incarnation belongs to: recycling an agent makes a new one of the same start."""
    return incarnation >> GENERATION_BITS
