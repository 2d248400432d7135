"""``eplb-async bench``: its arguments, and what it does with them."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eplb_async.bench.group import Place
    from eplb_async.bench.scenario import Scenario

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
    parser.add_argument(
        "--part", action="append", default=[], metavar="NAME", help="only this probe, simulation or policy; repeatable"
    )
    parser.add_argument("--contender", action="append", default=[], metavar="NAME", help="only these; repeatable")
    parser.add_argument("--rounds", type=_rounds, help=f"rounds (default {_ROUNDS}, {_QUICK_ROUNDS} with --quick)")
    parser.add_argument("--quick", action="store_true", help="less and smaller: shows that it works, not how fast")
    parser.add_argument("--transport", choices=("auto", "tcp"), help="instead of the scenario's")
    parser.add_argument("--loop", choices=("uvloop", "asyncio"), help="instead of the scenario's")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--plot", metavar="PNG", help="draw the results (needs eplb-async[plot])")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    parser.add_argument("--list", action="store_true", help="say what there is, and end")


def _rounds(text: str) -> int:
    if not 1 <= (value := int(text)) <= 1000:
        raise argparse.ArgumentTypeError(f"{value} is not from 1 to 1000")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Run it.

    Returns:
        Exit status: 0; 1 if something failed, bytes were wrong, or with ``--check`` a bar was missed; 2 for names
        that do not exist, and where there is nothing to draw the plot with.
    """
    from eplb_async.bench.parts import parts
    from eplb_async.bench.scenario import CONTENDERS, SCENARIOS

    known = parts()
    if arguments.list:
        _list(known)
        return 0
    unknown = [name for name in arguments.scenario if name not in SCENARIOS]
    unknown += [name for name in arguments.part if name not in known]
    unknown += [name for name in arguments.contender if name not in CONTENDERS]
    if unknown:
        print(f"bench: there is no {', '.join(unknown)}; see --list", file=sys.stderr)
        return 2
    if arguments.plot and importlib.util.find_spec("matplotlib") is None:
        print("bench: --plot needs matplotlib: pip install eplb-async[plot]", file=sys.stderr)
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
        from eplb_async.bench.plot import plot
        from eplb_async.errors import EplbError

        try:
            plot(results, arguments.plot)
        except EplbError as error:
            print(f"bench: {error}", file=sys.stderr)
            return 2
    return _status(arguments, results)


def _status(arguments: argparse.Namespace, results: dict[str, Any]) -> int:
    wrong = any(c["verified"] is False for s in results["scenarios"].values() for c in s["contenders"].values())
    missed = arguments.check and not all(bar["met"] for bar in results["bars"])
    return 1 if wrong or missed or results["failed"] else 0


def _results(arguments: argparse.Namespace, known: list[str]) -> dict[str, Any] | None:
    from eplb_async.bench.group import Place
    from eplb_async.bench.launch import launch
    from eplb_async.bench.scenario import choose
    from eplb_async.bench.whole import run_whole

    quick: bool = arguments.quick
    rounds = arguments.rounds or (_QUICK_ROUNDS if quick else _ROUNDS)
    changes = {
        "transport": arguments.transport,
        "loop": arguments.loop,
        "contenders": tuple(arguments.contender) or None,
    }
    chosen = [] if arguments.part and not arguments.scenario else choose(arguments.scenario, quick=quick, **changes)
    if place := Place.from_env():
        return _as_rank(place, chosen, rounds=rounds, named=bool(arguments.scenario), quick=quick)
    wanted = arguments.part if arguments.scenario or arguments.part else known
    return run_whole(chosen, wanted, rounds=rounds, quick=quick, measure=lambda s, n: launch(s, rounds=n), told=_told)


def _as_rank(place: Place, chosen: list[Scenario], *, rounds: int, named: bool, quick: bool) -> dict[str, Any] | None:
    """As one rank of a group that somebody else launched; ``None`` on all but the first.

    The group is as large as it was made, and UCX reads its environment once: without names, the scenarios that fit.
    """
    from eplb_async.bench.group import Group
    from eplb_async.bench.rank import run_rank
    from eplb_async.bench.whole import run_whole

    fitting = [replace(s, ranks=place.size) for s in chosen if named or (s.ranks, s.transport) == (place.size, "auto")]
    if len({s.transport for s in fitting}) > 1:
        raise SystemExit("bench: a process has one transport: name scenarios of one, and run it again for the other")
    if any(s.transport == "tcp" for s in fitting):
        os.environ["UCX_TLS"] = "tcp,self"
    group = Group.join(place)
    results = run_whole(
        fitting,
        [],
        rounds=rounds,
        quick=quick,
        measure=lambda s, n: run_rank(group, s, rounds=n),
        told=_told if place.rank == 0 else lambda _: None,
    )
    group.close()
    return results if place.rank == 0 else None


def _told(name: str) -> None:
    print(f"bench: {name}", file=sys.stderr, flush=True)


def _list(parts: dict[str, str]) -> None:
    from eplb_async.bench.scenario import CONTENDERS, SCENARIOS

    for scenario in SCENARIOS.values():
        print(f"{scenario.name:12} {'quick ' if scenario.in_quick else '      '}{scenario.what}")
    for name, module in parts.items():
        print(f"{name:12} part  {module}")
    print("contenders:", ", ".join(CONTENDERS))


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
