"""Introductions that a member of the job damaged or made up, and signed: refused, bounded, and never seen by NIXL."""

from __future__ import annotations

import asyncio
import hmac
import os
import random
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_async.core.layout import Layout
from eplb_async.errors import HandshakeError
from eplb_async.rendezvous import BlobError, FileRendezvous, Introduction, open_sealed, seal
from eplb_async.rendezvous.blob import VERSION
from eplb_async.rendezvous.keys import join
from eplb_async.testing.cluster import MemoryRendezvous

KEY = bytes(range(32))
TENSOR = ("w13", 2 << 20, 2 << 20, 4, (1024, 1024), (1024, 1), "bfloat16", "cuda:0", 0x7F0000000000)


def intro(**changes: Any) -> Introduction:
    plain = Introduction(
        group="default",
        rank=1,
        ep_size=4,
        agent="default/1.3-abcd",
        incarnation=3,
        node="host-a",
        metadata=bytes(range(256)),
        layout=((TENSOR, TENSOR), (TENSOR,)),
        placement_digest=b"p" * 16,
        agreed={"verify": "identity"},
    )
    return msgspec.structs.replace(plain, **changes)


def sign(payload: bytes) -> bytes:
    signed = struct.pack(">4sHI", b"EPLB", VERSION, len(payload)) + payload
    return signed + hmac.digest(KEY, signed, "sha256")


ONE, TWO = (msgspec.msgpack.encode(one) for one in (intro(), intro(rank=2, layout=((TENSOR,),) * 9, node="")))


def parse(blob: bytes) -> None:
    """What the communicator does with a blob before NIXL sees it; only these errors are turned into refusals."""
    try:
        opened = open_sealed(blob, KEY, group="default", ep_size=4)
        Layout.from_plain(opened.layout)
    except ValueError:  # BlobError is one
        return
    assert 0 <= opened.rank < 4
    assert 0 <= opened.incarnation < 1 << 63
    assert opened.metadata


