"""What the policy refuses, and how it says so."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_async.core.placement import Placement
from eplb_async.errors import PlacementError
from eplb_async.policy import rebalance_experts

LOAD = np.ones((2, 16))


def changed(value: float) -> np.ndarray:
    load = LOAD.copy()
    load[1, 3] = value
    return load


def test_ranks_that_do_not_divide_over_nodes() -> None:
    """C32: the error names both numbers, whether or not the groups divide over the nodes."""
    for groups in (1, 4, 8):
        with pytest.raises(PlacementError, match="num_ranks 16 does not divide by num_nodes 3"):
            rebalance_experts(LOAD, 32, groups, 3, 16)


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (changed(float("nan")), "layer 1, expert 3 is NaN"),
        (changed(float("inf")), "layer 1, expert 3 is infinite"),
        (changed(-1.0), "layer 1, expert 3 is negative: -1.0"),
        (LOAD[0], r"shape \(16,\)"),
        (LOAD[:, :0], r"shape \(2, 0\)"),
        ([[1, 2], [3]], "not an array of numbers"),
        ([["many"]], "not an array of numbers"),
    ],
)
def test_loads(load: object, said: str) -> None:
    """Numbers that no load can be, and shapes that no load has."""
    with pytest.raises(PlacementError, match=said):
        rebalance_experts(load, 16, 1, 1, 4)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((18, 1, 1, 4), "num_replicas 18 does not divide by num_ranks 4"),
        ((16, 3, 1, 4), "num_logical 16 does not divide by num_groups 3"),
        ((12, 1, 1, 4), "num_replicas is 12; 16 experts need at least as many"),
        ((16, 1, 1, 0), "num_ranks is 0"),
        ((16, 1, 1, 4.0), "num_ranks is 4.0; it must be an integer"),
    ],
)
def test_sizes(sizes: tuple[int, int, int, int], said: str) -> None:
    """Each number that does not fit is named."""
    with pytest.raises(PlacementError, match=said):
        rebalance_experts(LOAD, *sizes)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"current": Placement.initial(2, 16, ep_size=4, num_redundant=4)}, "20 slots, not 16"),
        ({"current": Placement.initial(3, 16, ep_size=8)}, "3 layers, not 2; 8 ranks, not 4"),
        ({"current": [[0, 1]]}, "do not divide over ep_size 4"),
        ({"max_moves": 3}, "without current there is nothing to move from"),
        ({"current": Placement.initial(2, 16, ep_size=4), "max_moves": -1}, "max_moves is -1"),
        ({"min_gain": 1.0}, "min_gain is 1.0"),
        ({"min_gain": float("nan")}, "min_gain is nan"),
        ({"out": [4]}, "out names rank 4"),
        ({"out": [0]}, "3 of 4 ranks are left, with 12 slots; 16 experts do not fit"),
    ],
)
def test_options(options: dict[str, object], said: str) -> None:
    """A placement of other sizes, a budget for nothing, ranks that do not exist."""
    with pytest.raises(PlacementError, match=said):
        rebalance_experts(LOAD, 16, 1, 1, 4, **options)


def test_emptying_a_rank_on_too_small_a_budget() -> None:
    """The error says how many moves it takes; with as many it is done."""
    current = Placement.initial(2, 16, ep_size=4, num_redundant=8)
    with pytest.raises(PlacementError, match="max_moves is 3; to empty the ranks that are out takes 8"):
        rebalance_experts(LOAD, 24, 1, 1, 4, current=current, out=[1], max_moves=3)
    done = rebalance_experts(LOAD, 24, 1, 1, 4, current=current, out=[1], max_moves=8)
    assert (done.placement.local(1) == -1).all()
    assert done.moves == 8
