"""``python -m eplb_async.bench``: the same as ``eplb-async bench``; each process of a torchrun is one rank."""

from __future__ import annotations

import argparse

from eplb_async.bench.command import add_arguments, run

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m eplb_async.bench", description=__doc__)
    add_arguments(parser)
    raise SystemExit(run(parser.parse_args()))
