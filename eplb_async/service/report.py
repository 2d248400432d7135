"""What a rebalance and a service say of themselves: frozen records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from eplb_async.communicator import MigrationReport

__all__ = ["Outcome", "RebalanceReport", "ServiceHealth"]

Outcome = Literal["moved", "not_worth_it", "too_soon", "paused", "no_load", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceReport:
    """How one round ended on this rank.

    Attributes:
        outcome: ``moved``: the weights are where the policy wants them. ``not_worth_it``: the gain is below
            ``min_gain``. ``too_soon``: within ``min_interval`` of the last migration. ``paused``: a rank is.
            ``no_load``: nothing was recorded on any rank. ``failed``: see ``reason``.
        round: Number of the round, the same on all ranks; 0 where none was begun.
        reason: Why, in words.
        balancedness_before: Mean over the layers of mean over maximum of the rank loads, as the loads were; ``None``
            where it is not known.
        balancedness_after: As the policy's placement makes it, by the same loads; ``None`` where it is not known.
        num_moves: Slots that receive an expert that their rank did not hold, all ranks together.
        migration: What this rank's ``migrate`` reported; ``None`` unless ``moved``.
        seconds: From the begin of the round on this rank to its end.
    """

    outcome: Outcome
    round: int = 0
    reason: str = ""
    balancedness_before: float | None = None
    balancedness_after: float | None = None
    num_moves: int = 0
    migration: MigrationReport | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceHealth:
    """What a service is doing now; ``str()`` of it is one line for a log.

    Attributes:
        phase: ``idle``; ``asking`` and ``deciding`` (the coordinator waits for loads, for the policy); ``asked`` (this
            rank waits for the verdict); ``moving``; ``paused`` (and nothing else); ``closed``.
        seconds_in_phase: How long it has been in it.
        round: Number of the round that runs, or of the last one; 0 before the first.
        rank: This rank.
        coordinator: The rank that begins rounds; ``None`` where this rank is out of the group.
        members: Ranks of the view.
        waiting_for: Ranks whose answer is waited for.
        paused: Whether this rank is paused.
        steps: Steps recorded, or run under ``forward()``, since the start: the larger of the two.
        steps_left: Steps to the next automatic round; 0 where one is due; ``None`` where there are none.
        seconds_left: How long an automatic round that is due still waits for ``min_interval`` or the back-off; 0 where
            it does not.
        rounds: How often rounds have ended on this rank, by outcome.
        failures: Rounds that have failed here one after the other; 0 once one has not.
        dropped: Messages of other services that were dropped, by reason.
        last_error: The last failure here, in words; empty if none.
        last_report: How the last round ended here.
        closed: Why the service is over; empty while it is not.
    """

    phase: str
    seconds_in_phase: float
    round: int
    rank: int
    coordinator: int | None
    members: tuple[int, ...]
    waiting_for: tuple[int, ...] = ()
    paused: bool = False
    steps: int = 0
    steps_left: int | None = None
    seconds_left: float = 0.0
    rounds: Mapping[str, int] = field(default_factory=dict)
    failures: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    last_error: str = ""
    last_report: RebalanceReport | None = None
    closed: str = ""

    def __str__(self) -> str:
        parts = [f"rank {self.rank}'s service: {self.phase} for {self.seconds_in_phase:.1f} s, round {self.round}"]
        if self.closed:
            parts.append(f"over: {self.closed}")
        if self.waiting_for:
            parts.append(f"waiting for ranks {', '.join(map(str, self.waiting_for))}")
        if self.paused:
            parts.append("paused until resume()")
        if self.steps_left is not None:
            parts.append(f"{self.steps} steps, {self.steps_left} to the next round")
        if self.failures:
            parts.append(f"{self.failures} rounds failed in a row; the next in {self.seconds_left:.1f} s")
        if self.last_error:
            parts.append(f"last error: {self.last_error}")
        return "; ".join(parts)
