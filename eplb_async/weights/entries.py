"""The entry of an expert row: which logical expert it is, of which weight version, and its digest (I-16)."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from eplb_async.errors import IntegrityError

ENTRY_BYTES = 32
ENTRY_NAME = "eplb_async.entries"
DIGEST_BYTES = 16
MAX_VERSION = (1 << 63) - 1  # that a caller may give; the field has room to count on
_ENTRY = struct.Struct("<IiQ16s")  # magic, logical expert (-1: none), weight version, digest
_FIELDS = np.dtype([("magic", "<u4"), ("expert", "<i4"), ("version", "<u8"), ("digest", "V16")])  # as _ENTRY
_MAGIC = 0x45504C31
_NO_DIGEST = bytes(DIGEST_BYTES)


class Wanted(NamedTuple):
    """What a staged row is to be, and where it came from.

    Attributes:
        layer: Its layer.
        expert: The logical expert that was planned.
        version: Weight version of this rank.
        rank: Rank it came from; this one for a local copy.
        slot: Slot of that rank.
    """

    layer: int
    expert: int
    version: int
    rank: int
    slot: int

    def __str__(self) -> str:
        return f"layer {self.layer}, expert {self.expert} from slot {self.slot} of rank {self.rank}"

    def wrong(self, text: str) -> IntegrityError:
        """The error that says so."""
        return IntegrityError(f"{self}: {text}", layer=self.layer, expert=self.expert, rank=self.rank, slot=self.slot)


def pack_entries(experts: Sequence[int], version: int, digests: Sequence[bytes] | None = None) -> bytes:
    """Entries of slots that hold these logical experts, -1 for none; ``ENTRY_BYTES`` each.

    Args:
        experts: Logical expert of each slot.
        version: Weight version of the rows.
        digests: Digest of each, 16 bytes; zeros where digests are not kept.
    """
    kept = digests if digests is not None else [_NO_DIGEST] * len(experts)
    return b"".join(
        _ENTRY.pack(_MAGIC, int(expert), version, digest) for expert, digest in zip(experts, kept, strict=True)
    )


def entry_rows(experts: Sequence[int], version: int, digests: Sequence[bytes] | None = None) -> torch.Tensor:
    """What :func:`pack_entries` packs, as rows, uint8 ``[n, ENTRY_BYTES]``."""
    packed = bytearray(pack_entries(experts, version, digests))
    return torch.frombuffer(packed, dtype=torch.uint8).view(-1, ENTRY_BYTES)


def suspects(entries: npt.NDArray[np.uint8], experts: npt.ArrayLike, version: int) -> list[int]:
    """Entries ``[n, ENTRY_BYTES]`` that :func:`check_entry` has something to say of, found all at once.

    Args:
        entries: What came.
        experts: The logical expert that each was to be ``[n]``.
        version: The weight version that all were to be of.
    """
    came: Any = entries.view(_FIELDS)[:, 0]
    right = came["magic"] == _MAGIC
    right &= came["expert"] == experts
    right &= came["version"] == np.uint64(version)  # as floats, many are equal
    return np.flatnonzero(~right).tolist()


def check_entry(entry: bytes, wanted: Wanted) -> None:
    """Check that a staged row is the expert and the weight version that were meant (I-16).

    Raises:
        IntegrityError: It is not; the source changed meaning since the plan.
    """
    magic, found, its_version, _ = _ENTRY.unpack(entry)
    if magic != _MAGIC:
        raise wanted.wrong("what arrived carries no entry; the source is not the memory it was")
    if (found, its_version) != (wanted.expert, wanted.version):
        changed = "it changed since the plan was made"
        if found == wanted.expert:
            changed += ": its owner updates its weights. Migrate again when all ranks have that update"
        raise wanted.wrong(
            f"wanted expert {wanted.expert} of weight version {wanted.version}, the source holds expert {found} of "
            f"version {its_version}; {changed}"
        )


def check_digest(entry: bytes, digest: bytes, wanted: Wanted) -> None:
    """Check that a staged row has the bytes that its source had when its digest was made (I-16).

    Raises:
        IntegrityError: It has not. Which of the layer's tensors differs is not known: one digest covers all.
    """
    if _ENTRY.unpack(entry)[3] != digest:
        raise wanted.wrong(
            f"the bytes that arrived are not those that weight version {wanted.version} had there: they were damaged "
            f"in memory or on the way, or written outside updating_weights(). No row was changed. Migrate again; "
            f"if this comes back, load that expert again on rank {wanted.rank}, inside updating_weights()"
        )
