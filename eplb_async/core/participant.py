"""A rank's own part in its attempt at a migration (rules 1, 3, 4 and 5 of ``protocol``)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from eplb_async.core.events import Commit, Ended, Phase
from eplb_async.core.messages import Steps
from eplb_async.core.views import Contradiction


@dataclass(slots=True)
class Participant:
    """What one rank wants, has staged, has voted and knows decided."""

    num_layers: int
    attempt: int = 0
    """Counts this rank's attempts up, over all views."""
    epoch: int = 0
    """The highest epoch seen; while ``begun``, the one that is open here."""
    active: bool = False
    begun: bool = False
    prepared: int = 0
    """Layers voted for."""
    committed: int = 0
    """Layers known committed."""
    holds: Steps = field(init=False)
    at: Steps = field(init=False)
    asked: str | None = None
    """Why this rank wants out; None while it does not."""
    doubt: bool = False
    deadline: float | None = None
    """When waiting for the end that was asked for turns into doubt."""
    last_epoch: int = 0
    last_upto: int = 0
    last_at: Steps = field(init=False)

    def __post_init__(self) -> None:
        self.holds = self.at = self.last_at = (0,) * self.num_layers

    @property
    def phase(self) -> Phase:
        """Where the attempt stands; IDLE if there is none."""
        if not self.active:
            return Phase.IDLE
        if self.doubt:
            return Phase.IN_DOUBT
        if self.asked is not None:
            return Phase.SETTLING
        return Phase.OPEN if self.begun else Phase.JOINED

    @property
    def bound(self) -> bool:
        """Whether a vote is outstanding: the others may commit what this rank does not know committed."""
        return self.prepared > self.committed

    def join(self) -> None:
        """The caller wants an epoch."""
        self.attempt += 1
        self.active = True

    def begin(self, epoch: int) -> None:
        """The coordinator has opened it."""
        self.epoch = epoch
        self.begun = True

    def vote(self, upto: int, holds: Steps) -> None:
        """Layers ``[0, upto)`` are prepared; a hold once voted stays."""
        held = holds[self.prepared : upto]
        self.holds = self.holds[: self.prepared] + held + self.holds[upto:]
        self.prepared = upto

    def check(self, upto: int) -> None:
        """Refuses an end at ``upto`` that undoes what is applied, or applies what was not prepared (I-19).

        Raises:
            Contradiction: A peer asks for that.
        """
        if not self.committed <= upto <= self.prepared:
            raise Contradiction(f"end at {upto} with {self.committed} committed and {self.prepared} prepared")

    def commit(self, upto: int, at: Steps) -> tuple[Commit, ...]:
        """Layers ``[0, upto)`` are decided; returns the command to apply those that are new (I-6)."""
        first = self.committed
        if upto <= first:
            return ()
        self.at = self.at[:first] + at[first:upto] + self.at[upto:]
        self.committed = upto
        return (Commit(self.epoch, first, upto, self.at),)

    def finish(self, origin: int, reason: str, *, rank: int, again: bool = False) -> tuple[Ended, ...]:
        """The attempt is over; returns its ``Ended``, the only one it gets. Of no attempt: nothing."""
        if not self.active:
            return ()
        epoch = 0
        if self.begun:
            epoch = self.epoch
            self.last_epoch, self.last_upto, self.last_at = self.epoch, self.committed, self.at
        complete = self.committed == self.num_layers
        if complete:
            origin, reason = -1, ""
        elif self.asked is not None:
            origin, reason = rank, self.asked
        ended = Ended(epoch, self.committed, complete, origin, reason, again)
        self.active = self.begun = self.doubt = False
        self.asked = self.deadline = None
        self.prepared = self.committed = 0
        self.holds = self.at = (0,) * self.num_layers
        return (ended,)

    def freeze(self) -> Hashable:
        """Its state as a value."""
        return tuple(getattr(self, name) for name in self.__slots__)
