"""Integers that must not be mixed up."""

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
