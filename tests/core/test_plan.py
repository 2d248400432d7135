"""Plans: executing one turns the old placement into the new, with few READs, spread over the sources."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_async.core.placement import Placement
from eplb_async.core.plan import Move, plan
from eplb_async.errors import ExpertsLost, PlacementError


@st.composite
def migrations(draw):
    """Any placement to any placement, on any nodes, with any members that hold all experts."""
    ep_size, local, num_layers = draw(st.integers(1, 6)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    members = draw(st.sets(st.integers(0, ep_size - 1), min_size=1))
    num_logical = draw(st.integers(1, len(members) * local))

    def rows(ranks):
        free = [rank * local + slot for rank in sorted(ranks) for slot in range(local)]
        out = np.full((num_layers, ep_size * local), -1)
        for row in out:
            spare = len(free) - num_logical
            extra = draw(st.lists(st.integers(-1, num_logical - 1), min_size=spare, max_size=spare))
            row[free] = draw(st.permutations([*range(num_logical), *extra]))
        return out

    old, new = rows(members), rows(members)
    for rank in set(range(ep_size)) - members:
        columns = slice(rank * local, (rank + 1) * local)
        old[:, columns] = draw(st.integers(-1, num_logical - 1))
    nodes = draw(st.lists(st.sampled_from("abc"), min_size=ep_size, max_size=ep_size))
    sizes = {"ep_size": ep_size, "num_logical": num_logical}
    return Placement(old, **sizes), Placement(new, **sizes), {"nodes": nodes, "members": members}


@st.composite
def losses(draw):
    """As `migrations`, but ``old`` may have put the only copies of experts on ranks that are no members."""
    old, new, where = draw(migrations())
    layers, local = old.num_layers, old.num_local_experts
    free = [rank * local + slot for rank in range(old.ep_size) for slot in range(local)]
    spare = len(free) - old.num_logical
    rows = np.full((layers, len(free)), -1)
    for row in rows:
        extra = draw(st.lists(st.integers(-1, old.num_logical - 1), min_size=spare, max_size=spare))
        row[free] = draw(st.permutations([*range(old.num_logical), *extra]))
    return Placement(rows, ep_size=old.ep_size, num_logical=old.num_logical), new, where


def every_move(migration):
    """(layer, move) for all layers and ranks."""
    for layer in range(migration.new.num_layers):
        for rank in range(migration.new.ep_size):
            for move in migration.moves(layer, rank):
                yield layer, move


def holders(placement, layer, expert):
    """Ranks that hold an expert."""
    return {rank for rank in range(placement.ep_size) if expert in placement.local(rank)[layer]}


@given(migrations())
def test_executing_a_plan_gives_the_new_placement(case):
    """Rows copied from the old state land so that every slot holds what the new placement says."""
    old, new, where = case
    migration = plan(old, new, **where)
    rows = old.physical_to_logical_map.copy()
    n = old.num_local_experts
    for layer, move in every_move(migration):
        staged = old.physical_to_logical_map[layer, move.source * n + move.source_slot]
        assert staged == move.expert
        rows[layer, [move.reader * n + slot for slot in move.targets]] = staged
    filled = new.physical_to_logical_map >= 0
    assert np.array_equal(rows[filled], new.physical_to_logical_map[filled])


@given(migrations())
def test_a_rank_receives_an_expert_once_and_only_for_slots_that_lacked_it(case):
    """One move per (layer, reader, expert); its targets are exactly the changed slots."""
    old, new, where = case
    migration = plan(old, new, **where)
    expected = defaultdict(tuple)
    changed = (old.physical_to_logical_map != new.physical_to_logical_map) & (new.physical_to_logical_map >= 0)
    for layer, physical in np.argwhere(changed).tolist():
        reader, slot = divmod(physical, new.num_local_experts)
        expected[layer, reader, int(new.physical_to_logical_map[layer, physical])] += (slot,)
    found = [((layer, move.reader, move.expert), move.targets) for layer, move in every_move(migration)]
    assert len(found) == len(expected)
    assert dict(found) == expected


@given(migrations())
def test_what_a_rank_holds_it_copies_locally_from_its_lowest_slot(case):
    """A READ happens only where the reader has no copy; sources are read at their lowest slot."""
    old, new, where = case
    for layer, move in every_move(plan(old, new, **where)):
        assert move.is_local == (move.reader in holders(old, layer, move.expert))
        assert move.source_slot == old.local(move.source)[layer].tolist().index(move.expert)


@given(migrations())
def test_reads_come_from_members_and_from_the_same_node_first(case):
    """A source on the reader's node is used whenever a member there holds the expert."""
    old, new, where = case
    nodes = where["nodes"]
    for layer, move in every_move(plan(old, new, **where)):
        sources = holders(old, layer, move.expert) & where["members"]
        assert move.source in sources
        near = {rank for rank in sources if nodes[rank] == nodes[move.reader]}
        assert not near or move.source in near


