"""Quantities as people read them."""

from __future__ import annotations

__all__ = ["counted", "spell_bytes"]


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
