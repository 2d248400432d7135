"""Move a tensor between two processes with ``AsyncNixlAgent`` alone: ``python examples/agent_only.py``."""

import asyncio
import multiprocessing
from multiprocessing.connection import Connection

import torch

from eplb_async import AsyncNixlAgent


async def source(pipe: Connection) -> None:
    weights = torch.arange(16 * 1024, dtype=torch.int32).reshape(16, 1024)
    async with AsyncNixlAgent.open("source") as agent:
        await agent.register(weights, name="weights")
        pipe.send(await agent.metadata())
        async with agent.serving():  # a source makes progress while it may be read from
            async for peer, message in agent.notifications():
                print(f"source: {peer} says {message.decode()!r}")
                break


async def reader(blob: bytes) -> None:
    target = torch.zeros(8, 1024, dtype=torch.int32)
    async with AsyncNixlAgent.open("reader") as agent:
        region = await agent.register(target, name="target")
        peer = await agent.add_peer(blob)
        stats = await agent.read(region[:], peer.region("weights")[8:16], notif=b"thank you", timeout=10)
        assert torch.equal(target, torch.arange(8 * 1024, 16 * 1024, dtype=torch.int32).reshape(8, 1024))
        print(f"reader: {stats.nbytes} bytes in {stats.seconds * 1e3:.1f} ms, verified")


def run_source(pipe: Connection) -> None:
    asyncio.run(source(pipe))


if __name__ == "__main__":
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=run_source, args=(theirs,), daemon=True)
    process.start()
    if not ours.poll(60):
        raise SystemExit("the source did not start within 60 s")
    asyncio.run(reader(ours.recv()))
    process.join(30)
    raise SystemExit(process.exitcode)
