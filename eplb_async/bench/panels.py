"""The panels of the bench's picture, each drawn on axes of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Panel", "panels"]

OURS = "ours"
_LABELS = {
    OURS: "eplb_async",
    "raw": "raw NIXL, then copy",
    "vllm_way": "the vLLM way",
    "vllm": "vLLM's own class",
    "vllm_drop_in": "our class for vLLM",
    "gloo": "gloo isend/irecv",
    "copy_twice": "memcpy, twice",
    "copy_once": "memcpy, once",
}
_COLOURS = ("#0b6e4f", "#3a7ca5", "#d17b0f", "#8c4843", "#4f9d69", "#7d5ba6", "#8f8f8f", "#c4c4c4")
_OTHER = "#c9b458"
_SCENARIOS_IN_ROW = 4


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel.

    Attributes:
        is_wide: Whether it takes a whole row.
        draw: Draws it on matplotlib axes.
    """

    is_wide: bool
    draw: Callable[[Any], None]


def panels(results: Mapping[str, Any]) -> list[Panel]:
    """Everything that these results have a panel for; see :func:`~eplb_async.bench.plot.plot`."""
    found: list[Panel] = []
    scenarios = list((results.get("scenarios") or {}).items())
    scenarios = [(name, told) for name, told in scenarios if _throughputs(told)]
    for first in range(0, len(scenarios), _SCENARIOS_IN_ROW):
        found.append(Panel(True, _throughput(scenarios[first : first + _SCENARIOS_IN_ROW])))
    curves = (results.get("probes") or {}).get("open", {}).get("curves")
    if curves:
        found.append(Panel(False, _open_times(curves)))
    latency = (results.get("probes") or {}).get("latency", {}).get("transports")
    if latency:
        found.append(Panel(False, _latencies(latency)))
    simulated = (results.get("simulation") or {}).get("curves") or []
    for key, title, unit, bar in (
        ("makespan_over_bound", "Simulation: makespan over the lower bound", "times what the busiest NIC needs", 1.15),
        ("messages_per_rank_layer", "Simulation: control messages", "messages per rank and layer", None),
        ("coordinator_seconds", "Simulation: CPU of the coordinator", "seconds per layer", None),
        ("memory_mib", "Simulation: memory", "MiB per rank", None),
    ):
        points = [(one["ranks"], one[key]) for one in simulated if one.get(key) is not None]
        if points:
            found.append(Panel(False, _over_ranks(points, title, unit, bar)))
    return found


def _throughputs(scenario: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Median and spread of each contender that has a throughput."""
    return {
        name: told["gb_per_s"]
        for name, told in (scenario.get("contenders") or {}).items()
        if isinstance(told, Mapping) and told.get("gb_per_s")
    }


def _throughput(scenarios: Sequence[tuple[str, Mapping[str, Any]]]) -> Callable[[Any], None]:
    def draw(axes: Any) -> None:
        there = {name for _, told in scenarios for name in _throughputs(told)}
        contenders = [name for name in _LABELS if name in there] + sorted(there - set(_LABELS))
        width = 0.88 / len(contenders)
        for number, contender in enumerate(contenders):
            offset = (number - (len(contenders) - 1) / 2) * width
            label = _LABELS.get(contender, contender)
            colour = _COLOURS[list(_LABELS).index(contender)] if contender in _LABELS else _OTHER
            for at, (_, told) in enumerate(scenarios):
                if (figures := _throughputs(told).get(contender)) is not None:
                    _bar(axes, at + offset, width, figures, colour=colour, label=label)
                    ratio = (told.get("ratios") or {}).get(contender)
                    text = f"{ratio['median']:.2g}×" if ratio else f"{figures['median']:.1f}"
                    top = max(figures.get("iqr") or (figures["median"],))
                    _write(axes, at + offset, top, text, bold=contender == OURS)
                    label = "_"  # one entry in the legend
        axes.set_xticks(range(len(scenarios)), [name for name, _ in scenarios])
        axes.set_xlim(-0.55, len(scenarios) - 0.45)
        axes.set_ylabel("GB/s, all ranks together")
        axes.set_title(
            "Migration, median and quartiles. 3× on another bar: eplb_async is 3 times as fast as that one",
            fontsize=10,
        )
        axes.legend(ncols=len(contenders), fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.07))
        axes.margins(y=0.12)
        _plain(axes)

    return draw


def _bar(axes: Any, place: float, width: float, figures: Mapping[str, Any], *, colour: str, label: str) -> None:
    median = figures["median"]
    low, high = figures.get("iqr") or (median, median)
    axes.bar(
        [place],
        [median],
        width * 0.94,
        yerr=[[max(0.0, median - low)], [max(0.0, high - median)]],
        color=colour,
        label=label,
        capsize=2,
        error_kw={"elinewidth": 0.8, "ecolor": "#333333"},
    )


def _write(axes: Any, place: float, top: float, text: str, *, bold: bool) -> None:
    """A text above a bar."""
    axes.annotate(
        text,
        (place, top),
        xytext=(0, 2),
        textcoords="offset points",
        ha="center",
        fontsize=7.5,
        fontweight="bold" if bold else "normal",
    )


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


def _latencies(transports: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Callable[[Any], None]:
    def draw(axes: Any) -> None:
        contenders = {OURS: _LABELS[OURS], "spin": "plain NIXL, spinning", "sleep": "plain NIXL, polled every 0.5 ms"}
        for number, (contender, label) in enumerate(contenders.items()):
            for at, sources in enumerate(transports.values()):
                took = sources["plain"]["4 KiB, notified"][contender]["p50_us"]
                place = at + (number - 1) * 0.28
                axes.bar([place], [took], 0.26, color=_COLOURS[number], label=label)
                _write(axes, place, took, f"{took:.0f}", bold=contender == OURS)
                label = "_"
        axes.set_xticks(range(len(transports)), list(transports))
        axes.set_ylabel("µs, median")
        axes.set_title("One awaited READ of 4 KiB, with a notification", fontsize=10)
        axes.legend(fontsize=8, frameon=False)
        axes.margins(y=0.45)
        _plain(axes)

    return draw


def _over_ranks(points: Sequence[tuple[int, float]], title: str, unit: str, bar: float | None) -> Callable[[Any], None]:
    def draw(axes: Any) -> None:
        ranks, values = zip(*sorted(points), strict=True)
        axes.plot(ranks, values, "o-", color=_COLOURS[0])
        axes.set_xscale("log", base=2)
        axes.set_xticks(ranks, [str(rank) for rank in ranks])
        axes.set_ylim(0, 1.15 * max(*values, bar or 0.0) or 1)
        if bar is not None:
            axes.axhline(bar, color=_COLOURS[2], linestyle="--", linewidth=1, label=f"bar: {bar:g}")
            axes.legend(fontsize=8, frameon=False, loc="lower right")
        axes.set_xlabel("ranks")
        axes.set_ylabel(unit)
        axes.set_title(title, fontsize=10)
        _plain(axes)

    return draw


def _plain(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
