"""A member that holds the secret and lies, or does not hold it: counted, bounded, logged on one line, never in NIXL."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_async.communicator import AsyncEplbCommunicator
from eplb_async.core import messages, wire
from eplb_async.core.messages import Message
from eplb_async.core.placement import Placement
from eplb_async.core.wire import Codec
from eplb_async.errors import MigrationAborted
from eplb_async.rendezvous.blob import open_sealed, seal
from eplb_async.rendezvous.keys import derive_key
from eplb_async.settings import Settings
from eplb_async.testing import FaultPlan, MemoryFabric, run
from eplb_async.testing.cluster import LocalCluster
from eplb_async.testing.memory import MemoryNative
from tests.communicator.groups import all_report

OLD = Placement([[0, 1, 2, 3, 4, 5]] * 2, ep_size=3)
NEW = Placement([[2, 3, 4, 5, 0, 1]] * 2, ep_size=3)
SECRET = b"the cluster's secret"
KEY = derive_key(SECRET, "default")
CODEC = Codec(KEY, ep_size=3, num_layers=2)


class Adding(MemoryFabric):
    """A fabric that counts the metadata which agents load."""

    def __init__(self, faults: FaultPlan | None = None) -> None:
        super().__init__(faults)
        self.added = 0

    def native(self, name: str, settings: Settings) -> MemoryNative:
        agent = super().native(name, settings)
        add = agent.add_remote

        def counted(metadata: bytes) -> str:
            self.added += 1
            return add(metadata)

        agent.add_remote = counted  # type: ignore[method-assign]
        return agent


def said(comm: AsyncEplbCommunicator, message: Message, *, sender: int = 1) -> bytes:
    """A message from a member to ``comm``, with the incarnations that are right."""
    driver = comm._session.driver
    member = driver.roster.get(sender)
    assert member is not None
    filled = replace(
        message,
        sender=sender,
        sender_incarnation=message.sender_incarnation or member.incarnation,
        receiver_incarnation=driver.identity.incarnation,
    )
    return CODEC.encode(filled)


def test_no_damaged_introduction_of_a_member_reaches_nixl() -> None:
    """Introduce with a right digest around a wrong blob: counted, NIXL unasked, the next migration works (I-14)."""
    fabric = Adding()

    async def main() -> None:
        async with LocalCluster(OLD, fabric=fabric) as cluster:
            comm = cluster.comms[0]
            driver, before = comm._session.driver, fabric.added
            known = driver.roster.get(1)
            blob = cluster.rendezvous.get("default/blob/1")
            assert known is not None
            assert blob is not None
            fair = open_sealed(blob, KEY)
            later = known.incarnation + 1
            rng = random.Random(5)

            def changed(**changes: object) -> bytes:
                return seal(msgspec.structs.replace(fair, **{"incarnation": later, **changes}), KEY)

            damaged = bytearray(changed())
            damaged[rng.randrange(len(damaged))] ^= 1
            blobs = [
                b"",
                b"EPLB",
                bytes(damaged),
                changed()[:-1],
                changed(rank=2),
                changed(group="other"),
                changed(ep_size=4),
                changed(incarnation=later + 1),
                changed(incarnation=known.incarnation - 1),
                changed(layout=()),
                changed(layout=fair.layout[:1]),
                changed(metadata=fair.metadata[:-1]),
                changed(metadata=b"x"),
                rng.randbytes(100_000),
            ]
            for one in blobs:
                data = said(comm, messages.Introduce(blob=one, sender_incarnation=later))
                driver.notification("whoever", data)
            assert fabric.added == before
            assert driver.dropped["bad introduction"] == len(blobs)
            assert driver.roster.get(1) is known
            reports = await cluster.migrate(NEW)
            all_report(reports)
            assert cluster.wrong_bytes() == 0

    run(main())
    assert not fabric.violations


@pytest.mark.parametrize(
    "make",
    [
        lambda: messages.View(term=wire.MAX_COUNTER, gone=0, declared=0),
        lambda: messages.View(term=wire.MAX_COUNTER - 1, gone=0b100, declared=0b100),
        lambda: messages.Term(term=wire.MAX_COUNTER),
        lambda: messages.Install(term=wire.MAX_COUNTER, members=0b111, upto=0, at=(0, 0), next_epoch=0),
        lambda: messages.Install(term=3, members=0b111, upto=0, at=(0, 0), next_epoch=wire.MAX_COUNTER),
        lambda: messages.Join(attempt=9, digests=(bytes(16),) * 3, last_epoch=wire.MAX_COUNTER),
        lambda: messages.Begin(epoch=wire.MAX_COUNTER, attempt=1),
        lambda: messages.Ping(term=wire.MAX_COUNTER, gone=0b111, declared=0),
    ],
)
def test_a_number_at_its_limit_wedges_nobody(make: Callable[[], Message]) -> None:
    """One such message to every rank, idle and in an epoch: dropped, and migrations and views go on."""

    async def main() -> None:
        async with LocalCluster(OLD) as cluster:
            for placement in (NEW, OLD):
                running = asyncio.ensure_future(cluster.migrate(placement, timeout=5.0))
                await asyncio.sleep(0)
                for rank, sender in ((0, 1), (1, 0), (2, 0), (2, 1)):
                    comm = cluster.comms[rank]
                    comm._session.driver.notification("whoever", said(comm, make(), sender=sender))
                reports = await running
                all_report(reports)
            cluster.kill(2)
            for rank in (0, 1):
                await cluster.comms[rank].exclude(2)
            async with asyncio.timeout(10):
                while any(comm.health().members != (0, 1) for comm in cluster.comms[:2]):
                    await asyncio.sleep(0.01)
            assert cluster.wrong_bytes([0, 1]) == 0

    run(main())


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.binary(max_size=200), st.booleans()), max_size=12))
def test_whatever_arrives_is_counted_and_moves_nothing(packets: list[tuple[int, bytes, bool]]) -> None:
    """Random bytes, and random bytes with a right digest, into every rank in the middle of a migration."""
    sign = CODEC._digest

    async def main() -> None:
        async with LocalCluster(OLD) as cluster:
            running = asyncio.ensure_future(cluster.migrate(NEW, timeout=5.0))
            await asyncio.sleep(0)
            for rank, data, signed in packets:
                driver = cluster.comms[rank]._session.driver
                before = sum(driver.dropped.values())
                driver.notification("whoever", data + sign(data) if signed else data)
                assert sum(driver.dropped.values()) == before + 1
                await asyncio.sleep(0)
            reports = await running
            all_report(reports)
            assert cluster.wrong_bytes() == 0

    run(main())


def test_a_reason_is_one_line_in_errors_and_logs(caplog: pytest.LogCaptureFixture) -> None:
    """An error of two lines and a colour on one rank: one line wherever it is told, on the others too."""
    caplog.set_level(logging.DEBUG)

    async def main() -> None:
        async with LocalCluster(OLD, faults=FaultPlan().hold_read("default/1.", nth=None)) as cluster:
            running = asyncio.ensure_future(cluster.migrate(NEW, timeout=5.0))
            await asyncio.sleep(0.5)
            session = cluster.comms[1]._session
            assert session.driver.attempt is not None
            session.driver.give_up(session.driver.attempt, "first\nERROR second \x1b[31mred\u2028third")
            results = await running
            assert all(isinstance(result, MigrationAborted) for result in results), results
            for result in results:
                assert "first ERROR second  [31mred third" in str(result)
            for comm in cluster.comms:
                assert comm.health().last_error.isprintable()

    run(main())
    for record in caplog.records:
        assert record.getMessage().isprintable(), record.getMessage()
