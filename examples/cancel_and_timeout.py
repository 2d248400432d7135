"""What a cancel and a timeout leave behind: ``python examples/cancel_and_timeout.py``.

Rank 1 does not come to the first two migrations. Rank 0 cancels one and lets the other time out; both end with every
layer as it was, and the third, which both ranks make, works.
"""

import asyncio
import multiprocessing
import tempfile
from multiprocessing.connection import Connection

import torch

from eplb_async import AsyncEplbCommunicator, MigrationAborted, Placement

BEFORE = Placement([[0, 1], [0, 1]], ep_size=2)
AFTER = Placement([[1, 0], [1, 0]], ep_size=2)


def weights_of(rank: int) -> list[list[torch.Tensor]]:
    return [[torch.full((1, 4096), float(BEFORE.local(rank)[layer][0]))] for layer in range(2)]


async def impatient(rendezvous: str, pipe: Connection) -> None:
    weights = weights_of(0)
    async with AsyncEplbCommunicator.open(
        rank=0, ep_size=2, weights=weights, placement=BEFORE, rendezvous=rendezvous
    ) as comm:
        task = asyncio.create_task(comm.migrate(AFTER, timeout=30))
        await asyncio.sleep(0.1)
        task.cancel()  # ends at once; the epoch settles in the background
        await asyncio.gather(task, return_exceptions=True)
        print(f"cancelled: {task.cancelled()}, phase {comm.health().phase}")

        try:
            await comm.migrate(AFTER, timeout=0.3)
        except MigrationAborted as error:
            print(f"timed out: {error.reason}; layers committed: {error.committed_layers}")
        assert comm.placement == BEFORE

        await asyncio.to_thread(pipe.send, "now you too")
        report = await comm.migrate(AFTER, timeout=30)
        assert comm.placement == AFTER
        assert weights[0][0][0, 0] == 1.0
        print(f"epoch {report.epoch}: {report.layers_committed} layers committed on both ranks")


async def late(rendezvous: str, pipe: Connection) -> None:
    async with AsyncEplbCommunicator.open(
        rank=1, ep_size=2, weights=weights_of(1), placement=BEFORE, rendezvous=rendezvous
    ) as comm:
        await asyncio.to_thread(pipe.recv)
        await comm.migrate(AFTER, timeout=30)


def run_late(rendezvous: str, pipe: Connection) -> None:
    asyncio.run(late(rendezvous, pipe))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        url = f"file://{folder}/rendezvous"
        ours, theirs = multiprocessing.Pipe()
        other = multiprocessing.get_context("spawn").Process(target=run_late, args=(url, theirs), daemon=True)
        other.start()
        asyncio.run(impatient(url, ours))
        other.join(30)
        raise SystemExit(other.exitcode)
