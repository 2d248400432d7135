"""Nothing forged, cut or replayed gets through, and every refusal says what it is (I-14, C13)."""

from __future__ import annotations

import hmac
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_async.rendezvous import BlobError, Introduction, open_sealed, seal
from eplb_async.rendezvous.blob import VERSION

KEY = bytes(range(32))
INTRO = Introduction(
    group="default",
    rank=1,
    ep_size=4,
    agent="default/1.3-abcd",
    incarnation=3,
    node="host-a",
    metadata=b"\0nixl metadata\xff" * 9,
    agreed={"verify": "identity"},
    layout=((("w13", 2 << 20, 2 << 20, 4, (1024, 1024), (1024, 1), "bfloat16", "cpu", 0x7F0000000000),), ()),
    placement_digest=b"p" * 16,
)
BLOB = seal(INTRO, KEY)


def altered(**changes: Any) -> Introduction:
    return msgspec.structs.replace(INTRO, **changes)


def forged(payload: bytes, *, magic: bytes = b"EPLB", version: int = VERSION, key: bytes = KEY) -> bytes:
    """A blob with any content and a right digest, as a member of the job could make."""
    signed = struct.pack(">4sHI", magic, version, len(payload)) + payload
    return signed + hmac.digest(key, signed, "sha256")


def as_payload(**changes: Any) -> bytes:
    return msgspec.msgpack.encode({**msgspec.to_builtins(INTRO, builtin_types=(bytes,)), **changes})


def test_what_was_sealed_comes_out() -> None:
    """A round trip keeps every field."""
    assert open_sealed(BLOB, KEY, group="default", rank=1, ep_size=4, newer_than=2) == INTRO


def test_truncated_at_every_length() -> None:
    """No prefix opens, and each is called truncated (N-23)."""
    for length in range(len(BLOB)):
        with pytest.raises(BlobError, match=rf"^truncated: {length} (of {len(BLOB)} )?bytes"):
            open_sealed(BLOB[:length], KEY)


def test_one_bit_changed_anywhere() -> None:
    """No byte is outside the digest."""
    for at in range(len(BLOB)):
        damaged = bytearray(BLOB)
        damaged[at] ^= 0x10
        with pytest.raises(BlobError, match=r"not an introduction|another version|truncated|too long|forged"):
            open_sealed(bytes(damaged), KEY)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"hello", "not an introduction"),
        (b"hello world" * 100, "not an introduction"),
        (BLOB + b"x", "too long: "),
        (forged(as_payload(), version=VERSION + 1), f"another version: {VERSION + 1}, this rank speaks {VERSION}"),
        (forged(as_payload(), key=b"k" * 32), "wrong secret or forged: keyed digest differs"),
        (forged(b""), "malformed"),
        (forged(b"\x93\x01\x02\x03"), "malformed"),
        (forged(b"\x91" * 100_000), "malformed"),
        (forged(as_payload(surprise=1)), "malformed.*surprise"),
        (forged(as_payload(rank="1")), "malformed.*rank"),
        (forged(as_payload(layout=[[[1.5]]])), "malformed.*layout"),
        (forged(as_payload(layout={"a": 1})), "malformed.*layout"),
        (forged(as_payload(layout=[[[[[[[[[[1]]]]]]]]]])), "malformed.*layout"),
        (forged(as_payload(layout=[[]] * 4097)), "malformed.*layout"),
        (forged(as_payload(layout=[[["w", 1, 1, 1, [1] * 65, [], "uint8", "cpu", 1]]])), "malformed.*layout"),
        (forged(as_payload(incarnation=1 << 63)), "incarnation"),
        (forged(as_payload(**{"new\nline": 1})), "malformed.*`new line`"),
    ],
)
def test_garbage_says_what_it_is(data: bytes, says: str) -> None:
    """Each kind of damage has its own reason."""
    with pytest.raises(BlobError, match=says):
        open_sealed(data, KEY)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rank": 4}, "rank 4 of 4"),
        ({"rank": -1}, "rank -1 of 4"),
        ({"ep_size": 0}, "ep_size 0"),
        ({"incarnation": -1}, "incarnation -1"),
        ({"agent": ""}, "no agent name"),
        ({"agent": "x" * 257}, "agent has 257 characters"),
        ({"agent": "x\nERROR y"}, r"agent 'x\\nERROR y' is not one line"),
        ({"node": "\x1b[31m"}, "node .* is not one line"),
        ({"agreed": {"verify": "off\nERROR y"}}, r"setting 'off\\nERROR y' is not one line"),
        ({"node": "x" * 257}, "node has 257 characters"),
        ({"metadata": b""}, "no NIXL metadata"),
        ({"placement_digest": b""}, "placement digest of 0 bytes"),
        ({"placement_digest": b"x" * 65}, "placement digest of 65 bytes"),
    ],
)
def test_values_out_of_range_are_refused_on_both_sides(changes: dict[str, Any], says: str) -> None:
    """A bad value is not sealed, and one that a peer sealed all the same is not opened."""
    with pytest.raises(BlobError, match=f"^out of range: .*{says}"):
        seal(altered(**changes), KEY)
    with pytest.raises(BlobError, match=f"^out of range: .*{says}"):
        open_sealed(forged(msgspec.msgpack.encode(altered(**changes))), KEY)


