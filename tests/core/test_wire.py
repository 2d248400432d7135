"""Control messages as bytes: whole or refused."""

from __future__ import annotations

import dataclasses
import pickle
import struct
from hashlib import blake2b
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_async.core import messages, wire
from eplb_async.core.messages import Message
from eplb_async.core.text import one_line
from eplb_async.core.wire import Codec, WireError

KEY = bytes(range(32))
RANKS, LAYERS = 11, 3
CODEC = Codec(KEY, ep_size=RANKS, num_layers=LAYERS)

ranks = st.integers(0, (1 << RANKS) - 1)
upto = st.integers(0, LAYERS)
counter = st.integers(0, wire.MAX_COUNTER)
steps = st.tuples(*[st.integers(0, (1 << 32) - 1)] * LAYERS)
digest = st.binary(min_size=16, max_size=16)
reason = st.text(st.characters(exclude_categories=["Cs"]), max_size=128).map(one_line)
incarnation = st.integers(0, (1 << 64) - 1)

FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "term": counter,
    "epoch": counter,
    "attempt": counter,
    "sender": st.integers(0, RANKS - 1),
    "rank": st.integers(0, RANKS - 1),
    "start": counter,
    "digest": digest,
    "sender_incarnation": incarnation,
    "receiver_incarnation": incarnation,
    "blob": st.binary(max_size=300),
    "digests": st.tuples(digest, digest, digest),
    "last_epoch": counter,
    "upto": upto,
    "holds": steps,
    "at": steps,
    "reason": reason,
    "origin": st.integers(-1, RANKS - 1),
    "gone": ranks,
    "declared": ranks,
    "leaving": ranks,
    "members": ranks,
    "ended": st.booleans(),
    "highest_epoch": counter,
    "installed_term": counter,
    "last_attempt": counter,
    "next_epoch": counter,
    "stride": counter,
    "topic": st.integers(0, wire.MAX_TOPIC),
    "serial": counter,
    "part": st.integers(0, wire.MAX_PARTS - 1),
    "parts": st.integers(1, wire.MAX_PARTS),
    "data": st.binary(max_size=300),
}
KINDS: list[type[Message]] = [
    kind
    for kind in vars(messages).values()
    if isinstance(kind, type) and issubclass(kind, Message) and kind is not Message
]


def of(kind: type[Message]) -> st.SearchStrategy[Message]:
    return st.builds(kind, **{field.name: FIELDS[field.name] for field in dataclasses.fields(kind)})


any_message = st.one_of(*map(of, KINDS))


def sign(data: bytes, *, codec_layout: tuple[int, int] = (RANKS, LAYERS)) -> bytes:
    """A digest as the format's description says, made without the codec."""
    salt = struct.pack("!QQ", *codec_layout)
    return data + blake2b(data, key=KEY, digest_size=16, salt=salt, person=b"eplb-control").digest()


def refusal(data: bytes, codec: Codec = CODEC) -> str:
    with pytest.raises(WireError) as caught:
        codec.decode(data)
    return caught.value.kind


def a_prepared() -> Message:
    return messages.Prepared(term=3, epoch=2, sender=1, upto=2, holds=(5, 6, 7))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=40)
@given(data=st.data())
def test_every_kind_comes_back_as_it_went(kind: type[Message], data: st.DataObject) -> None:
    message = data.draw(of(kind))
    encoded = CODEC.encode(message)
    assert CODEC.decode(encoded) == message
    assert CODEC.decode(encoded).__class__ is kind
    assert len(encoded) <= CODEC.max_size


def test_every_kind_has_a_number() -> None:
    assert set(KINDS) == set(CODEC._forms)


@settings(max_examples=300)
@given(message=any_message, data=st.data())
def test_one_changed_byte_is_refused(message: Message, data: st.DataObject) -> None:
    encoded = bytearray(CODEC.encode(message))
    at = data.draw(st.integers(0, len(encoded) - 1))
    encoded[at] ^= data.draw(st.integers(1, 255))
    assert refusal(bytes(encoded)) == "forged"


@settings(max_examples=100)
@given(message=any_message, data=st.data())
def test_a_truncated_message_is_refused(message: Message, data: st.DataObject) -> None:
    encoded = CODEC.encode(message)
    assert refusal(encoded[: data.draw(st.integers(0, len(encoded) - 1))]) in {"truncated", "forged"}


