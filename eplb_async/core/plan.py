"""What must move from one placement to the next, and from where: all layers at once.

Every expert that a rank must hold in slots which did not hold it is one **move** of that rank: a local copy
if the rank held the expert anywhere before, else one READ from one source; further slots are filled from
staging. An expert that no member holds any more is **lost**: its move has no source, and the reader loads it.

How sources are chosen, per layer and expert: the readers that have a source on their own node share those
sources; the other readers share all sources. Such readers are a team, with ``n`` readers and ``k`` sources.

- Every source serves ``floor(n / k)`` or ``ceil(n / k)`` readers of a team.
- Which sources serve the odd readers is settled by load: team after team chooses the least loaded sources of
  its layer until none would choose otherwise. So a source that serves one reader of a team more than another
  source does carries at most one READ of that layer more than it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eplb_async.core.placement import Placement, read_only, spell_experts
from eplb_async.errors import ExpertsLost, PlacementError

__all__ = ["PLAN_VERSION", "MigrationPlan", "Move", "plan"]

PLAN_VERSION = 1
"""Changes whenever the same arguments may give another plan. Ranks with unequal versions must not migrate."""

_NEVER = np.int64(1) << 60
_SHOWN = 8
_Ints = NDArray[np.int32]
_Longs = NDArray[np.int64]


class Move(NamedTuple):
    """One expert that a reader receives once, for one or more of its slots.

    ``source`` and ``source_slot`` are -1 where no member holds the expert: the reader loads it.
    """

    reader: int
    """Rank that receives it."""
    expert: int
    """The logical expert."""
    source: int
    """Rank whose row is read; the reader itself for a local copy."""
    source_slot: int
    """Slot of that rank, in the old placement."""
    targets: tuple[int, ...]
    """Slots of the reader that it fills, ascending, in the new placement."""

    @property
    def is_local(self) -> bool:
        """Whether the reader copies from itself."""
        return self.source == self.reader

    @property
    def is_loaded(self) -> bool:
        """Whether no member holds the expert, so that the reader loads it."""
        return self.source < 0

    @property
    def is_read(self) -> bool:
        """Whether the reader READs it from another rank."""
        return 0 <= self.source != self.reader


@dataclass(frozen=True, eq=False)
class MigrationPlan:
    """All moves of one migration, sorted by (layer, reader, first target); read-only int32 arrays.

    An empty plan can still change the placement: emptying a slot moves nothing.

    Attributes:
        old: Where the experts are.
        new: Where they go.
        members: Ranks that take part, ascending.
        layer: ``[M]``.
        reader: ``[M]`` rank that receives.
        expert: ``[M]`` logical expert.
        source: ``[M]`` rank whose row is read; the reader itself for a local copy, -1 for a lost expert.
        source_slot: ``[M]`` slot on the source, in ``old``; -1 for a lost expert.
        target_offsets: ``[M + 1]``; move ``i`` fills ``targets[target_offsets[i]:target_offsets[i + 1]]``.
        targets: ``[T]`` slots on the reader, ascending within a move.
        node: ``[ep_size]`` number of each rank's node.
    """

    old: Placement
    new: Placement
    members: tuple[int, ...]
    layer: _Ints
    reader: _Ints
    expert: _Ints
    source: _Ints
    source_slot: _Ints
    target_offsets: _Ints
    targets: _Ints
    node: _Ints

    @property
    def num_reads(self) -> int:
        """Experts that cross ranks."""
        return len(self.layer) - self.num_local - self.num_loads

    @property
    def num_local(self) -> int:
        """Experts that a rank copies from itself."""
        return int(np.count_nonzero(self.source == self.reader))

    @property
    def num_loads(self) -> int:
        """Lost experts that a rank loads; each rank that needs one loads it."""
        return int(np.count_nonzero(self.source < 0))

    @cached_property
    def lost(self) -> Mapping[int, tuple[int, ...]]:
        """Experts that no member holds, ascending, by layer; layers without any are left out."""
        lost = self.source < 0
        return _by_layer(np.unique(np.stack([self.layer[lost], self.expert[lost]], axis=1), axis=0))

    def lost_error(self) -> ExpertsLost | None:
        """What to raise where lost experts cannot be loaded; ``None`` if none is lost."""
        absent = np.zeros((self.new.num_layers, self.new.num_logical), dtype=np.bool_)
        absent[self.layer[self.source < 0], self.expert[self.source < 0]] = True
        return _lost_error(absent, self.members) if self.lost else None

    def sources(self, layer: int, expert: int, reader: int) -> tuple[tuple[int, int], ...]:
        """Members other than ``reader`` that hold an expert in ``old``, each with its lowest slot there.

        Those on the reader's node come first, then by distance in rank after the reader.
        """
        found: dict[int, int] = {}
        for physical in np.flatnonzero(self.old.physical_to_logical_map[layer] == expert).tolist():
            rank, slot = divmod(physical, self.old.num_local_experts)
            if rank != reader and rank in self.members:
                found.setdefault(rank, slot)
        near = self.node[reader]
        order = sorted(found, key=lambda rank: (self.node[rank] != near, (rank - reader) % self.old.ep_size))
        return tuple((rank, found[rank]) for rank in order)

    @property
    def is_empty(self) -> bool:
        """Whether no bytes move."""
        return len(self.layer) == 0

    def moves(self, layer: int, rank: int) -> tuple[Move, ...]:
        """What ``rank`` receives in ``layer``, by first target.

        Raises:
            IndexError: There is no such layer or rank.
        """
        if not (0 <= layer < self.new.num_layers and 0 <= rank < self.new.ep_size):
            raise IndexError(f"no layer {layer} or rank {rank} in {self.new}")
        at = layer * self.new.ep_size + rank
        first, stop = self._move_offsets[at : at + 2].tolist()
        ends = self.target_offsets[first : stop + 1].tolist()
        columns = [column[first:stop].tolist() for column in (self.expert, self.source, self.source_slot)]
        slots = self.targets[ends[0] : ends[-1]].tolist()
        return tuple(
            Move(rank, expert, source, slot, tuple(slots[start - ends[0] : end - ends[0]]))
            for expert, source, slot, start, end in zip(*columns, ends, ends[1:], strict=False)
        )

    def num_moves(self, rank: int) -> _Longs:
        """Experts that ``rank`` receives in each layer, int64 ``[num_layers]``."""
        at = np.arange(self.new.num_layers) * self.new.ep_size + rank
        return self._move_offsets[at + 1] - self._move_offsets[at]

    def reads_by_source(self, layer: int) -> _Longs:
        """READs that each rank serves in ``layer``, int64 ``[ep_size]``."""
        return np.bincount(self.reads(range(layer, layer + 1))[1], minlength=self.new.ep_size)

    def reads(self, layers: range) -> tuple[_Ints, _Ints]:
        """Reader and source of each READ of neighbouring layers, all ranks together; both ``[num_reads]``."""
        n = self.new.ep_size
        first, stop = int(self._move_offsets[layers.start * n]), int(self._move_offsets[layers.stop * n])
        reader, source = self.reader[first:stop], self.source[first:stop]
        read = (source != reader) & (source >= 0)
        return reader[read], source[read]

    def max_incoming(self, bytes_per_layer: Sequence[int]) -> int:
        """Bytes of staging that the busiest rank needs for its busiest layer, local copies included.

        Args:
            bytes_per_layer: Bytes of one expert, all its tensors together, for each layer ``[num_layers]``.

        Raises:
            ValueError: The number of layers differs from the plan's.
        """
        if len(bytes_per_layer) != self.new.num_layers:
            raise ValueError(f"{len(bytes_per_layer)} layer sizes for {self.new.num_layers} layers")
        busiest = np.diff(self._move_offsets).reshape(self.new.num_layers, -1).max(axis=1)
        return max(int(moves) * nbytes for moves, nbytes in zip(busiest, bytes_per_layer, strict=True))

    @cached_property
    def _move_offsets(self) -> _Longs:
        """Where the moves of each (layer, reader) begin, ``[num_layers * ep_size + 1]``."""
        key = self.layer.astype(np.int64) * self.new.ep_size + self.reader
        return np.searchsorted(key, np.arange(self.new.num_layers * self.new.ep_size + 1))


def plan(
    old: Placement,
    new: Placement,
    *,
    nodes: Sequence[str] | None = None,
    members: Collection[int] | None = None,
    load_lost: bool = False,
) -> MigrationPlan:
    """Plans a migration; depends on nothing but its arguments.

    Args:
        old: Where the experts are.
        new: Where they shall be.
        nodes: Host label of each rank ``[ep_size]``, for "same node first"; default one node.
        members: Ranks that take part; default all. Only they are sources, only they hold experts in ``new``.
        load_lost: Plan experts that no member holds as moves without a source, instead of refusing them.

    Raises:
        PlacementError: ``old``, ``new``, ``nodes`` and ``members`` do not fit together, or ``new`` uses a rank
            that is not a member.
        ExpertsLost: Experts have no copy on any member, and ``load_lost`` is not set; lists all of them.
    """
    old.require_same_sizes(new)
    node = _node_numbers(nodes, old.ep_size)
    ranks = tuple(sorted(set(range(old.ep_size) if members is None else map(int, members))))
    holders = _Holders.of(old)
    sources = holders.only(_mask(ranks, old.ep_size), node)
    held = np.bincount(sources.group, minlength=new.num_layers * new.num_logical) > 0
    # Each expert has a copy in new, so one that no member holds in old must be read, and cannot be.
    lost = ~held.reshape(new.num_layers, new.num_logical)
    if lost.any() and not load_lost:
        raise _lost_error(lost, ranks)
    _check_members(new, ranks, lost)

    layer, physical = np.nonzero(
        (new.physical_to_logical_map != old.physical_to_logical_map) & (new.physical_to_logical_map >= 0)
    )
    reader, slot = np.divmod(physical, new.num_local_experts)
    expert = new.physical_to_logical_map[layer, physical].astype(np.int64)
    key = (layer * new.ep_size + reader) * new.num_logical + expert
    _, first, move, count = np.unique(key, return_index=True, return_inverse=True, return_counts=True)
    order = np.argsort(first)  # unique sorts by expert; moves go by first target
    place = np.empty_like(order)
    place[order] = np.arange(order.size)
    targets = slot[np.argsort(place[move], kind="stable")]
    layer, reader, expert = (column[first[order]] for column in (layer, reader, expert))

    group = layer * new.num_logical + expert
    source, source_slot = reader.copy(), holders.slot_on(group, reader)
    source[~held[group]] = -1
    reads = np.flatnonzero((source_slot < 0) & held[group])
    chosen = _choose(sources, group[reads], reader[reads], node, old)
    source[reads], source_slot[reads] = sources.rank[chosen], sources.slot[chosen]
    offsets = np.concatenate([[0], np.cumsum(count[order])])
    columns = (read_only(column) for column in (layer, reader, expert, source, source_slot, offsets, targets, node))
    return MigrationPlan(old, new, ranks, *columns)


@dataclass(frozen=True, slots=True)
class _Holders:
    """Who holds what: for each (layer, expert) its ranks, each with its lowest slot; ``[H]``.

    ``group`` is ``layer * num_logical + expert`` and ascends.
    """

    group: _Longs
    rank: _Longs
    slot: _Longs
    ep_size: int

    @classmethod
    def of(cls, placement: Placement) -> _Holders:
        """All of a placement, by (group, rank)."""
        layer, physical = np.nonzero(placement.physical_to_logical_map >= 0)
        rank, slot = np.divmod(physical, placement.num_local_experts)
        group = layer * placement.num_logical + placement.physical_to_logical_map[layer, physical]
        key, first = np.unique(group * placement.ep_size + rank, return_index=True)
        return cls(*np.divmod(key, placement.ep_size), slot[first], placement.ep_size)

    def only(self, member: NDArray[np.bool_], node: _Longs) -> _Holders:
        """Those on members, by (group, node, rank): sources of a group, and of a node in it, adjoin."""
        kept = np.flatnonzero(member[self.rank])
        kept = kept[np.lexsort((self.rank[kept], node[self.rank[kept]], self.group[kept]))]
        return _Holders(self.group[kept], self.rank[kept], self.slot[kept], self.ep_size)

    def slot_on(self, group: _Longs, rank: _Longs) -> _Longs:
        """The lowest slot that holds ``group`` on ``rank``, -1 if none; only for holders by (group, rank)."""
        key, wanted = self.group * self.ep_size + self.rank, group * self.ep_size + rank
        at = np.minimum(np.searchsorted(key, wanted), key.size - 1)
        return np.where(key[at] == wanted, self.slot[at], -1)


def _choose(sources: _Holders, group: _Longs, reader: _Longs, node: _Longs, old: Placement) -> _Longs:
    """Index into ``sources`` of the source of each READ ``[num_reads]``."""
    if group.size == 0:
        return group
    width = int(node.max()) + 1
    at_node, wanted = sources.group * width + node[sources.rank], group * width + node[reader]
    first, stop = np.searchsorted(at_node, wanted), np.searchsorted(at_node, wanted, side="right")
    elsewhere = first == stop
    first[elsewhere] = np.searchsorted(sources.group, group[elsewhere])
    stop[elsewhere] = np.searchsorted(sources.group, group[elsewhere], side="right")

    # Readers with the same range of sources form one team and split them evenly.
    _, sample, team, n = np.unique(
        first * (sources.rank.size + 1) + stop, return_index=True, return_inverse=True, return_counts=True
    )
    first, k = first[sample], (stop - first)[sample]
    layer, expert = np.divmod(group[sample], old.num_logical)
    turn = (layer + expert) % k
    odd = n % k
    picks, offset = _pick_odd(sources, first, k, n // k, odd, turn, layer)

    order = np.argsort(team, kind="stable")
    nth = np.empty_like(order)
    nth[order] = _expand(n)[1]
    even = (n - odd)[team]
    position = (nth + turn[team]) % k[team]
    late = np.flatnonzero(nth >= even)
    position[late] = picks[offset[team[late]] + nth[late] - even[late]]
    chosen: _Longs = first[team] + position
    return chosen


def _pick_odd(
    sources: _Holders, first: _Longs, k: _Longs, each: _Longs, odd: _Longs, turn: _Longs, layer: _Longs
) -> tuple[_Longs, _Longs]:
    """Chooses, for each team, the ``odd`` sources that serve one reader more than ``each``.

    Teams of different layers are independent: step ``s`` settles the ``s``-th team of every layer together.

    Returns:
        Positions among the team's sources ``[odd.sum()]``, and where each team's begin ``[num_teams]``.
    """
    team, nth = _expand(k)
    cell = layer[team] * sources.ep_size + sources.rank[first[team] + nth]
    load = np.bincount(cell, each[team], (int(layer.max()) + 1) * sources.ep_size).astype(np.int64)
    team, nth = _expand(odd)
    picks = (nth + turn[team]) % k[team]
    np.add.at(load, layer[team] * sources.ep_size + sources.rank[first[team] + picks], 1)
    offset = np.cumsum(odd) - odd

    steps = []
    todo = np.flatnonzero(odd)
    todo = todo[np.lexsort((k[todo], layer[todo]))]
    step = np.arange(todo.size) - np.searchsorted(layer[todo], layer[todo])
    for number in range(int(step.max(initial=-1)) + 1):
        teams = todo[step == number]
        width = np.arange(k[teams].max())
        real = width < k[teams, None]
        spot = np.where(real, first[teams, None] + width, 0)
        tie = np.where(real, (width - turn[teams, None]) % k[teams, None], _NEVER)
        taken = np.arange(odd[teams].max()) < odd[teams, None]
        row, nth = np.nonzero(taken)
        steps.append(
            (
                layer[teams, None] * sources.ep_size + sources.rank[spot],
                tie,
                row,
                nth,
                offset[teams[row]] + nth,
            )
        )

    # Each choice lowers the sum of squared loads, or keeps it and lowers the sum of ties: this ends.
    settled = False
    while not settled:
        settled = True
        for cell, tie, row, nth, at in steps:
            load[cell[row, picks[at]]] -= 1
            best = np.argsort(load[cell] * tie.shape[1] + tie, axis=1)[row, nth]
            load[cell[row, best]] += 1
            settled = settled and np.array_equal(best, picks[at])
            picks[at] = best
    return picks, offset


def _expand(count: _Longs) -> tuple[_Longs, _Longs]:
    """Owner of each element and its number within the owner, both ``[count.sum()]``."""
    owner = np.repeat(np.arange(count.size), count)
    return owner, np.arange(owner.size) - (np.cumsum(count) - count)[owner]


def _lost_error(lost: NDArray[np.bool_], ranks: tuple[int, ...]) -> ExpertsLost:
    return ExpertsLost(
        f"no source among ranks {_spell(ranks)} for {spell_experts(lost)}; pass load_expert (to migrate(), or "
        "to the service) on every rank to supply them, or bring back a rank that holds them",
        lost=_by_layer(np.argwhere(lost)),
    )


def _by_layer(pairs: NDArray[Any]) -> dict[int, tuple[int, ...]]:
    """Sorted (layer, expert) pairs ``[n, 2]`` as experts by layer."""
    found: dict[int, tuple[int, ...]] = {}
    for layer, expert in pairs.tolist():
        found[layer] = (*found.get(layer, ()), expert)
    return found


def _check_members(new: Placement, ranks: tuple[int, ...], lost: NDArray[np.bool_]) -> None:
    outside = [
        f"rank {rank}, {_spell_slots(new.local(rank))}"
        for rank in sorted(set(range(new.ep_size)) - set(ranks))
        if (new.local(rank) >= 0).any()
    ]
    if outside:
        raise PlacementError(
            f"the new placement uses slots of ranks that are not members (members are ranks {_spell(ranks)}): "
            f"{'; '.join(outside)}; set them to -1 and give their experts to members, or reconnect the rank first"
            + (f". No member holds {spell_experts(lost)}: pass load_expert for these" if lost.any() else "")
        )


def _spell_slots(local: NDArray[np.int32]) -> str:
    """The slots that are not empty, ``[num_layers, num_local_experts]``, cut short when there are many."""
    used = np.argwhere(local >= 0).tolist()
    shown = [f"slot {slot} of layer {layer} (expert {local[layer, slot]})" for layer, slot in used[:_SHOWN]]
    return ", ".join(shown) + (f" and {len(used) - _SHOWN} more" if len(used) > _SHOWN else "")


def _mask(ranks: tuple[int, ...], ep_size: int) -> NDArray[np.bool_]:
    outside = [rank for rank in ranks if not 0 <= rank < ep_size]
    if outside or not ranks:
        raise PlacementError(f"members are {list(ranks)}; they must be one or more ranks within [0, {ep_size})")
    mask = np.zeros(ep_size, dtype=np.bool_)
    mask[list(ranks)] = True
    return mask


def _node_numbers(nodes: Sequence[str] | None, ep_size: int) -> _Longs:
    if nodes is None:
        return np.zeros(ep_size, dtype=np.int64)
    if len(nodes) != ep_size:
        raise PlacementError(f"{len(nodes)} node labels for ep_size {ep_size}")
    numbers = {label: number for number, label in enumerate(dict.fromkeys(nodes))}
    return np.array([numbers[label] for label in nodes], dtype=np.int64)


def _spell(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
