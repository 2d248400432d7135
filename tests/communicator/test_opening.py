"""An ``open`` that is cancelled or fails gives back everything it has made."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import threading
import time
from pathlib import Path
from typing import Literal

import pytest

from eplb_async.communicator import AsyncEplbCommunicator
from eplb_async.core.placement import Placement
from eplb_async.engine import LoopEngine
from eplb_async.errors import EplbError, HandshakeError
from eplb_async.settings import Settings
from eplb_async.testing import Life, MemoryFabric, run
from eplb_async.testing.cluster import LocalCluster
from eplb_async.testing.patterns import PatternWeights

ONE = Placement([[0, 1]], ep_size=1)
SETTINGS = Settings(secret=b"s" * 16)


@pytest.mark.parametrize("turns", [*range(40), 60, 100])
def test_a_cancel_after_any_turn_leaves_no_agent(turns: int) -> None:
    """On an engine that others use too: cancelled before, while or right after it opened."""
    fabric = MemoryFabric()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        cluster = LocalCluster(ONE, fabric=fabric)
        rows = PatternWeights(ONE, 0, (64,))
        task: asyncio.Future[AsyncEplbCommunicator] = asyncio.ensure_future(
            _open(rows, cluster.rendezvous, LoopEngine(loop), fabric)
        )
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            await task.result().aclose()
        await asyncio.sleep(1.0)
        assert [name for name in fabric.agents if fabric.life(name) is not Life.DEAD] == []

    run(main())


@pytest.mark.parametrize("turns", range(13))
def test_a_rank_whose_open_was_cancelled_opens_again_while_the_others_wait(turns: int) -> None:
    """They may know the start that was cancelled, and have not met it: nobody is gone, and the group is whole."""
    old, new = Placement([[0, 1, 2]], ep_size=3), Placement([[2, 0, 1]], ep_size=3)
    fabric = MemoryFabric()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        cluster = LocalCluster(old, fabric=fabric)

        def opened(rank: int) -> asyncio.Future[AsyncEplbCommunicator]:
            return asyncio.ensure_future(cluster._open(rank))

        first, cancelled = opened(0), opened(1)
        for _ in range(turns):
            await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.sleep(0.1)
        again, last = opened(1), opened(2)
        comms = await asyncio.gather(first, again, last)
        reports = await asyncio.gather(*(comm.migrate(new, timeout=5.0) for comm in comms))
        assert [report.epoch for report in reports] == [1, 1, 1]
        assert [comm.health().members for comm in comms] == [(0, 1, 2)] * 3
        assert [comm.health().degraded for comm in comms] == [{}] * 3
        await asyncio.gather(*(comm.aclose() for comm in comms))
        assert loop.time() < 10

    run(main())
    assert not fabric.violations


async def _open(
    rows: PatternWeights, rendezvous: object, engine: LoopEngine, fabric: MemoryFabric
) -> AsyncEplbCommunicator:
    return await AsyncEplbCommunicator.open(
        rank=0,
        ep_size=1,
        weights=rows.layers,
        placement=ONE,
        rendezvous=rendezvous,
        settings=SETTINGS,
        engine=engine,
        native=fabric.native,
    )


@pytest.mark.parametrize("verify", ["identity", "full"])
@pytest.mark.asyncio
@pytest.mark.usefixtures("no_blocking")
async def test_i1_no_call_blocks_the_users_loop(tmp_path: Path, verify: Literal["identity", "full"]) -> None:
    """Open, migrate, cancel, update, sleep and close on real engine threads; blockbuster watches both kinds of loop."""
    old, new = Placement([[0, 1]] * 2, ep_size=2), Placement([[1, 0]] * 2, ep_size=2)
    fabric = MemoryFabric(clock=time.monotonic)
    rows = [PatternWeights(old, rank, (100_000,)) for rank in range(2)]

    async def serve(rank: int) -> None:
        async with AsyncEplbCommunicator.open(
            rank=rank,
            ep_size=2,
            weights=rows[rank].layers,
            placement=old,
            rendezvous=f"file://{tmp_path}/rendezvous",
            settings=Settings(secret=b"s" * 16, verify=verify),
            native=fabric.native,
        ) as comm:
            await comm.migrate(new, timeout=20)
            async with comm.updating_weights():
                pass
            await comm.suspend()
            await comm.resume()
            assert comm.health().phase in ("idle", "settling")
            task = asyncio.ensure_future(comm.migrate(old, timeout=20))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            with contextlib.suppress(EplbError):
                await comm.migrate(old, timeout=20)

    await asyncio.gather(serve(0), serve(1))


@pytest.mark.asyncio
async def test_a_cancelled_host_gives_its_port_back() -> None:
    """tcp:// rank 0, cancelled while it waits for the others: the port is free again soon."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    placement = Placement([[0, 1]], ep_size=2)
    rows = PatternWeights(placement, 0, (64,))

    async def attempt(timeout: float) -> AsyncEplbCommunicator:
        return await AsyncEplbCommunicator.open(
            rank=0,
            ep_size=2,
            weights=rows.layers,
            placement=placement,
            rendezvous=url,
            settings=SETTINGS,
            timeout=timeout,
            native=MemoryFabric(clock=asyncio.get_running_loop().time).native,
        )

    for delay in (0.0, 0.01, 0.3):
        task = asyncio.ensure_future(attempt(20.0))
        await asyncio.sleep(delay)
        task.cancel()
        await asyncio.wait([task])
        async with asyncio.timeout(20):
            while True:
                try:
                    await attempt(0.4)
                except HandshakeError as error:
                    if "rank 1" in str(error):
                        break  # it hosted again, and rank 1 is not there
                await asyncio.sleep(0.05)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.asyncio
