"""A peer that sends without end: bounded laps, bounded memory, and the others migrate meanwhile."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Callable

import pytest

from eplb_async.core import messages
from eplb_async.core.placement import Placement
from eplb_async.core.wire import Codec
from eplb_async.rendezvous.keys import derive_key
from eplb_async.testing import MemoryFabric, run
from eplb_async.testing.cluster import LocalCluster
from tests.communicator.groups import all_report

OLD = Placement([[0, 1, 0, 2, 1, 2]] * 4, ep_size=3)
NEW = Placement([[2, 1, 0, 0, 1, 2]] * 4, ep_size=3)
ONE, TWO = (Placement([row] * 4, ep_size=3) for row in ([2, 1, 0, 1, -1, -1], [0, 1, 2, 0, -1, -1]))
CODEC = Codec(derive_key(b"the cluster's secret", "default"), ep_size=3, num_layers=4)
FLOOD = 50_000


@pytest.mark.parametrize("kind", ["garbage", "pings", "words", "large", "names"])
def test_a_flood_neither_starves_a_migration_nor_grows(kind: str) -> None:
    """50 000 notifications at once, and more in each lap, of a rank that is out and goes on sending.

    The others migrate; laps and memory are bounded.
    """
    fabric = MemoryFabric()

    async def main() -> None:
        async with LocalCluster(OLD, fabric=fabric) as cluster:
            for rank in (0, 1):
                await cluster.comms[rank].exclude(2)
            session = cluster.comms[0]._session
            driver, native = session.driver, session.endpoint.native
            known = driver.roster.get(2)
            assert known is not None
            ping = CODEC.encode(
                messages.Ping(
                    sender=2,
                    sender_incarnation=known.incarnation,
                    receiver_incarnation=driver.identity.incarnation,
                )
            )
            word = CODEC.encode(
                messages.Word(
                    sender=2,
                    sender_incarnation=known.incarnation,
                    receiver_incarnation=driver.identity.incarnation,
                    topic=1,
                    serial=1,
                    part=0,
                    parts=2,
                    data=bytes(100),
                )
            )
            message = {"garbage": b"x" * 120, "pings": ping, "words": word, "large": bytes(200_000), "names": b"x"}[
                kind
            ]
            burst = [(known.peer.name, message)] * (FLOOD if kind != "large" else 500)
            if kind == "names":
                burst = [(f"invented-{i}", message) for i in range(FLOOD)]
            pending = [burst]
            per_lap: list[int] = []
            handled = 0
            take, handle = native.notifications, driver.notification

            def flooded() -> list[tuple[str, bytes]]:
                nonlocal handled
                per_lap.append(handled)
                handled = 0
                return take() + (pending.pop() if pending else burst[:80])

            def counted(agent: str, data: bytes) -> None:
                nonlocal handled
                handled += 1
                handle(agent, data)

            native.notifications = flooded  # type: ignore[method-assign]
            session.endpoint._on_notification = counted
            peak = 0
            for target in (ONE, TWO):
                if not peak:
                    tracemalloc.start()
                reports = await cluster.migrate(target, timeout=20.0, ranks=[0, 1])
                all_report(reports)
                peak = max(peak, tracemalloc.get_traced_memory()[1])
                tracemalloc.stop()
            assert cluster.wrong_bytes([0, 1]) == 0
            assert max(per_lap) <= 64
            assert peak < 24 << 20
            dropped = cluster.comms[0].health().dropped
            assert dropped["too many"] > len(burst) // 3, dropped
            native.notifications = take  # type: ignore[method-assign]

    run(main())


def test_a_burst_of_a_member_costs_nobody_the_migration() -> None:
    """20 000 at once of a rank that takes part: its own JOIN is among the newest, so all migrate."""
    fabric = MemoryFabric()

    async def main() -> None:
        async with LocalCluster(OLD, fabric=fabric) as cluster:
            flooder = cluster.comms[2]._session.endpoint
            for rank in (0, 1):
                native = fabric.agents[cluster.comms[rank]._session.endpoint.name]
                take, mail = native.notifications, [(flooder.name, b"x" * 100)] * 20_000

                def flooded(
                    take: Callable[[], list[tuple[str, bytes]]] = take, mail: list[tuple[str, bytes]] = mail
                ) -> list[tuple[str, bytes]]:
                    found = [*mail, *take()]
                    mail.clear()
                    return found

                native.notifications = flooded  # type: ignore[method-assign]
            reports = await cluster.migrate(NEW, timeout=20.0)
            all_report(reports)
            assert cluster.wrong_bytes() == 0

    run(main())


def test_a_member_that_pings_without_end_is_not_answered_each_time() -> None:
    """What we send is bounded too: few answers to ten thousand pings of one moment."""

    async def main() -> None:
        async with LocalCluster(OLD) as cluster:
            driver = cluster.comms[0]._session.driver
            known = driver.roster.get(2)
            assert known is not None
            ping = CODEC.encode(
                messages.Ping(
                    sender=2, sender_incarnation=known.incarnation, receiver_incarnation=driver.identity.incarnation
                )
            )
            sent: list[bytes] = []
            assert driver.endpoint is not None
            native = driver.endpoint.native
            notify = native.notify
            native.notify = lambda peer, data: (sent.append(data), notify(peer, data))[1]  # type: ignore
            for _ in range(10_000):
                driver.notification("whoever", ping)
            assert len(sent) == 1
            native.notify = notify  # type: ignore[method-assign]
            await asyncio.sleep(0)

    run(main())
