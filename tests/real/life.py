"""A program with two communicators open that forks: ``python life.py FOLDER HOW``; see ``test_life``."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import sys

from eplb_async import AsyncEplbCommunicator, CommunicatorClosed, Placement
from eplb_async.testing.patterns import PatternWeights

OLD, NEW = Placement([[0, 1]], ep_size=2), Placement([[1, 0]], ep_size=2)


async def open_both(url: str) -> tuple[list[AsyncEplbCommunicator], list[PatternWeights]]:
    rows = [PatternWeights(OLD, rank, (1 << 20,)) for rank in range(2)]
    comms = await asyncio.gather(
        *(
            AsyncEplbCommunicator.open(
                rank=rank, ep_size=2, weights=rows[rank].layers, placement=OLD, rendezvous=url, timeout=30
            )
            for rank in range(2)
        )
    )
    return list(comms), rows


async def migrate(comms: list[AsyncEplbCommunicator], placement: Placement) -> None:
    await asyncio.gather(*(comm.migrate(placement, timeout=30) for comm in comms))


async def close(comms: list[AsyncEplbCommunicator]) -> None:
    await asyncio.gather(*(comm.aclose() for comm in comms))


def child(comms: list[AsyncEplbCommunicator], runner: asyncio.Runner, how: str) -> None:
    """Use it, let go of it, and end: 3 if the communicator did not refuse."""
    status = 3
    try:
        comms[0].migrate(OLD).send(None)
    except CommunicatorClosed as error:
        status = 0 if "fork" in str(error) else 4
    if how == "_exit":
        os._exit(status)
    comms.clear()
    gc.collect()
    # A loop that is closed in a fork unregisters its parent's descriptors from the epoll both share: asyncio's
    # own trap, not what is tested here.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(runner))
    sys.exit(status)


if __name__ == "__main__":
    runner = asyncio.Runner()
    comms, rows = runner.run(open_both(f"file://{sys.argv[1]}/rendezvous"))
    runner.run(migrate(comms, NEW))
    pid = os.fork()
    if pid == 0:
        child(comms, runner, sys.argv[2])
    assert os.waitpid(pid, 0)[1] == 0, "the child did not end with 0"
    runner.run(migrate(comms, OLD))
    assert [row.wrong_bytes(OLD) for row in rows] == [0, 0]
    runner.run(close(comms))
    runner.close()
    print("the parent lives")
