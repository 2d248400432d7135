"""Ranks that torchrun starts trade experts: ``torchrun --nproc-per-node 3 examples/torchrun_migrate.py``.

They meet at the store that torchrun's agent hosts (``env://``), or with ``--rendezvous group`` over a ProcessGroup of
``torch.distributed``. On several hosts, or wherever ``MASTER_ADDR`` is not loopback, export the same
``EPLB_ASYNC_SECRET`` on every host first. Every rank checks every byte it holds; the exit status is 0 if all are right.
"""

import argparse
import asyncio
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from eplb_async import AsyncEplbCommunicator, Placement

LAYERS, SLOTS, ROW = 3, 4, 64 << 10


def placement(ranks: int, turn: int) -> Placement:
    """Every expert has one copy; each turn moves all of them on by some ranks."""
    experts = torch.arange(ranks * SLOTS).roll(turn * (SLOTS + 1))
    return Placement(experts.expand(LAYERS, -1), ep_size=ranks)


def rows(layer: int, experts: torch.Tensor) -> torch.Tensor:
    """What the experts' rows hold, int32 ``[len(experts), ROW]``: no two experts of any layer have a row alike."""
    numbers = experts.to(torch.int32) + layer * 1000
    return numbers[:, None] * ROW + torch.arange(ROW, dtype=torch.int32)


async def serve(rank: int, ranks: int, rendezvous: object) -> int:
    """Migrate there and back; returns how many values of this rank were wrong after any migration."""
    now = placement(ranks, 0)
    held = torch.from_numpy(now.local(rank).copy())
    weights = [[rows(layer, held[layer])] for layer in range(LAYERS)]
    wrong = 0
    async with AsyncEplbCommunicator.open(
        rank=rank, ep_size=ranks, weights=weights, placement=now, rendezvous=rendezvous
    ) as comm:
        for turn in (1, 2, 0):
            report = await comm.migrate(placement(ranks, turn), timeout=60)
            held = torch.from_numpy(comm.placement.local(rank).copy())
            wrong += sum(int((weights[layer][0] != rows(layer, held[layer])).sum()) for layer in range(LAYERS))
            wrong += comm.placement != placement(ranks, turn)
    verdict = "verified" if not wrong else f"{wrong} values WRONG"
    sys.stdout.write(f"rank {rank} of {ranks}: {report.epoch} migrations, {report.bytes_read} bytes read, {verdict}\n")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rendezvous", choices=["env", "group"], default="env")
    chosen = parser.parse_args().rendezvous
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --nproc-per-node 3 examples/torchrun_migrate.py")
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if chosen == "env":
        return min(1, asyncio.run(serve(rank, ranks, "env://")))
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    try:
        return min(1, asyncio.run(serve(rank, ranks, dist.group.WORLD)))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    raise SystemExit(main())
