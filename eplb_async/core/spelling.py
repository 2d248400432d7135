"""Quantities as people read them."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["counted", "spell_bytes", "spell_ranks"]


def counted(number: int, noun: str) -> str:
    """``"1 layer"``, ``"3 layers"``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def spell_bytes(number: float) -> str:
    """Three digits and a decimal unit: ``"44 MB"``, ``"1.25 GB"``."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB" if number < 999.5 else f"{number:.0f} TB"


def spell_ranks(ranks: Sequence[int]) -> str:
    """``"rank 2"``, ``"ranks 0, 2"``, ``"no rank"``."""
    if not ranks:
        return "no rank"
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"
