"""The torchrun example, in whose first attempt rank 1 dies with its group open."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[2] / "examples" / "torchrun_migrate.py"


def load() -> Any:
    spec = importlib.util.spec_from_file_location("torchrun_migrate", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def main() -> None:
    example, rank = load(), int(os.environ["RANK"])
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        from eplb_async import AsyncEplbCommunicator

        now = example.placement(3, 0)
        weights = [[example.rows(0, example.torch.arange(example.SLOTS))] for _ in range(example.LAYERS)]
        async with AsyncEplbCommunicator.open(
            rank=rank, ep_size=3, weights=weights, placement=now, rendezvous="env://"
        ) as comm:
            await comm.migrate(example.placement(3, 1), timeout=60)
            if rank == 1:
                os.write(1, b"dies with the group open\n")
                os.kill(os.getpid(), signal.SIGKILL)
            await asyncio.sleep(60)  # torchrun ends it
    raise SystemExit(await example.serve(rank, 3, "env://"))


if __name__ == "__main__":
    asyncio.run(main())
