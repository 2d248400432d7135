"""Placements in which the victim has one role and no other, and whose loss loses no expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eplb_async.core.placement import Placement
from eplb_async.core.plan import plan

LAYERS = 3
_OUT = (-1, -1, -1, -1)
_SPARE = {False: (4, 5, 4, 5), True: (0, 1, 2, 3)}


@dataclass(frozen=True)
class Role:
    """What the victim is in the migration from ``old`` to ``new``.

    Attributes:
        name: The role.
        victim: The rank that dies or stops.
        partner: Another rank: the reader of a source or beside a bystander, the slow voter beside a coordinator.
        old: Where the experts are.
        new: Where the migration puts them.
        without: A placement without the victim, that moves something whichever of the others is true.
        after: Another one without the victim.
    """

    name: str
    victim: int
    partner: int
    old: Placement
    new: Placement
    without: Placement
    after: Placement

    def reads_from_victim(self, rank: int) -> bool:
        """Whether a rank reads from the victim."""
        return any(move.source == self.victim for move in plan(self.old, self.new).moves(0, rank))


def role(name: str, num_ranks: int) -> Role:
    """A role among so many ranks; every rank beyond the third holds copies and does not change."""
    victim = 0 if name == "coordinator" else 2
    a, b = (r for r in range(3) if r != victim)

    def placement(of_victim: Sequence[int], of_a: Sequence[int], of_b: Sequence[int]) -> Placement:
        slots = {victim: of_victim, a: of_a, b: of_b}
        spare = _SPARE[name != "source"]
        row = [expert for rank in range(num_ranks) for expert in slots.get(rank, spare)]
        return Placement([row] * LAYERS, ep_size=num_ranks)

    old, new, without = {
        "coordinator": (
            placement((0, 1, 2, 3), (0, 1, 4, 5), (2, 3, 4, 5)),
            placement((4, 5, 0, 1), (0, 1, 2, 3), (4, 5, 0, 1)),
            placement(_OUT, (2, 3, 4, 5), (0, 1, 2, 3)),
        ),
        "source": (
            placement((0, 1, 2, 3), (0, 1, 2, 3), (4, 5, 4, 5)),
            placement((0, 1, 2, 3), (0, 1, 2, 3), (4, 5, 0, 1)),
            placement(_OUT, (0, 1, 4, 5), (2, 3, 4, 5)),
        ),
        "reader": (
            placement((0, 1, 2, 3), (0, 1, 4, 5), (2, 3, 4, 5)),
            placement((4, 5, 0, 1), (0, 1, 4, 5), (2, 3, 4, 5)),
            placement(_OUT, (2, 3, 4, 5), (0, 1, 4, 5)),
        ),
        "bystander": (
            placement((0, 1, 2, 3), (0, 1, 4, 5), (2, 3, 6, 7)),
            placement((0, 1, 2, 3), (0, 1, 6, 7), (2, 3, 4, 5)),
            placement(_OUT, (4, 5, 6, 7), (0, 1, 2, 3)),
        ),
    }[name]
    of_a, of_b = (without.local(rank)[0].tolist() for rank in (a, b))
    made = Role(name, victim, b, old, new, without, placement(_OUT, of_b, of_a))
    _check(made)
    return made


def _check(made: Role) -> None:
    """The plan gives the victim its role and no other."""
    planned = plan(made.old, made.new)
    own = planned.moves(0, made.victim)
    reads = any(not move.is_local for move in own)
    is_read = bool(planned.reads_by_source(0)[made.victim])
    wanted = {
        "coordinator": (True, True),
        "source": (False, True),
        "reader": (True, False),
        "bystander": (False, False),
    }
    assert (reads, is_read) == wanted[made.name], (made.name, reads, is_read)
    assert reads or not own, "a source or bystander that copies from itself"
    for committed in range(LAYERS + 1):
        others = [rank for rank in range(made.old.ep_size) if rank != made.victim]
        assert plan(made.old.with_layers(made.new, committed), made.without, members=others).num_reads > 0
