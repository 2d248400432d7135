"""Devices of torch, as NIXL calls them."""

from __future__ import annotations

from functools import cache


@cache
def memory_of(device: str) -> str:
    """NIXL's memory type of a torch device."""
    return "VRAM" if device.startswith("cuda") else "DRAM"


@cache
def device_index(device: str) -> int:
    """Index of a torch device."""
    return int(device.partition(":")[2] or 0)