def check_shares(old, new, where):
    """Within a team floor or ceil; who serves one more is no busier than the others by more than one READ."""
    nodes = where["nodes"]
    migration = plan(old, new, **where)
    teams = defaultdict(Counter)
    for layer, move in every_move(migration):
        if move.is_local:
            continue
        sources = holders(old, layer, move.expert) & where["members"]
        near = {rank for rank in sources if nodes[rank] == nodes[move.reader]}
        teams[layer, move.expert, frozenset(near or sources)][move.source] += 1
    for (layer, _, sources), served in teams.items():
        counts = {rank: served[rank] for rank in sources}
        assert max(counts.values()) - min(counts.values()) <= 1
        load = migration.reads_by_source(layer)
        more = [load[rank] for rank in sources if counts[rank] > min(counts.values())]
        fewer = [load[rank] for rank in sources if counts[rank] == min(counts.values())]
        assert max(more, default=0) <= min(fewer) + 1


@given(migrations())
def test_no_source_carries_more_than_its_share(case):
    """Whatever the placements."""
    check_shares(*case)


@pytest.mark.parametrize("seed", range(4))
def test_no_source_carries_more_than_its_share_where_many_teams_compete(seed):
    """16 ranks on two nodes, all experts replicated: shares need more than one round to settle."""
    rng = np.random.default_rng(seed)

    def shuffled():
        copies = np.concatenate([np.tile(np.arange(32), 2), rng.integers(0, 32, 32)])
        return Placement([rng.permutation(copies) for _ in range(8)], ep_size=16)

    check_shares(shuffled(), shuffled(), {"nodes": ["a", "b"] * 8, "members": set(range(16))})


@given(migrations())
def test_a_plan_depends_only_on_its_arguments(case):
    """Two calls agree in every array, whatever the order or type of members."""
    old, new, where = case
    once = plan(old, new, **where)
    again = plan(old, new, nodes=tuple(where["nodes"]), members=sorted(where["members"], reverse=True))
    for name in ("layer", "reader", "expert", "source", "source_slot", "target_offsets", "targets"):
        mine, other = getattr(once, name), getattr(again, name)
        assert np.array_equal(mine, other)
        assert mine.dtype == np.int32
        assert not mine.flags.writeable
    assert once.members == again.members == tuple(sorted(where["members"]))


@given(migrations())
def test_moves_are_sorted_and_counted(case):
    """(layer, reader, first target) ascends; the counts agree with the moves."""
    old, new, where = case
    migration = plan(old, new, **where)
    moves = list(every_move(migration))
    order = [(layer, move.reader, move.targets[0]) for layer, move in moves]
    assert order == sorted(order) == sorted(set(order))
    assert len(migration.layer) == len(moves)
    assert migration.num_local == sum(move.is_local for _, move in moves)
    assert migration.num_reads == len(moves) - migration.num_local
    assert migration.is_empty == (not moves)
    sizes = [10**12 + layer for layer in range(old.num_layers)]
    per_rank = Counter((layer, move.reader) for layer, move in moves)
    assert migration.max_incoming(sizes) == max((n * sizes[layer] for (layer, _), n in per_rank.items()), default=0)


@given(migrations())
def test_staying_moves_nothing(case):
    """A placement to itself is an empty plan."""
    _, new, where = case
    migration = plan(new, new, **where)
    assert migration.is_empty
    assert migration.max_incoming([1] * new.num_layers) == 0


