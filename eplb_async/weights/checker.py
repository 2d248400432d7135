"""What arrived is what was meant: entries first, then digests where they are kept (I-16)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from eplb_async.core.incoming import Incoming
from eplb_async.errors import IntegrityError
from eplb_async.weights.digests import Digester
from eplb_async.weights.entries import Wanted, check_digest, check_entry, suspects


async def wrong_rows(
    moves: Incoming, version: int, entries: torch.Tensor, tensors: Sequence[torch.Tensor], digester: Digester | None
) -> dict[int, IntegrityError]:
    """Staged rows that are not what was wanted, by the index of their move.

    Args:
        moves: What each row is to be.
        version: Weight version that each is to be of.
        entries: The entries that came with them, uint8 ``[num_moves, 32]`` on the CPU.
        tensors: Their byte rows in every tensor that has bytes, uint8 ``[num_moves, row_bytes]`` each.
        digester: Digests them; ``None`` to check entries only.
    """

    def wanted(i: int) -> Wanted:
        columns = (moves.layer, moves.expert, moves.source, moves.source_slot)
        layer, expert, source, slot = (int(column[i]) for column in columns)
        return Wanted(layer, expert, version, source, slot)

    wrong: dict[int, IntegrityError] = {}
    came = entries.numpy()
    for i in suspects(came, moves.expert, version):
        try:
            check_entry(came[i].tobytes(), wanted(i))
        except IntegrityError as error:
            wrong[i] = error
    if digester is None:
        return wrong
    right: dict[int, list[int]] = {}  # rows by layer, whose number is in their digests
    for i, layer in enumerate(moves.layer.tolist()):
        if i not in wrong:
            right.setdefault(layer, []).append(i)
    for layer, rows in right.items():
        for i, digest in zip(rows, await digester.digests(layer, tensors, rows), strict=True):
            try:
                check_digest(came[i].tobytes(), digest, wanted(i))
            except IntegrityError as error:
                wrong[i] = error
    return wrong
