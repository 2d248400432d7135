"""Every number of the service, in one frozen record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eplb_async.settings import SERVICE_PREFIX, check_ranges, defaults_of, from_variables

__all__ = ["ServiceSettings"]

# name -> (lowest, highest); units are in the field's docstring line below.
_RANGES: dict[str, tuple[float, float]] = {
    "step_interval": (0, 1 << 31),
    "window_steps": (1, 1 << 31),
    "min_gain": (0, 1),
    "min_interval": (0, 86_400),
    "round_timeout": (0.001, 3600),
    "migrate_timeout": (0.001, 86_400),
    "backoff": (0.001, 86_400),
    "backoff_max": (0.001, 86_400),
    "max_moves": (0, 1 << 31),
    "num_groups": (1, 1 << 16),
    "num_nodes": (1, 1 << 16),
    "watch_interval": (0, 3600),
    "max_bytes_per_second": (0, 1 << 40),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """Settings of an `EplbService`; times in seconds. All ranks should have the same.

    Attributes:
        step_interval: Steps between automatic rebalances; 0 for none but those that are asked for.
        window_steps: Steps that the loads are summed over.
        min_gain: Least gain in predicted balancedness that is worth a migration (absolute: 0.02 is from 0.70 to 0.72).
        min_interval: Least time from the end of one migration to the next round, unless it is forced.
        round_timeout: How long a round waits for the loads of all ranks, and then for the policy.
        migrate_timeout: Deadline of the round's migration.
        backoff: How long after a failed round the next automatic one begins; doubled with each failure after that.
        backoff_max: Longest such pause.
        max_moves: Most slots, over all layers, that one rebalance may move an expert into; 0 for no limit.
        num_groups: Groups of experts, as the default policy wants it.
        num_nodes: Nodes, as the default policy wants it.
        watch_interval: How often members are pinged while nothing else is said, so that a dead one is noticed, from
            the start of the service to its end; 0 leaves what the communicator does.
        max_bytes_per_second: What the READs of this rank's migrations may bring in a second, from the start of the
            service to its end; 0 leaves the communicator's.
    """

    step_interval: int = 3000
    window_steps: int = 1000
    min_gain: float = 0.02
    min_interval: float = 30.0
    round_timeout: float = 10.0
    migrate_timeout: float = 120.0
    backoff: float = 5.0
    backoff_max: float = 300.0
    max_moves: int = 0
    num_groups: int = 1
    num_nodes: int = 1
    watch_interval: float = 2.0
    max_bytes_per_second: int = 0

    def __post_init__(self) -> None:
        check_ranges(self, _RANGES, "service setting")
        if 0 < self.watch_interval < 0.05:
            raise ValueError(f"service setting watch_interval={self.watch_interval} is neither 0 nor 0.05 or more")
        if self.backoff_max < self.backoff:
            raise ValueError(f"service setting backoff_max={self.backoff_max} is below backoff={self.backoff}")

    @property
    def rebalance_timeout(self) -> float:
        """What all deadlines of a round, and of one before it, add up to, in seconds."""
        return 2 * (3.5 * self.round_timeout + self.migrate_timeout)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> ServiceSettings:
        """Read settings from ``EPLB_ASYNC_SERVICE_<NAME>`` variables.

        Args:
            environ: Variables to read; default ``os.environ``.
            **overrides: Settings given by the caller; they win over variables.

        Returns:
            The settings.

        Raises:
            ValueError: A variable names no setting, or its value is malformed or out of range.
        """
        return cls(**(from_variables(environ, SERVICE_PREFIX, defaults_of(cls), "service setting") | overrides))
