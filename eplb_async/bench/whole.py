"""A whole run: scenarios and parts one after the other, then the bars."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

from eplb_async.bench.bars import bars
from eplb_async.bench.parts import run_part
from eplb_async.bench.scenario import Scenario

__all__ = ["run_whole"]

_PACKAGES = ("eplb-async", "nixl", "torch", "numpy", "uvloop")

Measure = Callable[[Scenario, int], dict[str, Any]]


def run_whole(
    scenarios: Sequence[Scenario], parts: Sequence[str], *, rounds: int, quick: bool, measure: Measure
) -> dict[str, Any]:
    """Measure everything that was asked for; what fails is told of, and the rest goes on.

    Args:
        scenarios: Scenarios.
        parts: Names of parts; see :func:`~eplb_async.bench.parts.parts`.
        rounds: Rounds of each scenario.
        quick: Whether parts are to be quick too.
        measure: Measures one scenario, given it and the rounds.

    Returns:
        ``machine``, ``scenarios`` and ``probes`` by name, ``simulation`` and ``policy`` where they were run,
        ``failed`` by name, ``bars``.
    """
    results: dict[str, Any] = {"machine": _machine(), "quick": quick, "scenarios": {}, "failed": {}}
    for scenario in scenarios:
        _told(scenario.name)
        try:
            results["scenarios"][scenario.name] = measure(scenario, rounds)
        except Exception as error:  # one scenario that fails must not lose the others
            results["failed"][scenario.name] = f"{type(error).__name__}: {error}"
    for name in parts:
        _told(name)
        try:
            run_part(name, results, quick=quick)
        except Exception as error:
            results["failed"][name] = f"{type(error).__name__}: {error}"
    results["bars"] = bars(results)
    return results


def _told(name: str) -> None:
    print(f"bench: {name}", file=sys.stderr, flush=True)


def _machine() -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "UCX_TLS": os.environ.get("UCX_TLS", ""),
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
