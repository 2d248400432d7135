"""Introductions: what a rank tells its peers of itself, sealed so that nothing forged or cut reaches NIXL.

A sealed introduction is::

    magic "EPLB" | version u16 | payload length u32 | payload (msgpack) | HMAC-SHA256 of all before it

Truncated metadata that NIXL sees poisons that peer's name for good (N-23), and whoever holds metadata can
read registered memory, so a blob is checked from the outside in (I-14): size, magic, version, length, keyed
digest, and only then its content is decoded. Pickle is never used.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterator
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from eplb_async.core.text import is_one_line, one_line

MAX_BLOB_BYTES = 4 << 20
VERSION = 2
KEY_SIZE = 32

_MAGIC = b"EPLB"
_HEADER = struct.Struct(">4sHI")
_MAC_SIZE = hashlib.sha256().digest_size
_MAX_RANKS = 1 << 16
_MAX_TEXT = 256
_MAX_LAYERS = _MAX_TENSORS = 1 << 12
_DIGEST_SIZES = range(8, 65)
_SPACE = 1 << 63

T = TypeVar("T")

# As `Layout.to_plain` gives it; bounded here so that a hostile one is refused while it is read, not after.
_Sizes = Annotated[tuple[int, ...], Meta(max_length=64)]
_Tensor = tuple[str, int, int, int, _Sizes, _Sizes, str, str, int]
_Layout = Annotated[
    tuple[Annotated[tuple[_Tensor, ...], Meta(max_length=_MAX_TENSORS)], ...], Meta(max_length=_MAX_LAYERS)
]

_Text = Annotated[str, Meta(max_length=_MAX_TEXT)]
_Texts = Annotated[dict[_Text, _Text], Meta(max_length=16)]


class BlobError(ValueError):
    """An introduction is refused; the message is a short reason that fits behind "rank 3: "."""


class Introduction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a rank tells its peers of itself.

    Attributes:
        group: Group on the rendezvous.
        rank: Rank of the sender.
        ep_size: Size of its group.
        agent: Name of its NIXL agent.
        incarnation: Identity of this start; later ones compare greater.
        metadata: NIXL's agent metadata, opaque.
        layout: Where its rows are, as ``Layout.to_plain`` gives it; its numbers are checked by the caller.
        placement_digest: Digest of the placement it was opened with.
        agreed: Its values of what all ranks must have alike, by name.
        node: Host label.
        term: Term of its view; 0 while it opens.
        version: Version of its weights.
        num_logical: Logical experts per layer.
        slots: Logical expert in each slot, little-endian int32 ``[num_layers, slots]``: in its own slots while it
            opens, in those of all ranks above term 0. Opaque here, checked by the caller; empty where it does not
            say.
    """

    group: str
    rank: int
    ep_size: int
    agent: str
    incarnation: int
    metadata: bytes
    layout: _Layout
    placement_digest: bytes
    agreed: _Texts = {}  # msgspec copies it
    node: str = ""
    term: int = 0
    version: int = 0
    num_logical: int = 0
    slots: bytes = b""

    def __repr__(self) -> str:
        return (
            f"Introduction(group={self.group!r}, rank={self.rank} of {self.ep_size}, agent={self.agent!r}, "
            f"incarnation={self.incarnation}, {len(self.metadata)} bytes of metadata)"
        )


_decoder = msgspec.msgpack.Decoder(Introduction)


def seal(intro: Introduction, key: bytes) -> bytes:
    """Serialise and sign an introduction.

    Args:
        intro: What to say.
        key: The job's key, ``KEY_SIZE`` bytes (see ``join``).

    Raises:
        BlobError: It would be refused by the peers; says why.
    """
    _check(intro)
    payload = msgspec.msgpack.encode(intro)
    size = _HEADER.size + len(payload) + _MAC_SIZE
    if size > MAX_BLOB_BYTES:
        raise BlobError(f"oversized: {size} bytes, {MAX_BLOB_BYTES} are allowed")
    signed = _HEADER.pack(_MAGIC, VERSION, len(payload)) + payload
    return signed + _mac(signed, key)


