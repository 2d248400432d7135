"""What arrived is what was meant: entries first, then digests where they are kept (I-16)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from eplb_async.errors import IntegrityError
from eplb_async.weights.digests import Digester
from eplb_async.weights.entries import Wanted, check_digest, check_entry, suspects


async def wrong_rows(
    wanted: Sequence[Wanted], entries: torch.Tensor, tensors: Sequence[torch.Tensor], digester: Digester | None
) -> dict[int, IntegrityError]:
    """Staged rows of one layer that are not what was wanted, by their index.

    Args:
        wanted: What each row is to be.
        entries: The entries that came with them, uint8 ``[n, 32]`` on the CPU.
        tensors: Their byte rows in every tensor that has bytes, uint8 ``[n, row_bytes]`` each.
        digester: Digests them; ``None`` to check entries only.
    """
    wrong: dict[int, IntegrityError] = {}
    came = entries.numpy()
    for i in suspects(came, wanted):
        try:
            check_entry(came[i].tobytes(), wanted[i])
        except IntegrityError as error:
            wrong[i] = error
    rows = [i for i in range(len(wanted)) if i not in wrong]
    if digester is None or not rows:
        return wrong
    for i, digest in zip(rows, await digester.digests(wanted[0].layer, tensors, rows), strict=True):
        try:
            check_digest(came[i].tobytes(), digest, wanted[i])
        except IntegrityError as error:
            wrong[i] = error
    return wrong
