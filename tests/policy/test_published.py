"""Without a current placement: as balanced as the published algorithm."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_async.bench.published_policy import as_vllm_loops, published_rebalance
from eplb_async.core.placement import Placement
from eplb_async.policy import rank_loads, rebalance_experts

LOAD = np.array(
    [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ]
)
PLACED = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]


def balancedness(load: np.ndarray, placement: Placement) -> np.ndarray:
    loads = rank_loads(load, placement)
    return loads.mean(axis=1) / loads.max(axis=1)


def test_the_yardstick_gives_the_published_example() -> None:
    """The example of deepseek-ai/EPLB: 12 experts, 16 copies, 4 groups, 2 nodes, 8 ranks."""
    assert published_rebalance(LOAD, 16, 4, 2, 8).tolist() == PLACED
    assert as_vllm_loops(LOAD, 16, 4, 2, 8).tolist() == PLACED


def test_the_policy_gives_the_published_example() -> None:
    """The same placement, and the two other maps of it."""
    physical, logical, count = rebalance_experts(LOAD, 16, 4, 2, 8)
    assert physical.tolist() == PLACED
    assert count.sum(axis=1).tolist() == [16, 16]
    assert logical[0, 5].tolist() == [0, 2]
    assert logical[0, 7].tolist() == [3, -1]


@pytest.mark.parametrize(("ranks", "replicas", "groups", "nodes"), [(32, 288, 1, 1), (64, 320, 8, 8), (32, 288, 8, 4)])
@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.1, 1.5])
def test_as_balanced_as_published(ranks: int, replicas: int, groups: int, nodes: int, exponent: float) -> None:
    """In every layer where the published placement has no rank with two copies of an expert, and on the whole.

    Two copies on a rank give it a double part of an expert. Ours never does that, so a layer may lose a little by it.
    """
    rng = np.random.default_rng(7)
    load = rng.permuted(np.tile(1 / np.arange(1, 257) ** exponent, (6, 1)), axis=1) * rng.lognormal(0, 0.3, (6, 256))
    sizes = (replicas, groups, nodes, ranks)
    ours = rebalance_experts(load, *sizes)
    published = Placement(published_rebalance(load, *sizes), ep_size=ranks, num_logical=256)
    apart = np.ones(6, dtype=bool)
    for rank in range(ranks):
        apart &= [len(set(row)) == len(row) for row in published.local(rank).tolist()]
    reference = balancedness(load, published)
    assert (ours.balancedness[apart] >= reference[apart] * (1 - 1e-9)).all()
    assert ours.balancedness.mean() >= reference.mean() * 0.999
    assert np.allclose(ours.balancedness, balancedness(load, ours.placement))
    for rank in range(ranks):
        assert all(len(set(row)) == len(row) for row in ours.placement.local(rank).tolist())
    assert rebalance_experts(load.tolist(), *sizes).placement == ours.placement


def test_groups_that_do_not_divide_over_nodes_are_ignored() -> None:
    """As published: then nodes do not count."""
    load = np.random.default_rng(1).random((3, 24))
    spread = rebalance_experts(load, 32, 3, 2, 8)
    assert not spread.hierarchical
    assert spread.placement == rebalance_experts(load, 32, 1, 1, 8).placement


def test_no_load_at_all_spreads_the_spare_copies() -> None:
    """Nothing is known, so no expert gets more than one copy more than another."""
    count = rebalance_experts(np.zeros((2, 8)), 12, 1, 1, 4).logical_replica_count
    assert count.max() == 2
    assert count.min() == 1
