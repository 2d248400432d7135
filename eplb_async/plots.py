"""Figures drawn to files with matplotlib, which is imported only here and only when a figure is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eplb_async.errors import EplbError

__all__ = ["new_figure", "save"]

_DOTS_PER_INCH = 150


def new_figure(width: float, height: float) -> Any:
    """A matplotlib ``Figure`` of its own, in inches: no window, no state shared with the caller's plots.

    Raises:
        EplbError: matplotlib is not installed; names the extra that brings it.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise EplbError(
            "a plot needs the package matplotlib, which is not installed here: pip install 'eplb-async[plot]'"
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, path: Path) -> None:
    """Write a figure; the path's suffix says in which format: ``.png``, ``.svg``, ``.pdf``.

    Raises:
        EplbError: The file cannot be written, or matplotlib knows no such format; names the path.
    """
    try:
        figure.savefig(path, dpi=_DOTS_PER_INCH)
    except (OSError, ValueError) as error:
        raise EplbError(f"{path}: the plot cannot be written: {error}") from error
