"""The entry of an expert row: which logical expert it is, of which weight version (I-16)."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from eplb_async.errors import IntegrityError

ENTRY_BYTES = 32
ENTRY_NAME = "eplb_async.entries"
_ENTRY = struct.Struct("<IiQ16s")  # magic, logical expert (-1: none), weight version, digest
_MAGIC = 0x45504C31


def pack_entries(experts: Sequence[int], version: int) -> bytes:
    """Entries of slots that hold these logical experts, -1 for none; ``ENTRY_BYTES`` each."""
    return b"".join(_ENTRY.pack(_MAGIC, int(expert), version, b"") for expert in experts)


def entry_rows(experts: Sequence[int], version: int) -> torch.Tensor:
    """Entries of slots that hold these logical experts, as rows, uint8 ``[n, ENTRY_BYTES]``."""
    packed = bytearray(pack_entries(experts, version))
    return torch.frombuffer(packed, dtype=torch.uint8).view(-1, ENTRY_BYTES)


def check_entry(entry: bytes, expert: int, version: int, where: str) -> None:
    """Check that a staged row is the expert and the weight version that were meant (I-16).

    Raises:
        IntegrityError: It is not; the source changed meaning since the plan.
    """
    magic, found, its_version, _ = _ENTRY.unpack(entry)
    if magic != _MAGIC:
        raise IntegrityError(f"{where}: what arrived carries no entry; the source is not the memory it was")
    if (found, its_version) != (expert, version):
        raise IntegrityError(
            f"{where}: wanted expert {expert} of weight version {version}, the source holds expert {found} of "
            f"version {its_version}; it changed since the plan was made"
        )
