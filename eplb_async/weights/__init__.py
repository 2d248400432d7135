"""The tensors: what can be moved, staging, and the copies that apply a layer."""

from eplb_async.weights.apply import Copier, Copy, CpuCopier, CudaCopier
from eplb_async.weights.checker import wrong_rows
from eplb_async.weights.digests import Digester, load_xxhash
from eplb_async.weights.entries import DIGEST_BYTES, ENTRY_NAME, MAX_VERSION, Wanted
from eplb_async.weights.staging import Piece, Staging, make_buffers, pack
from eplb_async.weights.tensors import ExpertWeights, WeightsLike

__all__ = [
    "DIGEST_BYTES",
    "ENTRY_NAME",
    "MAX_VERSION",
    "Copier",
    "Copy",
    "CpuCopier",
    "CudaCopier",
    "Digester",
    "ExpertWeights",
    "Piece",
    "Staging",
    "Wanted",
    "WeightsLike",
    "load_xxhash",
    "make_buffers",
    "pack",
    "wrong_rows",
]