def open_sealed(
    data: bytes,
    key: bytes,
    *,
    limit: int = MAX_BLOB_BYTES,
    group: str | None = None,
    rank: int | None = None,
    ep_size: int | None = None,
    newer_than: int = -1,
) -> Introduction:
    """Check a sealed introduction, from the outside in, and decode it.

    Args:
        data: Bytes from the rendezvous.
        key: The job's key.
        limit: Largest size accepted.
        group: Group that it must name, or None for any.
        rank: Rank that it must name, or None for any.
        ep_size: Size that it must name, or None for any.
        newer_than: Incarnation that it must exceed.

    Raises:
        BlobError: It is refused; says why. Nothing of an unauthenticated blob is decoded.
    """
    payload = _authenticate(data, key, limit)
    try:
        intro = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BlobError(f"malformed: {one_line(str(error))}; the peer runs another build of this library?") from error
    _check(intro)
    _match("group", intro.group, group)
    _match("rank", intro.rank, rank)
    _match("ep_size", intro.ep_size, ep_size)
    if intro.incarnation <= newer_than:
        raise BlobError(f"replayed: incarnation {intro.incarnation} is not newer than {newer_than}")
    return intro


def _authenticate(data: bytes, key: bytes, limit: int) -> bytes:
    if len(data) > limit:
        raise BlobError(f"oversized: {len(data)} bytes, {limit} are allowed")
    least = _HEADER.size + _MAC_SIZE
    if data[: len(_MAGIC)] != _MAGIC[: len(data)]:
        raise BlobError("not an introduction: it begins with other bytes; does something else use this key?")
    if len(data) < _HEADER.size:
        raise BlobError(f"truncated: {len(data)} bytes, at least {least} are needed")
    _, version, length = _HEADER.unpack_from(data)
    if version != VERSION:
        raise BlobError(f"another version: {version}, this rank speaks {VERSION}; run the same release on all ranks")
    if len(data) != least + length:
        kind = "truncated" if len(data) < least + length else "too long"
        raise BlobError(f"{kind}: {len(data)} of {least + length} bytes")
    signed, mac = data[:-_MAC_SIZE], data[-_MAC_SIZE:]
    if not hmac.compare_digest(_mac(signed, key), mac):
        raise BlobError(
            "wrong secret or forged: keyed digest differs; is EPLB_ASYNC_SECRET the same there, and is this "
            "not left over from an earlier run?"
        )
    return signed[_HEADER.size :]


def _mac(signed: bytes, key: bytes) -> bytes:
    if len(key) != KEY_SIZE:
        raise ValueError(f"a job key has {KEY_SIZE} bytes, this one {len(key)}")
    return hmac.digest(key, signed, "sha256")


def _match(what: str, value: T, wanted: T | None) -> None:
    if wanted is not None and value != wanted:
        raise BlobError(f"another {what}: it says {value!r}, expected {wanted!r}")


def _check(intro: Introduction) -> None:
    for problem in _problems(intro):
        raise BlobError(f"out of range: {problem}")


def _problems(intro: Introduction) -> Iterator[str]:
    if not 0 < intro.ep_size <= _MAX_RANKS:
        yield f"ep_size {intro.ep_size}"
    if not 0 <= intro.rank < intro.ep_size:
        yield f"rank {intro.rank} of {intro.ep_size}"
    for what in ("incarnation", "term", "version", "num_logical"):
        if not 0 <= getattr(intro, what) < _SPACE:
            yield f"{what} {getattr(intro, what)}"
    if not intro.agent:
        yield "no agent name"
    for what in ("group", "agent", "node"):
        text = getattr(intro, what)
        if len(text) > _MAX_TEXT:
            yield f"{what} has {len(text)} characters, {_MAX_TEXT} are allowed"
        if not is_one_line(text):
            yield f"{what} {text[:_MAX_TEXT]!r} is not one line"
    for text in (*intro.agreed, *intro.agreed.values()):
        if not is_one_line(text):
            yield f"setting {text!r} is not one line"
    if not intro.metadata:
        yield "no NIXL metadata"
    if len(intro.placement_digest) not in _DIGEST_SIZES:
        yield f"placement digest of {len(intro.placement_digest)} bytes"
