"""What a check found: one line of the report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

__all__ = ["Finding", "Status", "failed", "ok", "warning", "worst"]


class Status(Enum):
    """How a check went; from good to bad."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        check: Name of the check.
        status: How it went.
        found: What was found, in one line.
        remedy: What to do about it; empty where there is nothing to do.
        facts: The same as data, for ``--json``.
    """

    check: str
    status: Status
    found: str
    remedy: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As ``--json`` prints it."""
        return {
            "check": self.check,
            "status": self.status.value,
            "found": self.found,
            "remedy": self.remedy,
            "facts": dict(self.facts),
        }


def ok(check: str, found: str, **facts: Any) -> Finding:
    """Nothing to do."""
    return Finding(check, Status.OK, found, "", facts)


def warning(check: str, found: str, remedy: str, **facts: Any) -> Finding:
    """It works, but not as well as it could, or not for everybody."""
    return Finding(check, Status.WARNING, found, remedy, facts)


def failed(check: str, found: str, remedy: str, **facts: Any) -> Finding:
    """The library will not work like this."""
    return Finding(check, Status.FAILED, found, remedy, facts)


def worst(findings: Iterable[Finding]) -> Status:
    """The worst status; ``OK`` where there are none."""
    order = list(Status)
    return max((finding.status for finding in findings), key=order.index, default=Status.OK)
