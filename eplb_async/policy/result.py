"""What the policy answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb_async.core.placement import Placement
from eplb_async.policy.arguments import Question
from eplb_async.policy.table import Floats, Ints

__all__ = ["Rebalance", "answer", "rank_loads"]


@dataclass(frozen=True, slots=True)
class Rebalance:
    """A placement, and what is known of it. Unpacks as the three maps.

    Attributes:
        placement: The placement to migrate to; the current one where ``worth_it`` is false.
        hierarchical: Whether groups stay on nodes.
        worth_it: Whether the placement that was found gains ``min_gain``. True where ranks must be emptied or there is
            nothing to compare with.
        gain: Part of the busiest ranks' load, summed over the layers, that the placement found saves; 0 without
            ``current``.
        moves: Slots that must receive an expert that their rank does not hold, for the placement found. Times the bytes
            of an expert, what the migration transfers between ranks. All slots without ``current``.
        balancedness: Mean over maximum of the rank loads, of ``placement``, ``[num_layers]``; 1 without load.
        balancedness_before: Likewise, of ``current``; None without it.
    """

    placement: Placement
    hierarchical: bool
    worth_it: bool
    gain: float
    moves: int
    balancedness: Floats
    balancedness_before: Floats | None

    @property
    def physical_to_logical_map(self) -> NDArray[np.int32]:
        """int32 ``[num_layers, num_replicas]``, -1 on ranks that are out."""
        return self.placement.physical_to_logical_map

    @property
    def logical_to_physical_map(self) -> NDArray[np.int32]:
        """int32 ``[num_layers, num_logical, max_replicas]``, then -1."""
        return self.placement.logical_to_physical_map

    @property
    def logical_replica_count(self) -> NDArray[np.int32]:
        """int32 ``[num_layers, num_logical]``."""
        return self.placement.logical_replica_count

    def __iter__(self) -> Iterator[NDArray[np.int32]]:
        return iter((self.physical_to_logical_map, self.logical_to_physical_map, self.logical_replica_count))


def rank_loads(load: Any, placement: Placement) -> Floats:
    """Load of each rank, ``[num_layers, ep_size]``, where the copies of an expert share its load evenly.

    Args:
        load: ``[num_layers, num_logical]``.
        placement: The placement.
    """
    loads = np.asarray(load, dtype=np.float64)
    share = np.concatenate([loads / placement.logical_replica_count, np.zeros((len(loads), 1))], axis=1)
    taken = np.take_along_axis(share, placement.physical_to_logical_map.astype(np.int64), axis=1)
    return np.asarray(taken.reshape(len(loads), placement.ep_size, -1).sum(axis=2))


def answer(question: Question, slots: Ints, current: Placement | None, *, moves: int, must: bool) -> Rebalance:
    """Puts the answer together; ``slots`` is ``[num_layers, num_ranks, local]``.

    Args:
        question: What was asked.
        slots: The placement found.
        current: The placement before.
        moves: Slots of it that must receive.
        must: Whether it is needed whatever it gains.
    """
    layers, experts = question.load.shape
    found = Placement(slots.reshape(layers, -1), ep_size=question.usable.size, num_logical=experts)
    peaks, balance = _peaks_and_balance(question, found)
    gain, before = 0.0, None
    if current is not None:
        peaks_before, before = _peaks_and_balance(question, current)
        busy = ~question.idle
        gain = float(1 - peaks[busy].sum() / peaks_before[busy].sum()) if busy.any() else 0.0
        if not must and (gain < question.min_gain or gain <= 0):
            return Rebalance(current, question.nodes > 1, False, gain, moves, before, before)
    return Rebalance(found, question.nodes > 1, True, gain, moves, balance, before)


def _peaks_and_balance(question: Question, placement: Placement) -> tuple[Floats, Floats]:
    loads = rank_loads(question.load, placement)
    peaks = loads.max(axis=1)
    balance = loads.sum(axis=1) / question.usable.sum() / peaks
    return peaks, np.where(question.idle, 1.0, balance)
