"""Which rank holds which expert, per layer."""

from __future__ import annotations

import hashlib
import operator
import struct
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb_async.errors import PlacementError

__all__ = ["Placement", "read_only", "spell_experts"]

_SHOWN = 8


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Placement:
    """A validated, immutable assignment of logical experts to slots.

    Attributes:
        physical_to_logical_map: int32 ``[num_layers, num_physical]``, read-only; -1 is an empty slot.
        ep_size: Number of ranks; rank ``r`` owns the ``r``-th ``num_local_experts`` columns.
        num_logical: Logical experts per layer.
    """

    physical_to_logical_map: NDArray[np.int32]
    ep_size: int
    num_logical: int

    def __init__(self, physical_to_logical_map: Any, *, ep_size: int, num_logical: int | None = None) -> None:
        """Checks and copies a map.

        Args:
            physical_to_logical_map: Integers ``[num_layers, num_physical]``: array, lists or torch tensor.
            ep_size: Number of ranks in the expert-parallel group.
            num_logical: Logical experts per layer; default the largest id plus one.

        Raises:
            PlacementError: The map cannot be a placement; names the layer, ids or sizes at fault.
        """
        ids = _integers(physical_to_logical_map)
        ep_size = _at_least_one(ep_size, "ep_size")
        num_logical = int(ids.max()) + 1 if num_logical is None else _at_least_one(num_logical, "num_logical")
        _check_ids(ids, num_logical)
        _check_divisible(num_logical, ids.shape[1] - num_logical, ep_size)
        _check_covered(ids, num_logical)
        object.__setattr__(self, "physical_to_logical_map", read_only(ids))
        object.__setattr__(self, "ep_size", ep_size)
        object.__setattr__(self, "num_logical", num_logical)

    @classmethod
    def initial(cls, num_layers: int, num_logical: int, *, ep_size: int, num_redundant: int = 0) -> Placement:
        """Lays experts out in order, with the redundant ones repeating them from 0 on.

        Args:
            num_layers: MoE layers.
            num_logical: Logical experts per layer.
            ep_size: Ranks.
            num_redundant: Slots beyond one for each logical expert, all ranks together.

        Raises:
            PlacementError: A size is below its minimum, or the slots do not divide over the ranks (says the
                smallest redundant count that does).
        """
        num_layers = _at_least_one(num_layers, "num_layers")
        num_logical = _at_least_one(num_logical, "num_logical")
        ep_size = _at_least_one(ep_size, "ep_size")
        if num_redundant < 0:
            raise PlacementError(f"num_redundant is {num_redundant}; it must be 0 or more")
        _check_divisible(num_logical, num_redundant, ep_size)
        row = np.arange(num_logical + num_redundant) % num_logical
        return cls(np.broadcast_to(row, (num_layers, row.size)), ep_size=ep_size, num_logical=num_logical)

    @property
    def num_layers(self) -> int:
        """MoE layers."""
        return int(self.physical_to_logical_map.shape[0])

    @property
    def num_physical(self) -> int:
        """Slots of all ranks together."""
        return int(self.physical_to_logical_map.shape[1])

    @property
    def num_local_experts(self) -> int:
        """Slots of one rank."""
        return self.num_physical // self.ep_size

    @property
    def num_redundant(self) -> int:
        """Slots beyond one for each logical expert."""
        return self.num_physical - self.num_logical

    @cached_property
    def logical_replica_count(self) -> NDArray[np.int32]:
        """Copies of each expert, int32 ``[num_layers, num_logical]``, all at least 1."""
        return read_only(_count(self.physical_to_logical_map, self.num_logical))

    @cached_property
    def logical_to_physical_map(self) -> NDArray[np.int32]:
        """Slots of each expert, int32 ``[num_layers, num_logical, max_replicas]``, ascending, then -1."""
        count = self.logical_replica_count
        layer, physical = np.nonzero(self.physical_to_logical_map >= 0)
        key = layer * self.num_logical + self.physical_to_logical_map[layer, physical]
        order = np.argsort(key, kind="stable")
        first = np.cumsum(count.ravel()) - count.ravel()
        inverse = np.full((count.size, int(count.max())), -1, dtype=np.int32)
        inverse[key[order], np.arange(key.size) - first[key[order]]] = physical[order]
        return read_only(inverse.reshape(*count.shape, -1))

    def local(self, rank: int) -> NDArray[np.int32]:
        """The slots of one rank, a read-only view ``[num_layers, num_local_experts]``.

        Raises:
            IndexError: There is no such rank.
        """
        if not 0 <= rank < self.ep_size:
            raise IndexError(f"rank {rank} is outside [0, {self.ep_size})")
        n = self.num_local_experts
        return self.physical_to_logical_map[:, rank * n : (rank + 1) * n]

    def with_layers(self, new: Placement, upto: int) -> Placement:
        """What is true once the first ``upto`` layers hold ``new`` and the others still hold this.

        Raises:
            PlacementError: The two differ in a size, or ``upto`` is outside ``[0, num_layers]``.
        """
        self.require_same_sizes(new)
        if not 0 <= upto <= self.num_layers:
            raise PlacementError(f"upto is {upto}; it must be within [0, {self.num_layers}]")
        mixed = np.concatenate([new.physical_to_logical_map[:upto], self.physical_to_logical_map[upto:]])
        both = object.__new__(Placement)  # what is checked is checked layer by layer, and has been
        object.__setattr__(both, "physical_to_logical_map", read_only(mixed))
        object.__setattr__(both, "ep_size", self.ep_size)
        object.__setattr__(both, "num_logical", self.num_logical)
        return both

    def with_rank(self, rank: int, slots: Any) -> Placement:
        """What is true once one rank holds other experts than this says.

        Args:
            rank: The rank.
            slots: Logical expert in each of its slots, -1 for none: integers ``[num_layers, num_local_experts]``.

        Raises:
            PlacementError: The sizes do not fit, an id is out of range, or an expert is left without a copy.
        """
        own = np.asarray(slots)
        if own.shape != self.local(rank).shape:
            raise PlacementError(f"slots of rank {rank} have shape {own.shape}, not {self.local(rank).shape}")
        mixed = self.physical_to_logical_map.astype(np.int64)
        n = self.num_local_experts
        mixed[:, rank * n : (rank + 1) * n] = own
        return Placement(mixed, ep_size=self.ep_size, num_logical=self.num_logical)

    def require_same_sizes(self, new: Placement) -> None:
        """Refuses a placement that cannot follow this one.

        Raises:
            PlacementError: The two differ in a size; names it, with both values.
        """
        sizes = ("num_layers", "num_physical", "num_logical", "ep_size")
        pairs = [(name, getattr(self, name), getattr(new, name)) for name in sizes]
        unequal = [
            f"{name} is {mine} in the old and {theirs} in the new" for name, mine, theirs in pairs if mine != theirs
        ]
        if unequal:
            raise PlacementError("the placements do not fit together: " + "; ".join(unequal))

    def digest(self) -> bytes:
        """A 16-byte BLAKE2b digest of the map and all sizes; equal on every rank and platform."""
        sizes = (self.num_layers, self.num_physical, self.num_logical, self.ep_size)
        content = self.physical_to_logical_map.astype("<i4").tobytes()
        return hashlib.blake2b(
            struct.pack("<4q", *sizes) + content, digest_size=16, person=b"eplb placement 1"
        ).digest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Placement):
            return NotImplemented
        return (self.ep_size, self.num_logical) == (other.ep_size, other.num_logical) and np.array_equal(
            self.physical_to_logical_map, other.physical_to_logical_map
        )

    def __hash__(self) -> int:
        return hash(self.digest())

    def __repr__(self) -> str:
        return (
            f"Placement(num_layers={self.num_layers}, num_logical={self.num_logical}, "
            f"num_physical={self.num_physical}, ep_size={self.ep_size}, digest={self.digest().hex()[:8]})"
        )


