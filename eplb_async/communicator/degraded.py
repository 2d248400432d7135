"""Peers that are not well, and why: a dictionary that tells of its changes."""

from __future__ import annotations

from eplb_async.telemetry.emitter import Emit


class Degraded(dict[int, str]):
    """Why each peer that is not well is not, by rank; written on the engine loop only.

    Args:
        emit: Told of peers that are not well, or well again; ``None`` if nobody wants to know.
    """

    def __init__(self, emit: Emit | None = None) -> None:
        super().__init__()
        self._emit = emit

    def __setitem__(self, rank: int, reason: str) -> None:
        news = self.get(rank) != reason
        super().__setitem__(rank, reason)
        if news and self._emit is not None:
            self._emit("peer_degraded", peer=rank, reason=reason)

    def __delitem__(self, rank: int) -> None:
        super().__delitem__(rank)
        if self._emit is not None:
            self._emit("peer_recovered", peer=rank)
