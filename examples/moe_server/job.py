"""What all ranks are given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from examples.moe_server.model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Job:
    """One server.

    Attributes:
        ranks: How many there are.
        port: Port of the front end; 0 takes a free one.
        rebalancing: ``service``: in the background. ``vllm``: the engine stops for it. ``off``: never.
        config: The model.
        max_batch: Most requests in one step.
        max_queue: Most requests that wait for a place.
        step_interval: Steps between rebalances; 0 for none but those that are asked for.
        window_steps: Steps that the loads are summed over.
        max_bytes_per_second: What a rank's READs may bring in a second; 0 for no limit.
        secret: The job's secret.
    """

    ranks: int
    port: int
    rebalancing: Literal["service", "vllm", "off"]
    config: ModelConfig
    max_batch: int
    max_queue: int
    step_interval: int
    window_steps: int
    max_bytes_per_second: int
    secret: bytes = field(repr=False)
