"""``eplb-async plan``: its arguments, and what it does with them."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from eplb_async.arguments import byte_count, count, positive

_MOST_RANKS = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    placement = "physical_to_logical_map [layers, slots], integers, -1 for an empty slot, as numpy.save() writes it"
    parser.add_argument(
        "--old", type=Path, required=True, metavar="FILE.npy", help=f"where the experts are: {placement}"
    )
    parser.add_argument("--new", type=Path, required=True, metavar="FILE.npy", help="where they go: the same")
    parser.add_argument("--ep-size", type=count(1, _MOST_RANKS), required=True, metavar="N", help="ranks")
    parser.add_argument(
        "--bytes-per-expert",
        type=byte_count,
        default=byte_count("44MB"),
        metavar="BYTES",
        help="bytes of one expert in one layer, as 44e6, 44MB or 42MiB (default 44MB: DeepSeek-V3 in FP8)",
    )
    parser.add_argument("--gbps", type=positive, metavar="X", help="gigabits per second of one rank's NIC, each way")
    parser.add_argument(
        "--local-gbps", type=positive, metavar="X", help="gigabits per second that a rank moves within its node"
    )
    parser.add_argument(
        "--ranks-per-node",
        type=count(1, _MOST_RANKS),
        default=1,
        metavar="N",
        help="ranks 0 to N-1 are one node, and so on (default 1: every READ crosses nodes)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw a heat map (needs eplb-async[plot])")


def run(arguments: argparse.Namespace) -> int:
    """Plan, print, draw; returns the exit status, 2 where the arguments are at fault."""
    from eplb_async.core.forecast import Forecast
    from eplb_async.core.plan import plan
    from eplb_async.errors import EplbError, PlacementError
    from eplb_async.planning.files import read_placement
    from eplb_async.planning.heatmap import draw

    try:
        old, new = (read_placement(path, ep_size=arguments.ep_size) for path in (arguments.old, arguments.new))
        nodes = [str(rank // arguments.ranks_per_node) for rank in range(arguments.ep_size)]
        try:
            moves = plan(old, new, nodes=nodes)
        except PlacementError as error:
            raise PlacementError(f"{arguments.old} and {arguments.new}: {error}") from error
        forecast = Forecast(
            moves,
            (arguments.bytes_per_expert,) * new.num_layers,
            gbps=arguments.gbps,
            local_gbps=arguments.local_gbps,
        )
        if arguments.plot is not None:
            draw(forecast, arguments.plot)
    except EplbError as error:
        print(f"eplb-async plan: {error}", file=sys.stderr)
        return 2
    print(json.dumps(forecast.to_dict()) if arguments.json else forecast)
    return 0