def test_load_is_even_where_all_ranks_could_serve():
    """Ten experts on the same four ranks, read by three others: no rank always serves less."""
    experts = np.arange(10)
    empty = np.full(10, -1)
    old = Placement([np.concatenate([experts] * 4 + [empty] * 4)], ep_size=8)
    new = Placement([np.concatenate([experts] * 7 + [empty])], ep_size=8)
    migration = plan(old, new)
    load = migration.reads_by_source(0)
    assert load[:4].max() - load[:4].min() <= 1
    assert load.sum() == 30


def test_ties_rotate_from_layer_to_layer():
    """One READ per layer, two sources: they take turns, so that layers in flight together use both."""
    old = Placement([[0, 0, 1]] * 4, ep_size=3)
    new = Placement([[0, 1, 0]] * 4, ep_size=3)
    chosen = [
        next(m.source for m in plan(old, new).moves(layer, 2) if m.expert == 0) for layer in range(old.num_layers)
    ]
    assert chosen == [0, 1, 0, 1]


def test_c28_two_slots_of_one_expert_are_one_read():
    """Rank 0 READs expert 2 once, for two slots; rank 1 needs a local copy and a READ."""
    migration = plan(Placement([[0, 1, 2, 0]], ep_size=2), Placement([[2, 2, 0, 1]], ep_size=2))
    assert migration.moves(0, 0) == (Move(0, expert=2, source=1, source_slot=0, targets=(0, 1)),)
    assert migration.moves(0, 1) == (
        Move(1, expert=0, source=1, source_slot=1, targets=(0,)),
        Move(1, expert=1, source=0, source_slot=1, targets=(1,)),
    )
    assert migration.reads_by_source(0).tolist() == [1, 1]


def test_c29_experts_lost_with_their_rank_are_named_before_anything_moves():
    """Rank 1 is gone, and with it experts 2 and 3."""
    old = Placement([[0, 1, 2, 3]], ep_size=2)
    with pytest.raises(PlacementError, match=r"no source among ranks 0 for layer 0: experts 2, 3;"):
        plan(old, old, members={0})
    old = Placement([[0, 1, 2, 3, -1, -1]] * 2, ep_size=3)
    new = Placement([[0, 1, -1, -1, 2, 3]] * 2, ep_size=3)
    with pytest.raises(PlacementError, match=r"ranks 0, 2 for layer 0: experts 2, 3; layer 1: experts 2, 3;"):
        plan(old, new, members={0, 2})


@given(losses())
def test_lost_experts_are_all_named_or_loaded_once_by_each_rank_that_needs_them(case):
    """Without load_lost the error has exactly those; with it they have no source, and the rest of the plan stands."""
    old, new, where = case
    lost = {
        layer: tuple(e for e in range(old.num_logical) if not holders(old, layer, e) & where["members"])
        for layer in range(old.num_layers)
    }
    lost = {layer: experts for layer, experts in lost.items() if experts}
    migration = plan(old, new, load_lost=True, **where)
    assert migration.lost == lost
    if lost:
        with pytest.raises(ExpertsLost) as raised:
            plan(old, new, **where)
        assert raised.value.lost == lost
        assert str(migration.lost_error()) == str(raised.value)
    else:
        assert migration.lost_error() is None
    filled = defaultdict(set)
    loads = 0
    for layer, move in every_move(migration):
        assert move.is_loaded == (move.expert in lost.get(layer, ()))
        assert move.is_loaded + move.is_local + move.is_read == 1
        assert (move.source, move.source_slot) == (-1, -1) or not move.is_loaded
        loads += move.is_loaded
        filled[layer, move.reader] |= set(move.targets)
    assert (migration.num_loads, len(migration.layer)) == (loads, loads + migration.num_local + migration.num_reads)
    changed = (old.physical_to_logical_map != new.physical_to_logical_map) & (new.physical_to_logical_map >= 0)
    assert sum(map(len, filled.values())) == changed.sum()
    assert sum(migration.reads_by_source(layer).sum() for layer in range(old.num_layers)) == migration.num_reads


