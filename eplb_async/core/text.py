"""Text that comes from peers and goes to people: on one line, or a log could be made to say what it does not."""

from __future__ import annotations

import re

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069]+")
"""Controls, line ends, and marks that turn the direction of what is read."""


def is_one_line(text: str) -> bool:
    """Whether a log shows it as it is, within its line."""
    return _CONTROL.search(text) is None


def one_line(text: str) -> str:
    """The text with a blank for each run of line ends and controls."""
    return _CONTROL.sub(" ", text)
