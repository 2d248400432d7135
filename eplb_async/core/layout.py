"""Where the expert rows of one rank lie in memory, and what must agree between ranks.

Row sizes, shapes, strides within a row and dtypes must agree, or bytes would land where they mean something
else; addresses, strides between rows and devices are each rank's own. Layouts arrive from peers, so every
number is checked before it is used.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Layout", "TensorPlace", "TensorSpec", "compare"]

_MAX_LAYERS = 1 << 16
_MAX_TENSORS = 1 << 12
_MAX_ROWS = 1 << 20
_MAX_DIMS = 64
_MAX_TEXT = 256
_END = 1 << 63
_DEVICE = re.compile(r"[a-z]+(:[0-9]{1,4})?")
_AGREED = ("name", "row_bytes", "row_shape", "element_strides", "dtype", "num_rows")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One weight tensor ``[num_rows, *row_shape]``.

    Attributes:
        name: What errors call it.
        row_bytes: Bytes of one expert row.
        row_stride: Bytes from one row to the next.
        num_rows: Slots of the rank.
        row_shape: Shape of one row.
        element_strides: Strides of the row's dimensions, in elements.
        dtype: Name of the element type.
        device: ``"cpu"``, ``"cuda:0"``, …
    """

    name: str
    row_bytes: int
    row_stride: int
    num_rows: int
    row_shape: tuple[int, ...]
    element_strides: tuple[int, ...]
    dtype: str
    device: str


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor and the address of its first row."""

    spec: TensorSpec
    address: int


@dataclass(frozen=True, slots=True)
class Layout:
    """All weight tensors of one rank, ``layers[layer][tensor]``."""

    layers: tuple[tuple[TensorPlace, ...], ...]

    def row_address(self, layer: int, tensor: int, slot: int) -> int:
        """Address of one expert row.

        Raises:
            IndexError: There is no such row; names layer, tensor, row and range.
        """
        return int(self.addresses(layer, tensor, slot))

    def addresses(self, layer: int, tensor: int, slots: Any) -> NDArray[np.int64]:
        """Addresses of expert rows, int64 of the shape of ``slots``.

        Raises:
            IndexError: There is no such row; names layer, tensor, row and range.
        """
        place = self.layers[layer][tensor]
        slots = np.asarray(slots, dtype=np.int64)
        outside = slots[(slots < 0) | (slots >= place.spec.num_rows)]
        if outside.size:
            where = _where(layer, tensor, place.spec)
            raise IndexError(f"{where}: row {outside.flat[0]} is outside [0, {place.spec.num_rows})")
        return np.asarray(place.address + slots * place.spec.row_stride)

    def layer_bytes(self, layer: int) -> int:
        """Bytes of one expert of a layer, all its tensors together."""
        return sum(place.spec.row_bytes for place in self.layers[layer])

    def check(self) -> None:
        """Refuses numbers that cannot describe memory.

        Raises:
            ValueError: Names the layer, the tensor and the number at fault.
        """
        self._check(None)

    def to_plain(self) -> tuple[tuple[tuple[Any, ...], ...], ...]:
        """The layout as nested tuples of ints and strings, to be serialised."""
        return tuple(tuple((*_fields(place.spec), place.address) for place in places) for places in self.layers)

    @classmethod
    def from_plain(cls, plain: Any, *, like: Layout | None = None) -> Layout:
        """Builds a checked layout from what `to_plain` gave, as tuples or lists.

        Args:
            plain: It.
            like: A checked layout; tensors that are described as its own share its descriptions, so that the
                layouts of many equal ranks cost little more than their addresses.

        Raises:
            ValueError: A part is missing, of another type or out of range; names layer and tensor.
        """
        layers = []
        for layer, places in enumerate(_sequence(plain, "layout")):
            known = like.layers[layer] if like is not None and layer < len(like.layers) else ()
            tensors = enumerate(_sequence(places, f"layer {layer}"))
            layers.append(
                tuple(
                    _same_place(record, known[tensor] if tensor < len(known) else None)
                    or _place(record, f"layer {layer}, tensor {tensor}")
                    for tensor, record in tensors
                )
            )
        layout = cls(tuple(layers))
        layout._check(like)
        return layout

    def _check(self, like: Layout | None) -> None:
        """As `check`; places that share a description with ``like`` have been checked."""
        if len(self.layers) > _MAX_LAYERS:
            raise ValueError(f"{len(self.layers)} layers; at most {_MAX_LAYERS} are allowed")
        for layer, places in enumerate(self.layers):
            if len(places) > _MAX_TENSORS:
                raise ValueError(f"layer {layer}: {len(places)} tensors; at most {_MAX_TENSORS} are allowed")
            known = like.layers[layer] if like is not None and layer < len(like.layers) else ()
            for tensor, place in enumerate(places):
                if tensor < len(known) and place.spec is known[tensor].spec:
                    continue
                if fault := _fault(place):
                    raise ValueError(f"{_where(layer, tensor, place.spec)}: {fault}")


def compare(mine: Layout, theirs: Layout) -> list[str]:
    """What differs between two ranks' layouts though it must agree: one line each, with both values."""
    if len(mine.layers) != len(theirs.layers):
        return [f"number of layers: {len(mine.layers)} here, {len(theirs.layers)} there"]
    differences = []
    for layer, (here, there) in enumerate(zip(mine.layers, theirs.layers, strict=True)):
        if len(here) != len(there):
            differences.append(f"layer {layer}: {_spell_counts(here, there)}")
            continue
        for tensor, (a, b) in enumerate(zip(here, there, strict=True)):
            if a.spec is b.spec:
                continue
            for part in _AGREED:
                ours, other = getattr(a.spec, part), getattr(b.spec, part)
                if ours != other:
                    where = _where(layer, tensor, a.spec)
                    differences.append(f"{where}: {part} is {ours!r} here, {other!r} there")
    return differences


