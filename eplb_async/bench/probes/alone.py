"""Runs one probe alone, and the form in which all of them say whether a bar is met."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from eplb_async.bench.bars import bar


def at_most(name: str, limit: float, measured: float) -> dict[str, Any]:
    """A bar that is met by ``limit`` or less, as it stands in the results."""
    return bar(name, f"<= {limit:g}", round(measured, 4), measured <= limit)


def main(name: str, measure: Callable[..., dict[str, Any]]) -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=f"The probe {name!r} of the bench, alone.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: shows that it works, not how fast")
    print(json.dumps(measure(quick=parser.parse_args().quick), indent=2))
