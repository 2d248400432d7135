"""Two ranks trade experts: ``python examples/minimal.py``."""

import asyncio
import multiprocessing
import tempfile

import torch

from eplb_async import AsyncEplbCommunicator, Placement

BEFORE = Placement([[0, 1, 2, 3]], ep_size=2)  # one layer; rank 0 holds experts 0 and 1, rank 1 holds 2 and 3
AFTER = Placement([[3, 1, 0, 2]], ep_size=2)


async def serve(rank: int, rendezvous: str) -> None:
    experts = BEFORE.local(rank)[0]
    weights = [[torch.stack([torch.full((256, 1024), float(expert)) for expert in experts])]]
    async with AsyncEplbCommunicator.open(
        rank=rank, ep_size=2, weights=weights, placement=BEFORE, rendezvous=rendezvous
    ) as comm:
        report = await comm.migrate(AFTER, timeout=30)  # the event loop stays free meanwhile
        held = weights[0][0][:, 0, 0].int().tolist()
        assert held == AFTER.local(rank)[0].tolist(), held
        print(f"rank {rank} now holds experts {held}; read {report.bytes_read} bytes in epoch {report.epoch}")


def run(rank: int, rendezvous: str) -> None:
    asyncio.run(serve(rank, rendezvous))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        url = f"file://{folder}/rendezvous"
        other = multiprocessing.get_context("spawn").Process(target=run, args=(1, url), daemon=True)
        other.start()
        run(0, url)
        other.join(30)
        raise SystemExit(other.exitcode)
