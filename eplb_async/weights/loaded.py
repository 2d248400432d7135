"""One expert as the caller's ``load_expert`` gives it, turned into the bytes of its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from eplb_async.core.layout import TensorSpec
from eplb_async.errors import WeightsError
from eplb_async.weights.rows import byte_rows

LoadedExpert = Sequence[torch.Tensor] | Mapping[str, torch.Tensor]

# Copied as integers of their size: values are never interpreted, so that NaN payloads stay (I-12).
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def loaded_rows(given: object, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
    """Check an expert's tensors and lay them out as its rows are laid out.

    Args:
        given: One tensor ``[...]`` for each tensor of the layer, without the expert dimension: a mapping from
            their names, or a sequence in their order; on any device.
        specs: The layer's tensors.

    Returns:
        Bytes of each row, uint8 ``[1, row_bytes]`` on the CPU.

    Raises:
        WeightsError: Tensors are missing, too many, or of another shape or dtype; names them.
    """
    tensors = _by_name(given, [spec.name for spec in specs])
    return [_row(tensors[spec.name], spec) for spec in specs]


def _by_name(given: object, names: list[str]) -> dict[str, object]:
    if isinstance(given, Mapping):
        tensors = {str(name): tensor for name, tensor in given.items()}
    elif isinstance(given, Sequence) and not isinstance(given, str | bytes):
        if len(given) != len(names):
            raise WeightsError(f"{len(given)} tensors, the layer has {len(names)}: {names}")
        tensors = dict(zip(names, given, strict=True))
    else:
        raise WeightsError(f"{type(given).__name__} is neither a mapping nor a sequence of tensors; give {names}")
    if missing := [name for name in names if name not in tensors]:
        raise WeightsError(f"tensors {missing} are missing; given are {list(tensors)}")
    if surplus := [name for name in tensors if name not in names]:
        raise WeightsError(f"tensors {surplus} are not of this layer; it has {names}")
    return tensors


def _row(tensor: object, spec: TensorSpec) -> torch.Tensor:
    where = f"tensor {spec.name!r}"
    if not isinstance(tensor, torch.Tensor):
        raise WeightsError(f"{where}: {type(tensor).__name__} is not a torch.Tensor")
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tuple(tensor.shape) != spec.row_shape or dtype != spec.dtype:
        raise WeightsError(
            f"{where}: {dtype} {list(tensor.shape)} is not one expert's row, which is {spec.dtype} "
            f"{list(spec.row_shape)} (without the expert dimension, and already of the weights' own dtype)"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type not in ("cpu", "cuda"):
        raise WeightsError(f"{where}: {tensor.layout} on {tensor.device} has no plain bytes; give dense cpu or cuda")
    with torch.inference_mode(False), torch.no_grad():
        values = tensor.detach().resolve_conj().resolve_neg().cpu()
        row = torch.empty_strided((1, *spec.row_shape), (values.numel(), *spec.element_strides), dtype=tensor.dtype)
        if values.numel():
            carrier = _CARRIERS[tensor.element_size()]
            row[0].view(carrier).copy_(values.view(carrier))
    return byte_rows(row)
