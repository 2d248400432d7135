"""The one type of event, and every name that it has, with its fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """Something that has happened on one rank.

    Attributes:
        name: One of :data:`EVENTS`.
        group: Name of the group.
        rank: The rank that it happened on.
        at: When, in seconds since 1970.
        fields: What is to be said of it, by the names in :data:`EVENTS`.
    """

    name: str
    group: str
    rank: int
    at: float
    fields: Mapping[str, object]


Hook = Callable[[Event], object]
"""Takes events. It is called where they happen, so it must be quick; what it raises is logged once and counted."""

EVENTS: Mapping[str, tuple[str, ...]] = {
    "migration_ended": (
        "outcome",
        "epoch",
        "term",
        "layers_committed",
        "num_layers",
        "seconds",
        "bytes_read",
        "bytes_copied",
        "bytes_by_peer",
        "reads",
        "retries",
        "loads",
        "polls",
        "error",
    ),
    "migration_settled": ("epoch", "layers_committed", "num_layers"),
    "read_ended": ("peer", "layer", "bytes", "seconds", "state"),
    "layer_applied": ("layer", "epoch"),
    "view_changed": ("term", "members"),
    "peer_degraded": ("peer", "reason"),
    "peer_recovered": ("peer",),
    "agent_recycled": ("reason", "incarnation"),
    "fenced": ("reason",),
    "broken": ("reason",),
    "closed": ("left",),
    "rebalance_ended": (
        "outcome",
        "round",
        "reason",
        "balancedness_before",
        "balancedness_after",
        "num_moves",
        "seconds",
    ),
    "round_failed": ("round", "reason", "failures", "retry_in"),
    "rebalancing_paused": (),
    "rebalancing_resumed": (),
}
"""Fields of each event, by its name. What they mean is in ``docs/telemetry.md``."""