def spell_experts(at: NDArray[np.bool_]) -> str:
    """Names the experts marked in ``[num_layers, num_logical]``: ``layer 0: experts 2, 3; layer 4: …``."""
    layers = np.flatnonzero(at.any(axis=1))
    parts = [f"layer {layer}: {_spell_ids(np.flatnonzero(at[layer]).tolist())}" for layer in layers[:_SHOWN]]
    if layers.size > _SHOWN:
        parts.append(f"and {layers.size - _SHOWN} more layers")
    return "; ".join(parts)


def _spell_ids(experts: list[int]) -> str:
    shown = ", ".join(map(str, experts[:_SHOWN]))
    more = f" and {len(experts) - _SHOWN} more" if len(experts) > _SHOWN else ""
    return f"expert{'s' if len(experts) > 1 else ''} {shown}{more}"


def _integers(source: Any) -> NDArray[Any]:
    """The map as a 2-D integer array ``[num_layers, num_physical]`` of whatever integer type it came in."""
    try:
        ids = np.asarray(source.detach().cpu().numpy() if hasattr(source, "detach") else source)
    except (TypeError, ValueError) as error:
        raise PlacementError(f"physical_to_logical_map is not an array of integers: {error}") from error
    if ids.ndim != 2:
        raise PlacementError(f"physical_to_logical_map has shape {ids.shape}; it must be [num_layers, num_physical]")
    if ids.size == 0:
        raise PlacementError(f"physical_to_logical_map is empty: its shape is {ids.shape}")
    if not np.issubdtype(ids.dtype, np.integer):
        raise PlacementError(f"physical_to_logical_map has dtype {ids.dtype}; it must hold integers")
    if ids.max() < 0:
        raise PlacementError("physical_to_logical_map holds no expert: all ids are negative")
    return ids


