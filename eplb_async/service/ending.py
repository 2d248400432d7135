"""How rounds end on one rank, as its callers, the log, the hook and ``health()`` are told."""

from __future__ import annotations

import logging
from collections import Counter

from eplb_async.communicator import MigrationReport
from eplb_async.errors import RebalanceFailed
from eplb_async.service.actions import End
from eplb_async.service.report import RebalanceReport
from eplb_async.telemetry.emitter import Emitter

__all__ = ["Endings", "failure_of", "report_of"]

_log = logging.getLogger("eplb_async.service")
_TOLD = ("outcome", "round", "reason", "balancedness_before", "balancedness_after", "num_moves", "seconds")


class Endings:
    """Counts how rounds have ended, and tells of it.

    Args:
        rank: This rank.
        automatic: Whether a round that failed is tried again.
        emitter: Tells the hook; ``None`` if there is none.

    Attributes:
        outcomes: How often rounds have ended, by outcome.
        last_error: The last failure, in words; empty if none.
        last_report: How the last round ended.
    """

    def __init__(self, rank: int, *, automatic: bool, emitter: Emitter | None) -> None:
        self.outcomes: Counter[str] = Counter()
        self.last_error = ""
        self.last_report: RebalanceReport | None = None
        self._rank = rank
        self._automatic = automatic
        self._emitter = emitter

    def take(self, end: End, report: RebalanceReport, *, failures: int, wait: float, closed: bool) -> None:
        """A round, or the wish for one, is over.

        Args:
            end: Its end.
            report: What is said of it.
            failures: Rounds that have failed one after the other.
            wait: Seconds to the next automatic round, if it has failed.
            closed: Whether the service is over: then it is no wonder.
        """
        self.outcomes[report.outcome] += 1
        if end.round:
            self.last_report = report
        if report.outcome == "failed":
            self.last_error = f"round {end.round}: {end.reason}"
            if closed:
                _log.info("rank %d: round %d ended: %s", self._rank, end.round, end.reason)
            else:
                self._warn(end, wait)
            self.emit("round_failed", round=end.round, reason=end.reason, failures=failures, retry_in=wait)
        elif report.outcome == "moved":
            _log.info(
                "rank %d: round %d moved %d slots in %.2f s, balancedness %.3f to %.3f",
                self._rank,
                end.round,
                report.num_moves,
                report.seconds,
                report.balancedness_before,
                report.balancedness_after,
            )
        else:
            level = logging.INFO if end.round else logging.DEBUG
            _log.log(level, "rank %d: round %d: %s: %s", self._rank, end.round, report.outcome, report.reason)
        self.emit("rebalance_ended", **{name: getattr(report, name) for name in _TOLD})

    def emit(self, name: str, **fields: object) -> None:
        """Tell the hook of an event."""
        if self._emitter is not None:
            self._emitter.emit(name, **fields)

    def _warn(self, end: End, wait: float) -> None:
        _log.warning(
            "rank %d: round %d failed: %s. The experts stay where they are%s; %s",
            self._rank,
            end.round,
            end.reason,
            f", look at ranks {list(end.ranks)}" if end.ranks else "",
            f"tried again in {wait:.1f} s" if self._automatic and wait else "call rebalance() when that is mended",
        )


def report_of(end: End, migration: MigrationReport | None) -> RebalanceReport:
    """What is said of a round that is over.

    Args:
        end: Its end.
        migration: What this rank's ``migrate`` reported.
    """
    verdict = end.verdict
    known = verdict is not None and verdict.before == verdict.before
    return RebalanceReport(
        outcome=end.outcome,
        round=end.round,
        reason=end.reason or ("" if verdict is None else verdict.reason),
        balancedness_before=verdict.before if verdict is not None and known else None,
        balancedness_after=verdict.after if verdict is not None and known else None,
        num_moves=0 if verdict is None else verdict.moves,
        migration=migration if end.outcome == "moved" else None,
        seconds=end.seconds,
    )


def failure_of(end: End) -> RebalanceFailed:
    """The error of a round that failed for no error of this rank."""
    what = f"round {end.round}" if end.round else "no round was begun"
    return RebalanceFailed(f"{what}: {end.reason}", round=end.round, reason=end.reason, ranks=end.ranks)
