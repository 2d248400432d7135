"""``eplb-async bench``: its arguments, and what it does with them."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from eplb_async.bench.scenario import SCENARIOS, Scenario, choose

__all__ = ["add_arguments", "run"]

_ROUNDS, _QUICK_ROUNDS = 7, 3

EPILOG = """\
Everyone does the same moves in turns, round after round, the order moving on by one each round, so that a machine that
drifts favours nobody. Ratios are taken within a round, and their median is told with the quartiles. Each contender's
bytes are verified once before. On a cluster: torchrun ... -m eplb_async.bench --scenario reference, every process
being one rank. See docs/bench.md.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``bench``."""
    parser.epilog = EPILOG
    parser.add_argument("--scenario", action="append", default=[], metavar="NAME", help="only this; repeatable")
    parser.add_argument("--part", action="append", default=[], metavar="NAME", help="only this probe, the simulation "
                        "or the policy; repeatable")  # fmt: skip
    parser.add_argument("--rounds", type=int, help=f"rounds (default {_ROUNDS}, {_QUICK_ROUNDS} with --quick)")
    parser.add_argument("--quick", action="store_true", help="less and smaller: shows that it works, not how fast")
    parser.add_argument("--transport", choices=("auto", "tcp"), help="instead of the scenario's")
    parser.add_argument("--loop", choices=("uvloop", "asyncio"), help="instead of the scenario's")
    parser.add_argument("--contender", action="append", default=[], metavar="NAME", help="only these; repeatable")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--plot", metavar="PNG", help="draw the results (needs eplb-async[plot])")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    parser.add_argument("--list", action="store_true", help="say what there is, and end")


def run(arguments: argparse.Namespace) -> int:
    """Run it.

    Returns:
        Exit status: 0; 1 if something failed, bytes were wrong, or with ``--check`` a bar was missed; 2 for names
        that do not exist.
    """
    from eplb_async.bench.parts import parts

    known = parts()
    if arguments.list:
        _list(known)
        return 0
    if unknown := [n for n in arguments.scenario if n not in SCENARIOS] + [n for n in arguments.part if n not in known]:
        print(f"bench: there is no {', '.join(unknown)}; see --list", file=sys.stderr)
        return 2
    with _stdout_kept() as out:
        results = _results(arguments, list(known))
        if results is None:
            return 0  # a rank under torchrun that is not the first
        if arguments.json:
            print(json.dumps(results), file=out, flush=True)
        else:
            from eplb_async.bench.report import show

            with contextlib.redirect_stdout(out):
                show(results)
    if arguments.plot:
        importlib.import_module("eplb_async.bench.plot").plot(results, arguments.plot)
    wrong = any(c["verified"] is False for s in results["scenarios"].values() for c in s["contenders"].values())
    missed = arguments.check and not all(bar["met"] for bar in results["bars"])
    return 1 if wrong or missed or results["failed"] else 0


def _results(arguments: argparse.Namespace, known: list[str]) -> dict[str, Any] | None:
    from eplb_async.bench.group import Place
    from eplb_async.bench.launch import launch
    from eplb_async.bench.rank import run_rank
    from eplb_async.bench.whole import run_whole

    everything = not arguments.scenario and not arguments.part
    chosen = [] if arguments.part and not arguments.scenario else _scenarios(arguments)
    rounds = arguments.rounds or (_QUICK_ROUNDS if arguments.quick else _ROUNDS)
    place = Place.from_env()
    if place is None:
        wanted = known if everything else arguments.part
        return run_whole(chosen, wanted, rounds=rounds, quick=arguments.quick, measure=lambda s, n: launch(s, rounds=n))
    # Every process is one rank, so the group is as large as the launcher made it, and UCX is as its environment says.
    fitting = [s for s in chosen if s.ranks == place.size or len(arguments.scenario) > 0]
    results = run_whole(
        [replace(s, ranks=place.size) for s in fitting],
        [],
        rounds=rounds,
        quick=arguments.quick,
        measure=lambda s, n: run_rank(place, s, rounds=n, run=s.name),
    )
    return results if place.rank == 0 else None


def _scenarios(arguments: argparse.Namespace) -> list[Scenario]:
    return choose(
        arguments.scenario,
        quick=arguments.quick,
        transport=arguments.transport,
        loop=arguments.loop,
        contenders=tuple(arguments.contender) or None,
    )


def _list(parts: dict[str, str]) -> None:
    for scenario in SCENARIOS.values():
        print(f"{scenario.name:12} {'quick ' if scenario.in_quick else '      '}{scenario.what}")
    for name, module in parts.items():
        print(f"{name:12}       {module}")


@contextlib.contextmanager
def _stdout_kept() -> Iterator[Any]:
    """Keep stdout for the results: whatever else writes there, libraries and children too, goes to stderr."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        try:
            yield out
        finally:
            sys.stdout.flush()
            os.dup2(out.fileno(), 1)
