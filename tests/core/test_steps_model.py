"""Steps in the ring of pure ranks: no schedule runs a step with two placements, and all lead back to rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from eplb_async.core import coordinator, steps
from eplb_async.testing.explorer import Explored, explore
from eplb_async.testing.ring import Limits, Ring, Violation, Walk

IDLING = Walk(4, 1, frozenset({2}))


def walk(ep_size: int, num_layers: int, engines: Walk, limits: Limits, *, most: int = 200_000) -> Explored:
    ring = Ring(ep_size, num_layers, limits=limits, majority_rule=ep_size > 2, walk=engines)
    found = explore(ring, max_states=most, liveness=limits.give_ups > 0)  # who never gives up may wait for ever
    print(f"{ep_size} ranks, {num_layers} layers, {engines}, {limits}: {found}")
    return found


@pytest.mark.parametrize(
    ("num_layers", "engines", "limits"),
    [(1, Walk(4, 0), Limits()), (1, IDLING, Limits(fifo=False)), (1, Walk(3, 1, frozenset({1})), Limits(crashes=1))],
    ids=["margin 0", "idle after 2, any order", "a crash"],
)
def test_every_schedule_of_steps_is_safe_and_leads_back_to_rest(num_layers: int, engines: Walk, limits: Limits) -> None:
    """I-19, rule 11: giving up at any moment, idle phases, a rank that dies."""
    found = walk(2, num_layers, engines, limits)
    assert found.exhaustive
    assert found.at_rest > 0


@pytest.mark.model
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("ep_size", "num_layers", "engines", "limits"),
    [
        (2, 2, IDLING, Limits(crashes=1)),
        (2, 2, Walk(6, 2, frozenset({3})), Limits()),
        (2, 1, IDLING, Limits(migrations=2)),
        (3, 1, Walk(2, 1, frozenset({1})), Limits()),
        (3, 1, Walk(3, 1, frozenset({1})), Limits(crashes=1, give_ups=0)),
    ],
    ids=["2x2 a crash", "2x2 margin 2", "2x1 twice", "3x1", "3x1 a crash"],
)
def test_every_schedule_of_steps_in_larger_rings(ep_size: int, num_layers: int, engines: Walk, limits: Limits) -> None:
    """As above: takeovers, a next migration, and voting for a layer once those before it are applied."""
    assert walk(ep_size, num_layers, engines, limits, most=5_000_000).exhaustive


def _no_hold(counter: steps.StepCounter) -> None:
    counter.gate = min(*counter.due.values(), steps.NEVER, steps.NEVER)


def _not_forward(counter: steps.StepCounter, at: int) -> int:
    return at


def _all_forward(counter: steps.StepCounter, at: int) -> int:
    return min(at, counter.idle_after + 1)


def _idle_without_hold(counter: steps.StepCounter) -> None:
    hold = counter.hold
    IDLE(counter)
    counter.hold = hold
    counter.set_gate()


def _at_once(counter: steps.StepCounter, layer: int, *, held: bool = False) -> bool:
    return True


def _last_hold(ballot: coordinator.Ballot, rank: int, upto: int, holds: tuple[int, ...]) -> bool:
    decided = VOTE(ballot, rank, upto, holds)
    if decided:
        ballot.at = tuple(holds[layer] if layer < ballot.upto else at for layer, at in enumerate(ballot.at))
    return decided


IDLE, VOTE = steps.StepCounter.idle, coordinator.Ballot.vote


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (steps.StepCounter, "set_gate", _no_hold),
        (steps.StepCounter, "_brought_forward", _not_forward),
        (steps.StepCounter, "_brought_forward", _all_forward),
        (steps.StepCounter, "idle", _idle_without_hold),
        (steps.StepCounter, "is_time", _at_once),
        (coordinator.Ballot, "vote", _last_hold),
    ],
    ids=[
        "no hold",
        "nothing brought forward",
        "all brought forward",
        "idle without hold",
        "at once",
        "not the largest",
    ],
)
def test_without_a_clause_about_steps_the_walk_finds_a_violation(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, broken: Callable[..., Any]
) -> None:
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(Violation, match=r"(rule 11|I-9): ") as caught:
        walk(2, 1, IDLING, Limits())
    print(caught.value)
