"""Every number of the service, in one frozen record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eplb_async.variables import SERVICE_PREFIX, Range, check, defaults_of, from_variables

__all__ = ["ServiceSettings"]

RANGES: dict[str, Range] = {
    "step_interval": Range(0, 1 << 31, "steps"),
    "window_steps": Range(1, 1 << 31, "steps"),
    "min_gain": Range(0, 1, "balancedness"),
    "min_interval": Range(0, 86_400, "s"),
    "round_timeout": Range(0.001, 3600, "s"),
    "migrate_timeout": Range(0.001, 86_400, "s"),
    "backoff": Range(0.001, 86_400, "s"),
    "backoff_max": Range(0.001, 86_400, "s"),
    "max_moves": Range(0, 1 << 31, "slots"),
    "num_groups": Range(1, 1 << 16, "groups"),
    "num_nodes": Range(1, 1 << 16, "nodes"),
    "watch_interval": Range(0, 3600, "s", least=0.05),
    "max_bytes_per_second": Range(0, 1 << 40, "bytes/s"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """Settings of an `EplbService`; times in seconds. All ranks should have the same.

    Attributes:
        step_interval: Steps between automatic rounds; 0: only when asked.
        window_steps: How many of the last steps count as load.
        min_gain: Least rise of the predicted balancedness that is worth a migration; 0.02 is from 0.70 to 0.72.
        min_interval: Least time from the end of one migration to the next round, unless it is forced.
        round_timeout: How long a round waits for the loads of all ranks, and then for the policy.
        migrate_timeout: Deadline of a round's migration.
        backoff: Pause after a failed round before the next automatic one; doubled with each failure after it.
        backoff_max: Longest such pause; not below ``backoff``.
        max_moves: Most slots, over all layers, that one round may move an expert into; 0: no limit.
        num_groups: Groups of experts, for the default policy.
        num_nodes: Nodes, for the default policy.
        watch_interval: How often members are pinged also while nothing goes on, so that a dead one is noticed, from the
            start of the service to its end; 0: as ``comm.watch`` says.
        max_bytes_per_second: What the READs of this rank's migrations may bring in a second, from the start of the
            service to its end; 0: as the communicator has it.
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
        check(self, RANGES, "service setting")
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
