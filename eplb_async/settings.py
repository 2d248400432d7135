"""Every number and switch of the library, in one frozen record."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from eplb_async._types import Hidden

_PREFIX = "EPLB_ASYNC_"
SERVICE_PREFIX = "EPLB_ASYNC_SERVICE_"
VLLM_SWITCH = "EPLB_ASYNC_VLLM"
"""Whether vLLM is given our communicator; no setting, but read by :mod:`eplb_async.integrations.vllm`."""
_MIB = 1 << 20
_YEAR = 365 * 86_400

# name -> (lowest, highest) of the numeric settings; units are in the field's docstring line below.
_RANGES: dict[str, tuple[float, float]] = {
    "max_post_bytes": (4096, 1 << 34),
    "max_post_descriptors": (1, 1 << 16),
    "max_stretch_bytes": (0, 1 << 34),
    "max_bytes_in_flight": (4096, 1 << 40),
    "max_requests_in_flight": (1, 1 << 16),
    "max_peer_requests_in_flight": (1, 1 << 16),
    "max_peer_bytes_in_flight": (4096, 1 << 40),
    "max_peers_in_flight": (1, 1 << 16),
    "max_bytes_per_second": (0, 1 << 40),
    "max_queued_notifications": (1, 1 << 20),
    "max_blob_bytes": (1024, 1 << 30),
    "hot_seconds": (0, 1),
    "max_pause": (0.0001, 1),
    "idle_tick": (0.001, 10),
    "switch_interval": (0, 1),
    "migrate_timeout": (0.001, 86_400),
    "read_timeout": (0.001, 86_400),
    "peer_timeout": (0.001, 86_400),
    "close_timeout": (0, 3600),
    "settle_timeout": (0.001, 86_400),
    "ping_interval": (0.01, 3600),
    "watchdog_fraction": (0, 1),
    "staging_layers": (0, 64),
    "step_margin": (0, 1000),
    "activation_timeout": (0.001, 3600),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of an agent or communicator; times in seconds, sizes in bytes.

    Attributes:
        secret: The job's shared secret. Peers that cannot prove that they hold it are refused.
        progress_thread: Run NIXL's own progress thread (burns one core per agent; for bulk serving only).
        use_uvloop: Run the engine loop on uvloop where it is installed.
        max_post_bytes: Largest number of bytes in one post; bounds how long one native call can take. A little more
            than a round number: rows that fill a post take their entries along.
        max_post_descriptors: Largest number of descriptors in one post.
        max_stretch_bytes: Most bytes that a rank receives in several small layers which go together: they are posted,
            checked, voted for and applied as one. A quarter of the staging bounds them too. 0: each layer by itself.
        max_bytes_in_flight: Bytes of READs in flight at once, all peers together.
        max_requests_in_flight: READ requests in flight at once, all peers together.
        max_peer_requests_in_flight: READ requests in flight at once to one peer.
        max_peer_bytes_in_flight: Bytes of READs in flight at once to one peer, shared evenly by the ranks that read
            from it in the same layer. One READ each is always let out.
        max_peers_in_flight: Peers that a rank reads from at once, and, as far as ranks keep in step, ranks that read
            from one peer at once. More are let out while less than one post of ``max_post_bytes`` is in flight.
        max_bytes_per_second: Most bytes that the READs of this rank's migrations bring in a second; 0 for no limit.
        max_queued_notifications: Notifications kept of each peer for the iterator; older ones are dropped and counted.
        max_blob_bytes: Largest metadata blob accepted from a peer.
        hot_seconds: How long the poller laps without a pause after it last saw progress.
        max_pause: Longest pause between laps while something is in flight or served; an eighth of it at first, then
            2 % of the quiet.
        idle_tick: Longest pause between laps while nothing is in flight and nobody is served. The pause grows with
            the quiet: it doubles up to this.
        switch_interval: How long a thread may keep the GIL from others while an epoch is open: the process's
            ``sys.setswitchinterval``, put back afterwards. 0: as the process has it.
        migrate_timeout: Deadline of ``migrate`` where the caller gives none.
        read_timeout: Deadline of ``read`` where the caller gives none.
        peer_timeout: Deadline for each peer's introduction in ``open`` where the caller gives none.
        close_timeout: How long ``aclose`` waits for READs in flight before it destroys the agent.
        settle_timeout: How long a rank that voted waits for the decision before it is in doubt.
        ping_interval: How often a waiting rank pings whom it waits for.
        watchdog_fraction: Fraction of its deadline after which a phase is told of in the log; 0 for never.
        staging_layers: Staging to allocate, in layers (as large as the largest layer one rank can receive); 0 for two,
            or for as many as 32 MiB hold where layers are small.
        verify: ``"identity"`` checks which expert and weight version each READ brought, ``"full"`` also a digest of
            its bytes (needs the package xxhash); ``"off"`` checks nothing.
        majority_rule: Require a strict majority of the old view for a takeover.
        retry_reads: READ an expert again from another rank that holds it when a READ of it failed.
        activation: ``"immediate"`` applies a layer as soon as it is committed; ``"step"`` between two steps of the
            engine, the same two on every rank, for engines that run in lock-step and say so with ``comm.step()``.
        step_margin: How many whole steps a rank that has voted for a layer begins before it waits for the decision.
        activation_timeout: How long a step waits for a decision before the migration is given up, and then for the end;
            and how long one who would use a layer waits for its apply.
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
        check_ranges(self, _RANGES, "setting")
        if self.verify not in ("full", "identity", "off"):
            raise ValueError(f"setting verify={self.verify!r} is not 'full', 'identity' or 'off'")
        if self.activation not in ("immediate", "step"):
            raise ValueError(f"setting activation={self.activation!r} is not 'immediate' or 'step'")
        if self.secret is not None and (not isinstance(self.secret, bytes) or len(self.secret) < 16):
            raise ValueError("setting secret must be bytes, 16 or more of them")
        if self.secret is not None:
            object.__setattr__(self, "secret", Hidden(self.secret))

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> Settings:
        """Read settings from ``EPLB_ASYNC_<NAME>`` variables, without ``EPLB_ASYNC_SERVICE_<NAME>``: the service's.

        Args:
            environ: Variables to read; default ``os.environ``.
            **overrides: Settings given by the caller; they win over variables.

        Returns:
            The settings.

        Raises:
            ValueError: A variable names no setting, or its value is malformed or out of range.
        """
        defaults = defaults_of(cls) | {"secret": b""}
        return cls(**(from_variables(environ, _PREFIX, defaults, "setting", besides=SERVICE_PREFIX) | overrides))


def defaults_of(kind: type) -> dict[str, Any]:
    """The default of each field of a dataclass of settings."""
    return {field.name: field.default for field in fields(kind)}


def check_ranges(settings: object, ranges: Mapping[str, tuple[float, float]], what: str) -> None:
    """Refuse numbers that are out of range; where the default is an ``int``, those that are none.

    Raises:
        ValueError: Names ``what`` it is, which one, and what it may be.
    """
    defaults = defaults_of(type(settings))
    for name, (lowest, highest) in ranges.items():
        value, whole = getattr(settings, name), type(defaults[name]) is int
        kinds = (int,) if whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not lowest <= value <= highest:
            kind = "a whole number" if whole else "a number"
            raise ValueError(f"{what} {name}={value!r} is not {kind} from {lowest} to {highest}")


def from_variables(
    environ: Mapping[str, str] | None,
    prefix: str,
    defaults: Mapping[str, Any],
    what: str,
    *,
    besides: str | None = None,
) -> dict[str, Any]:
    """Settings that ``<prefix><NAME>`` variables give, each of the type of its default; ``besides`` begins others'.

    Raises:
        ValueError: A variable names none, or its value is malformed.
    """
    values = {}
    for variable, text in (os.environ if environ is None else environ).items():
        if not variable.startswith(prefix) or (besides is not None and variable.startswith(besides)):
            continue
        if variable == VLLM_SWITCH:
            continue
        name = variable.removeprefix(prefix).lower()
        if name not in defaults:
            raise ValueError(f"{variable} names no {what}; known: {', '.join(sorted(defaults))}")
        values[name] = _parse(variable, text, defaults[name])
    return values


def _parse(variable: str, text: str, like: object) -> object:
    """The value of a variable, of the type of another value.

    Raises:
        ValueError: The text is no such value.
    """
    try:
        if isinstance(like, bool):
            return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[text.lower()]
        if isinstance(like, bytes):
            return Hidden(text.encode())
        return int(text) if isinstance(like, int) else float(text) if isinstance(like, float) else text
    except (KeyError, ValueError):
        shown = "" if isinstance(like, bytes) else f"={text!r}"
        raise ValueError(f"{variable}{shown} is not a {type(like).__name__}") from None


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