@settings(max_examples=300)
@given(data=st.binary(max_size=400))
def test_random_bytes_are_refused(data: bytes) -> None:
    refusal(data)


@settings(max_examples=400)
@given(message=any_message, data=st.data())
def test_whatever_a_member_signs_is_a_message_or_a_wire_error(message: Message, data: st.DataObject) -> None:
    """Beyond the digest: a peer that holds the key and sends nonsense. What is accepted has one encoding."""
    body = bytearray(CODEC.encode(message)[:-16])
    for _ in range(data.draw(st.integers(1, 3))):
        match data.draw(st.sampled_from(["flip", "cut", "add", "big"])):
            case "flip":
                body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
            case "cut":
                del body[data.draw(st.integers(48, len(body))) :]
            case "add":
                body += data.draw(st.binary(max_size=20))
            case "big":
                at = data.draw(st.integers(0, len(body) - 1))
                body[at : at + 8] = b"\xff" * len(body[at : at + 8])
    signed = sign(bytes(body))
    try:
        decoded = CODEC.decode(signed)
    except WireError:
        return
    assert CODEC.encode(decoded) == signed


def test_what_is_said_to_many_is_what_is_said_to_each() -> None:
    """One message under many addresses, another in between: each is as if it were encoded by itself."""
    commit = messages.Commit(term=3, epoch=7, sender=0, upto=2, at=(1, 2, 3))
    end = messages.End(term=3, epoch=7, attempt=9, upto=1, at=(1, 0, 0), origin=-1, reason="enough")
    for message in (commit, commit, end, commit):
        for receiver in (1 << 16, 2 << 16):
            addresses = {"sender": 4, "sender_incarnation": 5 << 16, "receiver_incarnation": receiver}
            said = CODEC.address(message, **addresses)
            assert CODEC.decode(said) == dataclasses.replace(message, **addresses)
            assert said == CODEC.encode(dataclasses.replace(message, **addresses))
    with pytest.raises(WireError, match="sender=11"):
        CODEC.address(commit, sender=RANKS, sender_incarnation=0, receiver_incarnation=0)


@pytest.mark.parametrize("step", [-1, 1 << 32, 1.0, "1"])
def test_a_step_that_is_no_number_is_not_encoded(step: Any) -> None:
    with pytest.raises(WireError, match="range"):
        CODEC.encode(messages.Commit(epoch=1, upto=1, at=(0, 0, step)))


def test_another_key_is_refused() -> None:
    other = Codec(KEY[::-1], ep_size=RANKS, num_layers=LAYERS)
    assert refusal(other.encode(a_prepared())) == "forged"


@pytest.mark.parametrize("layout", [(RANKS + 1, LAYERS), (RANKS, LAYERS + 1)])
def test_another_layout_is_refused(layout: tuple[int, int]) -> None:
    other = Codec(KEY, ep_size=layout[0], num_layers=layout[1])
    assert refusal(CODEC.encode(a_prepared()), other) == "forged"


@pytest.mark.parametrize(
    ("at", "value", "kind"), [(0, b"XXXX", "foreign"), (4, b"\x02", "version"), (5, b"\xfe", "unknown")]
)
def test_a_foreign_header_is_named(at: int, value: bytes, kind: str) -> None:
    body = bytearray(CODEC.encode(a_prepared())[:-16])
    body[at : at + len(value)] = value
    assert refusal(sign(bytes(body))) == kind


def test_trailing_bytes_are_refused() -> None:
    assert refusal(sign(CODEC.encode(a_prepared())[:-16] + b"\0")) == "trailing"


def test_a_long_message_is_refused_before_it_is_hashed() -> None:
    assert refusal(bytes(CODEC.max_size + 1)) == "oversize"


def test_the_largest_introduction_fits() -> None:
    message = messages.Introduce(blob=bytes(wire.MAX_BLOB))
    assert CODEC.decode(CODEC.encode(message)) == message


