"""What a migration and a communicator say of themselves: frozen records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationReport:
    """How one migration went on this rank.

    Attributes:
        epoch: Its number.
        layers_committed: Layers that hold the new placement; all of them.
        bytes_read: Bytes that this rank read from peers.
        bytes_copied: Bytes that this rank copied out of staging into rows.
        reads: READ requests posted.
        retries: Experts that were READ again from another rank because a READ of them failed, each time counted.
        loads: Lost experts that ``load_expert`` supplied on this rank.
        seconds: Wall time by phase: ``plan``, ``join`` (until BEGIN), ``move`` (until the last COMMIT),
            ``apply`` (after it), ``total``.
        gb_per_s: Gigabytes (1e9) per second read from each peer, over the time its READs were in flight.
        polls: Native polls during the migration.
        longest_native_call: Longest native call of this agent so far: seconds, and what it was.
    """

    epoch: int
    layers_committed: int
    bytes_read: int
    bytes_copied: int
    reads: int
    retries: int
    loads: int
    seconds: Mapping[str, float]
    gb_per_s: Mapping[int, float]
    polls: int
    longest_native_call: tuple[float, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """What a communicator is doing now.

    Attributes:
        phase: ``idle``, ``joined`` (waiting for the others), ``open`` (moving), ``settling``, ``in_doubt``,
            ``suspended``, ``fenced`` or ``closed``.
        rank: This rank.
        term: Number of the view.
        members: Ranks of the view.
        epoch: The highest epoch seen; the open one while there is one.
        prepared: Layers of the open epoch that are staged and voted for here.
        committed: Layers of it that are known committed.
        num_layers: Layers of a migration.
        waiting_for: Ranks whose message is waited for.
        degraded: Why each peer that is not well is not, by rank.
        reads_in_flight: READs that have not ended.
        oldest_read_seconds: Age of the oldest; 0 if none.
        oldest_read_peer: Its peer; empty if none.
        quarantined_bytes: Bytes that READs without an awaiter may still write.
        recycled: How often the agent was replaced: to get its staging back, and by ``rebind``, ``suspend``, ``resume``.
        weight_version: Weight version of this rank's rows; the same on all ranks, or they cannot migrate.
        half_written: Layers whose update did not end well; they must be written again before a migration.
        dropped: Messages that were dropped, by reason.
        last_error: The last failure here, in words; empty if none.
    """

    phase: str
    rank: int
    term: int
    members: tuple[int, ...]
    epoch: int
    prepared: int
    committed: int
    num_layers: int
    waiting_for: tuple[int, ...]
    degraded: Mapping[int, str]
    reads_in_flight: int
    oldest_read_seconds: float
    oldest_read_peer: str
    quarantined_bytes: int
    recycled: int
    weight_version: int = 0
    half_written: tuple[int, ...] = ()
    dropped: Mapping[str, int] = field(default_factory=dict)
    last_error: str = ""
