"""Counters of an endpoint, for health."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eplb_async.nixl.native import Native
from eplb_async.nixl.transfer import Fate, Transfer


@dataclass(frozen=True, slots=True)
class EndpointStats:
    """Counters of an endpoint.

    Attributes:
        in_flight: READs in flight that somebody awaits.
        quarantined: READs in quarantine.
        quarantined_bytes: Bytes they may still write.
        oldest_seconds: Age of the oldest READ that has not ended; 0 if none.
        oldest_peer: Its peer; empty if none.
        oldest_rank: Its peer's rank, where known.
        oldest_layer: Its layer, where known.
        oldest_bytes: Its bytes.
        polls: Native polls so far.
        longest_call_seconds: Longest native call so far.
        longest_call: What that call was.
    """

    in_flight: int
    quarantined: int
    quarantined_bytes: int
    oldest_seconds: float
    oldest_peer: str
    oldest_rank: int | None
    oldest_layer: int | None
    oldest_bytes: int
    polls: int
    longest_call_seconds: float
    longest_call: str

    @classmethod
    def of(cls, transfers: Sequence[Transfer], native: Native, now: float) -> EndpointStats:
        """Count READs that have not ended, and what the agent did."""
        quarantined = [t for t in transfers if t.fate is Fate.QUARANTINED]
        oldest = min(transfers, key=lambda t: t.started, default=None)
        seconds, call = native.longest_call
        return cls(
            in_flight=len(transfers) - len(quarantined),
            quarantined=len(quarantined),
            quarantined_bytes=sum(t.nbytes for t in quarantined),
            oldest_seconds=now - oldest.started if oldest else 0.0,
            oldest_peer=oldest.peer if oldest else "",
            oldest_rank=oldest.origin.rank if oldest else None,
            oldest_layer=oldest.origin.layer if oldest else None,
            oldest_bytes=oldest.nbytes if oldest else 0,
            polls=native.polls,
            longest_call_seconds=seconds,
            longest_call=call,
        )
