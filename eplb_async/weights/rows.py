"""Which tensors can be moved, and their expert rows as bytes.

A tensor can be moved if its memory is its own and each expert's row is one dense block, whatever the dtype and
the order of the row's dimensions. Nothing is ever made contiguous: a copy would receive what the model never sees.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from eplb_async.core.layout import TensorPlace, TensorSpec
from eplb_async.errors import WeightsError


def check_movable(layer: int, name: str, tensor: object, num_local_experts: int) -> None:
    """Check that a tensor's expert rows can be moved.

    Raises:
        WeightsError: They cannot; names layer, tensor, shape and strides, and says why.
    """
    where = f"layer {layer}, tensor {name!r}"
    if not isinstance(tensor, torch.Tensor):
        raise WeightsError(f"{where}: {type(tensor).__name__} is not a torch.Tensor")
    try:
        fault = _fault(tensor, num_local_experts)
    except (RuntimeError, ValueError) as error:  # kinds of tensor that will not even say their shape
        reason = str(error).partition("\n")[0]
        raise WeightsError(f"{where}: {type(tensor).__name__} cannot be moved: {reason}") from error
    if fault:
        raise WeightsError(f"{where}: {fault}")


def check_apart(layers: Sequence[dict[str, torch.Tensor]]) -> None:
    """Check that tensors share no memory, but for tied ones of one layer: those are the same rows, all of them.

    Raises:
        WeightsError: They do; names both.
    """
    spans = sorted(
        _span(layer, name, tensor)
        for layer, tensors in enumerate(layers)
        for name, tensor in tensors.items()
        if tensor.numel()
    )
    # Neighbours suffice: tied spans are equal, and anything else that touches two of them touches one of those.
    for one, other in itertools.pairwise(spans):
        if one.device != other.device or other.start >= one.end:
            continue
        pair = f"layer {one.layer}, tensor {one.name!r} and layer {other.layer}, tensor {other.name!r}"
        if (one.start, one.end, one.row_bytes) != (other.start, other.end, other.row_bytes):
            raise WeightsError(f"{pair} overlap in part, or their rows interleave; give the tensor they are views of")
        if one.layer != other.layer:
            raise WeightsError(f"{pair} are the same memory; layers that share weights cannot move apart")


def byte_rows(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's expert rows as bytes, uint8 ``[num_rows, row_bytes]`` sharing its memory; ``[0, 0]`` without any."""
    with torch.inference_mode(False):  # whatever mode it is made in, another thread must be able to write it
        rows = torch.empty(0, 0, dtype=torch.uint8, device=tensor.device)
        if not tensor.numel():
            return rows
        spec = place_of("", tensor).spec
        shape, strides = (spec.num_rows, spec.row_bytes), (spec.row_stride, 1)
        offset = tensor.storage_offset() * tensor.element_size()
        return rows.set_(tensor.untyped_storage(), offset, shape, strides)


def place_of(name: str, tensor: torch.Tensor) -> TensorPlace:
    """Where a tensor's expert rows are, and what they look like."""
    size = tensor.element_size()
    num_rows, *row_shape = tensor.shape
    row_bytes = math.prod(row_shape) * size
    spec = TensorSpec(
        name=name,
        row_bytes=row_bytes,
        row_stride=tensor.stride(0) * size if num_rows > 1 and row_bytes else row_bytes,
        num_rows=num_rows,
        row_shape=tuple(row_shape),
        element_strides=tuple(
            stride if extent > 1 and row_bytes else 1  # others address nothing, and may be anything
            for extent, stride in zip(row_shape, tensor.stride()[1:], strict=True)
        ),
        dtype=str(tensor.dtype).removeprefix("torch."),
        device=str(tensor.device),
    )
    return TensorPlace(spec, tensor.data_ptr() if row_bytes else 0)


class _Span(NamedTuple):
    """The memory from a tensor's first byte to its last."""

    device: str
    start: int
    end: int
    row_bytes: int
    layer: int
    name: str


def _span(layer: int, name: str, tensor: torch.Tensor) -> _Span:
    place = place_of(name, tensor)
    spec, start = place.spec, place.address
    end = start + (spec.num_rows - 1) * spec.row_stride + spec.row_bytes
    return _Span(spec.device, start, end, spec.row_bytes, layer, name)


def _fault(tensor: torch.Tensor, num_local_experts: int) -> str:
    """Why a tensor's expert rows cannot be moved; empty if they can."""
    if tensor.layout is not torch.strided or tensor.device.type not in ("cpu", "cuda"):
        return f"{tensor.layout} on {tensor.device} cannot be moved; use dense cpu or cuda"
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return "its bytes alone are not its values (quantised, or lazily conjugated or negated); give plain tensors"
    shape, strides = tuple(tensor.shape), tensor.stride()
    described = f"shape {shape}, strides {strides}"
    if not shape or shape[0] != num_local_experts:
        need = f"need [{num_local_experts}, ...], a row for each local slot; leave out what experts share"
        return f"{described}: {need}"
    if not tensor.numel():
        return ""
    if shape[0] > 1 and strides[0] == 0:
        return f"{described}: shared by all experts: leave it out"
    dense = 1
    for size, stride in sorted(zip(shape[1:], strides[1:], strict=True), key=lambda d: (d[1], d[0])):
        if size > 1 and stride != dense:
            return f"{described}: an expert row is not one dense block; give the base tensor"
        dense *= size
    if shape[0] > 1 and strides[0] < dense:
        return f"{described}: expert rows overlap or interleave; put experts first"
    storage = tensor.untyped_storage()
    end = (tensor.storage_offset() + (shape[0] - 1) * strides[0] + dense) * tensor.element_size()
    if storage.device != tensor.device or storage.nbytes() < end or not tensor.data_ptr():
        return f"{described}: it has no memory of its own now (offloaded, asleep, sharded or fake)"
    return ""