async def test_a_name_server_that_hangs_is_bounded(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline of ``open`` holds for the look-up of a name, too, which nothing can end."""
    answer = threading.Event()

    def hang(*_: object, **__: object) -> object:
        answer.wait(30)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr("eplb_async.rendezvous.addresses.socket.getaddrinfo", hang)
    placement = Placement([[0, 1]], ep_size=2)
    started = time.monotonic()
    with pytest.raises(HandshakeError, match=rf"rank {rank} could not reach the rendezvous tcp://node-0:1 in 0\.2 s: "):
        await AsyncEplbCommunicator.open(
            rank=rank,
            ep_size=2,
            weights=PatternWeights(placement, rank, (64,)).layers,
            placement=placement,
            rendezvous="tcp://node-0:1",
            settings=SETTINGS,
            timeout=0.2,
        )
    assert time.monotonic() - started < 10
    answer.set()


@pytest.mark.asyncio
async def test_a_rebind_cancelled_before_the_engine_begins_it_is_done_all_the_same(tmp_path: Path) -> None:
    """The weights are taken anew on the user's loop: from then on no cancel may keep them from being registered."""
    old, new = Placement([[0, 1]], ep_size=2), Placement([[1, 0]], ep_size=2)
    fabric = MemoryFabric(clock=time.monotonic)
    rows = [PatternWeights(old, rank, (1000,)) for rank in range(2)]
    comms = await asyncio.gather(
        *(
            AsyncEplbCommunicator.open(
                rank=rank,
                ep_size=2,
                weights=rows[rank].layers,
                placement=old,
                rendezvous=f"file://{tmp_path}/rendezvous",
                settings=SETTINGS,
                native=fabric.native,
            )
            for rank in range(2)
        )
    )
    left = [tensor.data for tensor in rows[0].layers[0]]
    for tensor in rows[0].layers[0]:
        tensor.data = tensor.data.clone()
    take = comms[0]._weights.rebind

    def take_and_cancel() -> None:
        take()
        comms[0]._engine.post(lambda: time.sleep(0.2))  # what is posted meanwhile is found in one turn
        asyncio.get_running_loop().call_soon(task.cancel)

    comms[0]._weights.rebind = take_and_cancel  # type: ignore[method-assign]
    task = asyncio.ensure_future(comms[0].rebind())
    await asyncio.wait([task])
    assert task.cancelled()
    for memory in left:
        memory.fill_(0x77)
    await asyncio.gather(*(comm.migrate(new, timeout=20) for comm in comms))
    assert [row.wrong_bytes(new) for row in rows] == [0, 0]
    await asyncio.gather(*(comm.aclose() for comm in comms))


@pytest.mark.asyncio
async def test_c34_opens_and_closes_often(tmp_path: Path) -> None:
    """Twenty lives on engines of their own: no task, thread or callback is left, and nothing is warned of."""
    placement = Placement([[0, 1]], ep_size=2)
    fabric = MemoryFabric(clock=time.monotonic)
    rows = [PatternWeights(placement, rank, (1000,)) for rank in range(2)]
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))

    async def live(rank: int) -> None:
        async with AsyncEplbCommunicator.open(
            rank=rank,
            ep_size=2,
            weights=rows[rank].layers,
            placement=placement,
            rendezvous=f"file://{tmp_path}/rendezvous",
            settings=SETTINGS,
            native=fabric.native,
        ):
            pass

    threads = threading.active_count()
    for _ in range(20):
        await asyncio.gather(live(0), live(1))
        assert asyncio.all_tasks() == {asyncio.current_task()}
        gc.collect()
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("eplb-async")] == []
    assert threading.active_count() <= threads + 1
    assert fabric.open_registrations == 0
    assert not complaints
