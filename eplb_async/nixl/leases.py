"""Leases: exclusive rights to memory that a READ may still write (I-3)."""

from __future__ import annotations

from eplb_async.errors import CommunicatorBusy
from eplb_async.nixl.native import Descriptors

Intervals = tuple[tuple[int, int], ...]
"""Memory, as sorted and disjoint (start, end) addresses."""


def intervals_of(blocks: Descriptors) -> Intervals:
    """Merge descriptors into sorted, disjoint address intervals."""
    merged: list[tuple[int, int]] = []
    for start, length, _ in sorted(blocks.tolist()):
        end = start + length
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return tuple(merged)


class Leases:
    """Exclusive rights to memory that a READ may still write."""

    def __init__(self) -> None:
        self._held: dict[object, Intervals] = {}

    def acquire(self, owner: object, wanted: Intervals, what: str, *, within: object = None) -> None:
        """Lease intervals to ``owner``.

        Args:
            owner: Who may write it.
            wanted: The memory.
            what: What it is wanted for.
            within: Another holder whose lease this one is a part of.

        Raises:
            CommunicatorBusy: Some of it is leased to another READ.
        """
        if (holder := self.holder(wanted, but=within)) is not None:
            raise CommunicatorBusy(
                f"{what}: the memory is leased to {holder}, which may still write it; await its end first, "
                "e.g. with region.released()"
            )
        self._held[owner] = wanted

    def release(self, owner: object) -> None:
        """End the lease of ``owner``, if it has one."""
        self._held.pop(owner, None)

    def holder(self, wanted: Intervals, *, but: object = None) -> object | None:
        """Who, other than ``but``, holds a lease that overlaps ``wanted``, or ``None``."""
        return next((o for o in self._held if o is not but and self.holds(o, wanted)), None)

    def holds(self, owner: object, wanted: Intervals) -> bool:
        """Whether ``owner`` holds a lease that overlaps ``wanted``."""
        held = self._held.get(owner, ())
        return any(start < high and low < end for start, end in held for low, high in wanted)

    def __len__(self) -> int:
        return len(self._held)
