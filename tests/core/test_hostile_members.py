"""Whatever members send, however authentic: the protocol neither raises nor says what cannot be sent (I-8)."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_async.core import events, messages, wire
from eplb_async.core.events import Proof
from eplb_async.core.messages import Message
from eplb_async.core.protocol import Protocol
from eplb_async.core.wire import Codec, WireError

RANKS, LAYERS = 3, 2
KEY = bytes(32)
CODEC = Codec(KEY, ep_size=RANKS, num_layers=LAYERS)
DIGESTS = (bytes(16),) * 3

near = st.integers(0, 8)
far = st.integers(0, 8).map(lambda n: wire.MAX_COUNTER - n)
counter = st.one_of(near, near, near, near, st.integers(0, wire.MAX_COUNTER), far)
ranks = st.integers(0, (1 << RANKS) - 1)
steps = st.tuples(*[st.integers(0, 3)] * LAYERS)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "term": counter,
    "epoch": counter,
    "attempt": near,
    "sender": st.integers(0, RANKS - 1),
    "digests": st.sampled_from([DIGESTS, (bytes(16), bytes(16), b"x" * 16)]),
    "last_epoch": counter,
    "upto": st.integers(0, LAYERS),
    "holds": steps,
    "at": steps,
    "reason": st.sampled_from(["", "a reason", "é" * 256]),
    "origin": st.integers(-1, RANKS - 1),
    "gone": ranks,
    "stride": counter,
    "declared": ranks,
    "leaving": ranks,
    "members": ranks,
    "ended": st.booleans(),
    "highest_epoch": counter,
    "installed_term": counter,
    "last_attempt": near,
    "next_epoch": counter,
    "blob": st.just(b"blob"),
    "rank": st.integers(0, RANKS - 1),
    "start": counter,
    "digest": st.sampled_from([bytes(16), b"x" * 16]),
    "topic": st.just(7),
    "serial": counter,
    "part": st.integers(0, 3),
    "parts": st.integers(1, 3),
    "data": st.just(b"mail"),
}
KINDS = [kind for kind in Message.__subclasses__() if kind is not messages.Introduce]


def of(kind: type[Message]) -> st.SearchStrategy[Message]:
    names = [f.name for f in dataclasses.fields(kind) if "incarnation" not in f.name]
    return st.builds(kind, **{name: FIELDS[name] for name in names})


own = st.one_of(
    st.just(events.Migrate(DIGESTS)),
    st.integers(1, LAYERS).map(events.Staged),
    st.just(events.GiveUp("out\nof here\x1b[31m")),
    st.builds(events.Gone, st.integers(0, RANKS - 1), st.sampled_from(Proof)),
    st.builds(events.Met, st.integers(0, RANKS - 1), near),
    st.builds(events.Suspect, st.integers(0, RANKS - 1)),
    st.just(events.Returning()),
    st.just(events.Close()),
    st.just(events.Tick()),
)
said = st.one_of(*map(of, KINDS)).map(events.Received)
script = st.lists(st.one_of(own, said, said, said), max_size=30)


@settings(max_examples=600, deadline=None)
@given(rank=st.integers(0, RANKS - 1), script=script)
def test_any_messages_in_any_order_are_taken_or_counted_and_all_that_is_said_can_be_sent(
    rank: int, script: list[events.Event]
) -> None:
    """Members that lie, in any state of ours: no error, and each answer is one that a peer's codec accepts."""
    protocol = Protocol(rank=rank, ep_size=RANKS, num_layers=LAYERS, settle_timeout=1.0, ping_interval=0.3)
    now, migrations, ends = 0.0, 0, 0
    for event in script:
        busy = protocol.phase is not events.Phase.IDLE or protocol.leaving or protocol.outside
        if isinstance(event, events.Migrate) and busy:
            continue
        if isinstance(event, events.Gone | events.Met | events.Suspect) and event.rank == rank:
            continue
        migrations += isinstance(event, events.Migrate)
        now = now + 0.1 if not isinstance(event, events.Tick) else max(now, protocol.next_wakeup or now)
        for command in protocol.handle(event, now):
            ends += isinstance(command, events.Ended)
            if isinstance(command, events.Send):
                try:
                    assert CODEC.decode(CODEC.encode(command.message)) == command.message
                except WireError as error:
                    raise AssertionError(f"{command.message} cannot be sent: {error}") from error
    assert ends <= migrations
