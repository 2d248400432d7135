"""What the coordinator decides: gates, ranks that are out, and what a policy may answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_async.core.placement import Placement
from eplb_async.errors import PlacementError
from eplb_async.service import ServiceSettings
from eplb_async.service.decision import count_moves, decide, misplaced
from eplb_async.service.payloads import Loads, Verdict

SETTINGS = ServiceSettings()
PLACEMENT = Placement.initial(3, 6, ep_size=3, num_redundant=3)
SKEWED = np.tile([100.0, 50.0, 10.0, 1.0, 1.0, 1.0], (3, 1))


def decided(loads: Any = SKEWED, members: tuple[int, ...] = (0, 1, 2), **options: Any) -> Verdict:
    answers = {rank: Loads(term=0, round=0, loads=loads / len(members), steps=5) for rank in members}
    known: dict[str, Any] = {"policy": None, "settings": SETTINGS, "force": False, "members": members} | options
    return decide(answers, known.pop("placement", PLACEMENT), **known)


def test_the_default_policy_balances() -> None:
    verdict = decided()
    assert verdict.outcome == "moved"
    assert verdict.after > verdict.before + SETTINGS.min_gain
    assert verdict.placement is not None
    assert verdict.moves == count_moves(PLACEMENT, verdict.placement)


def test_ranks_that_are_out_are_emptied_whatever_it_gains() -> None:
    """Also without any load, and where the gain is below the least."""
    for loads in (SKEWED, np.zeros((3, 6))):
        verdict = decided(loads, members=(0, 2), settings=replace(SETTINGS, min_gain=1.0))
        assert verdict.outcome == "moved"
        assert verdict.placement is not None
        assert (verdict.placement.local(1) == -1).all()
        assert verdict.reason == "ranks [1] are out and hold experts"


def test_a_rank_that_came_back_is_filled() -> None:
    empty = decided(members=(0, 2)).placement
    assert empty is not None
    verdict = decided(placement=empty)
    assert verdict.outcome == "moved"
    assert verdict.placement is not None
    assert (verdict.placement.local(1) >= 0).all()


@pytest.mark.parametrize("ep_size", [3, 40])
def test_a_member_that_holds_nothing_is_filled_whatever_it_gains(ep_size: int) -> None:
    """Also where the load is even on the others; it counts as a rank without load."""
    full = Placement.initial(2, ep_size, ep_size=ep_size, num_redundant=ep_size)
    slots = np.tile(np.arange(ep_size), (2, 2))
    slots[:, :2] = -1
    placement = Placement(slots, ep_size=ep_size)
    verdict = decided(
        np.ones((2, ep_size)), tuple(range(ep_size)), placement=placement, settings=replace(SETTINGS, min_gain=1.0)
    )
    assert verdict.outcome == "moved"
    assert verdict.placement is not None
    assert (verdict.placement.local(0) >= 0).any()
    assert verdict.reason == "ranks [0] hold no experts"
    assert verdict.before < 1.0
    assert misplaced(placement, range(ep_size))
    assert not misplaced(full, range(ep_size))
    assert misplaced(full, range(1, ep_size))


def test_no_load_says_who_has_recorded_what() -> None:
    verdict = decided(np.zeros((3, 6)))
    assert (verdict.outcome, verdict.placement) == ("no_load", None)
    assert "{0: 5, 1: 5, 2: 5}" in verdict.reason


def test_a_policy_may_not_use_ranks_that_are_out_or_move_more_than_allowed() -> None:
    with pytest.raises(PlacementError, match=r"on ranks \[1\], which are out"):
        decided(members=(0, 2), policy=lambda loads, placement: placement)
    other = Placement(PLACEMENT.physical_to_logical_map[:, [3, 4, 5, 0, 1, 2, 3, 4, 5]], ep_size=3)
    with pytest.raises(PlacementError, match="max_moves is 2"):
        decided(policy=lambda loads, placement: other, settings=replace(SETTINGS, max_moves=2))


def test_an_answer_that_is_no_placement_is_refused() -> None:
    async def policy(loads: Any, placement: Placement) -> Placement:
        return placement

    made: list[Any] = []
    with pytest.raises(TypeError, match="gave a coroutine"):
        decided(policy=lambda loads, placement: made.append(policy(loads, placement)) or made[0])
    made[0].close()


@given(seed=st.integers(0, 1 << 30), layers=st.integers(1, 3), ranks=st.integers(1, 4), local=st.integers(1, 4))
def test_moves_are_counted_as_one_would_by_hand(seed: int, layers: int, ranks: int, local: int) -> None:
    """Slots that get an expert which their rank does not hold; an empty slot gets none."""
    rng = np.random.default_rng(seed)
    experts = max(1, ranks * local // 2)

    def any_placement() -> Placement:
        ids = np.concatenate([np.arange(experts), rng.integers(-1, experts, ranks * local - experts)])
        return Placement(np.stack([rng.permutation(ids) for _ in range(layers)]), ep_size=ranks, num_logical=experts)

    old, new = any_placement(), any_placement()
    by_hand = sum(
        expert >= 0 and expert not in old.local(rank)[layer]
        for layer in range(layers)
        for rank in range(ranks)
        for expert in new.local(rank)[layer]
    )
    assert count_moves(old, new) == by_hand
