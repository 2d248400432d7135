"""The expert weights of one rank: which tensors can be moved, their bytes, and whether they moved away."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence

import torch

from eplb_async.core.layout import Layout, TensorPlace, TensorSpec
from eplb_async.errors import IntegrityError, WeightsError

LayerWeights = Sequence[torch.Tensor] | Mapping[str, torch.Tensor]
WeightsLike = Sequence[LayerWeights] | Callable[[], Sequence[LayerWeights]]

ENTRY_BYTES = 32
ENTRY_NAME = "eplb_async.entries"
_ENTRY = struct.Struct("<IiQ16s")  # magic, logical expert (-1: none), weight version, digest
_ENTRY_MAGIC = 0x45504C31


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
        self._table: torch.Tensor | None = None
        self.layers: list[dict[str, torch.Tensor]] = []
        self._read()
        if entries:
            self._table = torch.zeros(len(self.layers), num_local_experts, ENTRY_BYTES, dtype=torch.uint8)
        self._build()

    @property
    def num_layers(self) -> int:
        """Layers."""
        return len(self.layers)

    def rows(self, layer: int, tensor: int) -> torch.Tensor:
        """Bytes of a tensor's expert rows, uint8 ``[num_local_experts, row_bytes]``, sharing its memory."""
        return self._rows[layer][tensor]

    def regions(self) -> list[tuple[torch.Tensor, str]]:
        """What to register: every tensor that has bytes, with a region name."""
        found = [
            (self._rows[layer][tensor], f"{layer}/{tensor}")
            for layer, tensors in enumerate(self.layers)
            for tensor, (_, value) in enumerate(tensors.items())
            if value.numel()
        ]
        if self._table is not None:
            found.append((self._table, ENTRY_NAME))
        return found

    def write_entries(self, layer: int, experts: Sequence[int], version: int) -> None:
        """Say which logical expert each slot of a layer holds; -1 for none."""
        if self._table is not None:
            packed = b"".join(_ENTRY.pack(_ENTRY_MAGIC, int(e), version, b"") for e in experts)
            self._table[layer] = torch.frombuffer(bytearray(packed), dtype=torch.uint8).view(-1, ENTRY_BYTES)

    def moved(self) -> None:
        """Re-read the source and check that every tensor is where it was registered.

        Raises:
            WeightsError: One is not: a READ would reach dead memory, and NIXL would say ``DONE``.
        """
        for layer, (known, now) in enumerate(zip(self.layers, self._ask(), strict=False)):
            tensors = _named(now)
            if list(tensors) != list(known):
                raise WeightsError(
                    f"layer {layer}: tensors are now {list(tensors)}, were {list(known)}: rebind()"
                )
            for name, tensor in tensors.items():
                was = known[name]
                same = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
                if same != (self._pointers[layer][name], was.shape, was.stride(), was.dtype):
                    raise WeightsError(
                        f"layer {layer}, tensor {name!r}: its storage moved since it was registered "
                        f"({self._pointers[layer][name]:#x} then, {tensor.data_ptr():#x} now); call rebind()"
                    )

    def rebind(self) -> None:
        """Take the tensors as they are now; what is registered must be deregistered first by the caller.

        Raises:
            WeightsError: A tensor cannot be moved; nothing has changed then.
        """
        kept = self.layers
        try:
            self._read()
            self._build()
        except WeightsError:
            self.layers = kept
            self._build()
            raise

    def _ask(self) -> Sequence[LayerWeights]:
        return self._source() if callable(self._source) else self._source

    def _read(self) -> None:
        given = self._ask()
        if isinstance(given, torch.Tensor | Mapping) or not isinstance(given, Sequence) or not len(given):
            raise WeightsError("weights must be a sequence of layers, each a sequence or mapping of tensors")
        layers = [_named(layer) for layer in given]
        for layer, tensors in enumerate(layers):
            if not tensors:
                raise WeightsError(f"layer {layer} has no tensors")
            for name, tensor in tensors.items():
                _check(layer, name, tensor, self.num_local_experts)
        _check_overlap(layers)
        self.layers = layers

    def _build(self) -> None:
        places, self._rows = [], []
        self._pointers = [{name: t.data_ptr() for name, t in tensors.items()} for tensors in self.layers]
        for layer, tensors in enumerate(self.layers):
            named = dict(tensors)
            if self._table is not None:
                named[ENTRY_NAME] = self._table[layer]
            self._rows.append([_byte_rows(tensor) for tensor in named.values()])
            places.append(tuple(_place(name, tensor) for name, tensor in named.items()))
        self.layout = Layout(tuple(places))


