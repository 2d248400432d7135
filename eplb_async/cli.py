"""The command line, ``eplb-async``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit status."""
    parser = argparse.ArgumentParser(prog="eplb-async", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_demo(commands.add_parser("demo", help="move experts between real ranks on this machine, and check"))
    arguments = parser.parse_args(argv)
    from eplb_async.demo.rank import Work
    from eplb_async.demo.show import run

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
    return run(work, as_json=arguments.json)


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=_count(2, 64), default=2, help="rank processes (default %(default)s)")
    parser.add_argument("--layers", type=_count(1, 512), default=4, help="layers (default %(default)s)")
    parser.add_argument("--experts", type=_count(2, 4096), default=8, help="slots of each rank (default %(default)s)")
    parser.add_argument("--mib", type=float, default=2.0, help="MiB of one expert (default %(default)s)")
    parser.add_argument("--rounds", type=_count(1, 10_000), default=5, help="migrations (default %(default)s)")
    parser.add_argument(
        "--transport", choices=("auto", "tcp"), default="auto", help="UCX's choice, or UCX_TLS=tcp,self"
    )
    parser.add_argument("--loop", choices=("uvloop", "asyncio"), default="uvloop", help="event loop")
    parser.add_argument("--seed", type=int, default=0, help="seed of the placements (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def _count(lowest: int, highest: int) -> type[int]:
    def parse(text: str) -> int:
        value = int(text)
        if not lowest <= value <= highest:
            raise argparse.ArgumentTypeError(f"{value} is not from {lowest} to {highest}")
        return value

    return parse  # type: ignore[return-value]


if __name__ == "__main__":
    raise SystemExit(main())
