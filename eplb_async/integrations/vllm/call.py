"""What one call moves: a layer, where its experts are, and which of them this rank receives."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from eplb_async.integrations.vllm.messages import DIGEST_SIZE
from eplb_async.integrations.vllm.tensors import Fetch

__all__ = ["Call"]


class Call:
    """One call that is being prepared; without a layer it is the fence alone.

    Args:
        layer: What is moved.
        old: Where its experts are: logical expert of each slot, -1 for none ``[num_ranks, num_local_experts]``.

    Attributes:
        layer: What is moved, or ``None``.
        digest: Of ``old``; all ranks must have the same.
        fetches: What this rank receives, by row of the buffer.
    """

    def __init__(self, layer: int | None = None, old: np.ndarray | None = None) -> None:
        self.layer = layer
        self.digest = bytes(DIGEST_SIZE) if old is None else blake2b(old.tobytes(), digest_size=DIGEST_SIZE).digest()
        self.fetches: dict[int, Fetch] = {}
        self._old = old
        self._rows: dict[int, dict[int, list[int]]] = {}

    @property
    def number(self) -> int:
        """The layer as ranks tell it each other: -1 for none."""
        return -1 if self.layer is None else self.layer

    def rows(self, rank: int, expert: int) -> Sequence[int]:
        """The rows in which a rank holds an expert, in order."""
        if (rows := self._rows.get(rank)) is None:
            rows = self._rows[rank] = {}
            for row, held in enumerate([] if self._old is None else self._old[rank].tolist()):
                if held != -1:
                    rows.setdefault(held, []).append(row)
        return rows.get(expert, ())