def _at_least_one(value: int, name: str) -> int:
    try:
        number = operator.index(value)
    except TypeError as error:
        raise PlacementError(f"{name} is {value!r}; it must be an integer") from error
    if number < 1:
        raise PlacementError(f"{name} is {number}; it must be 1 or more")
    return number


def _check_ids(ids: NDArray[Any], num_logical: int) -> None:
    wrong = np.argwhere((ids < -1) | (ids >= num_logical))
    if wrong.size:
        layer, physical = wrong[0].tolist()
        raise PlacementError(
            f"layer {layer}, physical expert {physical}: "
            f"id {ids[layer, physical]} is outside [-1, {num_logical})"
            + (f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else "")
        )


def _check_divisible(num_logical: int, num_redundant: int, ep_size: int) -> None:
    if (num_logical + num_redundant) % ep_size:
        smallest = -num_logical % ep_size
        raise PlacementError(
            f"{num_logical} logical and {num_redundant} redundant experts do not divide over "
            f"ep_size {ep_size}; the smallest redundant count that does is {smallest} "
            f"({(num_logical + smallest) // ep_size} experts per rank)"
        )


def _check_covered(ids: NDArray[Any], num_logical: int) -> None:
    if num_logical > ids.shape[1]:  # sizes come from outside: never allocate by num_logical before this
        present = set(ids[0].tolist())
        absent = list(islice((e for e in range(num_logical) if e not in present), _SHOWN))
        raise PlacementError(
            f"{num_logical} logical experts do not fit in {ids.shape[1]} slots; "
            f"without any copy, among others, are layer 0: {_spell_ids(absent)}"
        )
    absent_at = _count(ids, num_logical) == 0
    if absent_at.any():
        raise PlacementError(f"every expert needs a copy in every layer; without any are {spell_experts(absent_at)}")


def _count(ids: NDArray[Any], num_logical: int) -> NDArray[np.int64]:
    """Copies of each expert ``[num_layers, num_logical]``."""
    layer, physical = np.nonzero(ids >= 0)
    key = layer * num_logical + ids[layer, physical].astype(np.int64)
    return np.bincount(key, minlength=len(ids) * num_logical).reshape(len(ids), num_logical)


def read_only(array: NDArray[Any]) -> NDArray[np.int32]:
    """An int32 copy that refuses writes."""
    copy = array.astype(np.int32)
    copy.setflags(write=False)
    return copy