def test_the_largest_word_fits() -> None:
    message = messages.Word(topic=wire.MAX_TOPIC, serial=1, part=127, parts=128, data=bytes(wire.MAX_WORD))
    assert CODEC.decode(CODEC.encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        messages.Ping(sender=RANKS),
        messages.Ping(sender=-1),
        messages.Ping(term=-1),
        messages.Ping(term=1 << 63),
        messages.Ping(sender_incarnation=1 << 64),
        messages.Ping(gone=1 << RANKS),
        messages.Ping(declared=-1),
        messages.Prepared(upto=LAYERS + 1, holds=(0,) * LAYERS),
        messages.Prepared(upto=0, holds=(0,) * (LAYERS + 1)),
        messages.Prepared(upto=0, holds=(0, 0, 1 << 32)),
        messages.AbortRequest(reason="x" * 513),
        messages.AbortRequest(reason="\ud800"),
        messages.AbortRequest(reason="over\nERROR a line of its own"),
        messages.Introduce(blob=bytes(wire.MAX_BLOB + 1)),
        messages.Join(digests=(b"", b"", b""), last_epoch=0),
        messages.Join(digests=(bytes(16),) * 3, last_epoch=-1),
        messages.End(upto=0, at=(0,) * LAYERS, origin=RANKS, reason=""),
        messages.End(upto=0, at=(0,) * LAYERS, origin=-2, reason=""),
        messages.Word(topic=-1, serial=1, part=0, parts=1, data=b""),
        messages.Word(topic=wire.MAX_TOPIC + 1, serial=1, part=0, parts=1, data=b""),
        messages.Word(topic=0, serial=-1, part=0, parts=1, data=b""),
        messages.Word(topic=0, serial=1, part=wire.MAX_PARTS, parts=1, data=b""),
        messages.Word(topic=0, serial=1, part=0, parts=0, data=b""),
        messages.Word(topic=0, serial=1, part=0, parts=wire.MAX_PARTS + 1, data=b""),
        messages.Word(topic=0, serial=1, part=0, parts=1, data=bytes(wire.MAX_WORD + 1)),
    ],
    ids=str,
)
def test_a_field_out_of_range_is_not_encoded(message: Message) -> None:
    with pytest.raises(WireError):
        CODEC.encode(message)


def test_a_counter_near_its_end_is_refused_so_that_counting_on_from_it_always_fits() -> None:
    last = CODEC.encode(messages.Ping(term=wire.MAX_COUNTER))
    assert CODEC.decode(last).term == wire.MAX_COUNTER
    assert refusal(CODEC.encode(messages.Ping(term=wire.MAX_COUNTER + 1))) == "range"


@pytest.mark.parametrize("control", ["\n", "\r", "\x1b", "\0", "\x85", "\u2028", "\u202e"])
def test_a_reason_of_two_lines_is_refused(control: str) -> None:
    """What a member signs cannot put a line of its own into our log."""
    fair = CODEC.encode(messages.AbortRequest(reason="x" * len(control.encode())))[:-16]
    assert refusal(sign(fair[: -len(control.encode())] + control.encode())) == "text"


def test_a_rank_beyond_the_layout_is_refused_in_a_set() -> None:
    body = bytearray(CODEC.encode(messages.Ping(gone=0, declared=0))[:-16])
    body[48] = 0xFF
    assert refusal(sign(bytes(body))) == "range"


def test_a_record_that_is_no_control_message_is_not_encoded() -> None:
    with pytest.raises(WireError):
        CODEC.encode(Message())


@pytest.mark.parametrize("length", [0, 31, 33])
def test_a_key_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        Codec(bytes(length), ep_size=2, num_layers=1)


@pytest.mark.parametrize("layout", [(0, 1), (1, 0), (5000, 1), (1, 5000)])
def test_a_layout_beyond_the_format_is_refused(layout: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="at most"):
        Codec(KEY, ep_size=layout[0], num_layers=layout[1])


def test_the_key_is_not_shown_and_not_pickled() -> None:
    codec = Codec(b"secret-secret-secret-secret-key!", ep_size=2, num_layers=1)
    assert "secret" not in repr(codec)
    with pytest.raises(TypeError):
        pickle.dumps(codec)


def test_the_format_is_the_one_that_is_documented() -> None:
    """A golden message: a change of these bytes is a new version."""
    message = messages.Prepared(
        term=1,
        epoch=2,
        attempt=3,
        sender=4,
        sender_incarnation=5,
        receiver_incarnation=6,
        upto=2,
        holds=(7, 8, 9),
    )
    body = struct.pack("!4sBBHQQQQQ", b"EPLB", 1, 6, 4, 1, 2, 3, 5, 6) + struct.pack("!IIII", 2, 7, 8, 9)
    assert CODEC.encode(message) == sign(body)
