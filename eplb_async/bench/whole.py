"""A whole run: scenarios and parts one after the other, then the bars."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

from eplb_async.bench.bars import bars
from eplb_async.bench.launch import BenchFailed
from eplb_async.bench.parts import run_part
from eplb_async.bench.scenario import Scenario

__all__ = ["run_whole"]

_PACKAGES = ("eplb-async", "nixl", "torch", "numpy", "uvloop")

Measure = Callable[[Scenario, int], dict[str, Any]]
Told = Callable[[str], None]


def run_whole(
    scenarios: Sequence[Scenario], parts: Sequence[str], *, rounds: int, quick: bool, measure: Measure, told: Told
) -> dict[str, Any]:
    """Measure everything that was asked for; what fails is recorded, and the rest goes on.

    Args:
        scenarios: Scenarios.
        parts: Names of parts; see :func:`~eplb_async.bench.parts.parts`.
        rounds: Rounds of each scenario.
        quick: Whether parts are to be quick too.
        measure: Measures one scenario, given it and the rounds. A `BenchFailed` of it is recorded.
        told: Called with the name of what begins, and with what failed.

    Returns:
        ``machine``, ``scenarios`` and ``probes`` by name, ``simulation`` and ``policy`` where they were run,
        ``failed`` by name, ``bars``.
    """
    results: dict[str, Any] = {"machine": _machine(), "quick": quick, "scenarios": {}, "failed": {}}
    for scenario in scenarios:
        told(scenario.name)
        try:
            results["scenarios"][scenario.name] = measure(scenario, rounds)
        except BenchFailed as error:
            results["failed"][scenario.name] = str(error)
            told(f"{scenario.name} failed: {error}")
    for name in parts:
        told(name)
        try:
            run_part(name, results, quick=quick)
        except Exception as error:  # a part is a program of its own: it must not lose the others' figures
            results["failed"][name] = f"{type(error).__name__}: {error}"
            told(f"{name} failed: {error}")
    results["bars"] = bars(results)
    return results


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
