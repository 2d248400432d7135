"""The memory that one agent has registered: named regions over extents, each known to NIXL once.

Memory is kept alive for as long as it is registered, and registered for as long as a READ may write it (I-3).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from eplb_async.errors import CommunicatorBusy, NixlTransferFailed, WeightsError
from eplb_async.nixl.leases import Leases
from eplb_async.nixl.native import Extent, Native
from eplb_async.nixl.regions import Coverage, Rows, extent_of

_Stretch = tuple[str, int, int, int]


@dataclass(slots=True)
class _Registration:
    token: Any
    uses: int = 0


class Memory:
    """What is registered with a native agent.

    Args:
        native: The agent.
        leases: Leases of what READs may still write.

    Attributes:
        coverage: What of it lies inside one registered extent.
    """

    def __init__(self, native: Native, leases: Leases) -> None:
        self.coverage = Coverage(())
        self._native = native
        self._leases = leases
        self._regions: dict[str, tuple[Extent, Any]] = {}
        self._registered: dict[_Stretch, _Registration] = {}

    @property
    def extents(self) -> list[Extent]:
        """The regions, in the order they were registered."""
        return [extent for extent, _ in self._regions.values()]

    def register(self, named: list[tuple[Any, str]]) -> list[Rows]:
        """Register several pieces of memory, or none; an extent of several names is registered once (NIXL.md, 26).

        Raises:
            WeightsError: A row is not dense, memory overlaps a region in part, or a name is taken.
            NixlTransferFailed: NIXL refused one of them.
        """
        extents = [extent_of(memory, name) for memory, name in named]
        self._refuse_taken_names(extents)
        _refuse_partial_overlap([*self.extents, *extents])
        self._register_all(extents)
        for extent, (memory, name) in zip(extents, named, strict=True):
            self._regions[name] = (extent, memory)
            if extent.length:
                self._registered[_stretch(extent)].uses += 1
        self.coverage = Coverage(self.extents)
        return [Rows(extent) for extent in extents]

    def deregister(self, region: Rows) -> None:
        """Deregister a region.

        Raises:
            WeightsError: It is not registered here.
            CommunicatorBusy: A READ may still write into it (I-3).
        """
        extent = region.extent
        if self._regions.get(extent.name, (None,))[0] != extent:
            raise WeightsError(f"region {extent.name!r} is not registered here")
        if (holder := self._leases.holder(((extent.address, extent.end),))) is not None:
            raise CommunicatorBusy(f"region {extent.name!r} is leased to {holder}; await its end first")
        if extent.length:
            registration = self._registered[_stretch(extent)]
            if registration.uses == 1:
                self._native.deregister(registration.token)
                del self._registered[_stretch(extent)]
            else:
                registration.uses -= 1
        del self._regions[extent.name]
        self.coverage = Coverage(self.extents)

    def deregister_all(self) -> None:
        """Deregister everything, while the agent is alive; the memory itself is kept until :meth:`forget`."""
        for registration in self._registered.values():
            with contextlib.suppress(NixlTransferFailed):
                self._native.deregister(registration.token)

    def forget(self) -> None:
        """Let go of the memory, after the agent is gone."""
        self._registered.clear()
        self._regions.clear()

    def _refuse_taken_names(self, extents: Iterable[Extent]) -> None:
        taken = set(self._regions)
        for extent in extents:
            if extent.name in taken:
                raise WeightsError(f"region {extent.name!r} exists already")
            taken.add(extent.name)

    def _register_all(self, extents: Iterable[Extent]) -> None:
        done: list[_Stretch] = []
        try:
            for extent in extents:
                stretch = _stretch(extent)
                if extent.length and stretch not in self._registered:
                    self._registered[stretch] = _Registration(self._native.register([extent]))
                    done.append(stretch)
        except BaseException:
            for stretch in done:
                with contextlib.suppress(NixlTransferFailed):
                    self._native.deregister(self._registered.pop(stretch).token)
            raise


def _stretch(extent: Extent) -> _Stretch:
    return extent.memory, extent.device, extent.address, extent.end


def _refuse_partial_overlap(extents: Iterable[Extent]) -> None:
    # Sorted, an overlap that is no repetition shows between neighbours, if anywhere.
    for one, other in pairwise(sorted((e for e in extents if e.length), key=_stretch)):
        alike = (one.memory, one.device) == (other.memory, other.device)
        if alike and other.address < one.end and _stretch(one) != _stretch(other):
            raise WeightsError(
                f"regions {one.name!r} and {other.name!r} overlap in part "
                f"([{one.address:#x}, {one.end:#x}) and [{other.address:#x}, {other.end:#x}))"
            )
