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


@dataclass(frozen=True, slots=True)
class View:
    """Who is in the group.

    Attributes:
        term: Number of the view; later ones have greater ones.
        members: Its ranks, ascending. The lowest coordinates.
    """

    term: int
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """What a communicator is doing now; ``str()`` of it is one line for a log.

    Attributes:
        phase: ``idle``, ``joined`` (waiting for the others), ``open`` (moving), ``activating`` (committed, waiting for
            the step of the last layers, or for their users), ``settling`` (ending), ``in_doubt``, ``view_change`` (no
            migration, but members go), ``suspended``, ``closing``, ``closed`` or ``fenced``.
        seconds_in_phase: How long it has been in it.
        seconds_left: How long until the phase's deadline, below 0 once that has passed; ``None`` if it has none.
        rank: This rank.
        term: Number of the view.
        members: Ranks of the view.
        epoch: The highest epoch seen; the open one while there is one.
        layer: The layer being moved: the oldest READ's, else the first that is not staged; ``None`` outside an epoch.
        prepared: Layers of the open epoch that are staged and voted for here.
        committed: Layers of it that are known committed.
        num_layers: Layers of a migration.
        waiting_for: Ranks whose message is waited for.
        degraded: Why each peer that is not well is not, by rank.
        reads_in_flight: READs that have not ended.
        oldest_read_seconds: Age of the oldest; 0 if none.
        oldest_read_peer: Agent that it reads from; empty if none.
        oldest_read_rank: Rank that it reads from; ``None`` if none.
        oldest_read_layer: Layer that it belongs to; ``None`` if none.
        oldest_read_bytes: Its bytes.
        quarantined_bytes: Bytes that READs without an awaiter may still write.
        recycled: How often the agent was replaced: to get its staging back, and by ``rebind``, ``suspend``, ``resume``.
        weight_version: Weight version of this rank's rows; the same on all ranks, or they cannot migrate.
        paused: Whether it posts no READ until ``resume``.
        max_bytes_per_second: Most bytes that its READs bring in a second; 0 for no limit.
        step: The last step that the engine began; 0 before the first, and where layers are not applied at steps.
        due: The step before which each layer that is committed and not applied is to be applied, by layer.
        behind: Ranks that have come least far among the steps, as far as is known, while a layer waits for its step.
        in_use: How many users a layer that is committed waits for (``using``), by layer; empty if none waits.
        callback_errors: How often ``on_layer_applied`` and callbacks of ``on_applied`` have raised.
        half_written: Layers whose update did not end well; they must be written again before a migration.
        dropped: Messages that were dropped, by reason.
        last_error: The last failure here, in words; empty if none.
        group: Name of the group.
        polls: Native polls so far.
        telemetry_errors: How often the telemetry hook has raised; the first time is in the log.
    """

    phase: str
    seconds_in_phase: float
    seconds_left: float | None
    rank: int
    term: int
    members: tuple[int, ...]
    epoch: int
    layer: int | None
    prepared: int
    committed: int
    num_layers: int
    waiting_for: tuple[int, ...]
    degraded: Mapping[int, str]
    reads_in_flight: int
    oldest_read_seconds: float
    oldest_read_peer: str
    oldest_read_rank: int | None
    oldest_read_layer: int | None
    oldest_read_bytes: int
    quarantined_bytes: int
    recycled: int
    weight_version: int = 0
    paused: bool = False
    max_bytes_per_second: int = 0
    step: int = 0
    due: Mapping[int, int] = field(default_factory=dict)
    behind: tuple[int, ...] = ()
    in_use: Mapping[int, int] = field(default_factory=dict)
    callback_errors: int = 0
    half_written: tuple[int, ...] = ()
    dropped: Mapping[str, int] = field(default_factory=dict)
    last_error: str = ""
    group: str = "default"
    polls: int = 0
    telemetry_errors: int = 0

    def __str__(self) -> str:
        left = "" if self.seconds_left is None else f" ({self.seconds_left:.1f} s left)"
        parts = [f"rank {self.rank}: {self.phase} for {self.seconds_in_phase:.1f} s{left}"]
        parts.append(f"term {self.term} of ranks {_listed(self.members)}, epoch {self.epoch}")
        if self.paused:
            parts.append("paused: posts no READ until resume()")
        if self.max_bytes_per_second:
            parts.append(f"limited to {self.max_bytes_per_second} bytes a second")
        if self.layer is not None:
            parts.append(
                f"layer {self.layer} of {self.num_layers} ({self.prepared} prepared, {self.committed} committed)"
            )
        if self.waiting_for:
            parts.append(f"waiting for ranks {_listed(self.waiting_for)}")
        if self.due:
            waits = ", ".join(f"layer {layer} for step {step}" for layer, step in self.due.items())
            parts.append(f"step {self.step} was begun last; {waits} waits, least far are ranks {_listed(self.behind)}")
        for used, count in self.in_use.items():
            parts.append(f"layer {used} is committed and waits for {count} users to leave it")
        if self.reads_in_flight:
            rank = "" if self.oldest_read_rank is None else f"rank {self.oldest_read_rank} "
            layer = "" if self.oldest_read_layer is None else f" for layer {self.oldest_read_layer}"
            parts.append(
                f"{self.reads_in_flight} READs, the oldest {self.oldest_read_bytes} bytes from {rank}"
                f"({self.oldest_read_peer}){layer}, {self.oldest_read_seconds:.1f} s old"
            )
        if self.quarantined_bytes:
            parts.append(f"{self.quarantined_bytes} bytes in quarantine")
        if self.degraded:
            parts.append("degraded: " + ", ".join(f"rank {rank} ({why})" for rank, why in self.degraded.items()))
        if self.last_error:
            parts.append(f"last error: {self.last_error}")
        return "; ".join(parts)


def _listed(ranks: tuple[int, ...], most: int = 16) -> str:
    text = ", ".join(map(str, ranks[:most]))
    return f"{text} and {len(ranks) - most} more" if len(ranks) > most else text
