"""What ranks say to one that has not met all its peers yet: it is late by as long as its last look took."""

from __future__ import annotations

from typing import Any

from eplb_async.bench.simulation.control import START, Sink, coordinator
from eplb_async.core import events, messages
from eplb_async.core.wire import KEY_SIZE, Codec
from eplb_async.testing import run

RANKS = 400
DIGESTS = (b"old placement...", b"new placement...", b"all else that is")


def said(codec: Codec, make: type[messages.Message], rank: int, **fields: Any) -> bytes:
    return codec.encode(make(sender=rank, sender_incarnation=START, receiver_incarnation=START, **fields))


def test_no_join_of_hundreds_is_lost_and_no_flood_takes_their_place() -> None:
    """399 ranks are open first, join, and ping for what they wait for; one of them sends a thousand messages."""

    async def main() -> None:
        codec = Codec(bytes(KEY_SIZE), ep_size=RANKS, num_layers=2)
        sink = Sink()
        driver = coordinator(RANKS, 2, sink)
        for attempt in range(1, 1001):
            driver.notification("", said(codec, messages.AbortRequest, 1, attempt=attempt, reason="flood"))
        for rank in range(2, RANKS):
            for _ in range(3):
                driver.notification("", said(codec, messages.Ping, rank))
            driver.notification("", said(codec, messages.Join, rank, attempt=1, digests=DIGESTS, last_epoch=0))
        kept = RANKS - 2 + 16
        assert driver.dropped["early"] == 1000 + 4 * (RANKS - 2) - kept
        driver.start()
        driver.feed(events.Migrate(DIGESTS))
        driver.notification("", said(codec, messages.Join, 1, attempt=2000, digests=DIGESTS, last_epoch=0))
        assert driver.protocol.phase is events.Phase.OPEN
        driver.stop()

    run(main())