def test_oversized_is_refused_on_both_sides() -> None:
    """The limit is checked before anything is read."""
    with pytest.raises(BlobError, match=r"^oversized: .* 4194304 are allowed"):
        seal(altered(metadata=bytes(4 << 20)), KEY)
    with pytest.raises(BlobError, match=f"^oversized: {len(BLOB)} bytes, 100 are allowed"):
        open_sealed(BLOB, KEY, limit=100)
    with pytest.raises(BlobError, match=r"^oversized"):
        open_sealed(b"x" * ((4 << 20) + 1), KEY)


@pytest.mark.parametrize(
    ("expected", "says"),
    [
        ({"group": "other"}, "another group: it says 'default', expected 'other'"),
        ({"rank": 2}, "another rank: it says 1, expected 2"),
        ({"ep_size": 8}, "another ep_size: it says 4, expected 8"),
        ({"newer_than": 3}, "replayed: incarnation 3 is not newer than 3"),
        ({"newer_than": 9}, "replayed: incarnation 3 is not newer than 9"),
    ],
)
def test_a_good_blob_in_the_wrong_place_says_what_differs(expected: dict[str, Any], says: str) -> None:
    """Old introductions, and those of other ranks and groups, are named."""
    with pytest.raises(BlobError, match=f"^{says}"):
        open_sealed(BLOB, KEY, **expected)


def test_no_secret_shows() -> None:
    """Neither the key nor the metadata, which opens memory, is in a repr or a message."""
    assert "nixl metadata" not in repr(INTRO)
    with pytest.raises(ValueError, match="has 32 bytes, this one 5") as caught:
        seal(INTRO, b"short")
    assert "short" not in str(caught.value)


@given(st.binary(max_size=300))
def test_random_bytes_raise_nothing_else(data: bytes) -> None:
    """Only BlobError, whatever a store holds."""
    with pytest.raises(BlobError):
        open_sealed(data, KEY)


@given(st.binary(max_size=300))
def test_random_signed_content_raises_nothing_else(payload: bytes) -> None:
    """Only BlobError, whatever a member of the job signs."""
    with pytest.raises(BlobError):
        open_sealed(forged(payload), KEY)


@given(st.integers(0, len(BLOB) - 1), st.binary(min_size=1, max_size=40))
def test_overwritten_anywhere_raises_nothing_else(at: int, patch: bytes) -> None:
    """Only BlobError, unless nothing was changed."""
    data = BLOB[:at] + patch + BLOB[at + len(patch) :]
    if data != BLOB:
        with pytest.raises(BlobError):
            open_sealed(data, KEY)
