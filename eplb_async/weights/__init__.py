"""The tensors: what can be moved, staging, and the copies that apply a layer."""

from eplb_async.weights.apply import Copier, Copy, CpuCopier, CudaCopier
from eplb_async.weights.entries import ENTRY_NAME, check_entry
from eplb_async.weights.staging import Piece, Staging, make_buffers, pack
from eplb_async.weights.tensors import ExpertWeights, WeightsLike

__all__ = [
    "ENTRY_NAME",
    "Copier",
    "Copy",
    "CpuCopier",
    "CudaCopier",
    "ExpertWeights",
    "Piece",
    "Staging",
    "WeightsLike",
    "check_entry",
    "make_buffers",
    "pack",
]
