"""What the rivals over NIXL share: where every rank's rows are, and agents that know each other."""

from __future__ import annotations

import base64
import uuid
from typing import Any

import numpy as np

from eplb_async.bench.work import Fetch, Work

__all__ = ["Rows", "agent_name", "blocks", "exchange", "remote"]

Rows = list[list[int]]
"""Addresses of a rank's tensors, ``[layers][tensors]``; their rows follow each other without a gap."""


def agent_name(kind: str, rank: int) -> str:
    """A name that no agent before it had."""
    return f"{kind}-{rank}-{uuid.uuid4().hex[:12]}"


def exchange(work: Work, metadata: bytes) -> tuple[dict[int, bytes], list[Rows]]:
    """Give this rank's agent metadata and row addresses, take everyone's.

    Returns:
        The metadata of each peer, and the rows of all ranks.
    """
    rows = [[tensor.data_ptr() for tensor in layer] for layer in work.rows.layers]
    given = work.group.gather({"metadata": base64.b64encode(metadata).decode(), "rows": rows})
    blobs = {
        rank: base64.b64decode(each["metadata"], validate=True) for rank, each in enumerate(given) if rank != work.rank
    }
    return blobs, [each["rows"] for each in given]


def blocks(addresses: list[int], nbytes: int) -> np.ndarray[Any, Any]:
    """Descriptors of equal length in CPU memory, uint64 ``[n, 3]``."""
    found = np.zeros((len(addresses), 3), np.uint64)
    found[:, 0] = addresses
    found[:, 1] = nbytes
    return found


def remote(rows: list[Rows], layer: int, tensor: int, fetch: Fetch, nbytes: int) -> int:
    """Address of the row that a fetch reads."""
    return rows[fetch.source][layer][tensor] + fetch.source_slot * nbytes
