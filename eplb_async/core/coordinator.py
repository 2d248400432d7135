"""The coordinator's bookkeeping: who has joined, what has been voted (rules 1, 2, 4 and 5 of ``protocol``).

It counts, decides, and returns what is to be sent; a vote costs the same for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from eplb_async.core.messages import (
    VERSION_BYTES,
    AbortRequest,
    Begin,
    Commit,
    End,
    Join,
    Message,
    Prepared,
    Steps,
)
from eplb_async.core.views import Ignored, bit, clip, each, names

Sends = Iterator[tuple[int, Message]]
"""To whom, and what; taken one by one, because what a rank tells itself is heard at once."""

_SUBJECTS = ("the current placement", "the new placement", "the plan settings")


@dataclass(slots=True)
class Ballot:
    """The votes of one open epoch."""

    epoch: int
    attempts: dict[int, int]
    """The attempt with which each member is in it."""
    num_layers: int
    votes: dict[int, int] = field(init=False)
    behind: list[int] = field(init=False)
    """How many members have voted exactly up to each layer."""
    holds: list[int] = field(init=False)
    """The largest hold voted for each layer."""
    upto: int = 0
    """Layers decided."""
    at: Steps = field(init=False)

    def __post_init__(self) -> None:
        self.votes = dict.fromkeys(self.attempts, 0)
        self.behind = [len(self.votes)] + [0] * self.num_layers
        self.holds = [0] * self.num_layers
        self.at = (0,) * self.num_layers

    @property
    def complete(self) -> bool:
        """Whether all layers are decided."""
        return self.upto == self.num_layers

    @property
    def lagging(self) -> int:
        """Members whose votes the next decision waits for."""
        return sum(bit(rank) for rank, vote in self.votes.items() if vote == self.upto)

    def vote(self, rank: int, upto: int, holds: Steps) -> bool:
        """Counts a vote for layers ``[0, upto)``; returns whether it decides any.

        A layer is decided when every member has prepared it (I-6, I-19).
        """
        before = self.votes[rank]
        if upto <= before:
            return False
        for layer in range(before, upto):
            self.holds[layer] = max(self.holds[layer], holds[layer])
        self.votes[rank] = upto
        self.behind[before] -= 1
        self.behind[upto] += 1
        first = self.upto
        while self.upto < self.num_layers and not self.behind[self.upto]:
            self.upto += 1
        if self.upto == first:
            return False
        at = list(self.at)
        for layer in range(first, self.upto):
            at[layer] = max(self.holds[layer], at[layer - 1] if layer else 0)
        self.at = tuple(at)
        return True

    def freeze(self) -> Hashable:
        """Its state as a value."""
        return (
            self.epoch,
            tuple(sorted(self.attempts.items())),
            tuple(sorted(self.votes.items())),
            tuple(self.holds),
            self.upto,
            self.at,
        )


@dataclass(slots=True)
class Coordinator:
    """The books of one view."""

    rank: int
    term: int
    members: int
    num_layers: int
    last_attempt: dict[int, int] = field(default_factory=dict)
    """The newest attempt heard of from each rank; an older one, or the same again, is stale."""
    joins: dict[int, Join] = field(default_factory=dict)
    joined: int = 0
    ballot: Ballot | None = None
    decided: Ballot | None = None
    """The ballot before: over, and final in this term."""

    @property
    def missing(self) -> int:
        """Members whose JOIN or vote the next decision waits for."""
        ballot = self.ballot
        return self.members & ~self.joined if ballot is None else ballot.lagging

    def join(self, message: Join, highest_epoch: int) -> Sends:
        """A member wants an epoch (rules 1 and 2).

        Args:
            message: Its JOIN.
            highest_epoch: The highest epoch that this rank has seen.

        Raises:
            Ignored: It is no newer than the last from that rank.
        """
        sender = message.sender
        if self._is_stale(sender, message.attempt):
            raise Ignored("stale")
        if self.ballot is not None:
            yield from self._end_ballot(sender, f"rank {sender} has begun a new attempt")
        self.last_attempt[sender] = message.attempt
        self.joins[sender] = message
        self.joined |= bit(sender)
        if self.joined != self.members:
            return
        if differences := self._differences():
            yield from self._end(self._dissolve(), -1, f"the ranks do not want the same: {differences}")
            return
        epoch = 1 + max(highest_epoch, *(join.last_epoch for join in self.joins.values()))
        self.ballot = ballot = Ballot(epoch, self._dissolve(), self.num_layers)
        for rank, attempt in ballot.attempts.items():
            yield rank, Begin(term=self.term, epoch=epoch, attempt=attempt, sender=self.rank)

    def abort(self, message: AbortRequest) -> Sends:
        """A member wants out (rule 5).

        Raises:
            Ignored: Its attempt is over already.
        """
        sender, attempt = message.sender, message.attempt
        if self.ballot is not None and self.ballot.attempts[sender] == attempt:
            yield from self._end_ballot(sender, message.reason)
        elif sender in self.joins and self.joins[sender].attempt == attempt:
            yield from self._end(self._dissolve(), sender, message.reason)
        elif not self._is_stale(sender, attempt):  # it overtook its JOIN
            self.last_attempt[sender] = attempt
            yield from self._end({sender: attempt}, sender, message.reason)
        elif self.decided is not None and self.decided.attempts.get(sender) == attempt:
            # It has not heard how that epoch ended: the message was lost, or crosses this one.
            yield from self._say_end(self.decided, {sender: attempt}, -1, "the epoch was over already")
        else:
            raise Ignored("stale")

    def prepared(self, message: Prepared) -> Sends:
        """A member votes (rules 3 and 4).

        Raises:
            Ignored: In an epoch that is over, or again.
        """
        ballot = self.ballot
        if ballot is None or ballot.epoch != message.epoch:
            raise Ignored("stale")
        if message.upto <= ballot.votes[message.sender]:
            raise Ignored("duplicate")
        if not ballot.vote(message.sender, message.upto, message.holds):
            return
        if ballot.complete:
            self.ballot, self.decided = None, ballot
        commit = Commit(term=self.term, epoch=ballot.epoch, sender=self.rank, upto=ballot.upto, at=ballot.at)
        for rank in ballot.attempts:
            yield rank, commit

    def freeze(self) -> Hashable:
        """Its state as a value."""
        return (
            self.term,
            tuple(sorted(self.last_attempt.items())),
            tuple(sorted(self.joins.items(), key=lambda item: item[0])),
            self.ballot and self.ballot.freeze(),
            self.decided and (self.decided.epoch, tuple(sorted(self.decided.attempts.items())), self.decided.upto),
        )

    def _is_stale(self, rank: int, attempt: int) -> bool:
        return attempt <= self.last_attempt.get(rank, 0)

    def _dissolve(self) -> dict[int, int]:
        """Forgets the joins so far; returns their attempts, by rank in order."""
        attempts = {rank: self.joins[rank].attempt for rank in each(self.joined)}
        self.joins = {}
        self.joined = 0
        return attempts

    def _differences(self) -> str:
        """Which ranks joined with other digests than this one, and in what; empty if none."""
        own = _compared(self.joins[self.rank])
        found = []
        for index, subject in enumerate(_SUBJECTS):
            others = sum(bit(q) for q, join in self.joins.items() if _compared(join)[index] != own[index])
            if others:
                found.append(f"{subject} of {names(others)}")
        text = f"{'; '.join(found)} differ from that of rank {self.rank}" if found else ""
        return "; ".join(part for part in (text, self._versions()) if part)

    def _versions(self) -> str:
        """Which ranks joined with which weight version; empty if with one."""
        holders: dict[int, int] = {}
        for rank, join in self.joins.items():
            version = int.from_bytes(join.digests[2][-VERSION_BYTES:])
            holders[version] = holders.get(version, 0) | bit(rank)
        if len(holders) == 1:
            return ""
        listed = ", ".join(f"version {version} on {names(holders[version])}" for version in sorted(holders)[-4:])
        return f"the weights are {listed}: call updating_weights() where the update has not arrived"

    def _end_ballot(self, origin: int, reason: str) -> Sends:
        ballot, self.ballot = self.ballot, None
        if ballot is not None:
            self.decided = ballot
            yield from self._say_end(ballot, ballot.attempts, origin, reason)

    def _say_end(self, ballot: Ballot, attempts: dict[int, int], origin: int, reason: str) -> Sends:
        yield from self._end(attempts, origin, reason, epoch=ballot.epoch, upto=ballot.upto, at=ballot.at)

    def _end(
        self,
        attempts: dict[int, int],
        origin: int,
        reason: str,
        *,
        epoch: int = 0,
        upto: int = 0,
        at: Steps | None = None,
    ) -> Sends:
        for rank, attempt in attempts.items():
            end = End(
                term=self.term,
                epoch=epoch,
                attempt=attempt,
                sender=self.rank,
                upto=upto,
                at=at or (0,) * self.num_layers,
                origin=origin,
                reason=clip(reason),
            )
            yield rank, end


def _compared(join: Join) -> tuple[bytes, bytes, bytes]:
    """What must be equal, by subject; weight versions are compared apart."""
    old, new, rest = join.digests
    return old, new, rest[:-VERSION_BYTES]
