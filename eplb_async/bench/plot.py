"""The bench's results as one picture: throughput side by side, ``open`` against peers, and the simulation's curves."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from eplb_async.errors import EplbError

__all__ = ["plot"]

OURS = "ours"
_COLOURS = ("#0b6e4f", "#3a7ca5", "#d17b0f", "#8c4843", "#6b6b6b", "#a39bc4")
_SCENARIOS_IN_ROW = 5


def plot(results: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Draw what there is in the results of ``eplb-async bench --json``, as PNG.

    Args:
        results: ``scenarios`` by name, each with its ``contenders`` (``gb_per_s`` with ``median`` and ``iqr``) and
            ``ratios`` of ours to each other; ``probes`` by name; ``simulation``. What is absent is left out.
        path: File to write.

    Raises:
        EplbError: matplotlib is not installed.
        ValueError: There is nothing to draw.
    """
    panels = _panels(results)
    if not panels:
        raise ValueError("these results hold no scenario, no open times and no simulation: nothing to draw")
    figure_of, canvas_of = _matplotlib()
    wide, small = [draw for is_wide, draw in panels if is_wide], [draw for is_wide, draw in panels if not is_wide]
    columns = min(3, max(1, len(small)))
    rows = -(-len(small) // columns)
    figure = figure_of(figsize=(13, 4.6 * len(wide) + 3.6 * rows), dpi=120, layout="constrained")
    canvas_of(figure)
    grid = figure.add_gridspec(len(wide) + rows, columns, height_ratios=[4.6] * len(wide) + [3.6] * rows)
    for row, draw in enumerate(wide):
        draw(figure.add_subplot(grid[row, :]))
    for number, draw in enumerate(small):
        draw(figure.add_subplot(grid[len(wide) + number // columns, number % columns]))
    figure.savefig(path)


def _panels(results: Mapping[str, Any]) -> list[tuple[bool, Callable[[Any], None]]]:
    """What to draw: whether it takes a whole row, and on what axes."""
    panels: list[tuple[bool, Callable[[Any], None]]] = []
    scenarios = list((results.get("scenarios") or {}).items())
    scenarios = [(name, told) for name, told in scenarios if _throughputs(told)]
    for first in range(0, len(scenarios), _SCENARIOS_IN_ROW):
        panels.append((True, _throughput(scenarios[first : first + _SCENARIOS_IN_ROW])))
    curves = (results.get("probes") or {}).get("open", {}).get("curves")
    if curves:
        panels.append((False, _open_times(curves)))
    simulated = (results.get("simulation") or {}).get("curves") or []
    for key, title, unit in (
        ("makespan_over_bound", "Simulation: makespan over the lower bound", "× busiest NIC"),
        ("messages_per_rank_layer", "Simulation: control messages", "messages per rank and layer"),
        ("coordinator_seconds", "Simulation: CPU of the coordinator", "seconds"),
        ("memory_mib", "Simulation: memory", "MiB"),
    ):
        points = [(one["ranks"], one[key]) for one in simulated if one.get(key) is not None]
        if points:
            panels.append((False, _over_ranks(points, title, unit)))
    return panels


def _throughputs(scenario: Mapping[str, Any]) -> dict[str, Mapping[str, float]]:
    """Median and spread of each contender that has a throughput."""
    return {
        name: told["gb_per_s"]
        for name, told in (scenario.get("contenders") or {}).items()
        if isinstance(told, Mapping) and told.get("gb_per_s")
    }


def _throughput(scenarios: Sequence[tuple[str, Mapping[str, Any]]]) -> Callable[[Any], None]:
    def draw(axes: Any) -> None:
        contenders = list(dict.fromkeys(name for _, told in scenarios for name in _throughputs(told)))
        contenders.sort(key=lambda name: name != OURS)
        width = 0.84 / len(contenders)
        for number, contender in enumerate(contenders):
            colour = _COLOURS[number % len(_COLOURS)]
            shown = [(at, told, _throughputs(told)) for at, (_, told) in enumerate(scenarios)]
            shown = [(at, told, found[contender]) for at, told, found in shown if contender in found]
            places = [at + (number - (len(contenders) - 1) / 2) * width for at, _, _ in shown]
            heights = [found["median"] for _, _, found in shown]
            spread = [_half_spread(found.get("iqr")) for _, _, found in shown]
            axes.bar(
                places, heights, width * 0.92, yerr=spread, color=colour, label=contender, capsize=2,
                error_kw={"elinewidth": 0.8, "ecolor": "#333333"},
            )  # fmt: skip
            for place, height, error, (_, told, _) in zip(places, heights, spread, shown, strict=True):
                ratio = (told.get("ratios") or {}).get(contender)
                ratio = ratio.get("median") if isinstance(ratio, Mapping) else ratio
                text = f"{height:.1f}" if ratio is None else f"{ratio:.2g}×"
                axes.annotate(
                    text, (place, height + error), xytext=(0, 2), textcoords="offset points", ha="center",
                    fontsize=8, fontweight="bold" if contender == OURS else "normal",
                )  # fmt: skip
        axes.set_xticks(range(len(scenarios)), [name for name, _ in scenarios])
        axes.set_ylabel("GB/s, all ranks together")
        axes.set_title(
            "Migration throughput: medians and quartiles. On the others' bars: how many times as fast as them ours is",
            fontsize=10,
        )
        axes.legend(ncols=len(contenders), fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.08))
        axes.margins(y=0.1)
        _plain(axes)

    return draw


def _half_spread(iqr: Any) -> float:
    """Half of the distance between the quartiles, from that distance or from both of them."""
    if isinstance(iqr, Sequence):
        return float(iqr[1] - iqr[0]) / 2
    return float(iqr or 0.0) / 2


def _open_times(curves: Mapping[str, Sequence[Mapping[str, float]]]) -> Callable[[Any], None]:
    def draw(axes: Any) -> None:
        for (transport, points), colour in zip(curves.items(), _COLOURS, strict=False):
            peers = [point["peers"] for point in points]
            axes.plot(peers, [p["seconds"] for p in points], "o-", color=colour, label=f"open, {transport}")
            axes.plot(peers, [p["cpu_seconds"] for p in points], ":", color=colour, label=f"its CPU, {transport}")
            axes.set_xticks(peers)
        axes.set_xlabel("peers, all on this machine")
        axes.set_ylabel("seconds")
        axes.set_title("open() against the number of peers", fontsize=10)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8, frameon=False)
        _plain(axes)

    return draw


def _over_ranks(points: Sequence[tuple[int, float]], title: str, unit: str) -> Callable[[Any], None]:
    def draw(axes: Any) -> None:
        ranks, values = zip(*sorted(points), strict=True)
        axes.plot(ranks, values, "o-", color=_COLOURS[0])
        axes.set_xscale("log", base=2)
        axes.set_xticks(ranks, [str(rank) for rank in ranks])
        axes.set_ylim(0, max(values) * 1.15 or 1)
        axes.set_xlabel("ranks")
        axes.set_ylabel(unit)
        axes.set_title(title, fontsize=10)
        _plain(axes)

    return draw


def _plain(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def _matplotlib() -> tuple[Any, Any]:
    """Figure and canvas classes that need no display."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise EplbError(
            "a plot needs the package matplotlib, which is not installed here: pip install 'eplb-async[plot]'"
        ) from error
    return Figure, FigureCanvasAgg
