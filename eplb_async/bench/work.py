"""The work of one rank: whose rows it reads, in which slots they end, and the weights that rivals move."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from eplb_async.bench.group import Group
from eplb_async.bench.scenario import Scenario
from eplb_async.core.plan import MigrationPlan, plan
from eplb_async.testing.patterns import PatternWeights

__all__ = ["Fetch", "Turn", "Work"]


@dataclass(frozen=True, slots=True)
class Fetch:
    """One expert that a reader gets: from which rank and slot, into which slot."""

    reader: int
    source: int
    source_slot: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one turn of one contender took on one rank.

    Attributes:
        seconds: Wall time, from the barrier until its rows are in place.
        cpu: CPU seconds of the whole process meanwhile.
        polls: Native polls; ``None`` where it does not poll.
        lags: Of the user's loop, in seconds; empty where that was not looked at.
    """

    seconds: float
    cpu: float
    polls: int | None = None
    lags: tuple[float, ...] = ()


class Work:
    """A scenario as one rank does it: every contender is given the same.

    Attributes:
        scenario: It.
        group: The ranks.
        one: Where the experts are.
        two: Where they go.
    """

    def __init__(self, scenario: Scenario, group: Group) -> None:
        self.scenario = scenario
        self.group = group
        self.rank = group.rank
        self.one, self.two = scenario.placements()

    @cached_property
    def plan(self) -> MigrationPlan:
        """The moves, as ours plans them, and for all."""
        return plan(self.one, self.two)

    @cached_property
    def fetches(self) -> list[list[Fetch]]:
        """For each layer, what every rank reads, in the plan's order."""
        found = []
        for layer in range(self.one.num_layers):
            moves = [move for rank in range(self.group.size) for move in self.plan.moves(layer, rank)]
            if any(not move.is_read or len(move.targets) != 1 for move in moves):
                raise ValueError(f"scenario {self.scenario.name}: layer {layer} is not of READs into one slot each")
            found.append([Fetch(m.reader, m.source, m.source_slot, m.targets[0]) for m in moves])
        return found

    def incoming(self, layer: int) -> list[Fetch]:
        """What this rank reads in a layer."""
        return [fetch for fetch in self.fetches[layer] if fetch.reader == self.rank]

    def outgoing(self, layer: int) -> list[Fetch]:
        """What other ranks read of this one in a layer."""
        return [fetch for fetch in self.fetches[layer] if fetch.source == self.rank]

    @cached_property
    def bytes_in(self) -> int:
        """Bytes that this rank reads, all layers together."""
        return sum(len(self.incoming(layer)) for layer in range(self.one.num_layers)) * self.scenario.expert_bytes

    @cached_property
    def rows(self) -> PatternWeights:
        """The weights that the rivals share; ours has its own, whose placement it must know."""
        return PatternWeights(self.one, self.rank, self.scenario.row_bytes)

    def buffers(self) -> list[torch.Tensor]:
        """Room for what this rank reads in its busiest layer: for each tensor uint8 ``[most, row_bytes]``."""
        most = max(len(self.incoming(layer)) for layer in range(self.one.num_layers))
        return [torch.zeros(max(1, most), nbytes, dtype=torch.uint8) for nbytes in self.scenario.row_bytes]

    def place(self, layer: int, staged: list[torch.Tensor]) -> None:
        """Copy a layer's buffers into the rows of the rivals: the n-th row belongs to the n-th fetch."""
        targets = [fetch.target for fetch in self.incoming(layer)]
        for tensor, buffer in zip(self.rows.layers[layer], staged, strict=True):
            into: Any = tensor.numpy()
            out: Any = buffer.numpy()
            for number, target in enumerate(targets):
                into[target] = out[number]
