"""The expert weights of one rank: their rows, their entries, and whether they moved away."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from eplb_async.core.layout import Layout, compare
from eplb_async.errors import WeightsError
from eplb_async.weights.entries import DIGEST_BYTES, ENTRY_BYTES, ENTRY_NAME, entry_rows
from eplb_async.weights.rows import byte_rows, check_apart, check_movable, place_of

LayerWeights = Sequence[torch.Tensor] | Mapping[str, torch.Tensor]
WeightsLike = Sequence[LayerWeights] | Callable[[], Sequence[LayerWeights]]
"""For each layer of a rank its tensors ``[num_local_experts, ...]``, or a callable that returns that.

A layer's tensors are a sequence, or a mapping from names. They may differ in shape and dtype. Along the first dimension
each has a row for every slot of the rank, and each row is one dense block of bytes.
"""


class ExpertWeights:
    """All expert rows of one rank, and the entry table that says which expert each row is (I-16).

    The table is one more tensor of every layer (``[num_local_experts, 32]`` bytes on the CPU), so entries are
    read, staged and applied with the rows they describe.

    Args:
        source: ``[layers]`` of tensors ``[num_local_experts, ...]`` (a sequence, or a mapping from names), or
            a callable that returns that and is asked again at each :meth:`moved`.
        num_local_experts: Slots of this rank.
        entries: Whether to keep the entry table.

    Raises:
        WeightsError: A tensor cannot be moved; names layer, tensor and strides.
    """

    def __init__(self, source: WeightsLike, num_local_experts: int, *, entries: bool) -> None:
        self._source = source
        self.num_local_experts = num_local_experts
        self.layers = self._read()
        self._table: torch.Tensor | None = None
        if entries:
            with torch.inference_mode(False):  # it is written on the engine loop, whatever mode this is
                shape = len(self.layers), num_local_experts, ENTRY_BYTES
                self._table = torch.zeros(shape, dtype=torch.uint8)
        self.layout = self._layout(self.layers)
        self._take()

    @property
    def num_layers(self) -> int:
        """Layers."""
        return len(self.layout.layers)

    def rows(self, layer: int, tensor: int) -> torch.Tensor:
        """Bytes of a tensor's expert rows, uint8 ``[num_local_experts, row_bytes]``, sharing its memory."""
        return self._rows[layer][tensor]

    @property
    def entries(self) -> torch.Tensor | None:
        """The entry table, row ``layer * num_local_experts + slot`` for each slot, uint8 ``[n, 32]``; if it is kept."""
        return None if self._table is None else self._table.view(-1, ENTRY_BYTES)

    def regions(self) -> list[tuple[torch.Tensor, str]]:
        """What to register: every tensor that has bytes, with a region name."""
        found = [
            (self._rows[layer][tensor], f"{layer}/{tensor}")
            for layer, tensors in enumerate(self.layers)
            for tensor, value in enumerate(tensors.values())
            if value.numel()
        ]
        if self._table is not None:
            found.append((self._table, ENTRY_NAME))
        return found

    def expert_rows(self, layer: int) -> list[torch.Tensor]:
        """Byte rows of the tensors of a layer that have bytes, its entries left out."""
        count = len(self._rows[layer]) - (self._table is not None)
        return [rows for rows in self._rows[layer][:count] if rows.numel()]

    def write_entries(
        self, layer: int, experts: Sequence[int], version: int, digests: Sequence[bytes] | None = None
    ) -> None:
        """Say which logical expert each slot of a layer holds; -1 for none.

        Args:
            layer: The layer.
            experts: Logical expert of each slot.
            version: Weight version of the rows.
            digests: Digest of each slot; default those that the table has.
        """
        if self._table is not None:
            kept = [row.tobytes() for row in self._table[layer, :, -DIGEST_BYTES:].numpy()]
            self._table[layer] = entry_rows(experts, version, kept if digests is None else digests)

    def moved(self) -> None:
        """Re-read the source and check that every tensor is where it was registered.

        Raises:
            WeightsError: One is not: a READ would reach dead memory, and NIXL would say ``DONE``.
        """
        layers = _layers_of(self._source)
        if len(layers) != len(self.layers):
            raise WeightsError(f"weights now have {len(layers)} layers, had {len(self.layers)} when registered")
        for layer, (known, given) in enumerate(zip(self._bindings, layers, strict=True)):
            tensors = _named(layer, given)
            if list(tensors) != list(known):
                raise WeightsError(f"layer {layer}: tensors are now {list(tensors)}, were {list(known)}; open anew")
            for name, tensor in tensors.items():
                now = _bound(layer, name, tensor)
                if now != known[name]:
                    raise WeightsError(
                        f"layer {layer}, tensor {name!r}: it moved since it was registered: was {known[name]}, "
                        f"is {now}; call rebind()"
                    )

    def rebind(self) -> None:
        """Take the tensors as they are now; what is registered must be deregistered first by the caller.

        Raises:
            WeightsError: A tensor cannot be moved, or is of another kind than before; nothing has changed then.
        """
        layers = self._read()
        layout = self._layout(layers)
        differences = compare(layout, self.layout) or _other_devices(layout, self.layout)
        if differences:
            raise WeightsError(
                f"rebind() takes the same tensors at other addresses; to change what they are, close and open "
                f"on all ranks: {'; '.join(differences[:4])} before"
            )
        self.layers, self.layout = layers, layout
        self._take()

    def release(self) -> None:
        """Let go of every tensor, so that its memory can be freed; :meth:`rebind` takes them again."""
        self.layers = []
        self._rows.clear()
        self._bindings.clear()

    def _read(self) -> list[dict[str, torch.Tensor]]:
        layers = [_named(layer, given) for layer, given in enumerate(_layers_of(self._source))]
        for layer, tensors in enumerate(layers):
            for name, tensor in tensors.items():
                check_movable(layer, name, tensor, self.num_local_experts)
        check_apart(layers)
        devices = sorted({str(t.device) for tensors in layers for t in tensors.values() if t.device.type == "cuda"})
        if len(devices) > 1:
            raise WeightsError(f"a rank keeps its experts on one CUDA device, not on {', '.join(devices)}")
        return layers

    def _layout(self, layers: list[dict[str, torch.Tensor]]) -> Layout:
        layout = Layout(
            tuple(
                tuple(place_of(name, tensor) for name, tensor in self._with_entries(layer, tensors).items())
                for layer, tensors in enumerate(layers)
            )
        )
        try:
            Layout.from_plain(layout.to_plain())  # as peers will read it
        except ValueError as error:
            raise WeightsError(f"peers would refuse these weights: {error}") from error
        return layout

    def _take(self) -> None:
        """Note where the tensors are; their rows keep the memory alive that is registered."""
        self._bindings: list[dict[str, _Binding]] = [
            {name: _bound(layer, name, tensor) for name, tensor in tensors.items()}
            for layer, tensors in enumerate(self.layers)
        ]
        self._rows: list[list[torch.Tensor]] = [
            [byte_rows(tensor) for tensor in self._with_entries(layer, tensors).values()]
            for layer, tensors in enumerate(self.layers)
        ]

    def _with_entries(self, layer: int, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return tensors if self._table is None else {**tensors, ENTRY_NAME: self._table[layer]}


class _Binding(NamedTuple):
    """What must stay as it was registered, since a Parameter may be given other memory or another shape."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}, strides {self.strides}, on {self.device} at {self.address:#x}"


def _bound(layer: int, name: str, tensor: object) -> _Binding:
    if not isinstance(tensor, torch.Tensor):
        raise WeightsError(f"layer {layer}, tensor {name!r}: {type(tensor).__name__} is not a torch.Tensor")
    try:
        return _Binding(tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
    except RuntimeError as error:
        raise WeightsError(f"layer {layer}, tensor {name!r}: it is no plain tensor any more: {error}") from error


def _layers_of(source: object) -> Sequence[object]:
    given = source() if callable(source) else source
    if not isinstance(given, Sequence) or not given:
        raise WeightsError("weights must be a sequence of layers, each a sequence or mapping of tensors")
    return given


def _named(layer: int, given: object) -> dict[str, torch.Tensor]:
    """A layer's tensors by name; what they are is checked later."""
    if isinstance(given, Mapping):
        tensors = {str(name): tensor for name, tensor in given.items()}
    elif isinstance(given, Sequence):
        tensors = {str(i): tensor for i, tensor in enumerate(given)}
    else:
        raise WeightsError(
            f"layer {layer}: {type(given).__name__} is neither a sequence nor a mapping of tensors; "
            "wrap it in a list or dict"
        )
    if not tensors:
        raise WeightsError(f"layer {layer} has no tensors")
    if len(tensors) != len(given) or ENTRY_NAME in tensors:
        raise WeightsError(f"layer {layer}: names of tensors must differ, and {ENTRY_NAME!r} is taken: {list(given)}")
    return tensors


def _other_devices(now: Layout, before: Layout) -> list[str]:
    return [
        f"layer {layer}, tensor {place.spec.name!r}: {place.spec.device} now, {was.spec.device}"
        for layer, (places, known) in enumerate(zip(now.layers, before.layers, strict=True))
        for place, was in zip(places, known, strict=True)
        if place.spec.device != was.spec.device
    ]
