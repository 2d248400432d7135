"""The results as text: bars first, then a table for each scenario."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["show"]

_FILE_WIDTH = 150
_COLUMNS = (
    "contender",
    "ours is",
    "GB/s",
    "seconds",
    "CPU s/GB",
    "lag p50/p99/max ms",
    "polls",
    "extra MiB",
    "bytes",
)


def show(results: Mapping[str, Any]) -> None:
    """Print what was measured; with ``rich`` where it is installed."""
    for name, scenario in results["scenarios"].items():
        rows = [_row(contender, found, scenario) for contender, found in scenario["contenders"].items()]
        _table(f"{name}: {scenario['what']}; {scenario['bytes'] / 1e9:.2f} GB, {scenario['rounds']} rounds",
               _COLUMNS, rows)  # fmt: skip
        if ratio := scenario.get("blocked_over_free"):
            print(f"blocked over free: {_spread(ratio, 2)}")
        for contender, reason in scenario["not_run"].items():
            print(f"{contender} was not run: {reason}")
        print()
    for name, failed in results["failed"].items():
        print(f"{name} FAILED: {failed}")
    for name, found in results.get("probes", {}).items():
        print(f"probe {name}: {_brief(found)}")
    for name in ("simulation", "policy"):
        if name in results:
            print(f"{name}: {_brief(results[name])}")
    rows = [
        [bar["name"], bar["bar"], _figure(bar["measured"]), "yes" if bar["met"] else "NO"] for bar in results["bars"]
    ]
    if rows:
        _table("bars", ("what", "bar", "measured", "met"), rows)


def _row(name: str, found: Mapping[str, Any], scenario: Mapping[str, Any]) -> list[str]:
    ratio, lag = scenario["ratios"].get(name), found["lag_ms"]
    verified = {True: "verified", False: "WRONG", None: "-"}[found["verified"]]
    return [
        name,
        f"{_spread(ratio, 2)} x" if ratio else "-",
        _spread(found["gb_per_s"], 2) if found["gb_per_s"] else "-",
        _spread(found["seconds"], 3),
        f"{found['cpu_s_per_gb']:.2f}",
        f"{lag['p50']:.1f} / {lag['p99']:.1f} / {lag['max']:.1f}" if lag else "-",
        "-" if found["polls"] is None else str(found["polls"]),
        "?" if found["extra_mib"] is None else f"{found['extra_mib']:.0f}",
        verified,
    ]


def _spread(found: Mapping[str, Any], digits: int) -> str:
    low, high = found["iqr"]
    return f"{found['median']:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)


def _brief(found: Mapping[str, Any]) -> str:
    """A part's plain figures; the rest is in the JSON."""
    plain = [f"{name} {value:.4g}" for name, value in found.items() if isinstance(value, int | float)]
    return ", ".join(plain) or "see --json"


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
        print(title)
        for row in (columns, *rows):
            print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
        return
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_FILE_WIDTH)
    console.print(table)