def check_entry(entry: bytes, expert: int, version: int, where: str) -> None:
    """Check that a staged row is the expert and the weight version that were meant (I-16).

    Raises:
        IntegrityError: It is not; the source changed meaning since the plan.
    """
    magic, found, its_version, _ = _ENTRY.unpack(entry)
    if magic != _ENTRY_MAGIC:
        raise IntegrityError(f"{where}: what arrived carries no entry; the source is not the memory it was")
    if (found, its_version) != (expert, version):
        raise IntegrityError(
            f"{where}: wanted expert {expert} of weight version {version}, the source holds expert {found} of "
            f"version {its_version}; it changed since the plan was made"
        )


def _named(layer: LayerWeights) -> dict[str, torch.Tensor]:
    if isinstance(layer, Mapping):
        return {str(name): tensor for name, tensor in layer.items()}
    if isinstance(layer, torch.Tensor):
        raise WeightsError(
            "a layer must be a sequence or mapping of tensors, not one tensor: wrap it in a list"
        )
    return {str(i): tensor for i, tensor in enumerate(layer)}


def _check(layer: int, name: str, tensor: object, num_local_experts: int) -> None:
    where = f"layer {layer}, tensor {name!r}"
    if not isinstance(tensor, torch.Tensor):
        raise WeightsError(f"{where}: {type(tensor).__name__} is not a torch.Tensor")
    if tensor.layout is not torch.strided or tensor.device.type not in ("cpu", "cuda"):
        raise WeightsError(
            f"{where}: {tensor.layout} on {tensor.device} cannot be moved; use dense cpu or cuda"
        )
    if tensor.dim() == 0 or tensor.shape[0] != num_local_experts:
        raise WeightsError(
            f"{where}: shape {tuple(tensor.shape)}, need [{num_local_experts}, ...], a row for each local slot"
        )
    if not tensor.numel():
        return
    shape, strides = tuple(tensor.shape), tensor.stride()
    described = f"shape {shape}, strides {strides}"
    if shape[0] > 1 and strides[0] == 0:
        raise WeightsError(f"{where}: {described}: shared by all experts: leave it out")
    dense = 1
    for size, stride in sorted(zip(shape[1:], strides[1:], strict=True), key=lambda d: (d[1], d[0])):
        if size > 1 and stride != dense:
            raise WeightsError(
                f"{where}: {described}: an expert row is not one dense block; give the base tensor"
            )
        dense *= size
    if shape[0] > 1 and strides[0] < dense:
        raise WeightsError(f"{where}: {described}: expert rows overlap or interleave; put experts first")


def _check_overlap(layers: list[dict[str, torch.Tensor]]) -> None:
    spans = []
    for layer, tensors in enumerate(layers):
        for name, tensor in tensors.items():
            if tensor.numel():
                spec = _place(name, tensor).spec
                start = tensor.data_ptr()
                end = start + (spec.num_rows - 1) * spec.row_stride + spec.row_bytes
                spans.append((str(tensor.device), start, end, layer, name))
    spans.sort()
    for (device, start, end, layer, name), (device2, start2, end2, layer2, name2) in zip(
        spans, spans[1:], strict=False
    ):
        if device != device2 or start2 >= end:
            continue
        pair = f"layer {layer}, tensor {name!r} and layer {layer2}, tensor {name2!r}"
        if (start, end) != (start2, end2):
            raise WeightsError(f"{pair} overlap in part; rows of both cannot be moved")
        if layer != layer2:
            raise WeightsError(f"{pair} are the same memory; layers that share weights cannot move apart")


def _byte_rows(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor's rows as bytes, whatever its dtype and the order of its row's dimensions."""
    tensor = tensor.detach()
    size = tensor.element_size()
    row_bytes = tensor[0].numel() * size if tensor.numel() else 0
    stride = tensor.stride(0) * size if tensor.shape[0] > 1 else row_bytes
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    if not row_bytes:
        return raw.view(0, 0).expand(0, 0)
    shape = (tensor.shape[0], row_bytes)
    return raw.set_(tensor.untyped_storage(), tensor.storage_offset() * size, shape, (stride, 1))


def _place(name: str, tensor: torch.Tensor) -> TensorPlace:
    size = tensor.element_size()
    row_bytes = tensor[0].numel() * size if tensor.numel() else 0
    spec = TensorSpec(
        name=name,
        row_bytes=row_bytes,
        row_stride=tensor.stride(0) * size if tensor.shape[0] > 1 and row_bytes else row_bytes,
        num_rows=tensor.shape[0],
        row_shape=tuple(tensor.shape[1:]),
        element_strides=tuple(
            stride if extent > 1 else 1
            for extent, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True)
        ),
        dtype=str(tensor.dtype).removeprefix("torch."),
        device=str(tensor.device),
    )
    return TensorPlace(spec, tensor.data_ptr() if row_bytes else 0)
