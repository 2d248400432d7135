"""The real protocol, walked exhaustively in a ring of pure ranks; ``pytest -m model`` walks the large ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from eplb_async.core import coordinator, messages, participant, protocol, views
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

CRASH = Limits(crashes=1)
ANY_ORDER = Limits(crashes=1, fifo=False)
UNRELIABLE = Limits(crashes=1, unreliable=True)


@pytest.mark.parametrize(
    ("ep_size", "num_layers", "limits", "majority_rule"),
    [
        (2, 2, Limits(migrations=2, crashes=1), False),
        (2, 2, Limits(migrations=2, crashes=1, doubts=UNLIMITED), True),
        (2, 2, Limits(crashes=1, duplicates=1, doubts=UNLIMITED, fifo=False), True),
        (3, 1, Limits(crashes=1, fifo=False), False),
        (3, 1, Limits(crashes=1, doubts=UNLIMITED), True),
        (3, 2, ANY_ORDER, True),
    ],
    ids=["2x2 twice", "2x2 twice, doubts", "2x2 duplicates", "3x1", "3x1 doubts", "3x2"],
)
def test_every_schedule_is_safe_and_leads_back_to_rest(
    ep_size: int, num_layers: int, limits: Limits, majority_rule: bool
) -> None:
    """I-7, I-9, I-10, I-19: crashes in mid-broadcast too, giving up at any moment, a next epoch."""
    found = walk(Ring(ep_size, num_layers, limits=limits, majority_rule=majority_rule))
    assert found.exhaustive
    assert found.at_rest > 0


@pytest.mark.parametrize(
    ("ep_size", "num_layers", "limits"),
    [(2, 2, replace(UNRELIABLE, migrations=2)), pytest.param(3, 2, UNRELIABLE, marks=pytest.mark.faults)],
    ids=["2x2 twice", "3x2"],
)
def test_no_order_no_duplicate_and_no_loss_of_messages_makes_it_unsafe(
    ep_size: int, num_layers: int, limits: Limits
) -> None:
    """I-7, I-8, I-19: any message at any time, any number of times or never; a crash and giving up at any moment."""
    assert walk(Ring(ep_size, num_layers, limits=limits)).exhaustive


@pytest.mark.model
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("ep_size", "num_layers", "limits"),
    [
        (3, 2, replace(ANY_ORDER, doubts=UNLIMITED)),
        (3, 2, replace(UNRELIABLE, doubts=UNLIMITED)),
        (3, 2, replace(ANY_ORDER, duplicates=1)),
        (3, 2, replace(ANY_ORDER, crashes=2)),
        (3, 3, ANY_ORDER),
    ],
    ids=["3x2 doubts", "3x2 unreliable, doubts", "3x2 a duplicate", "3x2 two crashes", "3x3"],
)
def test_every_schedule_of_larger_rings(ep_size: int, num_layers: int, limits: Limits) -> None:
    """I-7, I-9, I-10, I-19, as above."""
    assert walk(Ring(ep_size, num_layers, limits=limits), max_states=20_000_000).exhaustive


@pytest.mark.parametrize("majority_rule", [False, True])
def test_closing_at_any_moment_leads_back_to_rest(majority_rule: bool) -> None:
    assert walk(Ring(2, 1, limits=Limits(closes=2), majority_rule=majority_rule, pings=True)).exhaustive


@pytest.mark.parametrize("limits", [Limits(give_ups=0, closes=1), Limits(give_ups=0, exclusions=1)], ids=str)
def test_closing_or_excluding_a_live_rank_of_three_at_any_moment_is_safe(limits: Limits) -> None:
    """Rules 8 and 10, in an epoch that nobody gives up: the others agree."""
    assert walk(Ring(3, 1, limits=limits, pings=True), liveness=False).exhaustive


@pytest.mark.parametrize("limits", [Limits(0, closes=1, exclusions=1, fifo=False)], ids=str)
def test_views_change_at_any_moment_and_come_to_rest(limits: Limits) -> None:
    """Rules 6 to 8 and 10 without epochs: whoever is out hears of it, and the others go on."""
    assert walk(Ring(3, 1, limits=limits, pings=True)).exhaustive


@pytest.mark.model
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("ep_size", "limits"),
    [
        (3, Limits(closes=1)),
        (3, Limits(exclusions=1)),
        (3, Limits(0, crashes=1, closes=1, exclusions=1, fifo=False)),
        (4, Limits(0, closes=1, exclusions=1)),
        (4, Limits(0, crashes=1, closes=1)),
    ],
    ids=str,
)
def test_closing_and_excluding_in_larger_rings(ep_size: int, limits: Limits) -> None:
    """Rules 6 to 8 and 10, in epochs that anybody may give up, and without epochs."""
    assert walk(Ring(ep_size, 1, limits=limits, pings=True), max_states=20_000_000).exhaustive


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
    walk(Ring(ep_size, num_layers, limits=limits, pings=bool(limits.exclusions)), max_states=20_000)


# ------------------------------------------------------------------------------------------- nothing is missed


def seen(ring: Ring, limits: Limits, *, reduced: bool) -> tuple[set[Any], Explored]:
    """Every combination of ranks that a walk reaches, whatever is under way."""
    found: set[Any] = set()
    ring.limits = limits
    explored = explore(
        ring, reduced=reduced, liveness=limits.give_ups > 1, visit=lambda ring: found.add(ring.state[:2])
    )
    return found, explored


@pytest.mark.parametrize(
    ("ep_size", "num_layers", "limits"),
    [
        (2, 2, Limits(crashes=1, duplicates=1, doubts=UNLIMITED, fifo=False)),
        (2, 1, Limits(migrations=2, crashes=1, fifo=False)),
        (2, 2, Limits(crashes=2, unreliable=True)),
        (3, 1, Limits(crashes=1, give_ups=1)),
        (3, 1, Limits(crashes=1, give_ups=0, unreliable=True)),
        (2, 1, Limits(crashes=1, returns=1, fifo=False)),
    ],
    ids=["2x2 duplicates", "2x1 twice", "2x2 unreliable", "3x1 in order", "3x1 unreliable", "2x1 a return"],
)
def test_a_reduced_walk_meets_every_combination_of_ranks(ep_size: int, num_layers: int, limits: Limits) -> None:
    ring = Ring(ep_size, num_layers, limits=limits, majority_rule=ep_size > 2, pings=bool(limits.returns))
    everything, plain = seen(ring, limits, reduced=False)
    enough, reduced = seen(ring, limits, reduced=True)
    assert enough == everything
    assert plain.exhaustive
    assert reduced.states < plain.states
    print(f"{plain.states} states, {reduced.states} reduced, {len(everything)} combinations of ranks")


def test_unreliable_messages_lead_everywhere_where_reordered_and_repeated_ones_lead() -> None:
    ring = Ring(3, 1)
    reordered, _ = seen(ring, Limits(crashes=1, duplicates=1, give_ups=0, fifo=False), reduced=True)
    unreliable, _ = seen(ring, Limits(crashes=1, give_ups=0, unreliable=True), reduced=True)
    assert reordered <= unreliable


# --------------------------------------------------------------------------- the checks see what they are for


def _few_answer(change: views.Change, view: views.View, newcomer: int = 0) -> views.Decision | None:
    missing = view.remaining & ~change.answered
    answers = {rank: replace(answer, gone=answer.gone | missing) for rank, answer in change.answers.items()}
    return DECIDE(replace(change, answers=answers), replace(view, gone=view.gone | missing), newcomer)


def _own_epoch(books: coordinator.Coordinator, message: messages.Join, highest_epoch: int) -> coordinator.Sends:
    return JOIN(books, replace(message, last_epoch=0), highest_epoch)


DECIDE, JOIN = views.Change.decide, coordinator.Coordinator.join


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


@pytest.mark.parametrize(
    ("owner", "name", "broken", "ep_size", "num_layers", "limits"),
    [
        (participant.Participant, "bound", property(_never_bound), 2, 1, Limits()),
        (views.View, "accepts", _no_promise, 3, 1, CRASH),
        (views, "_last_committed", _lowest_commit, 3, 2, Limits(crashes=1, give_ups=0)),
        (views, "_last_committed", _end_unheard, 3, 1, CRASH),
        (coordinator.Coordinator, "_is_stale", _never_stale, 2, 1, Limits(duplicates=1)),
        (views.View, "majority", _always_majority, 3, 1, Limits(cuts=2)),
        (views.Change, "decide", _few_answer, 3, 1, CRASH),
    ],
    ids=["leaves with a vote", "no promise", "lowest commit", "end unheard", "stale join", "no majority", "few answer"],
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
    with pytest.raises(Violation, match=r"(I-|rule )\d+: ") as caught:
        explore(ring, max_states=200_000, liveness=not limits.cuts)
    print(caught.value)
