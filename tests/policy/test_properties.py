"""Whatever the loads, sizes and current placement: what always holds."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_async.core.placement import Placement
from eplb_async.policy import Rebalance, rank_loads, rebalance_experts
from eplb_async.testing.placements import random_placement


@st.composite
def questions(draw: st.DrawFn):
    """Sizes, loads of some shape, and a placement that fits."""
    nodes, ranks_of_node, local = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    groups, ranks = nodes * draw(st.integers(1, 2)), nodes * ranks_of_node
    most = ranks * local // groups
    if most == 0:
        groups, most = 1, ranks * local
    num_logical = groups * draw(st.integers(1, most))
    layers = draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    load = rng.lognormal(0, draw(st.sampled_from([0.0, 0.5, 3.0])), (layers, num_logical))
    load[rng.random(load.shape) < draw(st.sampled_from([0.0, 0.5]))] = 0
    current = random_placement(rng, num_layers=layers, num_logical=num_logical, num_local_experts=local, ep_size=ranks)
    return load, (ranks * local, groups, nodes, ranks), current


def received(old: Placement, new: Placement) -> int:
    """Experts that their rank did not hold, from the maps alone; copies in one rank count once."""
    pairs = [(old.local(rank).tolist(), new.local(rank).tolist()) for rank in range(old.ep_size)]
    return sum(
        len(set(after) - set(before) - {-1}) for olds, news in pairs for before, after in zip(olds, news, strict=True)
    )


def check(answer: Rebalance, load: np.ndarray, sizes: tuple[int, int, int, int]) -> None:
    """The maps agree, no slot of a rank repeats an expert where another could be there, groups stay on nodes."""
    replicas, groups, nodes, ranks = sizes
    physical, logical, count = answer
    assert physical.shape == (len(load), replicas)
    assert (count >= 1).all()
    for layer, row in enumerate(physical.tolist()):
        for expert in range(load.shape[1]):
            slots = [slot for slot, held in enumerate(row) if held == expert]
            assert logical[layer, expert].tolist() == slots + [-1] * (logical.shape[2] - len(slots))
            assert count[layer, expert] == len(slots)
    of_node = load.shape[1] // (nodes if answer.hierarchical else 1)
    for rank in range(ranks):
        for row in answer.placement.local(rank).tolist():
            held = [expert for expert in row if expert >= 0]
            assert len(held) == len(set(held)) or of_node < len(held)
    if answer.hierarchical:
        group = physical.reshape(len(load), nodes, -1) // (load.shape[1] // groups)
        for layer in group.tolist():
            kept = [set(node) - {-1} for node in layer]
            assert all(not one & two for at, one in enumerate(kept) for two in kept[:at])


@given(questions())
def test_from_loads_alone(question) -> None:
    """Every slot is used."""
    load, sizes, _ = question
    answer = rebalance_experts(load, *sizes)
    check(answer, load, sizes)
    assert (answer.physical_to_logical_map >= 0).all()
    assert answer.worth_it


@given(questions())
def test_from_a_current_placement(question) -> None:
    """Counts what it says it moves, never makes the busiest ranks worse, keeps idle layers."""
    load, sizes, current = question
    answer = rebalance_experts(load, *sizes, current=current, min_gain=0.0)
    busy = load.any(axis=1)
    peaks = [rank_loads(load, placement).max(axis=1)[busy].sum() for placement in (answer.placement, current)]
    assert peaks[0] <= peaks[1] * (1 + 1e-9)
    old, new = current.physical_to_logical_map, answer.physical_to_logical_map
    assert (new[~busy] == old[~busy]).all()
    if not answer.worth_it:
        assert answer.placement == current
        return
    assert answer.moves == received(current, answer.placement)
    if busy.all():
        check(answer, load, sizes)


@given(questions(), st.integers(0, 30))
def test_never_more_moves_than_allowed(question, max_moves: int) -> None:
    """Whatever is asked; and more moves never balance less than none."""
    load, sizes, current = question
    answer = rebalance_experts(load, *sizes, current=current, max_moves=max_moves, min_gain=0.0)
    assert received(current, answer.placement) <= max_moves
    if answer.worth_it:
        assert answer.moves == received(current, answer.placement)
        assert answer.gain > 0


@given(questions(), st.data())
def test_ranks_that_are_out_get_nothing(question, data: st.DataObject) -> None:
    """A rank that leaves is emptied, stays empty by itself, and is filled again when asked for."""
    load, sizes, current = question
    ranks, local = sizes[3], current.num_local_experts
    out = data.draw(st.integers(0, ranks - 1))
    if (ranks - 1) * local < load.shape[1]:
        return
    without = rebalance_experts(load, *sizes, current=current, out=[out])
    assert (without.placement.local(out) == -1).all()
    assert without.moves == received(current, without.placement)
    again = rebalance_experts(load[:, ::-1], *sizes, current=without.placement, min_gain=0.0)
    assert (again.placement.local(out) == -1).all()
    back = rebalance_experts(load + 1, *sizes, current=without.placement, out=(), min_gain=0.0)
    assert not back.worth_it or (back.placement.local(out) >= 0).all()


@settings(max_examples=30)
@given(questions())
def test_every_rank_computes_the_same(question) -> None:
    """Equal arguments of other types give the same placement."""
    load, sizes, current = question
    one = rebalance_experts(load, *sizes, current=current)
    two = rebalance_experts(load.tolist(), *sizes, current=current.physical_to_logical_map.tolist())
    assert one.placement == two.placement
