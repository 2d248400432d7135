"""Every number and switch of the library, in one frozen record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from eplb_async._types import Hidden
from eplb_async.service_settings import ServiceSettings
from eplb_async.variables import OTHERS, PREFIX, SERVICE_PREFIX, Range, check, defaults_of, from_variables, variable_of
from eplb_async.variables import VLLM_SWITCH as VLLM_SWITCH

_MIB = 1 << 20
_YEAR = 365 * 86_400

RANGES: dict[str, Range] = {
    "max_post_bytes": Range(4096, 1 << 34, "bytes"),
    "max_post_descriptors": Range(1, 1 << 16, "descriptors"),
    "max_stretch_bytes": Range(0, 1 << 34, "bytes"),
    "max_bytes_in_flight": Range(4096, 1 << 40, "bytes"),
    "max_requests_in_flight": Range(1, 1 << 16, "requests"),
    "max_peer_requests_in_flight": Range(1, 1 << 16, "requests"),
    "max_peer_bytes_in_flight": Range(4096, 1 << 40, "bytes"),
    "max_peers_in_flight": Range(1, 1 << 16, "peers"),
    "max_bytes_per_second": Range(0, 1 << 40, "bytes/s"),
    "max_queued_notifications": Range(1, 1 << 20, "notifications"),
    "max_blob_bytes": Range(1024, 1 << 30, "bytes"),
    "hot_seconds": Range(0, 1, "s"),
    "max_pause": Range(0.0001, 1, "s"),
    "idle_tick": Range(0.001, 10, "s"),
    "switch_interval": Range(0, 1, "s"),
    "migrate_timeout": Range(0.001, 86_400, "s"),
    "read_timeout": Range(0.001, 86_400, "s"),
    "peer_timeout": Range(0.001, 86_400, "s"),
    "close_timeout": Range(0, 3600, "s"),
    "settle_timeout": Range(0.001, 86_400, "s"),
    "ping_interval": Range(0.01, 3600, "s"),
    "watchdog_fraction": Range(0, 1, "of a deadline"),
    "staging_layers": Range(0, 64, "layers"),
    "step_margin": Range(0, 1000, "steps"),
    "activation_timeout": Range(0.001, 3600, "s"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of an agent or communicator; times in seconds, sizes in bytes.

    Attributes:
        secret: The job's shared secret; peers that cannot prove that they hold it are refused. The variable's text is
            used as UTF-8.
        progress_thread: Run NIXL's own progress thread. It burns one core per agent, for ever; for bulk serving only.
        use_uvloop: Run the engine loop on uvloop where it is installed.
        max_post_bytes: Largest post; bounds how long one native call takes, and so how long a cancel or deadline can
            wait. 12 MiB and 64 KiB: rows that fill 12 MiB take their entries along.
        max_post_descriptors: Most descriptors in one post.
        max_stretch_bytes: Most bytes that a rank receives in several small layers which go together: posted, checked,
            voted for and applied as one. A quarter of the staging bounds them too. 0: each layer by itself.
        max_bytes_in_flight: READs in flight at once, all peers together.
        max_requests_in_flight: READ requests in flight at once, all peers together.
        max_peer_requests_in_flight: READ requests in flight at once to one peer.
        max_peer_bytes_in_flight: READs in flight at once to one peer, shared evenly by the ranks that read from it in
            the same layer. One READ each is always let out.
        max_peers_in_flight: Peers that a rank reads from at once and, as far as ranks keep in step, ranks that read
            from one peer at once. READs of layers after the one to be decided next begin with two thirds of them. Small
            READs may go to more: while less than one post of ``max_post_bytes`` is in flight.
        max_bytes_per_second: Most bytes that the READs of this rank's migrations bring in a second; 0: no limit. READs
            that are made again count, local copies and ``AsyncNixlAgent.read`` do not. ``limit()`` changes it while
            running.
        max_queued_notifications: Notifications kept of each peer for ``notifications()``; older ones are dropped and
            counted.
        max_blob_bytes: Largest introduction accepted from a peer.
        hot_seconds: How long the poller laps without a pause after it last saw progress.
        max_pause: Longest pause between laps while something is in flight or served: an eighth of it at first, then
            2 % of the quiet so far. What takes 1 s is noticed at most this late.
        idle_tick: Longest pause between laps while nothing is in flight and nobody is served: the pause doubles up to
            this. Bounds how late an idle rank hears a message.
        switch_interval: How long a thread that computes in Python may keep the GIL from others while an epoch is open:
            the process's ``sys.setswitchinterval``, put back afterwards. 0: as the process has it.
        migrate_timeout: Deadline of ``migrate`` where the call gives none.
        read_timeout: Deadline of ``AsyncNixlAgent.read`` where the call gives none.
        peer_timeout: Deadline for each peer's introduction in ``open`` where the call gives none.
        close_timeout: How long ``aclose`` waits for the others and for READs in flight before it destroys the agent.
        settle_timeout: How long a rank that voted and asked for the end waits for the decision before it is in doubt.
        ping_interval: How often a waiting rank pings whom it waits for; bounds how late a death is noticed.
        watchdog_fraction: When a phase has lasted this fraction of its deadline, one line in the log
            (``eplb_async.watchdog``) says what it waits for; again at twice that. 0: never.
        staging_layers: Staging to allocate, each as large as the largest layer one rank can receive. More overlap, more
            memory. 0: two, or as many as 32 MiB hold where layers are small.
        verify: ``identity`` reads a 32-byte entry with each expert and checks which expert and weight version it is;
            ``full`` also checks a digest of its bytes, and needs the package xxhash (``eplb-async[verify]``); ``off``
            checks nothing. Must be the same on all ranks.
        majority_rule: Require a strict majority of the old view to go on without a rank. Off only where something
            proves deaths.
        retry_reads: When a READ fails or brings other bytes than meant, READ its experts again from another rank that
            holds them, once from each, before the layer is given up. Needs free staging; not after a timeout or a
            disconnect.
        activation: ``immediate`` applies a layer as soon as it is committed. ``step`` applies it between two steps of
            the engine, the same two on every rank, for engines that run in lock-step and say so with ``comm.step()``.
            Must be the same on all ranks.
        step_margin: How many whole steps a rank that has voted for a layer begins before it waits for the decision.
            More: no step waits for a slow reader, and each layer takes longer. Must be the same on all ranks that use
            steps.
        activation_timeout: How long a step waits for a decision before the migration is given up, and then once more
            for its end, before ``comm.step()`` raises ``ActivationTimeout``; and how long ``comm.using()`` waits for an
            apply of its layer.
    """

    secret: bytes | None = field(default=None, repr=False)
    progress_thread: bool = False
    use_uvloop: bool = True
    max_post_bytes: int = 12 * _MIB + _MIB // 16
    max_post_descriptors: int = 512
    max_stretch_bytes: int = 12 * _MIB
    max_bytes_in_flight: int = 128 * _MIB
    max_requests_in_flight: int = 32
    max_peer_requests_in_flight: int = 8
    max_peer_bytes_in_flight: int = 64 * _MIB
    max_peers_in_flight: int = 6
    max_bytes_per_second: int = 0
    max_queued_notifications: int = 4096
    max_blob_bytes: int = 4 * _MIB
    hot_seconds: float = 0.002
    max_pause: float = 0.008
    idle_tick: float = 2.0
    switch_interval: float = 0.0005
    migrate_timeout: float = 120.0
    read_timeout: float = 30.0
    peer_timeout: float = 60.0
    close_timeout: float = 5.0
    settle_timeout: float = 10.0
    ping_interval: float = 0.25
    watchdog_fraction: float = 0.5
    staging_layers: int = 0
    verify: Literal["full", "identity", "off"] = "identity"
    majority_rule: bool = True
    retry_reads: bool = True
    activation: Literal["immediate", "step"] = "immediate"
    step_margin: int = 2
    activation_timeout: float = 5.0

    def __post_init__(self) -> None:
        check(self, RANGES, "setting")
        if self.secret is not None and (not isinstance(self.secret, bytes) or len(self.secret) < 16):
            raise ValueError("setting secret must be bytes, 16 or more of them")
        if self.secret is not None:
            object.__setattr__(self, "secret", Hidden(self.secret))

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> Settings:
        """Read settings from ``EPLB_ASYNC_<NAME>`` variables.

        ``EPLB_ASYNC_SERVICE_<NAME>`` variables are the service's; one that names no setting of it is refused here too,
        since nobody else may look.

        Args:
            environ: Variables to read; default ``os.environ``.
            **overrides: Settings given by the caller; they win over variables.

        Returns:
            The settings.

        Raises:
            ValueError: A variable names no setting, or its value is malformed or out of range.
        """
        services = {variable_of(name, SERVICE_PREFIX) for name in defaults_of(ServiceSettings)}
        defaults = defaults_of(cls) | {"secret": b""}
        return cls(**(from_variables(environ, PREFIX, defaults, "setting", others={*OTHERS, *services}) | overrides))


def seconds(given: float | None, default: float) -> float:
    """A timeout that a caller gave, or the default.

    Raises:
        ValueError: It is negative, endless or no number; every wait has a finite deadline (I-11).
    """
    if given is None:
        return default
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given <= _YEAR:
        raise ValueError(f"timeout={given!r} is not a number of seconds from 0 to {_YEAR}")
    return float(given)


DEFAULTS = Settings()
