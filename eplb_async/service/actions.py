"""What the rounds want done: frozen records, in the order in which they are to be done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from eplb_async.service.payloads import Loads, Message, Verdict
from eplb_async.service.report import Outcome

__all__ = ["Action", "Collect", "Decide", "End", "Move", "Send", "Stop"]


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to another member."""

    to: int
    message: Message


@dataclass(frozen=True, slots=True)
class Collect:
    """Find out this rank's loads; answer with ``collected`` or ``failed``."""

    round: int


@dataclass(frozen=True, slots=True)
class Decide:
    """Run the policy on the loads of all ranks; answer with ``decided``."""

    round: int
    force: bool
    loads: Mapping[int, Loads]


@dataclass(frozen=True, slots=True)
class Move:
    """Migrate to the verdict's placement; answer with ``moved`` or ``failed``."""

    round: int
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Stop:
    """Cancel this rank's migration of the round: it is over, for this reason. No answer is wanted."""

    round: int
    reason: str


@dataclass(frozen=True, slots=True)
class End:
    """The round, or the wish for one, is over on this rank.

    Attributes:
        round: Number of the round; 0 if none was begun.
        tickets: Whom it has served; `AUTOMATIC` for nobody.
        outcome: How.
        reason: Why, in words.
        ranks: Ranks that it is due to, where known.
        verdict: What the coordinator decided, where it is known.
        seconds: How long it took.
    """

    round: int
    tickets: tuple[int, ...]
    outcome: Outcome
    reason: str
    ranks: tuple[int, ...] = ()
    verdict: Verdict | None = None
    seconds: float = 0.0


Action = Send | Collect | Decide | Move | Stop | End
