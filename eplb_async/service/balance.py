"""How evenly loads fall on the ranks."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb_async.core.placement import Placement
from eplb_async.policy import rank_loads

__all__ = ["balancedness", "layer_balancedness"]


def layer_balancedness(
    loads: Any, placement: Placement, *, ranks: Collection[int] | None = None
) -> NDArray[np.float64]:
    """Mean over maximum of the rank loads of each layer; 1 is even, and is said of a layer without any load.

    Copies of an expert share its load evenly.

    Args:
        loads: ``[num_layers, num_logical]``, such as ``LoadWindow.loads`` gives.
        placement: Where the experts are or would be.
        ranks: Ranks that count besides those that hold experts; default none. A member that came back and holds
            nothing yet counts, one that is out does not.

    Returns:
        ``[num_layers]``, above 0 and up to 1.

    Raises:
        ValueError: The loads are not of the placement's shape.
    """
    shape = (placement.num_layers, placement.num_logical)
    if np.shape(loads) != shape:
        raise ValueError(f"loads have shape {list(np.shape(loads))}; the placement's are {list(shape)}")
    of_ranks = rank_loads(loads, placement)
    slots = placement.physical_to_logical_map.reshape(placement.num_layers, placement.ep_size, -1)
    counted = np.union1d(np.flatnonzero((slots >= 0).any(axis=(0, 2))), np.array(list(ranks or ()), dtype=int))
    mean, peak = of_ranks[:, counted].mean(axis=1), of_ranks.max(axis=1)
    even: NDArray[np.float64] = np.divide(mean, peak, out=np.ones_like(peak), where=peak > 0)
    return even


def balancedness(loads: Any, placement: Placement, *, ranks: Collection[int] | None = None) -> float:
    """The mean over the layers of :func:`layer_balancedness`, with the same arguments and errors."""
    return float(layer_balancedness(loads, placement, ranks=ranks).mean())
