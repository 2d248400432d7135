"""Integers that must not be mixed up, and bytes that must not be shown."""

from __future__ import annotations

from typing import NewType

Rank = NewType("Rank", int)
Layer = NewType("Layer", int)
Slot = NewType("Slot", int)
Expert = NewType("Expert", int)
Epoch = NewType("Epoch", int)
Term = NewType("Term", int)
Attempt = NewType("Attempt", int)
Incarnation = NewType("Incarnation", int)
"""Identity of one start of a rank's agent; later starts compare greater."""


class Hidden(bytes):
    """A secret, or a key made of one: no ``repr`` shows it, so that no traceback with its locals does."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{len(self)} hidden bytes>"

    __str__ = __repr__
