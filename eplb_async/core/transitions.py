"""Which moves between phases exist, as data: the protocol is checked against it, the docs are drawn from it.

A row says: in one of these phases, one of these events or messages may lead to one of those phases. To stay
is always allowed; what is not in a row is this library's own bug, whatever a peer sent.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any, NamedTuple

from eplb_async.core import events, messages
from eplb_async.core.events import Phase

Kind = type[Any]

_IDLE, _JOINED, _OPEN, _SETTLING = Phase.IDLE, Phase.JOINED, Phase.OPEN, Phase.SETTLING
_DOUBT, _CLOSED, _FENCED = Phase.IN_DOUBT, Phase.CLOSED, Phase.FENCED
_ACTIVE = (_JOINED, _OPEN, _SETTLING, _DOUBT)
_LIVE = (_IDLE, *_ACTIVE)
_NEWS = (events.Gone, messages.Leave, messages.Ping, messages.View)
"""What tells of members that are gone or close."""


class InvariantViolation(AssertionError):
    """A bug of this library: the protocol made a move that it does not have."""


class Row(NamedTuple):
    """Some moves and why they exist."""

    before: tuple[Phase, ...]
    kinds: tuple[Kind, ...]
    after: tuple[Phase, ...]
    why: str


ROWS = (
    Row((_IDLE,), (events.Migrate,), (_JOINED,), "JOIN is sent"),
    Row((_IDLE,), (events.Migrate,), (_OPEN, _IDLE), "the coordinator joins last: equal, or not"),
    Row((_JOINED,), (messages.Begin,), (_OPEN,), "BEGIN"),
    Row((_JOINED,), (messages.Join,), (_OPEN, _IDLE), "the last member joins the coordinator: equal, or not"),
    Row(
        (_OPEN,),
        (messages.Join,),
        (_IDLE,),
        "a member has begun a new attempt: the coordinator ends this one",
    ),
    Row((_OPEN,), (events.Staged, messages.Prepared), (_IDLE,), "the coordinator has the last vote of all"),
    Row((_OPEN, _SETTLING, _DOUBT), (messages.Commit,), (_IDLE,), "COMMIT of the last layer"),
    Row(_ACTIVE, (messages.End,), (_IDLE,), "END"),
    Row((_JOINED, _OPEN), (messages.AbortRequest,), (_IDLE,), "the coordinator ends it for a member"),
    Row((_JOINED, _OPEN), (events.GiveUp, events.Close), (_IDLE,), "no vote outstanding: out at once"),
    Row((_OPEN,), (events.GiveUp, events.Close), (_SETTLING,), "a vote is outstanding: ABORT?"),
    Row((_OPEN,), (events.GiveUp,), (_DOUBT,), "a vote is outstanding and no majority is left"),
    Row((_JOINED, _OPEN), (events.Gone,), (_IDLE,), "no vote outstanding and no majority left: out at once"),
    Row((_OPEN, _SETTLING), (events.Gone,), (_DOUBT,), "a vote is outstanding and no majority is left"),
    Row((_SETTLING,), (events.Tick,), (_DOUBT,), "neither END nor a new view in time"),
    Row(_ACTIVE, (*_NEWS, messages.State), (_IDLE,), "this rank installs a new view"),
    Row(_ACTIVE, (messages.Install,), (_IDLE,), "INSTALL"),
    Row(_LIVE, (messages.Install,), (_FENCED,), "the others went on without this rank"),
    Row(_LIVE, (*_NEWS, messages.State), (_FENCED,), "a member answered from a newer view without this rank"),
    Row(_LIVE, (events.Close,), (_CLOSED,), "nobody else stays"),
    Row((_IDLE, _SETTLING, _DOUBT), (messages.Install,), (_CLOSED,), "closing: the view of those who stay"),
    Row((_IDLE, _SETTLING, _DOUBT), _NEWS, (_CLOSED,), "closing: nobody else stays"),
)

TABLE: dict[tuple[Phase, Kind], dict[Phase, str]] = {}
"""Where each phase may go on each event or message, and why."""
for _row in ROWS:
    for _before in _row.before:
        for _kind in _row.kinds:
            for _after in _row.after:
                TABLE.setdefault((_before, _kind), {}).setdefault(_after, _row.why)


def check_move(before: Phase, kind: Kind, after: Phase) -> None:
    """Checks a move that was made.

    Raises:
        InvariantViolation: If there is no such move.
    """
    if before is not after and after not in TABLE.get((before, kind), ()):
        raise InvariantViolation(f"{before.name} to {after.name} on {kind.__name__}")


def mermaid() -> str:
    """The table as a Mermaid state diagram."""
    arrows = sorted({(before.name, after.name, kind.__name__) for (before, kind), to in TABLE.items() for after in to})
    lines = ["stateDiagram-v2", f"    [*] --> {_IDLE.name}"]
    for (before_name, after_name), group in groupby(arrows, key=lambda arrow: arrow[:2]):
        if before_name != after_name:
            lines.append(f"    {before_name} --> {after_name}: {', '.join(kind for *_, kind in group)}")
    lines += [f"    {phase.name} --> [*]" for phase in (_CLOSED, _FENCED)]
    return "\n".join(lines) + "\n"
