"""All peers at once: nobody waits for a slow, broken or missing one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from eplb_async.errors import HandshakeError
from eplb_async.rendezvous import (
    BlobError,
    FileRendezvous,
    Introduction,
    exchange,
    join,
    open_sealed,
    seal,
)

pytestmark = pytest.mark.asyncio


def publish(memory: Any, *ranks: int) -> None:
    for rank in ranks:
        memory.set(f"g/blob/{rank}", b"blob of %d" % rank)


async def run(memory: Any, on_peer: Any, *, ep_size: int = 8, timeout: float = 20.0, **more: Any) -> dict[int, float]:
    return await exchange(
        memory,
        group="g",
        rank=0,
        ep_size=ep_size,
        sealed=b"blob of 0",
        deadline_per_peer=timeout,
        on_peer=on_peer,
        **more,
    )


def exchange_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("eplb-exchange")]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Any:
    """After each test no thread of the exchange is left; tasks are checked where a loop is at hand."""
    yield
    for thread in exchange_threads():
        thread.join(20)
        assert not thread.is_alive()


async def only_this_task() -> bool:
    await asyncio.sleep(0)
    return asyncio.all_tasks() == {asyncio.current_task()}


async def test_all_ranks_meet(memory: Any) -> None:
    """Every rank publishes and meets every other, in any order of starting."""
    met: dict[int, dict[int, bytes]] = defaultdict(dict)

    async def rank(me: int) -> dict[int, float]:
        async def on_peer(peer: int, blob: bytes) -> None:
            met[me][peer] = blob

        return await exchange(
            memory,
            group="g",
            rank=me,
            ep_size=4,
            sealed=b"blob of %d" % me,
            deadline_per_peer=20,
            on_peer=on_peer,
        )

    took = await asyncio.gather(*map(rank, (3, 1, 0, 2)))
    assert met == {me: {peer: b"blob of %d" % peer for peer in range(4) if peer != me} for me in range(4)}
    assert set(took[0]) == {0, 1, 2}
    assert all(0 <= seconds < 20 for seconds in took[0].values())


async def test_one_rank_alone_needs_nobody(memory: Any) -> None:
    """A group of one is complete at once."""
    assert await run(memory, None, ep_size=1) == {}


async def test_a_slow_peer_delays_nobody_else(memory: Any) -> None:
    """Seven peers, one of which takes 1 s: the six others are met in a fraction of that, concurrently."""
    publish(memory, *range(1, 8))
    done: list[int] = []
    running = most = 0

    async def on_peer(peer: int, blob: bytes) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(1.0 if peer == 3 else 0.05)
        running -= 1
        done.append(peer)

    took = await run(memory, on_peer)
    assert done[-1] == 3
    assert most == 7
    assert max(seconds for peer, seconds in took.items() if peer != 3) < took[3] / 2


async def test_a_peer_that_publishes_late_delays_nobody_else(memory: Any) -> None:
    """The late one is met when it comes; the others are met before it comes."""
    publish(memory, *range(1, 7))
    done: list[int] = []

    async def on_peer(peer: int, blob: bytes) -> None:
        done.append(peer)
        if len(done) == 6:
            publish(memory, 7)

    await run(memory, on_peer)
    assert sorted(done[:6]) == [1, 2, 3, 4, 5, 6]
    assert done[6] == 7


async def test_all_failing_peers_are_listed_with_their_reasons(memory: Any) -> None:
    """A broken peer, a silent one and a missing one: each is named, the others are met (C23)."""
    publish(memory, 1, 2, 3, 4, 5, 6)
    met = []

    async def on_peer(peer: int, blob: bytes) -> None:
        if peer == 2:
            raise BlobError("truncated: 190 of 540 bytes")
        if peer == 4:
            await asyncio.Event().wait()
        if peer == 5:
            raise KeyError("a bug")
        met.append(peer)

    with pytest.raises(HandshakeError, match=r"met 3 of 7 peers of group 'g' in 0\.3 s at memory://") as caught:
        await run(memory, on_peer, timeout=0.3)
    assert sorted(met) == [1, 3, 6]
    assert set(caught.value.failures) == {2, 4, 5, 7}
    assert caught.value.failures[2] == "truncated: 190 of 540 bytes"
    assert "did not answer" in caught.value.failures[4]
    assert caught.value.failures[5] == "KeyError: 'a bug'"
    assert "never published" in caught.value.failures[7]
    assert isinstance(caught.value.__cause__, BlobError)
    assert await only_this_task()


async def test_a_stale_blob_that_fails_is_replaced_by_a_newer_one(memory: Any) -> None:
    """The same bytes are tried once; new ones are tried again until the deadline."""
    publish(memory, 1)
    tried = []

    async def on_peer(peer: int, blob: bytes) -> None:
        tried.append(blob)
        if blob != b"new":
            asyncio.get_running_loop().call_later(0.1, memory.set, "g/blob/1", b"new")
            raise BlobError("wrong secret or forged: keyed digest differs")

    await run(memory, on_peer, ep_size=2)
    assert tried == [b"blob of 1", b"new"]


async def test_a_stale_blob_that_is_being_tried_gives_way_to_a_newer_one(memory: Any) -> None:
    """A dead peer of an earlier run never answers; waiting for it must not use up the time."""
    publish(memory, 1)
    ended = []

    async def on_peer(peer: int, blob: bytes) -> None:
        if blob == b"new":
            return
        memory.set("g/blob/1", b"new")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(blob)

    await run(memory, on_peer, ep_size=2)
    assert ended == [b"blob of 1"]
    assert await only_this_task()


async def test_a_second_run_on_what_the_first_left_behind(tmp_path: Path) -> None:
    """On one file, without a secret: keys stay, old introductions are tried, fail and are replaced."""

    async def rank(me: int, run_number: int, start_after: asyncio.Event | None) -> None:
        rendezvous = FileRendezvous(tmp_path / "store", timeout=20)
        try:
            if start_after is not None:
                await start_after.wait()
            joined = await join(rendezvous, group="g", rank=me, secret=None, timeout=20)
            assert joined.incarnation == run_number
            intro = Introduction(
                group="g",
                rank=me,
                ep_size=3,
                agent=f"{me}.{run_number}",
                incarnation=joined.incarnation,
                metadata=b"metadata",
                layout=[],
                placement_digest=bytes(16),
            )

            async def on_peer(peer: int, blob: bytes) -> None:
                found = open_sealed(blob, joined.key, group="g", rank=peer, ep_size=3)
                if found.incarnation < run_number:
                    stale_seen.set()
                    await asyncio.Event().wait()  # the dead never answer

            await exchange(
                rendezvous,
                group="g",
                rank=me,
                ep_size=3,
                sealed=seal(intro, joined.key),
                deadline_per_peer=20,
                on_peer=on_peer,
            )
        finally:
            rendezvous.close()

    stale_seen = asyncio.Event()
    await asyncio.gather(*(rank(me, 1, None) for me in range(3)))
    assert not stale_seen.is_set()
    await asyncio.gather(rank(2, 2, None), rank(1, 2, stale_seen), rank(0, 2, stale_seen))


async def test_a_store_call_that_hangs_is_bounded_and_delays_nobody(memory: Any) -> None:
    """The loop does not wait for the thread; the other peers are met meanwhile."""
    publish(memory, *range(1, 8))
    free = threading.Event()
    get, met = memory.get, []

    def hanging(key: str) -> bytes | None:
        if key == "g/blob/5":
            free.wait()
        return get(key)  # type: ignore[no-any-return]

    async def on_peer(peer: int, blob: bytes) -> None:
        met.append(peer)

    memory.get = hanging
    with pytest.raises(HandshakeError) as caught:
        await run(memory, on_peer, timeout=0.4)
    assert caught.value.failures == {5: "the rendezvous did not answer; is the process that hosts it running?"}
    assert sorted(met) == [1, 2, 3, 4, 6, 7]
    free.set()


@pytest.mark.parametrize("hangs", [False, True])
async def test_publishing_that_fails_or_hangs_is_said(memory: Any, hangs: bool) -> None:
    """Nobody can meet a rank that cannot publish."""
    free = threading.Event()

    def broken(key: str, value: bytes) -> None:
        if hangs:
            free.wait()
        raise ConnectionResetError("etcd is gone")

    memory.set = broken
    says = "did not answer" if hangs else "ConnectionResetError: etcd is gone"
    with pytest.raises(HandshakeError, match=rf"could not publish .* in 0\.2 s: .*{says}"):
        await run(memory, None, timeout=0.2)
    free.set()


async def test_a_store_that_fails_now_and_then_is_asked_again(memory: Any) -> None:
    """One failed call is not the end, neither of set nor of get."""
    publish(memory, 1)
    calls: dict[str, int] = defaultdict(int)
    get, put = memory.get, memory.set

    def flaky(name: str, call: Any, *args: Any) -> Any:
        calls[name] += 1
        if calls[name] <= 2:
            raise ConnectionResetError("again, please")
        return call(*args)

    memory.get = lambda key: flaky("get", get, key)
    memory.set = lambda key, value: flaky("set", put, key, value)

    async def on_peer(peer: int, blob: bytes) -> None:
        pass

    assert set(await run(memory, on_peer, ep_size=2)) == {1}
    assert memory.values["g/blob/0"] == b"blob of 0"


async def test_a_store_that_always_fails_is_the_reason(memory: Any) -> None:
    """What the store said is in the list."""

    def get(key: str) -> bytes | None:
        raise HandshakeError("cannot read it: the host is gone")

    memory.get = get
    with pytest.raises(HandshakeError) as caught:
        await run(memory, None, ep_size=2, timeout=0.1)
    assert caught.value.failures == {1: "the rendezvous could not be asked: cannot read it: the host is gone"}


async def test_cancelling_leaves_nothing(memory: Any) -> None:
    """Cancelled while one peer is tried and another is looked for: on_peer is cancelled, no task is left."""
    publish(memory, 1)
    trying, ended = asyncio.Event(), []

    async def on_peer(peer: int, blob: bytes) -> None:
        trying.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(peer)

    task = asyncio.create_task(run(memory, on_peer, ep_size=3))
    await trying.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [1]
    assert await only_this_task()


async def test_cancelling_does_not_wait_for_a_store_that_hangs(memory: Any) -> None:
    """The loop is free at once, whatever the thread does (I-10)."""
    free, asked = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def get(key: str) -> bytes | None:
        loop.call_soon_threadsafe(asked.set)
        free.wait()
        return None

    memory.get = get
    task = asyncio.create_task(run(memory, None, ep_size=2))
    await asked.wait()
    task.cancel()
    started = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - started < 5
    free.set()


async def test_the_callers_executor_is_used_and_kept(memory: Any) -> None:
    """An executor that is given stays open."""
    from concurrent.futures import ThreadPoolExecutor

    publish(memory, 1)
    names = set()
    get = memory.get

    def noting(key: str) -> bytes | None:
        names.add(threading.current_thread().name)
        return get(key)  # type: ignore[no-any-return]

    async def on_peer(peer: int, blob: bytes) -> None:
        pass

    memory.get = noting
    with ThreadPoolExecutor(1, thread_name_prefix="mine") as pool:
        await run(memory, on_peer, ep_size=2, executor=pool)
        assert pool.submit(int).result() == 0
    assert names == {"mine_0"}


async def test_what_is_gathered_once_is_not_tried_again(memory: Any) -> None:
    """A ProcessGroup in which a rank has died since it met there: the others are told at once."""
    tries = 0

    def write(key: str, value: bytes) -> None:
        nonlocal tries
        tries += 1
        raise HandshakeError("could not gather: a rank is gone")

    memory.set, memory.one_time = write, "gathered once"
    with pytest.raises(HandshakeError, match=r"could not publish .*: could not gather: a rank is gone"):
        async with asyncio.timeout(20):
            await run(memory, None, timeout=600)
    assert tries == 1
