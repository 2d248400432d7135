"""Values of command-line arguments, checked as argparse wants it: what is wrong is said in one line."""

from __future__ import annotations

import argparse
from collections.abc import Callable

__all__ = ["count"]


def count(lowest: int, highest: int) -> Callable[[str], int]:
    """A type for ``add_argument``: an integer from ``lowest`` to ``highest``."""

    def integer(text: str) -> int:
        value = int(text)
        if not lowest <= value <= highest:
            raise argparse.ArgumentTypeError(f"{value} is not from {lowest} to {highest}")
        return value

    return integer
