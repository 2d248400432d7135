"""Notifications that wait: bounded for each peer, taken in turns, whoever sends how many."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_async.engine import LoopEngine
from eplb_async.nixl import AsyncNixlAgent
from eplb_async.nixl.inbox import FairQueue
from eplb_async.settings import Settings
from eplb_async.testing import MemoryFabric, run

PEERS = {"a", "b", "c"}


def queue(limit: int = 4, max_bytes: int = 1 << 20) -> FairQueue:
    return FairQueue(limit, PEERS.__contains__, max_bytes=max_bytes)


def drain(waiting: FairQueue) -> list[tuple[str, bytes]]:
    taken = []
    while (item := waiting.take()) is not None:
        taken.append(item)
    return taken


def test_peers_take_turns_and_each_keeps_its_order() -> None:
    """A hundred of one peer do not delay the second of another."""
    waiting = queue(limit=100)
    for i in range(100):
        waiting.put("a", b"%d" % i)
    for i in range(2):
        waiting.put("b", b"%d" % i)
    taken = drain(waiting)
    assert {("b", b"0"), ("b", b"1")} <= set(taken[:4])
    assert [m for peer, m in taken if peer == "a"] == [b"%d" % i for i in range(100)]
    assert not waiting
    assert waiting.dropped == 0


def test_only_the_flooding_peer_loses() -> None:
    """The oldest of the peer that sent too many are dropped and counted; the others' stay."""
    waiting = queue()
    waiting.put("b", b"honest")
    for i in range(10):
        waiting.put("a", b"%d" % i)
    taken = drain(waiting)
    assert ("b", b"honest") in taken
    assert [m for peer, m in taken if peer == "a"] == [b"6", b"7", b"8", b"9"]
    assert waiting.dropped == 6


def test_invented_names_share_one_place() -> None:
    """Names are the senders' word: ten thousand of them cost no more than one."""
    waiting = queue()
    for i in range(10_000):
        waiting.put(f"invented-{i}", b"x")
    waiting.put("c", b"honest")
    taken = drain(waiting)
    assert len(taken) == 5
    assert ("c", b"honest") in taken[:2]
    assert len(waiting._boxes) <= 2


def test_bytes_are_bounded_too_and_a_single_large_one_is_kept() -> None:
    """Large notifications: as many as fit, the newest, and at least one."""
    waiting = queue(limit=1000, max_bytes=1000)
    for _ in range(10):
        waiting.put("a", bytes(300))
    assert waiting.dropped == 7
    waiting.put("b", bytes(5000))
    assert sorted(len(message) for _, message in drain(waiting)) == [300, 300, 300, 5000]
    for _ in range(10):
        waiting.put("a", bytes(300))
    assert len(drain(waiting)) == 3, "what was taken counts no more"


@given(st.lists(st.one_of(st.tuples(st.sampled_from("abcx"), st.integers(0, 40)), st.none()), max_size=80))
def test_nothing_is_lost_but_what_is_counted(script: list[tuple[str, int] | None]) -> None:
    """Any mix of puts and takes: taken + dropped + waiting = put, each peer in order and within its bounds."""
    waiting = queue(limit=3, max_bytes=100)
    put: list[tuple[str, bytes]] = []
    taken = []
    for number, step in enumerate(script):
        if step is not None:
            item = (step[0], b"%04d" % number + bytes(step[1]))
            put.append(item)
            waiting.put(*item)
        elif (item_ := waiting.take()) is not None:
            taken.append(item_)
    taken += drain(waiting)
    assert len(taken) + waiting.dropped == len(put)
    for peer in "abcx":
        mine = [item for item in taken if item[0] == peer]
        assert mine == sorted(mine)
        assert set(mine) <= set(put)


def test_one_thread_puts_while_another_takes() -> None:
    """As the engine loop and the user's do: all that was put is taken or counted."""
    waiting, taken = queue(limit=50), []
    done = threading.Event()

    def take() -> None:
        while not done.is_set() or waiting:
            if (item := waiting.take()) is not None:
                taken.append(item)

    taker = threading.Thread(target=take)
    taker.start()
    for i in range(20_000):
        waiting.put("abc"[i % 3], b"%06d" % i)
    done.set()
    taker.join(30)
    assert len(taken) + waiting.dropped == 20_000
    for peer in "abc":
        mine = [item for item in taken if item[0] == peer]
        assert mine == sorted(mine)


@pytest.mark.parametrize("known", [True, False])
def test_a_flood_costs_an_agent_bounded_memory_and_nobody_else_a_message(known: bool) -> None:
    """50 000 from one peer between two laps, known or not; the honest peer's ten come through, in order."""
    fabric = MemoryFabric()

    async def main() -> None:
        engine = LoopEngine(asyncio.get_running_loop())

        def opened(name: str) -> object:
            return AsyncNixlAgent.open(name, Settings(), engine=engine, native=fabric.native)

        async with opened("target") as target, opened("honest") as honest, opened("flooder") as flooder:  # type: ignore
            card = await target.metadata()
            await target.add_peer(await honest.metadata())
            if known:
                await target.add_peer(await flooder.metadata())
            to_target, from_honest = await flooder.add_peer(card), await honest.add_peer(card)
            native = fabric.agents["target"]
            for i in range(10):
                await honest.notify(from_honest, b"%d" % i)
            mail = [("flooder", bytes(200))] * 50_000
            take = native.notifications
            native.notifications = lambda: take() + [mail.pop() for _ in range(len(mail))]  # type: ignore
            tracemalloc.start()
            got = []
            async with target.serving(), asyncio.timeout(60):
                async for sender, message in target.notifications():
                    if sender == "honest":
                        got.append(message)
                    if len(got) == 10:
                        break
                while target._endpoint._arrived:
                    await asyncio.sleep(0.001)
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert got == [b"%d" % i for i in range(10)]
            assert target.dropped >= 50_000 - 2 * 4096 - 64
            assert peak < 20 << 20
            assert to_target.name == "target"

    run(main())
