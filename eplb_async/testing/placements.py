"""Random placements, for demonstrations and tests."""

from __future__ import annotations

import numpy as np

from eplb_async.core.placement import Placement


def random_placement(
    rng: np.random.Generator,
    *,
    num_layers: int,
    num_logical: int,
    num_local_experts: int,
    ep_size: int,
    empty: int = 0,
) -> Placement:
    """A placement in which every expert has a copy, spare slots hold random copies, and all are shuffled.

    Args:
        rng: Source of randomness.
        num_layers: Layers.
        num_logical: Logical experts.
        num_local_experts: Slots of each rank.
        ep_size: Ranks.
        empty: Slots left empty (-1) in each layer.

    Returns:
        The placement.
    """
    num_physical = num_local_experts * ep_size
    spare = num_physical - num_logical - empty
    if spare < 0:
        raise ValueError(f"{num_logical} experts and {empty} empty slots do not fit {num_physical} slots")
    layers = []
    for _ in range(num_layers):
        copies = rng.integers(0, num_logical, spare)
        slots = np.concatenate([np.arange(num_logical), copies, np.full(empty, -1)])
        layers.append(rng.permutation(slots))
    return Placement(np.stack(layers), ep_size=ep_size, num_logical=num_logical)
