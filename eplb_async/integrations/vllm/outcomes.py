"""How a call ended, as an error here, and as what the other ranks are told of an error."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from eplb_async.core.text import one_line
from eplb_async.errors import NixlPeerDisconnected, NixlTransferFailed, NixlTransferTimeout
from eplb_async.integrations.vllm.member import Outcome
from eplb_async.integrations.vllm.messages import Cause

__all__ = ["cause_of", "error_of"]

_CAUSES: dict[Cause, type[NixlTransferFailed]] = {
    Cause.FAILED: NixlTransferFailed,
    Cause.TIMEOUT: NixlTransferTimeout,
    Cause.GONE: NixlPeerDisconnected,
}


def error_of(outcome: Outcome, layer: int) -> NixlTransferFailed:
    """What a call that ended so raises."""
    return _CAUSES[outcome.cause](
        outcome.text,
        rank=outcome.origin if outcome.origin >= 0 else None,
        layer=layer if layer >= 0 else None,
        phase="fence",
    )


def cause_of(error: BaseException, ranks: Mapping[str, int]) -> tuple[Cause, str, int]:
    """What the others are told of an error."""
    if isinstance(error, NixlPeerDisconnected) and (rank := ranks.get(error.peer, error.rank)) is not None:
        return Cause.GONE, f"rank {rank} is gone: {one_line(error.detail) or 'a READ from it says so'}", rank
    if isinstance(error, NixlTransferTimeout):
        return Cause.TIMEOUT, error.detail if error.phase == "fence" else one_line(str(error)), -1
    if isinstance(error, asyncio.CancelledError):
        return Cause.FAILED, "its call was interrupted", -1
    return Cause.FAILED, one_line(str(error) or type(error).__name__), -1
