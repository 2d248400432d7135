"""What a communicator does with its rendezvous: a ProcessGroup, a store hosted anew, one that outlives it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from eplb_async.communicator import AsyncEplbCommunicator
from eplb_async.communicator.meetings import Meetings
from eplb_async.communicator.members import Identity
from eplb_async.core.placement import Placement
from eplb_async.errors import HandshakeError
from eplb_async.settings import Settings
from eplb_async.testing import run
from eplb_async.testing.cluster import LocalCluster
from tests.rendezvous.conftest import Memory

TWO = Placement([[0, 1]], ep_size=2)


def gloo(size: int) -> list[Any]:
    """A group whose ranks are all in this process."""
    store = dist.HashStore()

    def make(rank: int) -> Any:
        return dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timedelta(seconds=2))

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(make, range(size)))


def opening(group: Any, timeout: float) -> Any:
    weights = [[torch.zeros(1, 64)]]
    return AsyncEplbCommunicator.open(
        rank=0, ep_size=2, weights=weights, placement=TWO, rendezvous=group, timeout=timeout
    )


@pytest.mark.asyncio
async def test_a_group_whose_other_rank_never_opens_is_bounded_and_blocks_no_loop() -> None:
    """Its collective hangs on a thread of its own, and the deadline ends the call."""
    groups = gloo(2)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.001)
            ticks += 1

    ticking = asyncio.ensure_future(tick())
    with pytest.raises(
        HandshakeError, match=r"rank 0 of 2 could not gather .*: not all ranks took part.*make a new one"
    ):
        await opening(groups[0], 0.5)
    ticking.cancel()
    assert ticks > 50


CANCELLED = """
import asyncio, contextlib
from tests.communicator.test_rendezvous import gloo, opening

async def main():
    groups = gloo(2)
    task = asyncio.ensure_future(opening(groups[0], 600)._opener())
    await asyncio.sleep(0.3)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task

asyncio.run(main())
"""


def test_an_open_cancelled_in_its_collective_holds_up_no_exit() -> None:
    """Neither the engine nor the interpreter waits for the collective, and nothing aborts."""
    subprocess.run([sys.executable, "-W", "error", "-c", CANCELLED], check=True, timeout=60)


def test_no_rank_comes_back_by_a_group() -> None:
    """It is refused at once, with what to use."""

    async def main() -> None:
        async with LocalCluster(TWO) as cluster:
            cluster.rendezvous.one_time = "gathered once; use a Store"  # type: ignore[attr-defined]
            with pytest.raises(HandshakeError, match="rank 1 cannot be had back: gathered once; use a Store"):
                await cluster.comms[0].reconnect(1, timeout=1e6)

    run(main())


@pytest.mark.parametrize("lasting", [True, False])
def test_a_rank_that_closes_takes_back_its_introduction_where_the_rendezvous_outlives_it(lasting: bool) -> None:
    """So that a store does not keep what nobody answers to."""

    async def main() -> None:
        async with LocalCluster(TWO) as cluster:
            cluster.rendezvous.lasting = lasting  # type: ignore[attr-defined]
            values = cluster.rendezvous.values
            assert values["default/blob/0"]
            await cluster.comms[1].aclose()
            assert bool(values["default/blob/1"]) is not lasting
            assert values["default/blob/0"]
            values["default/blob/0"] = b"of a newer start"
        assert values["default/blob/0"] == b"of a newer start"

    run(main())


def test_a_rendezvous_that_fails_holds_up_no_close() -> None:
    """Taking back is best effort."""

    async def main() -> None:
        async with LocalCluster(TWO) as cluster:

            def get(key: str) -> bytes | None:
                raise OSError("the store is gone")

            cluster.rendezvous.get = get  # type: ignore[method-assign]

    run(main())


@pytest.mark.asyncio
async def test_a_store_that_hangs_as_a_rank_is_let_in_does_not_occupy_the_worker() -> None:
    """Whoever stops the engine waits for its worker, and would wait for the store."""
    memory = Memory()
    here = Identity(1, 2, "g", "node", 1 << 16)
    driver = SimpleNamespace(identity=here, roster={0: here})

    async def offload(work: object) -> None:
        raise AssertionError("the worker is asked to wait for the store")

    engine = SimpleNamespace(loop=asyncio.get_running_loop(), offload=offload)
    meetings = Meetings(driver, None, engine=engine, endpoint=None)  # type: ignore[arg-type]
    meetings.rendezvous = memory
    assert await meetings.group_placement(0) is None
    free = threading.Event()
    memory.get = lambda key: free.wait(30)  # type: ignore[assignment, method-assign]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await meetings.group_placement(0)
    free.set()


def test_a_rank_joins_again_where_the_jobs_key_changes_as_it_opens() -> None:
    """Rank 0 hosts its store anew and makes a key; those who live on bring theirs; both are in one group then."""

    async def main() -> None:
        cluster = LocalCluster(TWO, settings=Settings())
        cluster.rendezvous.lasting = False  # type: ignore[attr-defined]
        first = asyncio.ensure_future(cluster._open(0))
        while "default/blob/0" not in cluster.rendezvous.values:
            await asyncio.sleep(0.01)
        introduced = cluster.rendezvous.values["default/blob/0"]
        cluster.rendezvous.values["default/key"] = b"k" * 32
        second = asyncio.ensure_future(cluster._open(1))
        comms = [await first, await second]
        assert cluster.rendezvous.values["default/blob/0"] != introduced
        for comm in comms:
            await comm.aclose()

    run(main())
