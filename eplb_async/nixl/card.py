"""An agent's card: what a peer needs to read from us, sealed so that damage is found before NIXL sees it (I-14)."""

from __future__ import annotations

import hashlib
import hmac
from sys import intern
from typing import Annotated

import msgspec

from eplb_async.core.text import is_one_line, one_line
from eplb_async.errors import HandshakeError
from eplb_async.nixl.native import Extent

_MAGIC = b"EPLBcard"
_VERSION = 1
_DIGEST = 32
_HEAD = len(_MAGIC) + _DIGEST

_Natural = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class _Extent(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    name: _Name
    address: _Natural
    row_bytes: _Natural
    row_stride: _Natural
    num_rows: _Natural
    memory: Annotated[str, msgspec.Meta(pattern="^(DRAM|VRAM)$")]
    device: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]


class Card(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """What an agent says of itself.

    Attributes:
        version: Version of this format.
        name: Agent name.
        metadata: NIXL's opaque metadata.
        regions: Registered memory that peers may read.
    """

    version: int
    name: _Name
    metadata: Annotated[bytes, msgspec.Meta(min_length=1, max_length=1 << 24)]
    regions: Annotated[list[_Extent], msgspec.Meta(max_length=1 << 20)]

    def extents(self) -> list[Extent]:
        """The regions as extents; names that many peers use are kept once."""
        return [
            Extent(intern(r.name), r.address, r.row_bytes, r.row_stride, r.num_rows, intern(r.memory), r.device)
            for r in self.regions
        ]


def seal(name: str, metadata: bytes, extents: list[Extent], key: bytes) -> bytes:
    """Encode and sign a card."""
    regions = [_Extent(e.name, e.address, e.row_bytes, e.row_stride, e.num_rows, e.memory, e.device) for e in extents]
    payload = msgspec.msgpack.encode(Card(_VERSION, name, metadata, regions))
    return _MAGIC + _digest(payload, key) + payload


def unseal(blob: bytes, key: bytes, *, limit: int) -> Card:
    """Check and decode a card.

    Raises:
        HandshakeError: It is oversized, no card, damaged, forged, of another version, or out of range.
    """
    if not isinstance(blob, bytes):
        raise HandshakeError(f"a metadata blob must be bytes, not {type(blob).__name__}")
    if len(blob) > limit:
        raise HandshakeError(f"metadata blob refused: {len(blob)} bytes are more than max_blob_bytes={limit}")
    if len(blob) <= _HEAD or not blob.startswith(_MAGIC):
        raise HandshakeError(f"metadata blob refused: its {len(blob)} bytes are no agent card, or truncated")
    payload = blob[_HEAD:]
    if not hmac.compare_digest(_digest(payload, key), blob[len(_MAGIC) : _HEAD]):
        raise HandshakeError("metadata blob refused: truncated, damaged, or made without this job's secret")
    try:
        card = msgspec.msgpack.decode(payload, type=Card)
    except msgspec.MsgspecError as error:
        raise HandshakeError(f"metadata blob refused: {one_line(str(error))}") from error
    if card.version != _VERSION:
        raise HandshakeError(f"metadata blob refused: card version {card.version}, this is {_VERSION}")
    if not is_one_line(card.name):
        raise HandshakeError(f"metadata blob refused: agent name {card.name!r} is not one line")
    for extent in card.extents():
        if extent.row_stride < extent.row_bytes or extent.end >= 1 << 63:
            raise HandshakeError(f"metadata blob refused: region {extent.name!r} is out of range")
    return card


def _digest(payload: bytes, key: bytes) -> bytes:
    return hmac.new(b"eplb-async card" + key, payload, hashlib.sha256).digest()
