"""What the bench measures besides migrations: probes of single costs, the simulation, the policy's table."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

__all__ = ["parts", "run_part"]

_PACKAGE = "eplb_async.bench"
_ALONE = {"simulation": f"{_PACKAGE}.simulation", "policy": f"{_PACKAGE}.policy_table"}

Measure = Callable[..., dict[str, Any]]


def parts() -> dict[str, str]:
    """Names of all parts, and the module of each, whose ``measure(*, quick)`` measures it; probes come first."""
    found = {}
    if _there(f"{_PACKAGE}.probes"):
        for module in importlib.import_module(f"{_PACKAGE}.probes").PROBES:
            name = f"{_PACKAGE}.probes.{module}"
            found[str(importlib.import_module(name).NAME)] = name
    found.update({name: module for name, module in _ALONE.items() if _there(module)})
    return found


def run_part(name: str, results: dict[str, Any], *, quick: bool) -> None:
    """Measure a part, and put what it found where it belongs: ``probes`` by name, or a key of its own."""
    measure: Measure = importlib.import_module(parts()[name]).measure
    found = measure(quick=quick)
    if name in _ALONE:
        results[name] = found
    else:
        results.setdefault("probes", {})[name] = found


def _there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
