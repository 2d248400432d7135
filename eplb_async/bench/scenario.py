"""What is measured: ranks, layers, experts, their sizes, and which of them move."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from eplb_async.core.placement import Placement

__all__ = ["CONTENDERS", "SCENARIOS", "Scenario", "choose"]

_KIB, _MIB = 1 << 10, 1 << 20
_RATE = ("ours", "raw", "vllm_way", "vllm", "vllm_drop_in", "gloo", "copy_twice", "copy_once", "copies")
_BLOCKED = ("late", "blocked")
CONTENDERS = (*_RATE, *_BLOCKED)
"""Names of all contenders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One piece of work, the same for every contender.

    Attributes:
        name: Name on the command line.
        what: What it shows, in a line.
        ranks: Ranks of the group.
        layers: Layers.
        experts: Slots of each rank.
        row_bytes: Bytes of an expert's row in each tensor.
        moves: ``"cross"``: every slot gets an expert of another rank; ``"skewed"``: every other rank needs the
            experts of rank 0.
        transport: ``"auto"`` or ``"tcp"``.
        loop: Of the user and the engine: ``"uvloop"`` or ``"asyncio"``.
        contenders: Who is measured.
        block: How the user's loop of rank 0 is blocked: ``"released"`` or ``"held"`` (the GIL); empty: not.
        settings: Settings of ours that differ from the defaults.
        in_quick: Whether ``--quick`` includes it.
    """

    name: str
    what: str
    ranks: int = 2
    layers: int = 4
    experts: int = 16
    row_bytes: tuple[int, ...] = (2 * _MIB, _MIB)
    moves: str = "cross"
    transport: str = "auto"
    loop: str = "uvloop"
    contenders: tuple[str, ...] = _RATE
    block: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    in_quick: bool = False

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert in one layer."""
        return sum(self.row_bytes)

    def quicker(self) -> Scenario:
        """The same in small: at most two layers of eight experts, or eight layers where there are many."""
        layers = 8 if self.layers > 8 else min(self.layers, 2)
        row_bytes = tuple(min(nbytes, 8 * _MIB) for nbytes in self.row_bytes)
        experts = self.experts if self.expert_bytes <= _MIB else min(self.experts, 8)
        return replace(self, layers=layers, experts=experts, row_bytes=row_bytes)

    def placements(self) -> tuple[Placement, Placement]:
        """Where the experts are, and where they go; the way back moves as much."""
        rng = np.random.default_rng(2026)
        make = self._skewed if self.moves == "skewed" else self._cross
        layers = [make(rng) for _ in range(self.layers)]
        one, two = (Placement(np.stack(rows), ep_size=self.ranks) for rows in zip(*layers, strict=True))
        return one, two

    def _cross(self, rng: np.random.Generator) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Slot ``j`` of rank ``r`` gets an expert of rank ``r + 1 + j % (ranks - 1)``, which one by chance."""
        held = np.arange(self.ranks * self.experts).reshape(self.ranks, self.experts)
        new = np.empty_like(held)
        stock = [list(rng.permutation(row)) for row in held]
        for reader in range(self.ranks):
            for slot in range(self.experts):
                new[reader, slot] = stock[(reader + 1 + slot % (self.ranks - 1)) % self.ranks].pop()
        return held.ravel(), new.ravel()

    def _skewed(self, rng: np.random.Generator) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Rank 0 holds two sets of experts; all others hold the first in half of their slots, then the second."""
        half = self.experts // 2
        hot = rng.permutation(2 * half)
        kept = 2 * half + np.arange((self.ranks - 1) * (self.experts - half)).reshape(self.ranks - 1, -1)
        both = []
        for chosen in (hot[:half], hot[half:]):
            others = np.concatenate([np.broadcast_to(chosen, (self.ranks - 1, half)), kept], axis=1)
            first = np.concatenate([hot, np.full(self.experts - 2 * half, -1)])
            both.append(np.concatenate([first, others.ravel()]))
        return both[0], both[1]

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Scenario:
        """From :meth:`to_json`, lists for tuples allowed."""
        tuples = {name: tuple(values[name]) for name in ("row_bytes", "contenders")}
        return cls(**{**values, **tuples})


SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario(name="reference", what="2 ranks, 4 layers, 16 experts of 2 + 1 MiB, all exchanged", in_quick=True),
        Scenario(
            name="small", what="small experts: 128 a rank of 64 KiB", experts=128, row_bytes=(64 * _KIB,), in_quick=True
        ),
        Scenario(name="big", what="few big experts: 8 of 64 MiB", layers=1, experts=8, row_bytes=(64 * _MIB,)),
        Scenario(name="layers", what="many layers: 58 of 4 x 256 KiB", layers=58, experts=4, row_bytes=(256 * _KIB,)),
        Scenario(
            name="skewed",
            what="4 ranks, all others need rank 0's experts",
            ranks=4,
            experts=8,
            moves="skewed",
            in_quick=True,
        ),
        Scenario(name="tcp", what="reference over UCX_TLS=tcp,self", transport="tcp", in_quick=True),
        Scenario(name="ranks3", what="reference with 3 ranks", ranks=3, experts=12),
        Scenario(name="ranks4", what="reference with 4 ranks", ranks=4, experts=12),
        Scenario(name="asyncio", what="reference on asyncio's own loop", loop="asyncio"),
        Scenario(
            name="blocked",
            what="rank 0's loop blocks 200 ms at a time, GIL released: its peer's migration",
            contenders=_BLOCKED,
            block="released",
            in_quick=True,
        ),
        Scenario(
            name="blocked-gil",
            what="rank 0's loop blocks 200 ms at a time, GIL held: its peer's migration",
            contenders=_BLOCKED,
            block="held",
            in_quick=True,
        ),
    )
}


def choose(names: list[str], *, quick: bool, **changes: Any) -> list[Scenario]:
    """Scenarios by name, or all; ``quick``: in small, and without names only those that it includes.

    Args:
        names: Names; empty for all.
        quick: Whether to shrink them.
        **changes: Fields to set in each, where the value is not ``None``.

    Raises:
        KeyError: A name is unknown.
    """
    chosen = [SCENARIOS[name] for name in names] or [s for s in SCENARIOS.values() if s.in_quick or not quick]
    given = {name: value for name, value in changes.items() if value is not None}
    return [replace(s.quicker() if quick else s, **given) for s in chosen]
