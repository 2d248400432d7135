"""From the turns of all ranks to medians, spreads and ratios; pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eplb_async.bench.scenario import Scenario

__all__ = ["Samples", "spread", "summarise"]

_UNTIMED = ("copies",)  # there for the loop's lag
_FREE, _BLOCKED = "late", "blocked"


@dataclass(slots=True)
class Samples:
    """What one rank saw.

    Attributes:
        turns: For each contender its turns, by field of :class:`~eplb_async.bench.work.Turn`.
        wrong: Wrong bytes of each contender's verified turn.
        extra_mib: Memory that each took at its peak; ``None`` where unknown.
    """

    turns: dict[str, list[dict[str, Any]]]
    wrong: dict[str, int] = field(default_factory=dict)
    extra_mib: dict[str, float | None] = field(default_factory=dict)


def spread(values: Sequence[float], digits: int = 4) -> dict[str, Any]:
    """Median, and the quartiles as ``iqr``.

    Args:
        values: One or more.
        digits: Digits after the point.
    """
    low, high = np.percentile(values, [25, 75]).tolist()
    return {"median": round(statistics.median(values), digits), "iqr": [round(low, digits), round(high, digits)]}


def summarise(
    scenario: Scenario, everyone: Sequence[Samples], nbytes: Sequence[int], not_run: Mapping[str, str]
) -> dict[str, Any]:
    """One record of a scenario.

    Args:
        scenario: It.
        everyone: What each rank saw ``[ranks]``.
        nbytes: Bytes that each rank read ``[ranks]``.
        not_run: Contenders that were not run, and why.

    Returns:
        ``contenders`` by name: ``seconds`` and ``gb_per_s`` (1e9 bytes over all ranks, per second of the slowest),
        ``cpu_s_per_gb`` (all ranks' CPU), ``polls`` of a migration (all ranks), ``extra_mib`` (worst rank),
        ``lag_ms`` (worst rank), ``verified``. ``ratios``: to each contender, how many times as fast ours is, turn
        by turn of the same round. ``blocked_over_free`` where a loop was blocked.
    """
    total = sum(nbytes)
    seconds = {name: _slowest(scenario, [each.turns[name] for each in everyone]) for name in everyone[0].turns}
    found: dict[str, Any] = {
        "what": scenario.what,
        "scenario": scenario.to_json(),
        "bytes": total,
        "rounds": max((len(each) for each in seconds.values()), default=0),
        "contenders": {
            name: _contender(name, scenario, everyone, took, total) for name, took in seconds.items() if took
        },
        "not_run": dict(not_run),
        "ratios": {},
    }
    if ours := seconds.get("ours"):
        for name, took in seconds.items():
            if name != "ours" and name not in _UNTIMED:
                found["ratios"][name] = spread([theirs / mine for theirs, mine in zip(took, ours, strict=True)], 3)
    if _BLOCKED in seconds and _FREE in seconds:
        pairs = zip(seconds[_BLOCKED], seconds[_FREE], strict=True)
        found["blocked_over_free"] = spread([blocked / free for blocked, free in pairs], 3)
    return found


def _slowest(scenario: Scenario, turns: Sequence[Sequence[Mapping[str, Any]]]) -> list[float]:
    """Seconds of the slowest rank that counts, turn by turn: where a loop is blocked, rank 0 does not."""
    counted = turns[1:] if scenario.block else turns
    return [max(turn["seconds"] for turn in each) for each in zip(*counted, strict=True)]


def _contender(
    name: str, scenario: Scenario, everyone: Sequence[Samples], took: Sequence[float], total: int
) -> dict[str, Any]:
    turns = list(zip(*(each.turns[name] for each in everyone), strict=True))
    polls = [sum(turn["polls"] for turn in each) for each in turns if each[0]["polls"] is not None]
    lags = [[lag for turn in each.turns[name] for lag in turn["lags"]] for each in everyone]
    extra = [each.extra_mib.get(name) for each in everyone]
    wrong = [each.wrong.get(name) for each in everyone]
    gigabytes = total / 1e9
    timed = name not in _UNTIMED and not scenario.block
    return {
        "seconds": spread(took),
        "gb_per_s": spread([gigabytes / each for each in took], 3) if timed else None,
        "cpu_s_per_gb": round(statistics.median(sum(t["cpu"] for t in each) for each in turns) / gigabytes, 4),
        "polls": round(statistics.median(polls)) if polls else None,
        "extra_mib": None if None in extra else max(extra),  # type: ignore[type-var]
        "lag_ms": _lag(lags),
        "verified": None if None in wrong else not any(wrong),
    }


def _lag(lags: Sequence[Sequence[float]]) -> dict[str, Any] | None:
    """Percentiles in ms of the worst rank, each."""
    if not any(lags):
        return None
    found = [np.percentile(each, [50, 99, 100]) * 1e3 for each in lags if each]
    worst = np.max(found, axis=0).tolist()
    return {
        **{name: round(value, 3) for name, value in zip(("p50", "p99", "max"), worst, strict=True)},
        "ticks": sum(len(each) for each in lags),
    }
