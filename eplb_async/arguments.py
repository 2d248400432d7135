"""Values of command-line arguments, checked as argparse wants it: what is wrong is said in one line."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable

__all__ = ["byte_count", "count", "positive"]

_BYTES = re.compile(r"([0-9.]+(?:e[0-9]+)?) ?(?:([kmgt])(i)?)?b?", re.IGNORECASE)
_POWER = {None: 0, "k": 1, "m": 2, "g": 3, "t": 4}
_MOST_BYTES = 1 << 50


def count(lowest: int, highest: int) -> Callable[[str], int]:
    """A type for ``add_argument``: an integer from ``lowest`` to ``highest``."""

    def integer(text: str) -> int:
        value = int(text)
        if not lowest <= value <= highest:
            raise argparse.ArgumentTypeError(f"{value} is not from {lowest} to {highest}")
        return value

    return integer


def positive(text: str) -> float:
    """A finite number above 0."""
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def byte_count(text: str) -> int:
    """Bytes, 1 to 2**50: ``44e6``, ``44MB`` (decimal), ``42MiB`` (binary)."""
    match = _BYTES.fullmatch(text.strip())
    try:
        number, unit, binary = match.groups() if match else ("", None, None)
        value: float = float(number) * (1024 if binary else 1000) ** _POWER[unit and unit.lower()]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes, such as 44e6, 44MB or 42MiB") from None
    if not 1 <= value <= _MOST_BYTES:
        raise argparse.ArgumentTypeError(f"{text} is not from 1 byte to 2**50 bytes")
    return round(value)
