"""Where a rank stands: the phase it is in, since when, and by when that should be over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from eplb_async.core.events import Phase

if TYPE_CHECKING:
    from eplb_async.communicator.driver import Driver

_LASTING = ("idle", "closed", "fenced")


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a rank stands, at one moment.

    Attributes:
        phase: As in ``Health``.
        since: Loop time at which that phase began.
        deadline: Loop time by which it should be over; ``None`` if it may last.
    """

    phase: str
    since: float
    deadline: float | None


def standing_of(driver: Driver, before: Standing | None, now: float) -> Standing:
    """Where the rank of a driver stands.

    Args:
        driver: The driver.
        before: Where it stood the last time it was looked at.
        now: Loop time.
    """
    attempt, phase = driver.attempt, _phase(driver)
    since = now if before is None or before.phase != phase else before.since
    if phase in _LASTING:
        deadline = None
    elif phase == "closing":
        deadline = driver.close_by
    elif attempt is not None and phase in ("joined", "open", "activating"):
        deadline = attempt.deadline
        if phase == "activating" and deadline <= since:  # of an epoch that ended at its deadline
            deadline = since + driver.settings.activation_timeout
    else:
        deadline = since + driver.settings.settle_timeout
    if before is not None and before.since == since and before.deadline == deadline and before.phase == phase:
        return before  # a coordinator looks once for each vote
    return Standing(phase=phase, since=since, deadline=deadline)


def _phase(driver: Driver) -> str:
    protocol, phase = driver.protocol, driver.protocol.phase
    if phase not in (Phase.CLOSED, Phase.FENCED):
        if driver.over:
            phase = Phase.CLOSED
        elif driver.identity.rank in protocol.leaving:
            return "closing"
        elif phase is Phase.IDLE and driver.attempt is not None:
            steps, users = driver.steps, driver.users
            if (steps is not None and steps.waiting) or (users is not None and users.waiting):
                return "activating"
            phase = Phase.SETTLING
        elif phase is Phase.IDLE and protocol.view_changing:
            return "view_change"
    return str(phase.value)
