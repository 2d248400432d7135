"""Staging: registered receive memory, handed out by layer and taken back when no READ can write it (I-3)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from eplb_async.errors import WeightsError
from eplb_async.weights.rows import byte_rows

ALIGNMENT = 256
_HELD_PARTS = 64
_SMALL = 32 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Staging of one layer: a stretch of the buffer of one memory type.

    Attributes:
        memory: NIXL's memory type.
        start: First byte in the buffer.
        nbytes: Bytes.
        address: Address of the first byte.
    """

    memory: str
    start: int
    nbytes: int
    address: int


class Staging:
    """A first-fit allocator over one buffer per memory type.

    What a READ may still write of a piece that is given back stays held until :attr:`leased` says otherwise: that
    is quarantine, as the allocator sees it.

    Args:
        buffers: Flat uint8 tensors by NIXL memory type.
    """

    def __init__(self, buffers: dict[str, torch.Tensor]) -> None:
        self.buffers = buffers
        self.leased: Callable[[int, int], bool] = lambda start, end: False
        self._used: set[Piece] = set()
        self._held: set[Piece] = set()
        self._changed = asyncio.Event()

    def try_allocate(self, sizes: dict[str, int]) -> tuple[Piece, ...] | None:
        """Pieces of the given sizes, or ``None`` if one does not fit now."""
        self.reclaim()
        pieces: list[Piece] = []
        for memory, nbytes in sizes.items():
            start = self._gap(memory, nbytes, pieces)
            if start is None:
                return None
            pieces.append(Piece(memory, start, nbytes, self.buffers[memory].data_ptr() + start))
        self._used.update(pieces)
        return tuple(pieces)

    async def allocate(self, *choices: dict[str, int]) -> tuple[int, tuple[Piece, ...]]:
        """Wait until pieces of the given sizes are free.

        Args:
            *choices: Sizes, the most wanted first. The others are for when held memory leaves no room for those.

        Returns:
            Which choice it is, and its pieces.
        """
        while True:
            for nth, sizes in enumerate(choices):
                if (pieces := self.try_allocate(sizes)) is not None:
                    return nth, pieces
                if self.fits(sizes):
                    break  # it waits only for what will be given back
            self._changed.clear()
            await self._changed.wait()

    def free(self, pieces: tuple[Piece, ...]) -> None:
        """Give pieces back; the parts that a READ may still write stay held until it has ended.

        A piece that was given back already is let be.
        """
        for piece in self._used.intersection(pieces):
            self._used.discard(piece)
            self._held.update(self._leased_parts(piece, max(ALIGNMENT, piece.nbytes // _HELD_PARTS)))
        self._changed.set()

    def reclaim(self) -> int:
        """Take back held pieces whose READs have ended; returns the bytes still held."""
        self._held = {p for p in self._held if self.leased(p.address, p.address + p.nbytes)}
        return sum(piece.nbytes for piece in self._held)

    def wake(self) -> None:
        """Have waiting allocations look again: a lease has ended."""
        self._changed.set()

    def fits(self, sizes: dict[str, int]) -> bool:
        """Whether pieces of these sizes could be had if nothing but held memory were in the way."""
        self.reclaim()
        return all(self._gap(memory, nbytes, [], only_held=True) is not None for memory, nbytes in sizes.items())

    def view(self, piece: Piece, offset: int, rows: int, row_bytes: int) -> torch.Tensor:
        """Part of a piece as byte rows, uint8 ``[rows, row_bytes]``."""
        buffer = self.buffers[piece.memory]
        start = buffer.storage_offset() + piece.start + offset
        return buffer.as_strided((rows, row_bytes), (row_bytes, 1), start)

    def _leased_parts(self, piece: Piece, smallest: int) -> list[Piece]:
        """Halves of halves of a piece, down to ``smallest`` bytes, that a READ may still write."""
        if not self.leased(piece.address, piece.address + piece.nbytes):
            return []
        half = _aligned(piece.nbytes // 2)
        if piece.nbytes <= smallest or half >= piece.nbytes:
            return [piece]
        low = Piece(piece.memory, piece.start, half, piece.address)
        high = Piece(piece.memory, piece.start + half, piece.nbytes - half, piece.address + half)
        return self._leased_parts(low, smallest) + self._leased_parts(high, smallest)

    def _gap(self, memory: str, nbytes: int, extra: list[Piece], *, only_held: bool = False) -> int | None:
        buffer = self.buffers.get(memory)
        taken = [*self._held, *(() if only_held else self._used), *extra]
        at = 0
        for piece in sorted((p for p in taken if p.memory == memory), key=lambda p: p.start):
            if piece.start - at >= nbytes:
                return at
            at = max(at, _aligned(piece.start + piece.nbytes))
        if buffer is None:
            return 0 if not nbytes else None
        return at if buffer.numel() - at >= nbytes else None


def pack(parts: Sequence[tuple[str, int]]) -> tuple[list[int], dict[str, int]]:
    """Lay parts out one behind the other, aligned, in one piece per memory type.

    Args:
        parts: Memory type and bytes of each.

    Returns:
        Offset of each part within its piece, and the bytes of each piece.
    """
    offsets: list[int] = []
    sizes: dict[str, int] = {}
    for memory, nbytes in parts:
        offsets.append(_aligned(sizes.get(memory, 0)))
        sizes[memory] = offsets[-1] + nbytes
    return offsets, sizes


def make_buffers(
    given: int | torch.Tensor | None,
    needed: dict[str, int],
    devices: dict[str, torch.device],
    *,
    layers: int,
    num_layers: int,
) -> dict[str, torch.Tensor]:
    """Allocate staging, or take the caller's.

    Args:
        given: Bytes, or the caller's own flat uint8 buffer, for the device that the weights are on; ``None`` for
            ``layers`` times what is needed.
        needed: Bytes of the largest layer one rank can receive, by memory type.
        devices: Device of each memory type.
        layers: Layers to hold by default; 0 for two, or as many as fit in 32 MiB: small layers go many at once.
        num_layers: Layers there are.

    Raises:
        WeightsError: It is smaller than the largest layer one rank can receive (names the bytes), or the caller's
            buffer is not one that can be used.
    """
    main = "VRAM" if "VRAM" in needed else "DRAM"  # beside weights on a device, only their entries are on the CPU
    buffers = {}
    for memory, nbytes in needed.items():
        wanted = given if memory == main else None
        if isinstance(wanted, torch.Tensor):
            buffer = _checked(wanted, devices[memory])
        elif wanted is None:
            size = max(1, _aligned(nbytes))
            buffer = _allocated(size * (layers or max(2, min(num_layers, _SMALL // size))), devices[memory])
        elif isinstance(wanted, int):
            if wanted < nbytes:
                raise _too_small(wanted, nbytes, memory)
            buffer = _allocated(wanted, devices[memory])
        else:
            raise WeightsError(f"staging must be bytes (an int) or a tensor, not {type(wanted).__name__}")
        if buffer.numel() < nbytes:
            raise _too_small(buffer.numel(), nbytes, memory)
        buffers[memory] = buffer
    return buffers


def _checked(given: torch.Tensor, device: torch.device) -> torch.Tensor:
    if given.dtype is not torch.uint8 or given.dim() != 1 or not given.is_contiguous():
        raise WeightsError("staging must be a flat, contiguous uint8 tensor")
    if given.device != device:
        raise WeightsError(f"staging is on {given.device}, the weights are on {device}")
    return byte_rows(given).view(-1)


def _allocated(nbytes: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        if device.type == "cpu":
            buffer.zero_()  # fault the pages in now, not under the first READ
    if device.type == "cuda":
        # READs bypass streams: what is still queued on memory that torch hands out again must not land after them.
        torch.cuda.current_stream(device).synchronize()
    return buffer


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _too_small(size: int, nbytes: int, memory: str) -> WeightsError:
    return WeightsError(
        f"staging of {size} bytes ({memory}) is smaller than the largest layer one rank can receive, {nbytes} bytes"
    )
