"""Findings as text, for a terminal or for a file, or as JSON."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import TextIO

from eplb_async.doctor.finding import Finding, Status, worst

__all__ = ["as_json", "as_text", "summary", "width"]

_COLOURS = {Status.OK: "32", Status.WARNING: "33", Status.FAILED: "31"}
_HEAD = 22  # columns of status and check
_WIDEST = 120


def as_text(finding: Finding, out: TextIO = sys.stdout) -> str:
    """A finding in a few lines: coloured and wrapped for a terminal, else one line and one for the remedy."""
    terminal = out.isatty() and "NO_COLOR" not in os.environ
    status = f"{finding.status.value:8}"
    shown = f"\x1b[{_COLOURS[finding.status]}m{status}\x1b[0m" if terminal else status
    head = f"{finding.check:{_HEAD - 9}} "
    lines = _wrapped(finding.found, terminal=terminal)
    if finding.remedy:
        lines += _wrapped(f"-> {finding.remedy}", terminal=terminal)
    return shown + " " + head + ("\n" + " " * _HEAD).join(lines)


def _wrapped(text: str, *, terminal: bool) -> list[str]:
    if not terminal:
        return [text]
    return textwrap.wrap(text, max(40, width() - _HEAD), break_long_words=False, break_on_hyphens=False)


def width() -> int:
    """Columns to fill."""
    return min(_WIDEST, shutil.get_terminal_size((_WIDEST, 0)).columns)


def summary(findings: Sequence[Finding]) -> str:
    """How many of each kind."""
    counts = Counter(finding.status for finding in findings)
    return ", ".join(f"{counts[status]} {status.value}" for status in Status)


def as_json(findings: Sequence[Finding]) -> str:
    """All findings, and ``status``, the worst of them."""
    return json.dumps({"status": worst(findings).value, "findings": [finding.to_json() for finding in findings]})
