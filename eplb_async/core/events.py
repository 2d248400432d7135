"""What goes into the protocol (events) and what comes out of it (commands), and the words both use."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from eplb_async.core.messages import DIGEST_BYTES, Digests, Message, Steps


class Phase(Enum):
    """Where a rank stands."""

    IDLE = "idle"
    JOINED = "joined"
    """Wants an epoch; no READ may be posted yet."""
    OPEN = "open"
    """In an epoch."""
    SETTLING = "settling"
    """Asked for the end; waits for END or a new view."""
    IN_DOUBT = "in_doubt"
    """As SETTLING, but nothing that can still be expected will say how the epoch ended."""
    CLOSED = "closed"
    FENCED = "fenced"
    """The others made a view without this rank."""


class Proof(Enum):
    """Why a rank is known to be gone. Silence is no proof."""

    DISCONNECTED = "disconnected"
    """NIXL says so."""
    LEFT = "left"
    """It said LEAVE."""
    EXCLUDED = "excluded"
    """The caller says so."""


# ---------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Migrate:
    """The caller wants an epoch; only when IDLE and not closing."""

    digests: Digests


@dataclass(frozen=True, slots=True)
class Received:
    """A message that is authentic and of the right incarnations."""

    message: Message


@dataclass(frozen=True, slots=True)
class Staged:
    """All READs and local copies of layers ``[0, upto)`` of the open epoch are done and checked here.

    ``holds`` has one step per layer: the first step that this rank will not begin while undecided.
    """

    upto: int
    holds: Steps | None = None


@dataclass(frozen=True, slots=True)
class GiveUp:
    """A failure, timeout or cancel here: this rank wants out."""

    reason: str


@dataclass(frozen=True, slots=True)
class Gone:
    """``rank`` is gone. May be repeated with a stronger proof."""

    rank: int
    proof: Proof


@dataclass(frozen=True, slots=True)
class Suspect:
    """The caller takes ``rank`` for gone: look for a proof."""

    rank: int


@dataclass(frozen=True, slots=True)
class Met:
    """The caller wants ``rank`` back, and this rank has met that start of it; 0 takes that back (rule 12).

    ``digest`` is of what this rank will hold true with that rank back.
    """

    rank: int
    start: int
    digest: bytes = bytes(DIGEST_BYTES)


@dataclass(frozen=True, slots=True)
class Returning:
    """This rank opens into a group that runs: until a view has it, it only answers."""


@dataclass(frozen=True, slots=True)
class Close:
    """The caller closes this rank. ``Closed`` follows when the others go on without it."""


@dataclass(frozen=True, slots=True)
class Tick:
    """``next_wakeup`` has come."""


Event = Migrate | Received | Staged | GiveUp | Gone | Suspect | Met | Returning | Close | Tick
"""What the protocol is told."""

# -------------------------------------------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class Send:
    """Send ``message``, with both incarnations filled in, to rank ``to``. A failure to is no error."""

    to: int
    message: Message


@dataclass(frozen=True, slots=True)
class Begin:
    """The epoch is open: READs may be posted from ``members``."""

    epoch: int
    members: frozenset[int]


@dataclass(frozen=True, slots=True)
class Commit:
    """Apply layers ``[first, upto)``, layer *l* at step ``at[l]``."""

    epoch: int
    first: int
    upto: int
    at: Steps


@dataclass(frozen=True, slots=True)
class Ended:
    """The attempt is over here: drop what is staged beyond ``committed``. Exactly one for each ``Migrate``.

    Attributes:
        epoch: Its number; 0 if it never began here.
        committed: Layers ``[0, committed)`` hold the new placement.
        complete: Whether that is all of them.
        origin: Rank that asked for the end; -1 if none did or it is not known.
        reason: Why it ended early; empty if it did not.
        again: A new view ended it, and no member of that had begun it: all of them may make it again.
    """

    epoch: int
    committed: int
    complete: bool
    origin: int
    reason: str
    again: bool = False


@dataclass(frozen=True, slots=True)
class InDoubt:
    """This rank cannot learn yet how the epoch ended; ``Ended`` may follow later. Keep what is staged."""

    reason: str


@dataclass(frozen=True, slots=True)
class Installed:
    """A new view."""

    term: int
    members: frozenset[int]


@dataclass(frozen=True, slots=True)
class Fenced:
    """The others went on without this rank: apply nothing more and come back as a new incarnation."""

    reason: str


@dataclass(frozen=True, slots=True)
class Closed:
    """The others know that this rank has left, or nobody is left to know."""


Command = Send | Begin | Commit | Ended | InDoubt | Installed | Fenced | Closed
"""What the protocol wants done."""
