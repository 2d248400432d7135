"""Ranks that come back: who has met which start of them (rule 12 of ``protocol``)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from eplb_async.core.messages import DIGEST_BYTES
from eplb_async.core.views import View, bit, each


class Meeting(NamedTuple):
    """What a member has met of a rank that is to come back.

    Attributes:
        start: Its start; 0 for none.
        digest: Of what the member will hold true once that rank is back.
    """

    start: int
    digest: bytes


NOT_MET = Meeting(0, bytes(DIGEST_BYTES))


@dataclass(slots=True)
class Returns:
    """What this rank wants back, and, at the coordinator, what each member said.

    A start is the incarnation of one start of a rank, whatever became of its agent since; later ones are larger.
    """

    own: dict[int, Meeting] = field(default_factory=dict)
    """What this rank has met of each rank that its caller wants back; none of them is a member."""
    heard: dict[int, dict[int, Meeting]] = field(default_factory=dict)
    """By rank that is to come back: what each member of this term has met."""

    def want(self, rank: int, met: Meeting) -> None:
        """The caller wants a rank back that was met so; start 0 takes that back."""
        if met.start:
            self.own[rank] = met
        else:
            self.own.pop(rank, None)

    def hear(self, member: int, rank: int, met: Meeting) -> bool:
        """A member says what it has met; returns whether that is news."""
        said = self.heard.setdefault(rank, {})
        if said.get(member, NOT_MET) == met:
            return False
        said[member] = met
        return True

    def forget(self, member: int) -> None:
        """A member wants an epoch: its words are over, also where taking them back was lost."""
        for said in self.heard.values():
            said.pop(member, None)

    def ready(self, view: View) -> int:
        """The rank that may come back now, as a set; empty if none may.

        All members have met the same start of it, and mean the same by having it back. It is one rank at a time, and
        only while no member is gone or leaves: then a majority of the view before and one of the view after always
        have a member in common.
        """
        if view.broken:
            return 0
        for rank in sorted(self.heard):
            met = {self.heard[rank].get(member, NOT_MET) for member in each(view.members)}
            if len(met) == 1 and all(one.start for one in met) and not view.members & bit(rank):
                return bit(rank)
        return 0

    def missing(self, view: View) -> int:
        """Members that have not met what this rank wants back. Safe from any thread."""
        own = tuple(self.own.items())
        return sum(
            bit(member)
            for member in each(view.members)
            if any(self.heard.get(rank, {}).get(member) != met for rank, met in own)
        )

    def installed(self, members: int) -> None:
        """A new term: what was heard was of the old one, and who is in need not be waited for."""
        self.heard = {}
        self.own = {rank: met for rank, met in self.own.items() if not members & bit(rank)}

    def freeze(self) -> Hashable:
        """Its state as a value."""
        heard = tuple((rank, tuple(sorted(said.items()))) for rank, said in sorted(self.heard.items()))
        return (tuple(sorted(self.own.items())), heard)
