"""Mail between members: whole, once, in order; bounded; and nothing of the protocol moves by it."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import itertools
import threading
import time
import tracemalloc
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eplb_async.communicator import MAX_MAIL, AsyncEplbCommunicator, View, outbox
from eplb_async.core import wire
from eplb_async.core.messages import Word
from eplb_async.core.placement import Placement
from eplb_async.core.wire import MAX_PARTS, MAX_WORD, Codec
from eplb_async.core.words import cut
from eplb_async.errors import CommunicatorBusy, CommunicatorClosed
from eplb_async.rendezvous.keys import derive_key
from eplb_async.settings import Settings
from eplb_async.testing import FaultPlan, MemoryFabric, run
from eplb_async.testing.cluster import LocalCluster
from eplb_async.testing.patterns import PatternWeights
from tests.communicator.groups import all_report

OLD = Placement([[0, 1, 2, 3, 4, 5]] * 2, ep_size=3)
NEW = Placement([[2, 3, 4, 5, 0, 1]] * 2, ep_size=3)
THIRD = Placement([[2, 1, 0, 3, 4, 5]] * 2, ep_size=3)
ALONE = Placement([[0, 1]], ep_size=1)
SECRET = b"the cluster's secret"
CODEC = Codec(derive_key(SECRET, "default"), ep_size=3, num_layers=2)
TOPIC = 7
Came = list[tuple[int, int, bytes]]


def subscribed(cluster: LocalCluster, topic: int = TOPIC) -> Came:
    """What comes at any rank: (receiver, sender, payload)."""
    came: Came = []
    for rank, comm in enumerate(cluster.comms):
        comm.mail.subscribe(topic, lambda sender, payload, rank=rank: came.append((rank, sender, payload)))
    return came


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def dropped(cluster: LocalCluster, rank: int) -> dict[str, int]:
    return dict(cluster.comms[rank].health().dropped)


def as_member(comm: AsyncEplbCommunicator, word: Word, *, by: int = 1, **more: int) -> bytes:
    """A word as a member signs it."""
    member = comm._session.driver.roster.get(by)
    assert member is not None
    addresses = {
        "sender": by,
        "sender_incarnation": member.incarnation,
        "receiver_incarnation": comm._session.driver.identity.incarnation,
    }
    return CODEC.encode(replace(word, **(addresses | more)))


def a_word(**more: Any) -> Word:
    return Word(**({"topic": TOPIC, "serial": 1, "part": 0, "parts": 1, "data": b"hello"} | more))


# ------------------------------------------------------------------------------------------------ as it should be
def test_mail_comes_whole_and_in_each_senders_order() -> None:
    """All to all, this rank included: empty, small, in many parts, of the largest size."""
    sizes = [0, 5, MAX_WORD, 3 * MAX_WORD + 1, 0, 100, MAX_MAIL, 1]

    async def main() -> None:
        async with LocalCluster(OLD) as cluster:
            came = subscribed(cluster)
            for number, size in enumerate(sizes):
                for comm in cluster.comms:
                    for receiver in range(3):
                        comm.mail.send(receiver, TOPIC, bytes([number]) * size)
            await until(lambda: len(came) == 9 * len(sizes))
            for receiver in range(3):
                for sender in range(3):
                    got = [payload for at, of, payload in came if (at, of) == (receiver, sender)]
                    assert got == [bytes([number]) * size for number, size in enumerate(sizes)]
            assert [comm.health().dropped for comm in cluster.comms] == [{}] * 3

    run(main())


def test_a_topic_has_its_own_subscribers_until_they_end_it() -> None:
    async def main() -> None:
        async with LocalCluster(OLD) as cluster:
            came, other = subscribed(cluster), subscribed(cluster, topic=0)
            twice: list[bytes] = []
            tag = contextvars.ContextVar("tag", default="")
            tag.set("the subscriber's")

            def once(sender: int, payload: bytes) -> None:
                twice.append(payload)
                assert tag.get() == "the subscriber's"
                remove()
                remove()

            remove = cluster.comms[1].mail.subscribe(TOPIC, once)
            tag.set("another")
            for payload in (b"one", b"two"):
                cluster.comms[0].mail.send(1, TOPIC, payload)
            cluster.comms[0].mail.send(1, wire.MAX_TOPIC, b"to nobody")
            cluster.comms[2].mail.send(0, 0, b"zero")
            await until(lambda: len(came) == 2 and len(other) == 1)
            await asyncio.sleep(0.1)
            assert (came, other) == ([(1, 0, b"one"), (1, 0, b"two")], [(0, 2, b"zero")])
            assert twice == [b"one"]
            assert dropped(cluster, 1) == {"unsubscribed": 1}

    run(main())


def test_mail_is_answered_at_once_by_a_rank_that_was_asked() -> None:
    """An idle rank looks for messages rarely: after mail it looks often, so the answer to an answer is quick."""

    async def main() -> None:
        async with LocalCluster(OLD) as cluster:
            loop, times = asyncio.get_running_loop(), []
            await asyncio.sleep(100.0)

            def ball(rank: int) -> Callable[[int, bytes], object]:
                def bounce(sender: int, payload: bytes) -> None:
                    times.append(loop.time())
                    loop.call_later(1.5, lambda: cluster.comms[rank].mail.send(sender, TOPIC, payload))

                return bounce

            for rank in (0, 1):
                cluster.comms[rank].mail.subscribe(TOPIC, ball(rank))
            cluster.comms[0].mail.send(1, TOPIC, b"x")
            await until(lambda: len(times) == 5)
            gaps = [later - before for before, later in itertools.pairwise(times)]
            assert max(gaps[1:]) < 1.5 + 0.02, gaps

    run(main())


def test_mail_between_migrations_and_in_them() -> None:
    async def main() -> None:
        async with LocalCluster(OLD) as cluster:
            came = subscribed(cluster)
            for number, target in enumerate((NEW, OLD, NEW)):
                running = asyncio.ensure_future(cluster.migrate(target))
                while not running.done():
                    cluster.comms[number].mail.send((number + 1) % 3, TOPIC, bytes(100_000))
                    await asyncio.sleep(0.001)
                all_report(running.result())
            await asyncio.sleep(1.0)
            assert cluster.wrong_bytes() == 0
            assert len(came) >= 3
            assert [comm.health().dropped for comm in cluster.comms] == [{}] * 3

    run(main())


@pytest.mark.asyncio
async def test_a_storm_from_many_threads_comes_in_each_threads_order(tmp_path: Path) -> None:
    """Real engine threads: 8 threads, 200 messages each, each retried while too much waits."""
    placement = Placement([[0, 1]], ep_size=2)
    fabric = MemoryFabric(clock=time.monotonic)
    came: list[bytes] = []
    done = threading.Event()

    async def opened(rank: int) -> AsyncEplbCommunicator:
        return await AsyncEplbCommunicator.open(
            rank=rank,
            ep_size=2,
            weights=PatternWeights(placement, rank, (64,)).layers,
            placement=placement,
            rendezvous=f"file://{tmp_path}/rendezvous",
            settings=Settings(secret=SECRET),
            native=fabric.native,
        )

    def take(sender: int, payload: bytes) -> None:
        came.append(payload[:4])
        if len(came) == 8 * 200:
            done.set()

    def send(thread: int) -> None:
        for number in range(200):
            while True:
                try:
                    comms[0].mail.send(1, TOPIC, bytes([thread, number, 0, 0]) + bytes(40_000))
                    break
                except CommunicatorBusy:
                    time.sleep(0.001)

    comms = await asyncio.gather(opened(0), opened(1))
    try:
        comms[1].mail.subscribe(TOPIC, take)
        async with asyncio.timeout(60):
            await asyncio.gather(*(asyncio.to_thread(send, thread) for thread in range(8)))
            assert await asyncio.to_thread(done.wait, 60)
    finally:
        await asyncio.gather(*(comm.aclose() for comm in comms))
    for thread in range(8):
        assert [message[1] for message in came if message[0] == thread] == list(range(200))


# ------------------------------------------------------------------------------------------------- what is refused
def test_what_cannot_be_sent_is_refused_at_once() -> None:
    async def main() -> None:
        async with LocalCluster(OLD) as cluster:
            mail = cluster.comms[0].mail
            for rank in (-1, 3, True, "1"):
                with pytest.raises(ValueError, match="ranks 0 to 2"):
                    mail.send(rank, TOPIC, b"")  # type: ignore[arg-type]
            for topic in (-1, 1 << 16, 1.0):
                with pytest.raises(ValueError, match="topic"):
                    mail.send(1, topic, b"")  # type: ignore[arg-type]
                with pytest.raises(ValueError, match="topic"):
                    mail.subscribe(topic, lambda *_: None)  # type: ignore[arg-type]
            for payload in (bytes(MAX_MAIL + 1), bytearray(5), "text"):
                with pytest.raises(ValueError, match="at most 4194304 bytes"):
                    mail.send(1, TOPIC, payload)  # type: ignore[arg-type]
        with pytest.raises(CommunicatorClosed, match="mail to rank 1"):
            mail.send(1, TOPIC, b"")

    run(main())


def test_mail_of_a_fenced_rank_is_refused() -> None:
    async def main() -> None:
        async with LocalCluster(OLD) as cluster:
            came = subscribed(cluster)
            for rank in (0, 1):
                await cluster.comms[rank].exclude(2)
            await until(lambda: cluster.comms[2].health().phase == "fenced")
            with pytest.raises(CommunicatorClosed, match="fenced"):
                cluster.comms[2].mail.send(0, TOPIC, b"x")
            cluster.comms[0].mail.send(2, TOPIC, b"to no member")
            cluster.comms[0].mail.send(1, TOPIC, b"to a member")
            await until(lambda: bool(came))
            assert came == [(1, 0, b"to a member")]
            assert dropped(cluster, 0)["unsendable"] == 1

    run(main())


@pytest.mark.parametrize(
    ("word", "more", "why"),
    [
        (a_word(term=5), {}, "early"),
        (a_word(part=1), {}, "impossible"),
        (a_word(parts=2), {}, "impossible"),
        (a_word(topic=8), {}, "unsubscribed"),
        (a_word(), {"sender_incarnation": 99 << 16}, "another incarnation"),
        (a_word(), {"receiver_incarnation": 99 << 16}, "another incarnation"),
        (a_word(), {"sender": 0}, "another incarnation"),
    ],
)
def test_a_word_that_does_not_count_moves_nothing(word: Word, more: dict[str, int], why: str) -> None:
    """Of another term, start or sender, or cut as nobody cuts: counted, told to nobody (I-8)."""

    async def main() -> None:
        async with LocalCluster(OLD) as cluster:
            came = subscribed(cluster)
            driver = cluster.comms[0]._session.driver
            before = driver.protocol.snapshot()
            driver.notification("whoever", as_member(cluster.comms[0], word, **more))
            assert dropped(cluster, 0) == {why: 1}
            assert not came
            driver.notification("whoever", as_member(cluster.comms[0], a_word()))
            assert came == [(0, 1, b"hello")]
            assert driver.protocol.snapshot() == before

    run(main())


def test_words_of_an_older_view_and_of_no_member_are_dropped() -> None:
    async def main() -> None:
        async with LocalCluster(OLD) as cluster:
            came = subscribed(cluster)
            for rank in (0, 1):
                await cluster.comms[rank].exclude(2)
            await until(lambda: cluster.comms[0].view.members == (0, 1))
            comm = cluster.comms[0]
            term = comm.view.term
            before = Counter(dropped(cluster, 0))
            for sender, at in ((2, term), (2, 0), (1, 0), (1, term)):
                comm._session.driver.notification("", as_member(comm, a_word(term=at), by=sender))
            assert Counter(dropped(cluster, 0)) - before == {"foreign": 2, "stale": 1}
            assert came == [(0, 1, b"hello")]

    run(main())


def test_mail_before_a_rank_is_open_is_dropped() -> None:
    """Nobody can have subscribed; and a JOIN of that rank, which is kept, loses its place to none."""

    async def main() -> None:
        async with LocalCluster(OLD) as cluster:
            driver = cluster.comms[0]._session.driver
            driver.opened = False
            for serial in range(1, 100):
                driver.notification("", as_member(cluster.comms[0], a_word(serial=serial)))
            driver.opened = True
            assert dropped(cluster, 0) == {"early": 99}
            assert not driver._early

    run(main())


# ------------------------------------------------------------------------------------------------------ what fails
@pytest.mark.parametrize("how", ["drop", "duplicate", "delay"])
def test_a_part_that_is_lost_doubled_or_late_costs_one_message_at_most(how: str) -> None:
    """Any of the parts: the other messages come, in order, whole."""
    sent = [bytes([number]) * size for number, size in enumerate((70_000, 10, 100_000, 40_000))]
    words = sum(sum(1 for _ in cut(payload, topic=TOPIC, serial=1)) for payload in sent)

    async def one(nth: int) -> None:
        plan = FaultPlan()
        async with LocalCluster(OLD, faults=plan) as cluster:
            came = subscribed(cluster)
            fault = {"receiver": "default/1.", "nth": nth}
            match how:
                case "drop":
                    plan.drop_notif("default/0.", **fault)  # type: ignore[arg-type]
                case "duplicate":
                    plan.duplicate_notif("default/0.", **fault)  # type: ignore[arg-type]
                case _:
                    plan.delay_notif("default/0.", delay=0.5, **fault)  # type: ignore[arg-type]
            for payload in sent:
                cluster.comms[0].mail.send(1, TOPIC, payload)
            await asyncio.sleep(2.0)
            got = [payload for _, _, payload in came]
            assert got == [payload for payload in sent if payload in got], plan
            assert len(got) >= len(sent) - (how != "duplicate"), plan
            cluster.comms[0].mail.send(1, TOPIC, b"on")
            await until(lambda: came[-1][2] == b"on")

    async def main() -> None:
        for nth in range(words):
            await one(nth)

    run(main())


def test_a_new_view_ends_what_was_under_way() -> None:
    """Half a message, and what waits to be sent: dropped and counted; mail in the new view comes."""
    plan = FaultPlan()

    async def main() -> None:
        async with LocalCluster(OLD, faults=plan) as cluster:
            came = subscribed(cluster)
            plan.drop_notif("default/1.", receiver="default/0.", nth=1)
            cluster.comms[1].mail.send(0, TOPIC, bytes(100_000))
            await until(lambda: len(cluster.comms[0]._session.driver.post.assembly) == 1)
            cluster.stop(1)
            for _ in range(3):
                cluster.comms[0].mail.send(1, TOPIC, bytes(MAX_MAIL))
            await asyncio.sleep(1.0)
            cluster.resume(1)
            for rank in (0, 1):
                await cluster.comms[rank].exclude(2)
            assert cluster.comms[0].view == View(0, (0, 1, 2))
            await until(lambda: all(comm.view.members == (0, 1) for comm in cluster.comms[:2]))
            counted = dropped(cluster, 0)
            assert counted["incomplete"] == 1
            assert len(cluster.comms[0]._session.driver.post.assembly) == 0
            assert counted["unsendable"] >= 2  # at 2 MiB for each time that rank 1 was heard, the last could not go
            cluster.comms[0].mail.send(1, TOPIC, b"new")
            cluster.comms[1].mail.send(0, TOPIC, b"new")
            await until(lambda: (0, 1, b"new") in came and (1, 0, b"new") in came)
            await asyncio.sleep(1.0)
            assert sum(len(payload) == MAX_MAIL for _, _, payload in came) <= 1

    run(main())


def test_a_member_that_died_is_found_by_the_mail_to_it() -> None:
    async def main() -> None:
        async with LocalCluster(OLD) as cluster:
            cluster.kill(2)
            await asyncio.sleep(60.0)
            assert cluster.comms[0].view.members == (0, 1, 2)
            cluster.comms[0].mail.send(2, TOPIC, bytes(MAX_MAIL))
            await until(lambda: all(comm.view.members == (0, 1) for comm in cluster.comms[:2]))
            assert cluster.comms[0].health().degraded == {2: "disconnected"}

    run(main())


def test_a_line_that_is_held_with_nothing_in_it_holds_up_nobody() -> None:
    """The last word of all is the one that fills what may be on its way to a rank that is not heard: then it is."""

    async def main() -> None:
        async with LocalCluster(OLD) as cluster:
            came = subscribed(cluster)
            line = -(-outbox._WINDOW // (MAX_WORD + outbox._ENVELOPE)) * MAX_WORD
            cluster.comms[0].mail.send(1, TOPIC, bytes(line))
            await until(lambda: len(came) == 1)
            await asyncio.sleep(5.0)
            for rank in (1, 2):
                cluster.comms[0].mail.send(rank, TOPIC, b"after")
            await until(lambda: len(came) == 3)

    run(main())


def test_mail_to_who_is_no_member_is_dropped_however_much_it_is() -> None:
    """Nothing of it is on its way, so none of it waits for that rank to be heard."""

    async def main() -> None:
        async with LocalCluster(OLD) as cluster:
            cluster.kill(2)
            await asyncio.gather(*(cluster.comms[rank].exclude(2) for rank in (0, 1)))
            await until(lambda: cluster.comms[0].view.members == (0, 1))
            before = dropped(cluster, 0).get("unsendable", 0)
            for size in [MAX_WORD] * 100 + [MAX_MAIL] * 10:
                cluster.comms[0].mail.send(2, TOPIC, bytes(size))
                await asyncio.sleep(0.01)
            assert dropped(cluster, 0)["unsendable"] == before + 110

    run(main())


def test_a_stopped_member_is_sent_a_bounded_amount_and_gets_all_when_it_goes_on() -> None:
    """NIXL would take messages without end: 2 MiB go out, 16 MiB wait, more is refused; nothing is lost."""

    async def main() -> None:
        async with LocalCluster(OLD) as cluster:
            came = subscribed(cluster)
            native = cluster.comms[0]._session.endpoint.native
            notify, out = native.notify, Counter[str]()

            def counted(peer: str, data: bytes) -> None:
                out[peer] += len(data)
                notify(peer, data)

            native.notify = counted  # type: ignore[method-assign]
            cluster.stop(1)
            accepted = 0
            while accepted < 1000:
                try:
                    cluster.comms[0].mail.send(1, TOPIC, accepted.to_bytes(4) + bytes(499_996))
                except CommunicatorBusy:
                    break
                accepted += 1
                await asyncio.sleep(0.1)
            with pytest.raises(CommunicatorBusy, match="mail to rank 1 is not taken"):
                cluster.comms[0].mail.send(1, TOPIC, bytes(500_000))
            cluster.comms[0].mail.send(2, TOPIC, b"past it")
            await until(lambda: (2, 0, b"past it") in came)
            await asyncio.sleep(60.0)
            assert 33 <= accepted <= 42
            assert max(out.values()) < (2 << 20) + 100_000
            cluster.resume(1)
            await until(lambda: len(came) == 1 + accepted)
            assert [payload[:4] for at, _, payload in came if at == 1] == [n.to_bytes(4) for n in range(accepted)]
            native.notify = notify  # type: ignore[method-assign]

    run(main())


def test_mail_comes_while_agents_are_replaced() -> None:
    """Sender and receiver recycle in turn, with mail under way: in order, and nothing twice."""

    async def main() -> None:
        async with LocalCluster(OLD) as cluster:
            came = subscribed(cluster)
            number = 0
            for rank in (0, 1, 0, 1):
                replacing = asyncio.ensure_future(cluster.comms[rank].rebind())
                while not replacing.done():
                    cluster.comms[0].mail.send(1, TOPIC, number.to_bytes(4) + bytes(50_000))
                    number += 1
                    await asyncio.sleep(0.0005)
                await replacing
            cluster.comms[0].mail.send(1, TOPIC, b"last")
            await until(lambda: bool(came) and came[-1][2] == b"last")
            got = [int.from_bytes(payload[:4]) for _, _, payload in came[:-1]]
            assert got == sorted(set(got))
            assert len(got) >= number - 8

    run(main())


@pytest.mark.parametrize("error", [RuntimeError("broken"), asyncio.CancelledError(), SystemExit(3)])
def test_a_subscriber_that_fails_costs_nobody_anything(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    """Logged, counted; the other subscriber hears it, and the engine goes on."""

    async def main() -> None:
        async with LocalCluster(OLD) as cluster:

            def fail(sender: int, payload: bytes) -> None:
                raise error

            cluster.comms[1].mail.subscribe(TOPIC, fail)
            came = subscribed(cluster)
            for _ in range(2):
                cluster.comms[0].mail.send(1, TOPIC, b"x")
            await until(lambda: len(came) == 2)
            assert dropped(cluster, 1) == {"subscriber failed": 2}
            all_report(await cluster.migrate(NEW))

    run(main())
    assert "subscriber to topic 7 failed for 1 bytes of rank 0" in caplog.text


# ---------------------------------------------------------------------------------------------------- who is hostile
def test_a_member_that_floods_with_words_costs_a_bounded_amount_of_memory() -> None:
    """20 000 messages begun and never finished, in the middle of a migration of all."""

    async def main() -> None:
        async with LocalCluster(OLD) as cluster:
            came = subscribed(cluster)
            comm = cluster.comms[0]
            flood = [
                as_member(comm, a_word(serial=serial, parts=MAX_PARTS, data=bytes(MAX_WORD)))
                for serial in range(1, 300)
            ]
            running = asyncio.ensure_future(cluster.migrate(NEW))
            await asyncio.sleep(0)
            tracemalloc.start()
            for data in flood:
                comm._session.driver.notification("", data)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            all_report(await running)
            assert peak < 1 << 20
            assert not came
            assert dropped(cluster, 0)["incomplete"] == 298

    run(main())


def test_large_mail_takes_turns_with_all_else() -> None:
    """12 MiB to each of two ranks at once: between two turns of the loop a few words go, and a migration is through
    before they are.
    """

    async def main() -> None:
        async with LocalCluster(OLD) as cluster:
            came = subscribed(cluster)
            loop, native = asyncio.get_running_loop(), cluster.comms[0]._session.endpoint.native
            notify, per_turn = native.notify, Counter[float]()

            def counted(peer: str, data: bytes) -> None:
                per_turn[loop.time()] += len(data) > MAX_WORD
                notify(peer, data)

            native.notify = counted  # type: ignore[method-assign]
            for _ in range(3):
                for rank in (1, 2):
                    cluster.comms[0].mail.send(rank, TOPIC, bytes(MAX_MAIL))
            reports = await cluster.migrate(THIRD)
            all_report(reports)
            assert len(came) < 6
            await until(lambda: len(came) == 6)
            assert max(per_turn.values()) <= 8
            native.notify = notify  # type: ignore[method-assign]

    run(main())


# ------------------------------------------------------------------------------------------------------------- life
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_subscription_does_not_keep_a_communicator_alive() -> None:
    """What a subscriber holds may hold the communicator; the engine must not."""

    async def main() -> None:
        async with LocalCluster(ALONE) as cluster:
            comm = cluster.comms.pop()
            session, gone = comm._session, weakref.ref(comm)
            comm.mail.subscribe(TOPIC, lambda sender, payload, comm=comm: None)
            del comm
            gc.collect()
            assert gone() is None
            await session.close(1.0)

    run(main())


def test_mail_of_a_closed_communicator_ends_with_it() -> None:
    """Closing with mail under way: nothing hangs, no timer is left, and who is left hears no half of it."""

    async def main() -> None:
        async with LocalCluster(OLD) as cluster:
            came = subscribed(cluster)
            cluster.stop(1)
            for _ in range(3):
                cluster.comms[0].mail.send(1, TOPIC, bytes(MAX_MAIL))
            await asyncio.sleep(0.5)
            await cluster.comms[0].aclose(1.0)
            with pytest.raises(CommunicatorClosed):
                cluster.comms[0].mail.send(1, TOPIC, b"")
            outbox = cluster.comms[0]._session.driver.post.outbox
            assert outbox._timer is None
            assert not outbox._lines
            cluster.resume(1)
            await asyncio.sleep(5.0)
            assert not came
            assert cluster.comms[1].view.members == (1, 2)

    run(main())
