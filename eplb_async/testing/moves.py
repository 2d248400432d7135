"""What may happen in a ring: one act by name, and how often each kind may be chosen."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

UNLIMITED = 1 << 30


class Violation(AssertionError):
    """An invariant does not hold."""


class Move(NamedTuple):
    """One act, by name and arguments: printable, and repeatable with `Ring.play`."""

    act: str
    """Name of a method of the ring."""
    args: tuple[Any, ...] = ()
    """What it is called with."""
    helpful: bool = True
    """Whether progress may rely on it; faults are not."""

    def __str__(self) -> str:
        return f"{self.act}({', '.join(map(str, self.args))})"


@dataclass(frozen=True, slots=True)
class Limits:
    """How often what may happen in `Ring.moves`: everywhere together, but ``migrations`` on each rank.

    Attributes:
        fifo: Messages of one rank to another arrive in order. NIXL promises no such thing.
        unreliable: Messages arrive in any order, any number of times, or never: whatever was sent stays under
            way. What is safe so is safe with any order, duplicates and losses.
    """

    migrations: int = 1
    crashes: int = 0
    give_ups: int = UNLIMITED
    closes: int = 0
    exclusions: int = 0
    cuts: int = 0
    duplicates: int = 0
    doubts: int = 0
    returns: int = 0
    fifo: bool = True
    unreliable: bool = False

    @property
    def only_crashes(self) -> bool:
        """Whether who leaves a view is dead, and stays so."""
        return not (self.closes or self.exclusions or self.cuts or self.returns)

    def __str__(self) -> str:
        changed = (f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default)
        return ", ".join(changed).replace(str(UNLIMITED), "any") or "nothing goes wrong"


USES = ("crashes", "give_ups", "closes", "exclusions", "cuts", "duplicates", "doubts", "returns")
"""The limits that are counted together."""