@given(migrations())
def test_other_sources_are_members_that_hold_the_expert_nearest_first(case):
    """Every member but the reader, at its lowest slot; the reader's node before all others."""
    old, new, where = case
    migration = plan(old, new, **where)
    for layer, move in every_move(migration):
        sources = migration.sources(layer, move.expert, move.reader)
        assert {rank for rank, _ in sources} == (holders(old, layer, move.expert) & where["members"]) - {move.reader}
        assert all(slot == old.local(rank)[layer].tolist().index(move.expert) for rank, slot in sources)
        far = [where["nodes"][rank] != where["nodes"][move.reader] for rank, _ in sources]
        assert far == sorted(far)
        assert move.is_local or (move.source, move.source_slot) in sources


def test_c30_swapping_slots_on_one_rank_is_two_local_copies():
    """Both rows are staged, so neither overwrites the other."""
    migration = plan(Placement([[0, 1]], ep_size=1), Placement([[1, 0]], ep_size=1))
    assert [(m.is_local, m.source_slot, m.targets) for m in migration.moves(0, 0)] == [
        (True, 1, (0,)),
        (True, 0, (1,)),
    ]
    assert (migration.num_local, migration.num_reads) == (2, 0)


def test_c30_a_rank_that_is_only_read_and_one_with_nothing_to_do_have_no_moves():
    """Rank 0 is read, rank 1 reads, rank 2 idles."""
    migration = plan(Placement([[0, 1, 1, -1, 2, -1]], ep_size=3), Placement([[0, 1, 1, 0, 2, -1]], ep_size=3))
    assert migration.moves(0, 0) == ()
    assert [m.expert for m in migration.moves(0, 1)] == [0]
    assert migration.moves(0, 2) == ()


def test_emptying_a_slot_moves_nothing():
    """The placement changes, no byte does."""
    migration = plan(Placement([[0, 1, 1, -1]], ep_size=2), Placement([[0, 1, -1, -1]], ep_size=2))
    assert migration.is_empty


@pytest.mark.parametrize(
    ("new", "where", "message"),
    [
        (Placement([[0, 1, 0, 1]] * 2, ep_size=2), {}, "num_layers is 1 in the old and 2 in the new"),
        (Placement([[0, 1, 0, 1]], ep_size=4), {}, "ep_size is 2 in the old and 4 in the new"),
        (Placement([[0, 1, 2, 1]], ep_size=2), {}, "num_logical is 2 in the old and 3 in the new"),
        (Placement([[0, 1]], ep_size=2), {}, "num_physical is 4 in the old and 2 in the new"),
        (
            Placement([[0, 1, -1, 0]], ep_size=2),
            {"members": [0]},
            r"members are ranks 0\): rank 1, slot 1 of layer 0 \(expert 0\); set them to -1",
        ),
        (
            Placement([[0, 1, 1, 0]], ep_size=2),
            {"members": [0, 2]},
            r"members are \[0, 2\]; .* within \[0, 2\)",
        ),
        (Placement([[0, 1, 1, 0]], ep_size=2), {"members": []}, r"members are \[\]"),
        (Placement([[0, 1, 1, 0]], ep_size=2), {"nodes": ["a"]}, "1 node labels for ep_size 2"),
    ],
)
def test_refuses_what_does_not_fit_together(new, where, message):
    """Sizes, members and nodes are checked, and named with their values."""
    with pytest.raises(PlacementError, match=message):
        plan(Placement([[0, 1, 0, 1]], ep_size=2), new, **where)


def test_questions_about_what_the_plan_does_not_have_are_refused():
    """A negative or too large layer or rank is not silently another one."""
    migration = plan(Placement([[0, 1]], ep_size=2), Placement([[1, 0]], ep_size=2))
    for layer, rank in ((-1, 0), (1, 0), (0, -1), (0, 2)):
        with pytest.raises(IndexError, match=f"no layer {layer} or rank {rank}"):
            migration.moves(layer, rank)
    with pytest.raises(ValueError, match="2 layer sizes for 1 layers"):
        migration.max_incoming([1, 1])
