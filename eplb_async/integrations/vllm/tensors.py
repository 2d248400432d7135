"""The tensors that vLLM gives: its expert weights, its buffer, and which bytes a call moves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from eplb_async.core.layout import Layout, TensorPlace
from eplb_async.errors import WeightsError
from eplb_async.nixl.blocks import Blocks
from eplb_async.nixl.devices import device_index, memory_of
from eplb_async.nixl.native import Descriptors
from eplb_async.weights import ExpertWeights
from eplb_async.weights.rows import byte_rows, check_apart, check_movable, place_of

__all__ = ["Fetch", "Tensors", "blocks_of"]

_ALIKE = ("row_bytes", "row_shape", "element_strides", "dtype")


@dataclass(frozen=True, slots=True)
class Fetch:
    """One expert that this rank receives: from which row of which rank, into which row of the buffer."""

    source: int
    expert: int
    source_row: int
    row: int


@dataclass(slots=True)
class _Group:
    """Tensors of one memory on both sides: what one request can move."""

    local: list[Descriptors] = field(default_factory=list)
    remote: list[Descriptors] = field(default_factory=list)


class Tensors:
    """One rank's expert weights, and the buffer that experts arrive in.

    Args:
        all_expert_weights: For each layer its tensors ``[num_local_experts, ...]``.
        expert_buffer: For each of a layer's tensors one of the same rows ``[num_rows, ...]``.

    Raises:
        WeightsError: A tensor cannot be moved, or the buffer is not like a layer's tensors; names it.
    """

    def __init__(
        self, all_expert_weights: Sequence[Iterable[torch.Tensor]], expert_buffer: Sequence[torch.Tensor]
    ) -> None:
        layers = [list(tensors) for tensors in all_expert_weights]
        if not layers or not layers[0]:
            raise WeightsError("all_expert_weights has no layer with tensors")
        if not isinstance(layers[0][0], torch.Tensor) or not layers[0][0].ndim:
            raise WeightsError(f"all_expert_weights[0][0] is {type(layers[0][0]).__name__}, not a tensor of experts")
        self.num_local_experts = int(layers[0][0].shape[0])
        self.weights = ExpertWeights(layers, self.num_local_experts, entries=False)
        self.buffer = list(expert_buffer)
        self.places = [_buffer_place(number, tensor) for number, tensor in enumerate(self.buffer)]
        self._check_alike()
        buffers = {place.spec.name: tensor for place, tensor in zip(self.places, self.buffer, strict=True)}
        check_apart([*self.weights.layers, buffers])
        self._source = layers
        self._kinds = [_kind(place, tensor) for place, tensor in zip(self.places, self.buffer, strict=True)]

    @property
    def layout(self) -> Layout:
        """Where the weights are, as peers are told."""
        return self.weights.layout

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._source[0][0].device

    def regions(self) -> list[tuple[torch.Tensor, str]]:
        """What to register, by name."""
        buffers = [
            (byte_rows(tensor), place.spec.name)
            for place, tensor in zip(self.places, self.buffer, strict=True)
            if tensor.numel()
        ]
        return [*self.weights.regions(), *buffers]

    def check_place(self, layer: int) -> None:
        """Check that a layer's tensors, and the buffer's, are where they were registered.

        Raises:
            WeightsError: One is not: peers would read dead memory, and NIXL would say ``DONE``.
        """
        known = self.layout.layers[layer]
        for number, tensor in enumerate(self._source[layer]):
            if place_of(known[number].spec.name, tensor) != known[number]:
                raise WeightsError(f"layer {layer}, tensor {number}: {_MOVED}")
        for place, tensor in zip(self.places, self.buffer, strict=True):
            if place_of(place.spec.name, tensor) != place:
                raise WeightsError(f"{place.spec.name}: {_MOVED}")

    def check_source(self, layer: int, rows: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        """Check that rows that vLLM says it sends are some that peers read.

        Args:
            layer: The layer.
            rows: Where this rank holds the expert.
            tensors: A row of each of the layer's tensors.

        Raises:
            WeightsError: They are others.
        """
        places = self.layout.layers[layer]
        if len(tensors) != len(places):
            raise WeightsError(f"layer {layer} has {len(places)} tensors, {len(tensors)} rows were given to send")
        left = rows
        for number, (place, tensor) in enumerate(zip(places, tensors, strict=True)):
            if place.spec.row_bytes:
                away, stride = tensor.data_ptr() - place.address, place.spec.row_stride
                left = [row for row in left if away == row * stride]
            if not left:
                raise WeightsError(f"layer {layer}, tensor {number}, row {' or '.join(map(str, rows))}: {_MOVED}")

    def row_of(self, tensors: Sequence[torch.Tensor]) -> int:
        """The row of the buffer that these are, one view for each of its tensors.

        Raises:
            WeightsError: They are none, or not of one row.
        """
        if len(tensors) != len(self.places):
            raise WeightsError(f"{len(tensors)} tensors to receive into; expert_buffer has {len(self.places)}")
        found: set[int] = set()
        for number, (kind, tensor) in enumerate(zip(self._kinds, tensors, strict=True)):
            if not kind.row_bytes:
                continue
            row, rest = divmod(tensor.data_ptr() - kind.address, kind.row_stride)
            alike = tensor.shape == kind.shape and tensor.stride() == kind.strides and tensor.dtype is kind.dtype
            if rest or not 0 <= row < kind.num_rows or not alike:
                raise WeightsError(
                    f"tensor {number} to receive into is no row of expert_buffer[{number}]: shape "
                    f"{tuple(tensor.shape)}, strides {tensor.stride()}, {tensor.dtype} at {tensor.data_ptr():#x}"
                )
            found.add(row)
        if len(found) != 1:
            raise WeightsError(f"the tensors to receive into are of rows {sorted(found)} of expert_buffer, not of one")
        return found.pop()

    def intervals(self, row: int) -> tuple[tuple[int, int], ...]:
        """Memory of a row of the buffer, as (start, end) addresses."""
        starts = ((place.address + row * place.spec.row_stride, place.spec.row_bytes) for place in self.places)
        return tuple(sorted((start, start + size) for start, size in starts if size))

    def _check_alike(self) -> None:
        for layer, places in enumerate(self.layout.layers):
            if len(places) != len(self.places):
                raise WeightsError(f"layer {layer} has {len(places)} tensors, expert_buffer {len(self.places)}")
            for number, (place, buffer) in enumerate(zip(places, self.places, strict=True)):
                for part in _ALIKE:
                    ours, other = getattr(place.spec, part), getattr(buffer.spec, part)
                    if ours != other:
                        raise WeightsError(
                            f"layer {layer}, tensor {number}: {part} is {ours!r}, that of expert_buffer[{number}] "
                            f"{other!r}; bytes would mean something else"
                        )


_MOVED = (
    "it is not where it was registered (weights were loaded anew, or given other memory); "
    "make the communicator after that"
)


def blocks_of(fetches: Sequence[Fetch], layer: int, ours: Tensors, theirs: Layout) -> Iterator[Blocks]:
    """What one rank reads from another, rows that are neighbours on both sides as one descriptor.

    Args:
        fetches: Experts, all of one source.
        layer: The layer.
        ours: Where they go.
        theirs: The source's weights.
    """
    ordered = sorted(fetches, key=lambda fetch: fetch.row)
    rows = np.array([fetch.row for fetch in ordered], dtype=np.int64)
    sources = [fetch.source_row for fetch in ordered]
    groups: dict[tuple[str, str], _Group] = {}
    for number, place in enumerate(ours.places):
        nbytes, far = place.spec.row_bytes, theirs.layers[layer][number]
        if not nbytes:
            continue
        near = place.address + rows * place.spec.row_stride
        local, remote = _merged(near, theirs.addresses(layer, number, sources), nbytes)
        local[:, 2], remote[:, 2] = device_index(place.spec.device), device_index(far.spec.device)
        group = groups.setdefault((memory_of(place.spec.device), memory_of(far.spec.device)), _Group())
        group.local.append(local)
        group.remote.append(remote)
    for (memory, far_memory), group in groups.items():
        yield Blocks(np.concatenate(group.local), np.concatenate(group.remote), memory, far_memory)


def _merged(near: np.ndarray, far: np.ndarray, nbytes: int) -> tuple[Descriptors, Descriptors]:
    starts = np.ones(len(near), dtype=bool)
    starts[1:] = (np.diff(near) != nbytes) | (np.diff(far) != nbytes)
    first = np.flatnonzero(starts)
    lengths = np.diff(first, append=len(near)) * nbytes
    out = []
    for addresses in (near, far):
        blocks = np.empty((len(first), 3), dtype=np.uint64)  # zeros() lets go of the GIL, and a busy thread takes it
        blocks[:, 0], blocks[:, 1], blocks[:, 2] = addresses[first], lengths, 0
        out.append(blocks)
    return out[0], out[1]


def _buffer_place(number: int, tensor: torch.Tensor) -> TensorPlace:
    name = f"expert_buffer[{number}]"
    if not isinstance(tensor, torch.Tensor) or not tensor.ndim:
        raise WeightsError(f"{name} is {type(tensor).__name__}, not a tensor of experts")
    try:
        check_movable(0, name, tensor, int(tensor.shape[0]))
    except WeightsError as error:
        raise WeightsError(str(error).replace(f"layer 0, tensor {name!r}", name)) from None
    return place_of(name, tensor)


class _Kind(NamedTuple):
    """What a row of a buffer is like, and where the first one is; looked at for every expert."""

    address: int
    row_bytes: int
    row_stride: int
    num_rows: int
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


def _kind(place: TensorPlace, tensor: torch.Tensor) -> _Kind:
    spec, row = place.spec, tensor[0]
    return _Kind(place.address, spec.row_bytes, spec.row_stride, spec.num_rows, row.shape, row.stride(), tensor.dtype)
