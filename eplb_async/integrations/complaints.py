"""What is wrong, by what health says, and what to do: for who is woken by it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eplb_async.communicator import Health

_FAILED_IN_A_ROW = 2


@dataclass(frozen=True, slots=True)
class Complaint:
    """Something that is wrong.

    Attributes:
        rank: The rank that it is about.
        what: What is wrong.
        do: What to do.
    """

    rank: int
    what: str
    do: str


def complaints(health: Health, service: Any = None) -> list[Complaint]:
    """What is wrong with a communicator and, if there is one, its service; empty if all is well.

    Args:
        health: What the communicator says.
        service: What the service says; ``None`` if there is none.
    """
    me = health.rank
    found = [Complaint(rank, why, _mend(rank, why)) for rank, why in sorted(health.degraded.items())]
    because = f": {health.last_error}" if health.last_error else ""
    match health.phase:
        case "fenced":
            found.append(Complaint(me, f"the others go on without this rank{because}", _come_back(me)))
        case "closed":
            found.append(
                Complaint(me, f"the communicator is closed{because}", "open it again; if it broke, see the log")
            )
        case "closing":
            found.append(Complaint(me, "the communicator is closing", "nothing, if that was meant"))
        case "suspended":
            found.append(Complaint(me, "the communicator is suspended: its memory is let go of", "await resume()"))
        case "in_doubt":
            do = "say which ranks are dead with exclude(rank), on every rank that lives; else wait until they answer"
            found.append(Complaint(me, f"it cannot be known how the migration ends{because}", do))
        case phase if health.seconds_left is not None and health.seconds_left < 0:
            what = f"{phase} for {health.seconds_in_phase:.1f} s, past its deadline, waiting for {_awaited(health)}"
            found.append(Complaint(me, what, "look at them: stopped, stuck in a step or in using(), or dead"))
    if health.half_written:
        what = f"what the rows of layers {list(health.half_written)} hold is not known: their update failed"
        found.append(Complaint(me, what, "write these layers again inside updating_weights()"))
    if service is not None and service.closed and health.phase not in ("fenced", "closing", "closed"):
        found.append(Complaint(me, f"the service is over: {service.closed}", "start an EplbService again"))
    if service is not None and service.failures >= _FAILED_IN_A_ROW:
        what = f"{service.failures} rebalances failed in a row, the last because: {service.last_error}"
        found.append(Complaint(me, what, f"mend that; it is tried again in {service.seconds_left:.0f} s"))
    return found


def _awaited(health: Health) -> str:
    if health.in_use:
        return f"users of layers {sorted(health.in_use)} on this rank"
    return f"ranks {list(health.behind or health.waiting_for)}"


def _mend(rank: int, why: str) -> str:
    if why.startswith(("disconnected", "excluded")):
        return _come_back(rank)
    return f"look at its process and at the network to it; if it is dead, exclude({rank}) on every rank that lives"


def _come_back(rank: int) -> str:
    return f"start rank {rank}'s process again, and await reconnect({rank}) on every rank of the view meanwhile"
