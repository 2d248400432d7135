"""``python -m examples.moe_server``, or ``python examples/moe_server``, from the repository's root."""

import argparse
import secrets
import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from eplb_async.arguments import count
from examples.moe_server.job import Job
from examples.moe_server.launch import run
from examples.moe_server.model import ModelConfig
from examples.moe_server.ranks import MAX_BATCH


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="moe_server", description="Serve an expert-parallel toy model.")
    parser.add_argument("--ranks", type=count(2, 8), default=2, help="rank processes (default %(default)s)")
    parser.add_argument("--port", type=count(0, 65535), default=8000, help="0 takes a free one (default %(default)s)")
    parser.add_argument(
        "--rebalancing",
        choices=("service", "vllm", "off"),
        default="service",
        help="in the background; between two steps, with the engine stopped; or never (default %(default)s)",
    )
    parser.add_argument("--layers", type=count(1, 64), default=6, help="layers (default %(default)s)")
    parser.add_argument("--hidden", type=count(8, 65536), default=512, help="size of experts (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default %(default)s)")
    parser.add_argument("--max-batch", type=count(1, MAX_BATCH), default=16, help="(default %(default)s)")
    parser.add_argument("--max-queue", type=count(1, 65536), default=256, help="(default %(default)s)")
    parser.add_argument(
        "--step-interval", type=count(0, 1 << 30), default=1000, help="steps between rebalances (default %(default)s)"
    )
    parser.add_argument(
        "--window-steps", type=count(1, 1 << 30), default=300, help="steps that loads are of (default %(default)s)"
    )
    parser.add_argument(
        "--max-bytes-per-second", type=count(0, 1 << 40), default=0, help="of a rank's READs; 0 for no limit"
    )
    return parser.parse_args()


def main() -> int:
    given = arguments()
    return run(
        Job(
            ranks=given.ranks,
            port=given.port,
            rebalancing=given.rebalancing,
            config=ModelConfig(layers=given.layers, hidden=given.hidden, seed=given.seed),
            max_batch=given.max_batch,
            max_queue=given.max_queue,
            step_interval=given.step_interval,
            window_steps=given.window_steps,
            max_bytes_per_second=given.max_bytes_per_second,
            secret=secrets.token_bytes(32),
        )
    )


if __name__ == "__main__":
    raise SystemExit(main())
