"""The bench's results as one picture: throughput side by side, ``open`` against peers, and the simulation's curves."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eplb_async.bench.panels import panels
from eplb_async.errors import EplbError
from eplb_async.plots import new_figure, save

__all__ = ["plot"]

_WIDE_INCHES, _SMALL_INCHES = 4.6, 3.6


def plot(results: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Draw what there is in the results of ``eplb-async bench --json``.

    Args:
        results: ``scenarios`` by name, each with its ``contenders`` (``gb_per_s`` with ``median`` and ``iqr``) and
            ``ratios`` of ours to each other; ``probes`` by name; ``simulation``. What is absent is left out.
        path: File to write; its suffix says in which format.

    Raises:
        EplbError: matplotlib is not installed, there is nothing to draw, or the file cannot be written.
    """
    found = panels(results)
    if not found:
        raise EplbError(f"{path}: nothing to draw: no scenario, open times, latencies or simulation in these results")
    wide, small = ([panel.draw for panel in found if panel.is_wide is which] for which in (True, False))
    columns = min(3, max(1, len(small)))
    heights = [_WIDE_INCHES] * len(wide) + [_SMALL_INCHES] * -(-len(small) // columns)
    figure = new_figure(13, sum(heights))
    grid = figure.add_gridspec(len(heights), columns, height_ratios=heights)
    for row, draw in enumerate(wide):
        draw(figure.add_subplot(grid[row, :]))
    for number, draw in enumerate(small):
        draw(figure.add_subplot(grid[len(wide) + number // columns, number % columns]))
    save(figure, Path(path))
