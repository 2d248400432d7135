"""Counts of tokens as an engine makes them: what is refused, and which expert each of them is of."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb_async.core.placement import Placement

__all__ = ["By", "Floats", "as_counts", "as_experts", "infer"]

Floats = NDArray[np.float64]

_LIMIT = 2.0**53
_LIMIT_BITS = np.uint64(np.float64(_LIMIT).view(np.uint64))
"""Seen as integers, exactly the floats from 0 to below 2**53 are below this: others have the sign bit, or more."""


class By(StrEnum):
    """What a column of counts is."""

    SLOTS = "slots"
    """A slot of any rank: ``[num_layers, num_physical]``."""
    EXPERTS = "experts"
    """A logical expert: ``[num_layers, num_logical]``."""
    LOCAL = "local"
    """A slot of this rank: ``[num_layers, num_local_experts]``."""


def infer(shape: Sequence[int], placement: Placement, by: str | None, rank: int | None) -> tuple[By, slice]:
    """What the columns of counts are, and which slots (none if they are experts).

    Args:
        shape: Their shape.
        placement: Gives the sizes.
        by: ``"slots"``, ``"experts"`` or ``"local"``; ``None`` goes by the width.
        rank: This rank, or ``None`` where it is not known.

    Raises:
        ValueError: The shape fits no kind, or not ``by``; or several, and ``by`` is not given; or ``by`` is unknown; or
            local counts come without a rank.
    """
    known = _widths(placement)
    if by is None:
        fit = [kind for kind, width in known.items() if tuple(shape) == (placement.num_layers, width)]
        if not fit:
            raise ValueError(f"counts have shape {list(shape)}; they must be {_spell(placement)}")
        if len(fit) > 1:
            kinds = " or ".join(f'by="{kind.value}"' for kind in fit)
            raise ValueError(f"counts of shape {list(shape)} can be of several kinds; say {kinds}")
        kind = fit[0]
    else:
        try:
            kind = By(by)
        except ValueError:
            raise ValueError(f'by is {by!r}; it must be "slots", "experts" or "local"') from None
        if tuple(shape) != (placement.num_layers, known[kind]):
            wanted = [placement.num_layers, known[kind]]
            raise ValueError(f'counts have shape {list(shape)}; by="{kind.value}" takes {wanted}')
    if kind is By.SLOTS:
        return kind, slice(0, known[kind])
    if kind is By.EXPERTS:
        return kind, slice(0, 0)
    if rank is None:
        raise ValueError("counts of this rank's slots need the rank; give it to the window or counter")
    return kind, slice(rank * known[kind], (rank + 1) * known[kind])


def as_counts(counts: Any) -> Floats:
    """Counts as float64, checked in one pass; the caller's own array where it is that already.

    Args:
        counts: Integers, float32 or float64, of any shape: array, torch CPU tensor or lists.

    Raises:
        ValueError: The dtype is another, the tensor is not in CPU memory, or a count is NaN, negative or 2**53 or more.
    """
    array = counts if type(counts) is np.ndarray else _array(counts)
    if array.dtype.kind not in "iuf" or array.dtype == np.float16:
        raise ValueError(f"counts have dtype {array.dtype}; they must be integers, float32 or float64")
    floats: Floats = array.astype(np.float64, order="C", copy=False)
    if floats.size and floats.view(np.uint64).max() >= _LIMIT_BITS:
        wrong = np.argwhere(~((floats >= 0) & (floats < _LIMIT)))
        if wrong.size:  # otherwise it was a negative zero
            at = tuple(wrong[0].tolist())
            raise ValueError(f"count {floats[at]} at {list(at)} is not a number from 0 to 2**53")
    return floats


def as_experts(counts: Floats, slots: NDArray[np.int32], num_logical: int) -> tuple[Floats, float]:
    """Counts of slots as counts of the experts in them.

    Args:
        counts: float64 ``[n, width]``.
        slots: The logical expert in each slot, -1 for none, ``[n, width]``.
        num_logical: Logical experts.

    Returns:
        float64 ``[n, num_logical]``; and the counts on empty slots, which are of no expert.
    """
    wide = num_logical + 1
    keys = slots % wide + (np.arange(len(slots)) * wide)[:, None]  # an empty slot counts in a last column of its own
    sums = np.bincount(keys.ravel(), weights=counts.ravel(), minlength=len(slots) * wide)
    found: Floats = sums.reshape(-1, wide).astype(np.float64, copy=False)
    return found[:, :-1], float(found[:, -1].sum())


def _array(counts: Any) -> NDArray[Any]:
    if hasattr(counts, "detach"):
        if counts.device.type != "cpu":
            raise ValueError(f"counts are on {counts.device}; attach() a counter that stays there, or copy them over")
        try:
            return np.asarray(counts.detach().numpy())
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"counts of dtype {counts.dtype} cannot be read: {error}") from error
    return np.asarray(counts)


def _spell(placement: Placement) -> str:
    layers = placement.num_layers
    return " or ".join(f"[{layers}, {width}] ({kind.value})" for kind, width in _widths(placement).items())


def _widths(placement: Placement) -> dict[By, int]:
    return dict(zip(By, (placement.num_physical, placement.num_logical, placement.num_local_experts), strict=True))
