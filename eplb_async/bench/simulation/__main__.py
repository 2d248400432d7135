"""``python -m eplb_async.bench.simulation``: the simulation alone."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence

from eplb_async.bench.simulation import NAME, measure


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate, and print; returns 1 if a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m eplb_async.bench.simulation", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="8 to 32 ranks only")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--plot", metavar="FILE", help="draw the curves into a file")
    arguments = parser.parse_args(argv)
    found = measure(quick=arguments.quick, told=lambda line: print(line, file=sys.stderr, flush=True))
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        for one in found["curves"]:
            print(
                f"{one['ranks']:4d} ranks: {one['messages_per_rank_layer']:g} messages per rank and layer, makespan "
                f"{one['makespan_over_bound']:.3f} of the bound, coordinator {1e3 * one['coordinator_seconds']:.2f} ms "
                f"a layer, plan {1e3 * one['plan_seconds']:.0f} ms, {one['memory_mib']:.1f} MiB"
            )
        for one in found["skewed"]:
            print(f"{one['name']}: {one['makespan_over_bound']:.3f} of the bound, {one['makespan_seconds']:.4f} s")
        for bar in found["bars"]:
            print(f"{'met' if bar['met'] else 'MISSED'}: {bar['name']}: {bar['measured']} ({bar['bar']})")
    if arguments.plot:
        importlib.import_module("eplb_async.bench.plot").plot({NAME: found}, arguments.plot)
    return 0 if all(bar["met"] for bar in found["bars"]) else 1


if __name__ == "__main__":
    sys.exit(main())
