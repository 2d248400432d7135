"""Another source for what a source did not serve."""

from __future__ import annotations

from eplb_async.core.detours import Detours
from eplb_async.core.placement import Placement
from eplb_async.core.plan import Move, plan

# Expert 0 on ranks 0, 1 and 3 (twice there); rank 2 reads it, on one node with rank 3.
OLD = Placement([[0, 1, 2, 0, 3, 4, 0, 0]] * 2, ep_size=4)
NEW = Placement([[0, 1, 2, 0, 0, 4, 3, 0]] * 2, ep_size=4)


def detours() -> tuple[Detours, Move]:
    migration = plan(OLD, NEW, nodes=["a", "a", "b", "b"])
    return Detours(migration), migration.moves(0, 2)[0]


def test_each_source_once_nearest_first() -> None:
    """Rank 3 shares the node, then the next ranks round the group; then none is left."""
    roads, move = detours()
    assert (move.source, move.source_slot, move.targets) == (3, 0, (0,))
    second = roads.instead(0, move)
    assert second == Move(2, 0, source=0, source_slot=0, targets=(0,))
    third = roads.instead(0, second)
    assert third == Move(2, 0, source=1, source_slot=1, targets=(0,))
    assert roads.instead(0, third) is None


def test_a_source_that_failed_elsewhere_comes_last_and_is_driven_around() -> None:
    """In another layer it is avoided from the start, and tried only when no other is left."""
    roads, move = detours()
    assert roads.around(1, move) == move
    first = roads.instead(0, move)
    assert first is not None
    assert roads.around(1, move).source == 0
    assert roads.instead(0, first) is not None  # rank 0 is shaky, too
    assert roads.around(1, move).source == 1
    on_one = roads.around(1, move)
    last = roads.instead(1, on_one)
    assert last is not None
    assert last.source == 3, "all are shaky: the nearest, though it has failed in layer 0"
    assert roads.around(1, move) == move, "with no sound source the plan stands"


def test_only_reads_and_only_members() -> None:
    """A local copy or a load has no other source; a rank that is out is none."""
    roads, _ = detours()
    assert roads.instead(0, Move(2, 3, source=2, source_slot=0, targets=(1,))) is None
    assert roads.instead(0, Move(2, 3, source=-1, source_slot=-1, targets=(1,))) is None
    old = Placement([[0, 1, 2, 0, 3, 4, 0, 0]], ep_size=4)
    new = Placement([[0, 1, -1, -1, 2, 0, 3, 4]], ep_size=4)
    migration = plan(old, new, members=(0, 2, 3), load_lost=True)
    read = next(m for m in migration.moves(0, 2) if m.expert == 0)
    other = Detours(migration).instead(0, read)
    assert other is not None
    assert {read.source, other.source} == {0, 3}
