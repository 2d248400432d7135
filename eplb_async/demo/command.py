"""``eplb-async demo``: its arguments, and what it does with them."""

from __future__ import annotations

import argparse

from eplb_async.arguments import count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--ranks", type=count(2, 64), default=2, help="rank processes (default %(default)s)")
    parser.add_argument("--layers", type=count(1, 512), default=4, help="layers (default %(default)s)")
    parser.add_argument("--experts", type=count(2, 4096), default=8, help="slots of each rank (default %(default)s)")
    parser.add_argument("--mib", type=float, default=2.0, help="MiB of one expert (default %(default)s)")
    parser.add_argument("--rounds", type=count(1, 10_000), default=5, help="migrations (default %(default)s)")
    parser.add_argument(
        "--transport", choices=("auto", "tcp"), default="auto", help="UCX's choice, or UCX_TLS=tcp,self"
    )
    parser.add_argument("--loop", choices=("uvloop", "asyncio"), default="uvloop", help="event loop")
    parser.add_argument("--seed", type=int, default=0, help="seed of the placements (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def run(arguments: argparse.Namespace) -> int:
    """Run the demonstration; returns the exit status."""
    from eplb_async.demo import show
    from eplb_async.demo.rank import Work

    work = Work(
        ranks=arguments.ranks,
        layers=arguments.layers,
        experts=arguments.experts,
        mib=arguments.mib,
        rounds=arguments.rounds,
        transport=arguments.transport,
        loop=arguments.loop,
        seed=arguments.seed,
    )
    return show.run(work, as_json=arguments.json)
