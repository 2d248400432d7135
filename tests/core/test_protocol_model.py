"""The real protocol, walked exhaustively and at random, in a ring of pure ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from eplb_async.core import coordinator, participant, protocol, views
from eplb_async.testing.explorer import Explored, explore
from eplb_async.testing.ring import UNLIMITED, Limits, Ring, Violation


def walk(ring: Ring, *, max_states: int = 500_000, liveness: bool = True) -> Explored:
    found = explore(ring, max_states=max_states, liveness=liveness)
    print(f"{ring.ep_size} ranks, {ring.num_layers} layers, {ring.limits}: {found}")
    return found


def all_open(ring: Ring) -> None:
    """An epoch is open everywhere, and nothing under way."""
    for rank in range(ring.ep_size):
        ring.migrate(rank)
    ring.settle(stage=False)


# ------------------------------------------------------------------------------------------------- exhaustive


@pytest.mark.parametrize(
    ("ep_size", "num_layers", "limits", "majority_rule"),
    [
        (2, 2, Limits(migrations=2, crashes=1), False),
        (2, 2, Limits(migrations=2, crashes=1, doubts=UNLIMITED), True),
        (2, 2, Limits(crashes=1, duplicates=1, doubts=UNLIMITED, fifo=False), True),
        (3, 1, Limits(crashes=1), False),
        (3, 1, Limits(crashes=1, doubts=UNLIMITED), True),
    ],
    ids=["2x2 twice", "2x2 twice, doubts", "2x2 any order", "3x1", "3x1 doubts"],
)
def test_every_schedule_is_safe_and_leads_back_to_rest(
    ep_size: int, num_layers: int, limits: Limits, majority_rule: bool
) -> None:
    """I-7, I-9, I-10, I-19: crashes in mid-broadcast too, giving up at any moment, a next epoch."""
    found = walk(Ring(ep_size, num_layers, limits=limits, majority_rule=majority_rule))
    assert found.exhaustive
    assert found.at_rest > 0


@pytest.mark.parametrize(("ep_size", "closes", "majority_rule"), [(2, 2, False), (2, 2, True), (3, 1, True)])
def test_closing_at_any_moment_leads_back_to_rest(ep_size: int, closes: int, majority_rule: bool) -> None:
    limits = Limits(closes=closes)
    assert walk(Ring(ep_size, 1, limits=limits, majority_rule=majority_rule, pings=True)).exhaustive


def test_excluding_a_live_rank_at_any_moment_fences_it() -> None:
    """Rule 8: the others agree, and whoever is out hears of it."""
    assert walk(Ring(3, 1, limits=Limits(exclusions=1), pings=True)).exhaustive


def test_lost_links_never_make_two_views() -> None:
    """I-7 behind cut links: a majority on one side at most."""
    limits = Limits(cuts=2, give_ups=0)
    assert walk(Ring(3, 1, limits=limits), liveness=False).exhaustive


@pytest.mark.parametrize(
    ("ep_size", "num_layers", "limits"),
    [
        (3, 1, Limits(migrations=2, crashes=2, duplicates=1, doubts=UNLIMITED, fifo=False)),
        (3, 2, Limits(crashes=1, closes=1, exclusions=1)),
        (4, 1, Limits(crashes=1, cuts=2)),
    ],
    ids=["3x1 twice, any order", "3x2 closing, excluding", "4x1 cuts"],
)
def test_the_beginning_of_what_is_too_large_to_finish_is_safe(ep_size: int, num_layers: int, limits: Limits) -> None:
    walk(Ring(ep_size, num_layers, limits=limits, pings=bool(limits.exclusions)), max_states=40_000)


# --------------------------------------------------------------------------- the checks see what they are for


def _never_bound(part: participant.Participant) -> bool:
    return False


def _no_promise(view: views.View, term: int) -> bool:
    return term == view.installed


def _lowest_commit(answers: list[Any]) -> int:
    return int(min(answer.upto for answer in answers))


def _end_unheard(answers: list[Any]) -> int:
    return max((answer.upto for answer in answers if not answer.ended), default=0)


def _never_stale(books: coordinator.Coordinator, rank: int, attempt: int) -> bool:
    return False


def _always_majority(view: views.View, members: int | None = None) -> bool:
    return True


CRASH = Limits(crashes=1)


@pytest.mark.parametrize(
    ("owner", "name", "broken", "ep_size", "num_layers", "limits"),
    [
        (participant.Participant, "bound", property(_never_bound), 2, 1, Limits()),
        (views.View, "accepts", _no_promise, 3, 1, CRASH),
        (views, "_last_committed", _lowest_commit, 3, 2, Limits(crashes=1, give_ups=0)),
        (views, "_last_committed", _end_unheard, 3, 1, CRASH),
        (coordinator.Coordinator, "_is_stale", _never_stale, 2, 1, Limits(duplicates=1)),
        (views.View, "majority", _always_majority, 3, 1, Limits(cuts=2)),
    ],
    ids=["leaves with a vote", "no promise", "lowest commit", "end unheard", "stale join", "no majority"],
)
def test_without_a_clause_of_the_rules_the_walk_finds_a_violation(
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    broken: Callable[..., Any] | property,
    ep_size: int,
    num_layers: int,
    limits: Limits,
) -> None:
    """Each clause that the design has in bold, switched off; the table of moves too, to see what follows."""
    monkeypatch.setattr(owner, name, broken)
    monkeypatch.setattr(protocol, "check_move", lambda before, kind, after: None)
    ring = Ring(ep_size, num_layers, limits=limits, majority_rule=name == "majority")
    if not limits.duplicates:
        all_open(ring)
    with pytest.raises(Violation, match=r"I-\d+: ") as caught:
        explore(ring, max_states=200_000, liveness=not limits.cuts)
    print(caught.value)
