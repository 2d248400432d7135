"""Cancels and timeouts at random moments, in memory on virtual time: nothing is lost, torn or written late.

Each seed is one run of a group of 2 to 4 ranks: one or two migrations that a rank cancels or lets run out, with
READs that are slow, held or landing late, then a migration that must succeed. ``test_any_moment[seed17]`` repeats
seed 17.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from eplb_async.communicator import AsyncEplbCommunicator, MigrationReport
from eplb_async.core.placement import Placement
from eplb_async.errors import EplbError
from eplb_async.settings import Settings
from eplb_async.testing import FaultPlan, MemoryFabric, run
from eplb_async.testing.cluster import LocalCluster
from eplb_async.testing.placements import random_placement
from eplb_async.weights import Piece

SEEDS = 260
# An idle rank may look for messages every two seconds only; until then it counts a JOIN that was taken back.
SETTLED_SECONDS = 2.2


@pytest.fixture(scope="module", autouse=True)
def _cheap_collections() -> Iterator[None]:
    """Leave what is imported out of the collections that every run makes."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Run:
    """What a seed says: the group, its network and faults, and what is cut off when."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._numpy = np.random.default_rng(seed)
        self.ep_size = self.random.randint(2, 4)
        self._shape = {
            "num_layers": self.random.randint(1, 4),
            "num_logical": self.ep_size * 2 + self.random.randint(0, 2),
            "num_local_experts": 3,
            "ep_size": self.ep_size,
            "empty": self.random.randint(0, 1) if self.ep_size > 2 else 0,
        }
        self.placement = self.new_placement()
        self.settings = Settings(
            secret=b"s" * 16,
            staging_layers=self.random.randint(1, 2),
            max_post_descriptors=self.random.choice((1, 3, 512)),
            max_peer_requests_in_flight=self.random.choice((1, 8)),
            max_pause=self.random.choice((0.01, 0.03)),  # laps are what these tests cost
            hot_seconds=self.random.choice((0.0, 0.0002)),
        )
        self.faults = FaultPlan()
        for _ in range(self.random.randint(0, 3)):
            reader = f"default/{self.random.randrange(self.ep_size)}.10000"  # its successor reads undisturbed
            nth = self.random.randint(0, 6)
            if self.random.random() < 0.5:
                self.faults.hold_read(reader, nth=nth)
            else:
                self.faults.late_landing(reader, nth=nth, delay=self.random.choice((0.001, 0.1, 0.4)))
        self.fabric = MemoryFabric(
            self.faults,
            latency=self.random.choice((20e-6, 100e-6, 1e-3)),
            bytes_per_second=self.random.choice((1e5, 1e7, 1e10)),
            needs_target_progress=self.random.random() < 0.5,
        )

    def new_placement(self) -> Placement:
        """Another random placement."""
        return random_placement(self._numpy, **self._shape)

    def cut_seconds(self, quarantined: bool) -> float:
        """A moment somewhere in a migration, or after it; if READs hold staging, perhaps while that is got back."""
        drained = 0.5 if quarantined and self.random.random() < 0.5 else 0.0
        return drained + 10 ** self.random.uniform(-5, -1.5)


@pytest.mark.parametrize("seed", range(SEEDS), ids=lambda seed: f"seed{seed}")
def test_any_moment(seed: int) -> None:
    """I-3, I-7, I-9, I-10: cut off at any moment, all ranks end at one layer, and the next migration works."""
    this = Run(seed)
    noise: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: noise.append(context))
        async with LocalCluster(this.placement, fabric=this.fabric, settings=this.settings) as cluster:
            for _ in range(this.random.randint(1, 2)):
                await cut_off(this, cluster)
                await check_late_landings(this, cluster)
            this.fabric.faults = FaultPlan()  # READs that are held stay held; no more of them
            new = this.new_placement()
            reports = await cluster.migrate(new, timeout=30.0)
            assert all(isinstance(report, MigrationReport) for report in reports), reports
            assert all(comm.placement == new for comm in cluster.comms)
            check_rows(cluster)
            this.fabric.unhold()
            await asyncio.sleep(SETTLED_SECONDS)
            check_rows(cluster)
            alive = [agent.name.split(".")[0] for agent in this.fabric.agents.values() if not agent.destroyed]
            assert sorted(alive) == [f"default/{rank}" for rank in range(this.ep_size)], this.fabric
        await asyncio.sleep(0.01)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main())
    gc.collect()
    assert not this.fabric.violations, this.fabric
    assert this.fabric.open_handles == 0, this.fabric
    assert all(agent.destroyed for agent in this.fabric.agents.values()), this.fabric
    assert not noise, noise


async def cut_off(this: Run, cluster: LocalCluster) -> None:
    """One migration that one rank cancels, or gives too little time; all ranks must end it at one layer."""
    old, new = cluster.comms[0].placement, this.new_placement()
    victim = this.random.randrange(this.ep_size)
    kind = this.random.choice(("turns", "seconds", "timeout"))
    quarantined = cluster.comms[victim].health().quarantined_bytes > 0
    limits = [1.0] * this.ep_size
    if kind == "timeout":
        limits[victim] = this.random.choice((0.0, *(this.cut_seconds(quarantined) for _ in range(3))))
    tasks = [
        asyncio.ensure_future(comm.migrate(new, timeout=limit))
        for comm, limit in zip(cluster.comms, limits, strict=True)
    ]
    if kind == "turns":
        for _ in range(this.random.choice((this.random.randint(0, 12), this.random.randint(0, 400)))):
            await asyncio.sleep(0)
    elif kind == "seconds":
        await asyncio.sleep(this.cut_seconds(quarantined))
    begun = cluster.comms[victim].health().phase == "open"
    cut = asyncio.get_running_loop().time()
    if kind != "timeout" and not tasks[victim].done():
        tasks[victim].cancel()
        for _ in range(2):
            await asyncio.sleep(0)
        assert tasks[victim].cancelled(), "I-10: a cancelled call did not end at once"
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, MigrationReport | EplbError | asyncio.CancelledError), repr(result)
    if begun and kind != "timeout":
        assert asyncio.get_running_loop().time() - cut < 0.4, "the others were not told that a rank gave up"
    async with asyncio.timeout(5.0):
        while any(comm.health().phase != "idle" for comm in cluster.comms):
            await asyncio.sleep(0.01)
    await asyncio.sleep(SETTLED_SECONDS)
    now = cluster.comms[0].placement
    assert now in [old.with_layers(new, count) for count in range(old.num_layers + 1)]
    check_rows(cluster)


async def check_late_landings(this: Run, cluster: LocalCluster) -> None:
    """Take all staging that can be had, fill it, let held READs land (or not yet), and find it as it was left."""
    taken = [(comm, piece) for comm in cluster.comms for piece in take_all(comm)]
    for number, (comm, piece) in enumerate(taken):
        view(comm, piece).fill_(number % 251)
    if this.random.random() < 0.5:
        this.fabric.unhold()
    await asyncio.sleep(SETTLED_SECONDS)
    for number, (comm, piece) in enumerate(taken):
        assert (view(comm, piece) == number % 251).all(), "I-3: staging was written after it was handed out again"
        comm._session._staging.free((piece,))
    check_rows(cluster)


def take_all(comm: AsyncEplbCommunicator) -> list[Piece]:
    """All staging of a rank that is free, in small pieces."""
    pieces: list[Piece] = []
    while (more := comm._session._staging.try_allocate({"DRAM": 64})) is not None:
        pieces += more
    return pieces


def view(comm: AsyncEplbCommunicator, piece: Piece) -> torch.Tensor:
    """A piece's bytes."""
    return comm._session._staging.view(piece, 0, 1, piece.nbytes)


def check_rows(cluster: LocalCluster) -> None:
    """I-7: every rank at the same layers, and every byte as its placement says."""
    assert len({comm.placement for comm in cluster.comms}) == 1, [comm.placement for comm in cluster.comms]
    assert cluster.wrong_bytes() == 0
