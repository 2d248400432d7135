"""Room for what is read: how large staging must be, making it, and what one plan needs of it."""

from __future__ import annotations

import torch

from eplb_async.communicator.job import room_for
from eplb_async.core.placement import Placement
from eplb_async.core.plan import MigrationPlan
from eplb_async.errors import WeightsError
from eplb_async.nixl.devices import memory_of
from eplb_async.settings import Settings
from eplb_async.weights import ExpertWeights, make_buffers, pack


def make_staging(
    weights: ExpertWeights, placement: Placement, settings: Settings, given: int | torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Staging for the weights as they are, by memory type.

    Args:
        weights: This rank's rows.
        placement: Where the experts are.
        settings: Says for how many layers, by default.
        given: Bytes, or the caller's buffer, which is used then; ``None`` for the default.

    Raises:
        WeightsError: The caller's is too small, or is part of the weights.
    """
    devices = {memory_of(str(t.device)): t.device for tensors in weights.layers for t in tensors.values()}
    devices["DRAM"] = torch.device("cpu")
    needed = _largest_layer(weights, placement)
    buffers = make_buffers(given, needed, devices, layers=settings.staging_layers, num_layers=placement.num_layers)
    _refuse_own_memory(weights, buffers)
    return buffers


def needs_of(plan: MigrationPlan, rank: int, weights: ExpertWeights) -> list[dict[str, int]]:
    """Bytes of staging, by memory type, that each layer of a plan needs on a rank; layers that are alike once."""
    counts = plan.num_moves(rank).tolist()
    kinds = {
        (tuple(place.spec for place in places), count)
        for places, count in zip(weights.layout.layers, counts, strict=True)
    }
    return [room_for(specs, count)[1] for specs, count in kinds]


def _refuse_own_memory(weights: ExpertWeights, buffers: dict[str, torch.Tensor]) -> None:
    """Staging that is (part of) the weights would be overwritten by what is read into it."""
    for rows, name in weights.regions():
        for buffer in buffers.values():
            start, end = buffer.data_ptr(), buffer.data_ptr() + buffer.numel()
            if rows.device == buffer.device and rows.data_ptr() < end and start < rows.data_ptr() + rows.nbytes:
                raise WeightsError(f"staging shares memory with the weights (region {name}); give it its own")


def _largest_layer(weights: ExpertWeights, placement: Placement) -> dict[str, int]:
    """Bytes of the largest layer that one rank can receive, by memory type: every local slot new."""
    needed: dict[str, int] = {}
    for places in weights.layout.layers:
        parts = [(memory_of(p.spec.device), p.spec.row_bytes * placement.num_local_experts) for p in places]
        _, sizes = pack(parts)
        for memory, size in sizes.items():
            needed[memory] = max(needed.get(memory, 0), size)
    return needed