def _fields(spec: TensorSpec) -> tuple[Any, ...]:
    return tuple(getattr(spec, name) for name in TensorSpec.__slots__)


def _spell_counts(here: tuple[TensorPlace, ...], there: tuple[TensorPlace, ...]) -> str:
    ours, theirs = (Counter(place.spec.name for place in places) for places in (here, there))
    text = f"{len(here)} tensors here, {len(there)} there"
    for names, side in ((ours - theirs, "here"), (theirs - ours, "there")):
        if names:
            text += f"; only {side}: {', '.join(map(repr, sorted(names.elements())))}"
    return text


def _where(layer: int, tensor: int, spec: TensorSpec) -> str:
    return f"layer {layer}, tensor {tensor} ({spec.name!r})"


def _fault(place: TensorPlace) -> str:
    """What is wrong with a place; empty if nothing is."""
    spec = place.spec
    end = place.address + (spec.num_rows - 1) * spec.row_stride + spec.row_bytes
    rules = (
        (_DEVICE.fullmatch(spec.device) is not None, f"device {spec.device!r} is not one"),
        (1 <= spec.num_rows <= _MAX_ROWS, f"num_rows {spec.num_rows} is outside [1, {_MAX_ROWS}]"),
        (spec.row_bytes >= 0, f"row_bytes {spec.row_bytes} is negative"),
        (
            spec.row_stride >= spec.row_bytes,
            f"row_stride {spec.row_stride} is below row_bytes {spec.row_bytes}",
        ),
        # An empty tensor may have no memory at all.
        (place.address >= min(1, spec.row_bytes), f"address {place.address} is not one of memory"),
        (end < _END, f"the rows end at {end:#x}, beyond 2**63"),
        (
            len(spec.row_shape) <= _MAX_DIMS,
            f"rows have {len(spec.row_shape)} dimensions; at most {_MAX_DIMS}",
        ),
        (min(spec.row_shape, default=0) >= 0, f"row_shape {spec.row_shape} has a negative size"),
        (
            len(spec.element_strides) == len(spec.row_shape),
            f"element_strides {spec.element_strides} do not fit row_shape {spec.row_shape}",
        ),
    )
    return next((fault for holds, fault in rules if not holds), "")


def _same_place(record: Any, known: TensorPlace | None) -> TensorPlace | None:
    """The place of a tensor that is described exactly as a known one and lies in memory; ``None`` of any other."""
    if known is None or type(record) is not tuple or record[:-1] != _fields(known.spec):
        return None
    spec, address = known.spec, record[-1]
    if type(address) is not int or not min(1, spec.row_bytes) <= address < _END - spec.num_rows * spec.row_stride:
        return None
    return TensorPlace(spec, address)


def _place(record: Any, where: str) -> TensorPlace:
    fields = _sequence(record, where)
    if len(fields) != len(TensorSpec.__slots__) + 1:
        raise ValueError(f"{where}: {len(fields)} fields instead of {len(TensorSpec.__slots__) + 1}")
    name, row_bytes, row_stride, num_rows, row_shape, element_strides, dtype, device, address = fields
    spec = TensorSpec(
        name=_text(name, f"{where}: name"),
        row_bytes=_integer(row_bytes, f"{where}: row_bytes"),
        row_stride=_integer(row_stride, f"{where}: row_stride"),
        num_rows=_integer(num_rows, f"{where}: num_rows"),
        row_shape=_integers(row_shape, f"{where}: row_shape"),
        element_strides=_integers(element_strides, f"{where}: element_strides"),
        dtype=_text(dtype, f"{where}: dtype"),
        device=_text(device, f"{where}: device"),
    )
    return TensorPlace(spec, _integer(address, f"{where}: address"))


def _sequence(value: Any, what: str) -> list[Any] | tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{what} is a {type(value).__name__}, not a sequence")
    return value


def _integer(value: Any, what: str) -> int:
    if type(value) is not int:
        raise ValueError(f"{what} is a {type(value).__name__}, not an integer")
    if not -_END <= value < _END:
        raise ValueError(f"{what} does not fit 64 bits")
    return value


def _integers(value: Any, what: str) -> tuple[int, ...]:
    return tuple(_integer(item, what) for item in _sequence(value, what))


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what} is a {type(value).__name__}, not a string")
    if len(value) > _MAX_TEXT:
        raise ValueError(f"{what} has {len(value)} characters; at most {_MAX_TEXT} are allowed")
    return value
