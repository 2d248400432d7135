"""One simulated migration: real communicators in one loop on virtual time, over a modelled network."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, fields, replace

import numpy as np

from eplb_async.bench.simulation.fabric import NetworkFabric
from eplb_async.bench.simulation.world import World, lower_bound
from eplb_async.core.placement import Placement
from eplb_async.core.plan import plan
from eplb_async.settings import Settings
from eplb_async.testing import run
from eplb_async.testing.cluster import LocalCluster

__all__ = ["Outcome", "simulate"]

_PINGS = ("Ping", "Pong")
_POST_BYTES = 4096
_LOOK_SECONDS = 0.02
_STAGING_LAYERS = 2  # what 0 means where layers are as large as those that are modelled
_SECRET = b"a secret that all simulated ranks share"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a simulated migration took.

    Attributes:
        ranks: Ranks.
        reads: Experts that crossed ranks.
        bound: Seconds that the busiest NIC needs for its bytes alone.
        makespan: Modelled seconds from BEGIN to the last rank's last apply.
        join: Modelled seconds from the first JOIN to BEGIN, on the slowest rank.
        messages: Control messages that a rank other than the coordinator sent and received, per layer, pings
            apart: the mean, and the most of any rank.
        coordinator_messages: As ``messages``, of the coordinator.
        pings: Pings and answers per rank, in all.
        cpu_seconds: What simulating it cost, for all ranks together: opening, then migrating.
    """

    ranks: int
    reads: int
    bound: float
    makespan: float
    join: float
    messages: tuple[float, float]
    coordinator_messages: float
    pings: float
    cpu_seconds: tuple[float, float]

    @property
    def over_bound(self) -> float:
        """Makespan in multiples of the bound."""
        return self.makespan / self.bound


def simulate(
    world: World, old: Placement, new: Placement, *, settings: Settings | None = None, resolution: float = 20e-6
) -> Outcome:
    """Open ``world.ranks`` communicators on a modelled network, and migrate.

    Args:
        world: Ranks and network.
        old: Where the experts are.
        new: Where they shall be.
        settings: Of the ranks. A post is 4096 real bytes, and as many are in flight as the settings' posts were.
        resolution: Seconds; READs that would end within that of each other end together.

    Raises:
        RuntimeError: A rank failed, or holds other bytes than the new placement says.
    """
    return run(_simulate(world, old, new, scaled(settings or Settings()), resolution))


def scaled(settings: Settings) -> Settings:
    """Settings for rows of a few bytes: posts as small as may be, and as many of them in flight as settings say.

    The poller sleeps between what it is woken for: the fabric knows when something comes.
    """
    stretch = settings.max_stretch_bytes * _POST_BYTES // settings.max_post_bytes
    in_flight = {
        field.name: max(1, getattr(settings, field.name) // settings.max_post_bytes) * _POST_BYTES
        for field in fields(settings)
        if field.name.endswith("bytes_in_flight")
    }
    return replace(
        settings,
        max_stretch_bytes=stretch,
        **in_flight,
        secret=_SECRET,
        max_post_bytes=_POST_BYTES,
        staging_layers=settings.staging_layers or _STAGING_LAYERS,
        hot_seconds=0,
        max_pause=_LOOK_SECONDS,
    )


async def _simulate(world: World, old: Placement, new: Placement, settings: Settings, resolution: float) -> Outcome:
    network = world.network(resolution=resolution)
    fabric = NetworkFabric(network, factor=world.factor, message_seconds=world.message_seconds)
    row_bytes = [nbytes // world.factor for nbytes in world.row_bytes]
    began = time.process_time()
    cluster = LocalCluster(
        old, row_bytes=row_bytes, settings=settings, fabric=fabric, nodes=[f"node {n}" for n in world.nodes]
    )
    async with cluster:
        fabric.forget_counts()
        fabric.wake = {rank: comm._session.endpoint.poller.wake for rank, comm in enumerate(cluster.comms)}
        opened = time.process_time()
        found = await cluster.migrate(new)
        migrated = time.process_time()
        reports = [report for report in found if not isinstance(report, Exception)]
        if len(reports) < len(found):
            raise RuntimeError("the simulated migration failed") from next(
                error for error in found if isinstance(error, Exception)
            )
        if fabric.violations or cluster.wrong_bytes():
            raise RuntimeError(f"the simulated migration went wrong: {fabric.violations[:3]}")
        each = _messages(fabric.sent) + _messages(fabric.received)
    planned = plan(old, new, nodes=[f"node {n}" for n in world.nodes])
    others = [each[rank] / world.layers for rank in range(1, world.ranks)]
    return Outcome(
        ranks=world.ranks,
        reads=planned.num_reads,
        bound=lower_bound(planned, world),
        makespan=max(report.seconds["move"] + report.seconds["apply"] for report in reports),
        join=max(report.seconds["join"] for report in reports),
        messages=(float(np.mean(others)), max(others)),
        coordinator_messages=each[0] / world.layers,
        pings=sum(n for (_, kind), n in fabric.sent.items() if kind in _PINGS) / world.ranks,
        cpu_seconds=(opened - began, migrated - opened),
    )


def _messages(counts: Counter[tuple[int, str]]) -> Counter[int]:
    """Messages of each rank, pings apart."""
    found: Counter[int] = Counter()
    for (rank, kind), count in counts.items():
        if kind not in _PINGS:
            found[rank] += count
    return found
