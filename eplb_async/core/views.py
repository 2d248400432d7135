"""A rank's view, who of it is gone, and the change to the next view (rules 6-8 of ``protocol``).

A set of ranks is a bitset: a Python ``int`` in which bit *r* stands for rank *r*.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from eplb_async.core.messages import State, Steps
from eplb_async.core.text import one_line

MAX_REASON = 400
"""Bytes of a reason that are sent; the rest is cut."""


class Ignored(Exception):
    """A message moves nothing (I-8).

    Attributes:
        why: Label to count it under.
    """

    def __init__(self, why: str, detail: str = "") -> None:
        self.why = why
        super().__init__(detail or why)


class Contradiction(Ignored):
    """A peer says what cannot be true beside what is known here."""

    def __init__(self, detail: str) -> None:
        super().__init__("impossible", detail)


def bit(rank: int) -> int:
    """The set of one rank."""
    return 1 << rank


def each(ranks: int) -> Iterator[int]:
    """The ranks of a set, lowest first."""
    while ranks:
        low = ranks & -ranks
        yield low.bit_length() - 1
        ranks ^= low


def lowest(ranks: int) -> int:
    """The lowest rank of a set; -1 of none."""
    return (ranks & -ranks).bit_length() - 1


def names(ranks: int, most: int = 8) -> str:
    """For messages to people: ``"rank 3"``, ``"ranks 1, 2, 5"``, cut short when there are many."""
    listed = list(each(ranks))
    text = ", ".join(map(str, listed[:most]))
    if len(listed) > most:
        text += f" and {len(listed) - most} more"
    return f"rank {text}" if len(listed) == 1 else f"ranks {text or 'none'}"


def clip(reason: str) -> str:
    """Cuts a reason to what a message may carry, and makes it one line of UTF-8."""
    data = one_line(reason).encode(errors="replace")
    if len(data) <= MAX_REASON:
        return data.decode()
    return data[: MAX_REASON - 3].decode(errors="ignore") + "…"


@dataclass(slots=True)
class View:
    """What one rank knows of the members of its group."""

    rank: int
    ep_size: int
    majority_rule: bool
    members: int
    installed: int = 0
    """Term of the view that this rank is in."""
    promised: int = 0
    """Highest term that it opened or answered for; nothing of an older one is accepted or sent (rule 7)."""
    gone: int = 0
    declared: int = 0
    """Of the gone: those excluded by a caller's word. That word spreads; the other proofs do not."""
    leaving: int = 0
    suspects: int = 0
    """Ranks that others know gone: to be pinged, for a proof of our own."""
    arriving: int = 0
    """Members that came back with this view, or one before it, and have not spoken in it yet (rule 12)."""
    outside: bool = False
    """This rank opens into a group that runs, and no view has it yet."""
    behind: bool = False
    """The promised term was opened from a newer view than this rank's."""

    @property
    def coordinator(self) -> int:
        """The lowest member."""
        return lowest(self.members)

    @property
    def settled(self) -> bool:
        """Whether no newer term is promised than the one installed."""
        return self.promised == self.installed

    @property
    def defers(self) -> bool:
        """Whether the next term is not for this rank to open, even if it is the lowest that stays.

        It is in no view yet, or who knows a newer view than this rank has opened one: two openers would outbid
        each other.
        """
        return self.outside or (self.behind and not self.settled and not self.gone & bit(self.owner))

    def accepts(self, term: int) -> bool:
        """Whether something of this term may still be heard or said: the promise of rule 7."""
        return term == self.installed == self.promised

    @property
    def remaining(self) -> int:
        """Members not known gone: those who must answer before the next view."""
        return self.members & ~self.gone

    @property
    def staying(self) -> int:
        """Those of the remaining that do not close: the next view."""
        return self.remaining & ~self.leaving

    @property
    def broken(self) -> int:
        """Members whom the next view will not have."""
        return self.members & (self.gone | self.leaving)

    @property
    def opener(self) -> int:
        """The rank that opens the next term: the lowest that stays; -1 if none does."""
        return lowest(self.staying)

    @property
    def owner(self) -> int:
        """The rank that opened the promised term."""
        return self.promised % self.ep_size

    def next_term(self) -> int:
        """The lowest term above all seen that belongs to this rank."""
        return (self.promised // self.ep_size + 1) * self.ep_size + self.rank

    def majority(self, members: int | None = None) -> bool:
        """Whether those who stay may go on alone: a cut link looks like a death.

        They must be more than half of the old view, not counting those who left or whom a caller excluded.
        """
        if not self.majority_rule:
            return True
        members = self.members if members is None else members
        counted = members & ~self.leaving & ~self.declared
        staying = members & ~self.leaving & ~self.gone
        return 2 * staying.bit_count() > counted.bit_count()

    def declare(self, ranks: int) -> bool:
        """Takes a caller's word, heard here or from a peer; returns whether it says anything new."""
        ranks &= ~bit(self.rank)
        new = ranks & ~self.declared
        self.declared |= ranks
        self.gone |= ranks
        return bool(new)

    def install(self, term: int, members: int) -> int:
        """Takes the next view; returns who comes with it.

        What was known of a rank is of its start in the view before: nothing of it holds for one that comes back.
        """
        stay, newcomers = self.members & members, members & ~self.members
        self.gone &= stay
        self.declared &= stay
        self.leaving &= stay
        self.suspects &= stay
        self.arriving = (self.arriving & stay) | newcomers
        self.installed = self.promised = term
        self.members = members
        self.outside = self.behind = False
        return newcomers

    def suspect(self, ranks: int) -> None:
        """Others know these gone."""
        self.suspects |= ranks & ~bit(self.rank)

    def freeze(self) -> Hashable:
        """Its state as a value."""
        return (
            self.members,
            self.installed,
            self.promised,
            self.gone,
            self.declared,
            self.leaving,
            self.suspects,
            self.arriving,
            self.outside,
            self.behind,
        )


@dataclass(frozen=True, slots=True)
class Decision:
    """What the opener of a term decides from the answers of all who remain."""

    members: int
    base: int
    """The newest view that anyone who answered is in."""
    epoch: int
    upto: int
    at: Steps
    highest_epoch: int
    attempts: dict[int, int]
    """Last attempt of each rank that answered."""


class Superseded(Exception):
    """A newer view exists, and this rank is not in it."""


@dataclass(slots=True)
class Change:
    """A new term that this rank opened, and the answers to it so far."""

    term: int
    answered: int = 0
    answers: dict[int, State] = field(default_factory=dict)

    def add(self, state: State) -> bool:
        """Takes an answer, or a later one of the same rank that knows more of them gone."""
        known = self.answers.get(state.sender)
        if known is not None and (state.gone & known.gone != known.gone or state == known):
            return False
        self.answers[state.sender] = state
        self.answered |= bit(state.sender)
        return True

    def missing(self, view: View) -> int:
        """Those who have not answered, or do not agree yet on who is gone."""
        remaining = view.remaining
        missing = remaining & ~self.answered
        if missing:
            return missing
        disagree = (q for q in each(remaining) if _differ(self.answers[q], view))
        return sum(map(bit, disagree)) & ~bit(view.rank)

    def decide(self, view: View, newcomer: int = 0) -> Decision | None:
        """Decides the new view and where the last epoch ended in it.

        Args:
            view: The opener's.
            newcomer: Who comes back, if nothing else changes.

        Returns:
            None while answers are missing, disagree on who is gone, or do not make a majority.

        Raises:
            Superseded: When the newest view that anyone here is in does not have this rank.
            Contradiction: When the answers cannot all be true.
        """
        if view.remaining & ~self.answered or not view.majority():
            return None
        answers = [self.answers[q] for q in each(view.remaining)]
        _, base = max((a.installed_term, a.members) for a in answers)
        if not base & bit(view.rank):
            raise Superseded
        # Who is only in a newer view than the opener's has not answered, and is left out: it can come again. No
        # epoch of that view has begun, because the opener never joined one.
        members = base & view.members
        if any(_differ(a, view) & members for a in answers if a.sender != view.rank) or not view.majority(members):
            return None
        answers = [a for a in answers if base & bit(a.sender)]
        epoch = max(a.last_epoch for a in answers)
        concerned = [a for a in answers if a.last_epoch == epoch]
        members &= view.staying
        return Decision(
            members=members | newcomer if members == base == view.members else members,
            base=base,
            epoch=epoch,
            upto=_last_committed(concerned),
            at=tuple(map(max, zip(*(a.at for a in concerned), strict=True))),
            highest_epoch=max(a.highest_epoch for a in answers),
            attempts={a.sender: a.last_attempt for a in answers},
        )

    def freeze(self) -> Hashable:
        """Its state as a value."""
        return (self.term, tuple(sorted(self.answers.items(), key=lambda item: item[0])))


def _differ(answer: State, view: View) -> int:
    """Ranks that both count as members, and only one knows gone."""
    return (answer.gone ^ view.gone) & answer.members & view.members


def _last_committed(answers: list[State]) -> int:
    """The END if any knows it, else the highest COMMIT that any knows (I-19: what one applied, all apply)."""
    ends = {a.upto for a in answers if a.ended}
    highest = max(a.upto for a in answers)
    if not ends:
        return highest
    if len(ends) > 1 or highest > min(ends):
        raise Contradiction("different ends of one epoch")
    return highest
