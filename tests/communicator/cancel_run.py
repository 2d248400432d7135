"""One seeded run of many cancels on one group in memory: what is done, and what must hold after each."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import torch

from eplb_async.communicator import AsyncEplbCommunicator, MigrationReport
from eplb_async.core.placement import Placement
from eplb_async.errors import EplbError, WeightsError
from eplb_async.settings import Settings
from eplb_async.testing import FaultPlan, MemoryFabric
from eplb_async.testing.cluster import LocalCluster
from eplb_async.testing.placements import random_placement
from eplb_async.weights import Piece
from tests.communicator.cuts import Cutter
from tests.communicator.groups import all_report

AWAY = 0x77  # memory that a rank has given up


class Run:
    """What a seed says: the group, its network and faults, and what is cut off when."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._numpy = np.random.default_rng(seed)
        self.cutter = Cutter(self.random)
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
            idle_tick=self.random.choice((0.2, 2.0)),
        )
        # An idle rank may look for messages only this often; until then it counts a JOIN that was taken back.
        self.settled_seconds = self.settings.idle_tick + 0.2
        self.fabric = MemoryFabric(
            latency=self.random.choice((20e-6, 100e-6, 1e-3)),
            bytes_per_second=self.random.choice((1e5, 1e7, 1e10)),
            needs_target_progress=self.random.random() < 0.5,
        )
        self.given_up: list[torch.Tensor] = []
        self.noise: list[dict[str, Any]] = []

    async def go(self, cancels: int) -> None:
        """Cut calls off until so many were cancelled, then close every rank with a cancelled ``aclose``."""
        asyncio.get_running_loop().set_exception_handler(lambda _, context: self.noise.append(context))
        async with LocalCluster(self.placement, fabric=self.fabric, settings=self.settings) as cluster:
            self.registrations = self.fabric.open_registrations
            for act in range(3 * cancels):
                if self.cutter.cancels >= cancels:
                    break
                await (self.rebind(cluster) if self.random.random() < 0.15 else self.migrate(cluster))
                await self.check_known_state(cluster)
                await self.check_handed_out(cluster)
                if act % 6 == 5:
                    await self.check_usable(cluster)
            await self.check_usable(cluster)
            self.fabric.unhold()
            await asyncio.sleep(self.settled_seconds)
            await self.check_known_state(cluster)
            assert self.fabric.open_handles == 0, self.fabric
            await self.close(cluster)
        await asyncio.sleep(0.01)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert all((memory == AWAY).all() for memory in self.given_up), "memory was written after it was given up"

    # ---------------------------------------------------------------------------------------------- acts
    async def migrate(self, cluster: LocalCluster) -> None:
        """One migration that one or two ranks cut off; all ranks must end it at one layer."""
        self.fabric.faults = self.some_faults()
        old, new = cluster.comms[0].placement, self.new_placement()
        victims = self.random.sample(range(self.ep_size), self.random.choice((1, 1, 1, 2)))
        alone = self.random.random() < 0.1
        begun = [False]

        async def other(rank: int, turns: int) -> object:
            for _ in range(turns):
                await asyncio.sleep(0)
            try:
                return await cluster.comms[rank].migrate(new, timeout=1.0)
            except EplbError as error:
                return error

        async def victim(rank: int) -> object:
            comm = cluster.comms[rank]
            driver = comm._session.driver
            outcome = await self.cutter.cut(
                lambda timeout: comm.migrate(new, timeout=1.0 if timeout is None else timeout),
                self.cut_seconds,
                lambda: driver.attempt.result if driver.attempt is not None else None,
            )
            begun[0] |= comm.health().phase == "open"
            return outcome

        others = [rank for rank in range(self.ep_size) if rank not in victims and not alone]
        turns = self.random.choice((0, 0, 3, 30))
        ended = await asyncio.gather(*(other(rank, turns) for rank in others), *map(victim, victims))
        if begun[0] and len(victims) == 1 and self.cutter.last_cut:
            late = asyncio.get_running_loop().time() - self.cutter.last_cut
            assert late < 0.4, f"the others were told after {late} s that a rank gave up"
        for outcome in ended:
            assert isinstance(outcome, MigrationReport | EplbError | asyncio.CancelledError | TimeoutError), outcome
        await self.settle(cluster)
        now = cluster.comms[0].placement
        assert now in [old.with_layers(new, count) for count in range(old.num_layers + 1)]

    async def rebind(self, cluster: LocalCluster) -> None:
        """A rank's tensors get new storage, and its ``rebind`` is cut off: done, or to be done again."""
        rank = self.random.randrange(self.ep_size)
        comm, session = cluster.comms[rank], cluster.comms[rank]._session
        for tensor in (tensor for layer in cluster.rows[rank].layers for tensor in layer):
            self.given_up.append(tensor.data)
            tensor.data = tensor.data.clone()

        def recycling() -> asyncio.Future[Any] | None:
            return session._agents._task if session._agents.retiring is not None else None

        before = session._agents.recycled
        outcome = await self.cutter.cut(lambda timeout: comm.rebind(), self.cut_seconds, recycling)
        assert outcome is None or isinstance(outcome, asyncio.CancelledError | TimeoutError), repr(outcome)
        await self.settle(cluster)
        if session._agents.recycled == before:
            try:
                await comm.migrate(comm.placement, timeout=0.5)
            except WeightsError:
                pass
            else:
                raise AssertionError("weights that moved were migrated without rebind()")
            await comm.rebind()
            await self.settle(cluster)
        for memory in self.given_up:
            memory.fill_(AWAY)  # from here on nobody may read or write it

    async def close(self, cluster: LocalCluster) -> None:
        """Every ``aclose`` is cut off, at once or one after the other; the second call says how it ended."""
        running = self.random.random() < 0.5
        moving = [asyncio.ensure_future(c.migrate(self.new_placement(), timeout=1.0)) for c in cluster.comms]
        if running:
            await asyncio.sleep(self.cut_seconds())
        else:
            await asyncio.wait(moving)

        async def one(comm: AsyncEplbCommunicator) -> None:
            cancels = self.cutter.cancels
            await self.cutter.cut(lambda timeout: comm.aclose(timeout), self.cut_seconds, lambda: comm._closing)
            assert await comm.aclose(self.random.choice((0.0, None))) == await comm.aclose()
            del cancels

        if self.random.random() < 0.5:
            await asyncio.gather(*map(one, cluster.comms))
        else:
            for comm in cluster.comms:
                await one(comm)
        for outcome in await asyncio.gather(*moving, return_exceptions=True):
            assert isinstance(outcome, MigrationReport | EplbError), repr(outcome)

    # -------------------------------------------------------------------------------------------- checks
    async def settle(self, cluster: LocalCluster) -> None:
        """Wait until every rank is idle."""
        async with asyncio.timeout(10.0):
            while any(comm.health().phase != "idle" for comm in cluster.comms):
                await asyncio.sleep(0.01)
            for comm in cluster.comms:
                await comm._session._agents.settled()
        await asyncio.sleep(self.settled_seconds)

    async def check_known_state(self, cluster: LocalCluster) -> None:
        """I-7, I-9: one layer everywhere, every byte right; nothing held but what quarantine holds, no task left."""
        assert len({comm.placement for comm in cluster.comms}) == 1, [comm.placement for comm in cluster.comms]
        assert cluster.wrong_bytes() == 0
        quarantined = 0
        for comm in cluster.comms:
            endpoint, engine = comm._session.endpoint, comm._engine
            left = endpoint.transfers
            quarantined += len(left)
            assert len(endpoint.leases) == len(left), "a lease without a READ"
            assert not comm._session._staging._used, "staging of no layer"
            assert not engine._submissions
            assert {task.get_name() for task in engine._tasks} == {f"poller of {endpoint.name}"}
            assert len(engine._closers) == 1, engine._closers
            assert len(engine.immortal) == 1
            assert left or len(endpoint.peers) == self.ep_size - 1, "a peer that was replaced is still known"
            assert comm._calls.busy == ""
        assert self.fabric.open_handles == quarantined, self.fabric
        assert self.fabric.open_registrations == self.registrations, self.fabric
        alive = [agent.name.split(".")[0] for agent in self.fabric.agents.values() if not agent.destroyed]
        assert sorted(alive) == [f"default/{rank}" for rank in range(self.ep_size)], self.fabric
        assert len(asyncio.all_tasks()) == 1 + self.ep_size, asyncio.all_tasks()
        assert not self.noise, self.noise
        assert not self.fabric.violations, self.fabric.violations

    async def check_handed_out(self, cluster: LocalCluster) -> None:
        """I-3: take all staging that can be had, fill it, let held READs land (or not yet): it stays as it was left."""
        taken = [(comm, piece) for comm in cluster.comms for piece in take_all(comm)]
        for number, (comm, piece) in enumerate(taken):
            view(comm, piece).fill_(number % 251)
        if self.random.random() < 0.5:
            self.fabric.unhold()
        await asyncio.sleep(self.settled_seconds)
        for number, (comm, piece) in enumerate(taken):
            assert (view(comm, piece) == number % 251).all(), "I-3: staging was written after it was handed out again"
            comm._session._staging.free((piece,))

    async def check_usable(self, cluster: LocalCluster) -> None:
        """I-9: the next migration works. READs that are held stay held; there are no more of them."""
        self.fabric.faults = FaultPlan()
        new = self.new_placement()
        reports = await cluster.migrate(new, timeout=30.0)
        all_report(reports)
        assert all(comm.placement == new for comm in cluster.comms)
        assert cluster.wrong_bytes() == 0
        await self.settle(cluster)

    # -------------------------------------------------------------------------------------------- within
    def new_placement(self) -> Placement:
        """Another random placement."""
        return random_placement(self._numpy, **self._shape)

    def some_faults(self) -> FaultPlan:
        """READs that are held or land late, or none."""
        faults = FaultPlan()
        for _ in range(self.random.choice((0, 0, 1, 3))):
            reader, nth = f"default/{self.random.randrange(self.ep_size)}.", self.random.randint(0, 6)
            if self.random.random() < 0.4:
                faults.hold_read(reader, nth=nth)
            else:
                faults.late_landing(reader, nth=nth, delay=self.random.choice((0.001, 0.1, 0.4)))
        return faults

    def cut_seconds(self) -> float:
        """A moment somewhere in a migration, or after it; or while staging is got back from quarantine."""
        drained = 0.5 if self.fabric.open_handles and self.random.random() < 0.3 else 0.0
        return drained + 10 ** self.random.uniform(-5, -1.5)


def take_all(comm: AsyncEplbCommunicator) -> list[Piece]:
    """All staging of a rank that is free, in small pieces."""
    pieces: list[Piece] = []
    while (more := comm._session._staging.try_allocate({"DRAM": 64})) is not None:
        pieces += more
    return pieces


def view(comm: AsyncEplbCommunicator, piece: Piece) -> torch.Tensor:
    """A piece's bytes."""
    return comm._session._staging.view(piece, 0, 1, piece.nbytes)
