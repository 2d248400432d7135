"""Columns of what a rank receives: the plan's moves, sorted, cut by layers, and where each lands."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from eplb_async.core.incoming import Incoming
from eplb_async.core.plan import Move, plan
from eplb_async.testing.placements import random_placement


def some_plan(seed):
    """A plan of three ranks and five layers, two of which do not change."""
    rng = np.random.default_rng(seed)
    shape = {"num_layers": 5, "num_logical": 6, "num_local_experts": 4, "ep_size": 3, "empty": 2}
    old, new = (random_placement(rng, **shape) for _ in range(2))
    return plan(old, old.with_layers(new, 3) if seed % 2 else new)


seeds = st.integers(0, 2**32 - 1)


@given(seeds, st.integers(0, 2))
def test_the_columns_are_the_moves_of_the_plan(seed, rank):
    """Every move once, by layer, source and slot there, also when they are made of moves."""
    planned = some_plan(seed)
    wanted = [(layer, move) for layer in range(5) for move in planned.moves(layer, rank)]
    wanted.sort(key=lambda each: (each[0], each[1].source, each[1].source_slot))
    found = Incoming.of(planned, rank)
    assert list(found.moves()) == wanted == list(Incoming.of_moves(rank, wanted[::-1]).moves())
    assert len(found) == len(wanted) == planned.num_moves(rank).sum()
    assert planned.num_moves(rank).tolist() == np.bincount(found.layer, minlength=5).tolist()


@given(seeds, st.integers(0, 5), st.integers(0, 5))
def test_a_part_is_what_the_whole_says_of_these_layers(seed, one, other):
    """Layers without moves, and no layers at all, included."""
    layers = range(min(one, other), max(one, other))
    whole = Incoming.of(some_plan(seed), 1)
    assert list(whole.part(layers).moves()) == [each for each in whole.moves() if each[0] in layers]


@given(seeds, st.integers(0, 4), st.sets(st.integers(0, 19)))
def test_what_lands_are_the_targets_of_the_moves_that_are_kept(seed, layer, dropped):
    """By layer and slot, each filled from the row of its move."""
    incoming = Incoming.of(some_plan(seed), 0).part(range(layer, 5))
    kept = np.array([i not in dropped for i in range(len(incoming))], dtype=np.bool_)
    slot, of, row = incoming.landing(range(layer, 4), kept)
    wanted = sorted(
        (at, target, i)
        for i, (at, move) in enumerate(incoming.moves())
        if kept[i] and at < 4
        for target in move.targets
    )
    assert list(zip(of.tolist(), slot.tolist(), row.tolist(), strict=True)) == wanted


def test_lost_experts_and_several_targets():
    """A lost expert has no source; an expert may fill several slots."""
    moves = [(2, Move(0, 5, -1, -1, (3,))), (0, Move(0, 7, 1, 4, (0, 2)))]
    incoming = Incoming.of_moves(0, moves)
    assert list(incoming.moves()) == moves[::-1]
    assert [column.tolist() for column in incoming.landing(range(3), np.ones(2, np.bool_))] == [
        [0, 2, 3],
        [0, 0, 2],
        [0, 0, 1],
    ]
    assert len(Incoming.of_moves(0, [])) == 0