mutation = st.sampled_from(["flip", "cut", "drop", "add", "splice", "big", "array", "deep"])
CLAIMS = [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\x7f\xff\xff\xff"]


@settings(max_examples=600, deadline=None)
@given(seed=st.integers(0, 1 << 32), kinds=st.lists(mutation, min_size=1, max_size=5), signed=st.booleans())
def test_a_mutated_introduction_is_refused_or_in_range(seed: int, kinds: list[str], signed: bool) -> None:
    """Bit flips, cuts, additions, splices of two, false lengths, depth; with and without a right digest."""
    rng = random.Random(seed)
    data = bytearray(ONE if signed else seal(intro(), KEY))
    for kind in kinds:
        at = rng.randrange(len(data)) if data else 0
        match kind:
            case "flip" if data:
                data[at] ^= 1 << rng.randrange(8)
            case "cut":
                del data[at:]
            case "drop":
                del data[at : at + rng.randrange(1, 9)]
            case "add":
                data[at:at] = rng.randbytes(rng.randrange(1, 20))
            case "splice":
                data[at:] = TWO[rng.randrange(len(TWO)) :]
            case "big":
                data[at : at + 9] = b"\xcf" + b"\xff" * 8
            case "array":
                data[at : at + 5] = rng.choice(CLAIMS)
            case "deep":
                data[at:at] = b"\x91" * 5000
    parse(sign(bytes(data)) if signed else bytes(data))


@settings(max_examples=300, deadline=None)
@given(
    place=st.integers(0, 8),
    value=st.one_of(
        st.integers(-(1 << 63), (1 << 64) - 1),
        st.sampled_from([0, -1, 1 << 63, (1 << 63) - 1, "", "cuda:x", "cuda:99999999999999999999", "x" * 300, "\n"]),
        st.lists(st.integers(-2, 1 << 40), max_size=70),
    ),
)
def test_a_tensor_with_one_false_value_is_refused_or_lies_in_memory(place: int, value: Any) -> None:
    """Numbers that a READ's addresses are computed from: what is accepted has no overflow in it."""
    record = (*TENSOR[:place], value, *TENSOR[place + 1 :])
    blob = sign(msgspec.msgpack.encode({**msgspec.to_builtins(intro(), builtin_types=(bytes,)), "layout": [[record]]}))
    try:
        layout = Layout.from_plain(open_sealed(blob, KEY).layout)
    except ValueError:
        return
    spec = layout.layers[0][0].spec
    last = layout.row_address(0, 0, spec.num_rows - 1)
    assert 0 <= last <= last + spec.row_bytes < 1 << 63
    assert spec.device.partition(":")[2].isdecimal() or ":" not in spec.device


def with_layout(raw: bytes) -> bytes:
    fields = {k: v for k, v in msgspec.to_builtins(intro(), builtin_types=(bytes,)).items() if k != "layout"}
    body = msgspec.msgpack.encode(fields)
    return sign(bytes([0x80 | (len(fields) + 1)]) + body[1:] + msgspec.msgpack.encode("layout") + raw)


MANY = 1 << 20
SMALL_RECORD = b"\x99\xa0\x00\x00\x01\x90\x90\xa0\xa0\x01"
BOMBS: dict[str, Callable[[], bytes]] = {
    **{f"claim {claim.hex()}": lambda claim=claim: with_layout(claim) for claim in CLAIMS},
    "claim of all": lambda: sign(CLAIMS[1]),
    "many empty layers": lambda: with_layout(b"\xdd" + struct.pack(">I", MANY) + b"\x90" * MANY),
    "many nils": lambda: with_layout(b"\xdd" + struct.pack(">I", MANY) + b"\xc0" * MANY),
    "many maps": lambda: with_layout(b"\x91\xdd" + struct.pack(">I", MANY) + b"\x80" * MANY),
    "the most records": lambda: with_layout(b"\xdc\x00\x14" + (b"\xdc\x10\x00" + SMALL_RECORD * 4096) * 20),
    "deep": lambda: with_layout(b"\x91" * MANY),
    "claims within claims": lambda: with_layout(b"\xdc\x0f\xff" * 900),
    "long text": lambda: with_layout(b"\x91\x91\x99\xdb" + struct.pack(">I", MANY) + b"x" * MANY),
    "unsigned": lambda: os.urandom(MANY),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_memory_is_bounded_by_a_multiple_of_what_came(bomb: str) -> None:
    """Lengths that are claimed and not there cost nothing, what is there costs a small multiple."""
    data = BOMBS[bomb]()
    tracemalloc.start()
    try:
        parse(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    print(f"{bomb}: {len(data)} bytes, {peak / len(data):.1f} times that at the peak")
    assert peak < 64 * len(data) + (1 << 16)


# ------------------------------------------------------------------------------------- rendezvous records
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 32), torn=st.booleans())
def test_a_damaged_log_is_refused_or_read_up_to_the_damage(
    tmp_path_factory: pytest.TempPathFactory, seed: int, torn: bool
) -> None:
    """Any bytes in the file: HandshakeError or values that were written, never another error; writing goes on."""
    rng = random.Random(seed)
    path = tmp_path_factory.mktemp("log") / "rendezvous"
    values = {f"group/blob/{i}": rng.randbytes(rng.randrange(200)) for i in range(4)}
    store = FileRendezvous(path, timeout=5.0)
    for key, value in values.items():
        store.set(key, value)
    store.close()
    data = bytearray(path.read_bytes())
    at = rng.randrange(len(data))
    if torn:
        data[at:] = rng.choice([b"", bytes(rng.randrange(64)), rng.randbytes(rng.randrange(64))])
    else:
        data[at : at + 4] = rng.choice([rng.randbytes(4), b"\xff" * 4, bytes(4)])
    path.write_bytes(data)
    try:
        again = FileRendezvous(path, timeout=5.0)
    except HandshakeError:
        return
    try:
        for key, value in values.items():
            assert again.get(key) in (None, value)
        again.set("group/blob/9", b"new")
        assert again.get("group/blob/9") == b"new"
    finally:
        again.close()


def test_a_log_too_large_to_be_one_is_refused_unread(tmp_path: Path) -> None:
    """A sparse file of terabytes: refused by its size."""
    path = tmp_path / "rendezvous"
    FileRendezvous(path, timeout=5.0).close()
    path.write_bytes(b"EPLBRDV1")
    os.truncate(path, 1 << 40)
    started = time.perf_counter()
    with pytest.raises(HandshakeError, match=f"{1 << 40} bytes are more"):
        FileRendezvous(path, timeout=5.0)
    print(f"refused in {time.perf_counter() - started:.4f} s")


@pytest.mark.parametrize("count", [-5, 0, 1 << 47, 1 << 70])
def test_a_counter_that_somebody_else_wrote_is_refused(count: int) -> None:
    """A start's number that no counting gives: named, before anything is built on it."""

    class Wrong(MemoryRendezvous):
        def add(self, key: str, amount: int) -> int:
            return count

    with pytest.raises(HandshakeError, match=f"counts {count} starts of rank 1"):
        asyncio.run(join(Wrong(), group="g", rank=1, secret=b"s" * 16, timeout=5.0))


def test_a_counter_in_a_file_that_is_no_number_is_refused(tmp_path: Path) -> None:
    """Text where a number should be: HandshakeError."""
    store = FileRendezvous(tmp_path / "rendezvous", timeout=5.0)
    store.set("g/incarnation/1", b"\xffmany")
    with pytest.raises(HandshakeError, match="count"):
        store.add("g/incarnation/1", 1)
    store.close()


def test_only_blob_errors_leave_the_parser() -> None:
    """Everything above was refused by `BlobError` or `ValueError`; one example says which."""
    with pytest.raises(BlobError, match="malformed"):
        open_sealed(sign(ONE[:-3]), KEY)
