"""Regions, spans of their rows, and which memory they cover."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_async.errors import TransferError, WeightsError
from eplb_async.nixl.native import Descriptors, Extent

_FEW = 8  # descriptors, which are sooner looked up one by one than by numpy


@dataclass(frozen=True, slots=True)
class Span:
    """Rows of one region: what a READ reads from or into.

    Attributes:
        extent: The region's extent.
        first: First row.
        count: Rows.
        owner: Agent that registered them; empty for our own.
    """

    extent: Extent
    first: int
    count: int
    owner: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes to move."""
        return self.count * self.extent.row_bytes

    @property
    def memory(self) -> str:
        """NIXL's memory type."""
        return self.extent.memory

    def descriptors(self) -> Descriptors:
        """The rows as NIXL descriptors ``[n, 3]``; rows that touch are one descriptor."""
        extent = self.extent
        start = extent.address + self.first * extent.row_stride
        if not self.nbytes:
            return np.empty((0, 3), dtype=np.uint64)
        if extent.row_stride == extent.row_bytes:
            return np.array([(start, self.nbytes, extent.device)], dtype=np.uint64)
        blocks = np.empty((self.count, 3), dtype=np.uint64)
        blocks[:, 0] = start + np.arange(self.count, dtype=np.uint64) * np.uint64(extent.row_stride)
        blocks[:, 1] = extent.row_bytes
        blocks[:, 2] = extent.device
        return blocks


class Rows:
    """Rows that can be sliced into spans: ``region[8:16]``, ``region[3]``, ``region[:]``."""

    def __init__(self, extent: Extent, owner: str = "") -> None:
        self.extent = extent
        self.owner = owner

    @property
    def name(self) -> str:
        """Name of the region."""
        return self.extent.name

    def __len__(self) -> int:
        """Rows of the region."""
        return self.extent.num_rows

    def __getitem__(self, rows: int | slice) -> Span:
        """Some of its rows: one by its number, or a slice without a step; negative ones count from the end.

        Raises:
            IndexError: It has no such rows; unlike a list it cuts no slice short.
        """
        total = self.extent.num_rows
        if isinstance(rows, slice):
            first, stop, step = rows.indices(total)
            asked = [bound for bound in (rows.start, rows.stop) if bound is not None]
            if step != 1 or any(not -total <= bound <= total for bound in asked):
                asked_for = f"[{rows.start}:{rows.stop}:{step}]"
                raise IndexError(f"region {self.name!r} has {total} rows, asked for {asked_for}")
            return Span(self.extent, first, max(0, stop - first), self.owner)
        if not -total <= rows < total:
            raise IndexError(f"region {self.name!r} has {total} rows, asked for row {rows}")
        return Span(self.extent, rows % total, 1, self.owner)

    def __repr__(self) -> str:
        e = self.extent
        return f"<{type(self).__name__} {e.name!r}: {e.num_rows} rows of {e.row_bytes} bytes, {e.memory}>"


def extent_of(memory: Any, name: str) -> Extent:
    """Describe a torch tensor or numpy array by the rows along its first dimension.

    Raises:
        WeightsError: A row is not one dense block of bytes, or the rows overlap; names the strides.
    """
    if hasattr(memory, "data_ptr"):
        shape, itemsize = tuple(memory.shape), memory.element_size()
        strides = tuple(s * itemsize for s in memory.stride())
        address, cuda = memory.data_ptr(), memory.device.type != "cpu"
        device = int(memory.device.index or 0)
    elif isinstance(memory, np.ndarray):
        shape, itemsize, strides = memory.shape, memory.itemsize, memory.strides
        address, cuda, device = memory.ctypes.data, False, 0
    else:
        raise WeightsError(f"region {name!r}: {type(memory).__name__} is neither a torch tensor nor an array")
    if not shape:
        raise WeightsError(f"region {name!r}: a scalar has no rows; reshape it to [1]")
    row_bytes = itemsize
    for size, stride in sorted(zip(shape[1:], strides[1:], strict=True), key=lambda d: d[1]):
        if size > 1 and stride != row_bytes:
            raise WeightsError(f"region {name!r}: rows are not dense: shape {shape}, strides {strides} bytes")
        row_bytes *= size
    row_stride = strides[0] if shape[0] > 1 and row_bytes else row_bytes
    if shape[0] > 1 and row_stride < row_bytes:
        raise WeightsError(f"region {name!r}: rows overlap: shape {shape}, strides {strides} bytes")
    return Extent(name, address, row_bytes, row_stride, shape[0], "VRAM" if cuda else "DRAM", device)


class Coverage:
    """Which descriptors lie inside one registered extent: NIXL itself only says "not found" (NIXL.md, 27)."""

    def __init__(self, extents: Iterable[Extent]) -> None:
        self.extents = sorted((e for e in extents if e.length), key=lambda e: (e.memory, e.device, e.address))
        self._bounds: dict[tuple[str, int], tuple[list[int], list[int]]] = {}
        self._groups: dict[tuple[str, int], tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]] = {}
        for key in {(e.memory, e.device) for e in self.extents}:
            ours = [e for e in self.extents if (e.memory, e.device) == key]
            starts, ends = self._bounds[key] = [e.address for e in ours], [e.end for e in ours]
            self._groups[key] = np.array(starts, dtype=np.uint64), np.array(ends, dtype=np.uint64)

    def outside(self, blocks: Descriptors, memory: str) -> int | None:
        """Index of the first descriptor that no single extent covers, or ``None``."""
        if len(blocks) <= _FEW:
            return self._first_outside(blocks, memory)
        for device in sorted(set(blocks[:, 2].tolist())):  # np.unique would import numpy.ma here, on the loop
            mine = np.flatnonzero(blocks[:, 2] == device)
            starts, ends = self._groups.get((memory, device), (None, None))
            if starts is None or ends is None:
                return int(mine[0])
            at = np.searchsorted(starts, blocks[mine, 0], side="right")
            inside = at > 0
            inside &= blocks[mine, 0] + blocks[mine, 1] <= ends[np.maximum(at, 1) - 1]
            inside &= blocks[mine, 1] < np.uint64(1 << 63)
            if not inside.all():
                return int(mine[np.argmin(inside)])
        return None

    def _first_outside(self, blocks: Descriptors, memory: str) -> int | None:
        for i, (address, length, device) in enumerate(blocks.tolist()):
            starts, ends = self._bounds.get((memory, device), ([], []))
            at = bisect_right(starts, address)
            if at == 0 or address + length > ends[at - 1]:
                return i
        return None

    def check(self, blocks: Descriptors, memory: str, whose: str) -> None:
        """Refuse descriptors that leave registered memory.

        Raises:
            TransferError: One does; names it, and ``whose`` memory it is.
        """
        if (at := self.outside(blocks, memory)) is not None:
            address, nbytes, device = blocks[at].tolist()
            raise TransferError(
                f"descriptor {at} ({nbytes} bytes at {address:#x}, {memory} device {device}) is not inside "
                f"one registered region of {whose}"
            )
