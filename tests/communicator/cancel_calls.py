"""Seeded runs of cancels of calls that begin or end something: reads of an agent, ``open``, ``exclude``, ``aclose``."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from eplb_async.communicator import AsyncEplbCommunicator
from eplb_async.core.placement import Placement
from eplb_async.engine import LoopEngine
from eplb_async.errors import CommunicatorBusy, EplbError, HandshakeError, TransferError
from eplb_async.nixl import AsyncNixlAgent
from eplb_async.nixl.peers import Peer
from eplb_async.settings import Settings
from eplb_async.testing import FaultPlan, MemoryFabric
from eplb_async.testing.cluster import MemoryRendezvous
from eplb_async.testing.patterns import PatternWeights
from tests.communicator.cuts import Cutter
from tests.communicator.groups import all_report

HANDED_OUT = 0xEE
TWICE = Placement([[0, 1, 2, 0, 1, 2]] * 2, ep_size=3)  # every expert on two ranks
WITHOUT = [
    Placement([[-1, -1, 0, 2, 2, 1]] * 2, ep_size=3),
    Placement([[1, 0, -1, -1, 2, 1]] * 2, ep_size=3),
    Placement([[1, 0, 2, 0, -1, -1]] * 2, ep_size=3),
]


class Calls:
    """What a seed says: the network, and what is cut off when."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.cutter = Cutter(self.random)
        self.fabric = MemoryFabric(
            latency=self.random.choice((20e-6, 100e-6, 1e-3)),
            bytes_per_second=self.random.choice((1e5, 1e7, 1e10)),
            needs_target_progress=self.random.random() < 0.5,
        )
        self.settings = Settings(
            secret=b"s" * 16,
            max_post_descriptors=self.random.choice((1, 3, 512)),
            max_peer_requests_in_flight=self.random.choice((1, 8)),
            max_pause=self.random.choice((0.002, 0.02)),
            hot_seconds=0.0,
            idle_tick=0.2,
            close_timeout=1.0,
        )
        self.noise: list[dict[str, Any]] = []

    def cut_seconds(self) -> float:
        """A moment within a call, or after it."""
        return float(10 ** self.random.uniform(-5, -1))

    # ---------------------------------------------------------------------------------------------- read
    async def reads(self, cancels: int) -> None:
        """Cut READs off; memory that is granted again is written by nobody, and the next READ works."""
        asyncio.get_running_loop().set_exception_handler(lambda _, context: self.noise.append(context))
        engine = LoopEngine(asyncio.get_running_loop())
        rows = np.random.default_rng(1).integers(0, 200, (16, 64), dtype=np.uint8)
        target = np.zeros_like(rows)
        open_agent = [
            AsyncNixlAgent.open(name, self.settings, engine=engine, native=self.fabric.native)
            for name in ("source", "reader")
        ]
        async with open_agent[0] as source, open_agent[1] as reader, source.serving():
            await source.register(rows, "rows")
            region = await reader.register(target, "target")
            peer = await reader.add_peer(await source.metadata())
            while self.cutter.cancels < cancels:
                await self.read(reader, region, peer, rows, target)
            self.fabric.unhold()
            await region.released(timeout=2.0)
            assert self.fabric.open_handles == 0
            await region.deregister()
            await self.cutter.cut(lambda timeout: reader.aclose(timeout), self.cut_seconds, lambda: reader._closing)
            assert await reader.aclose() == ()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    async def read(self, agent: AsyncNixlAgent, region: Any, peer: Peer, rows: np.ndarray, target: np.ndarray) -> None:
        """One READ that is cut off."""
        first = self.random.randint(0, 15)
        last = self.random.randint(first + 1, 16)
        faults = self.fabric.faults = FaultPlan()
        if self.random.random() < 0.3:
            faults.hold_read("reader", nth=self.random.randint(0, 3))
        if self.random.random() < 0.3:
            faults.late_landing("reader", nth=self.random.randint(0, 3), delay=self.random.choice((0.001, 0.1)))
        endpoint = agent._endpoint
        outcome = await self.cutter.cut(
            lambda timeout: agent.read(
                region[first:last], peer.region("rows")[first:last], timeout=0.5 if timeout is None else timeout
            ),
            self.cut_seconds,
            lambda: endpoint.transfers[-1].future if endpoint.transfers else None,
        )
        if isinstance(outcome, BaseException):
            assert isinstance(outcome, TransferError | asyncio.CancelledError | TimeoutError), repr(outcome)
        else:
            assert (target[first:last] == rows[first:last]).all()
        for _ in range(5):  # until a cancel has reached the engine
            await asyncio.sleep(0)
        try:
            await region.released(timeout=self.random.choice((0.0, 0.2)))
        except TimeoutError:
            if endpoint.transfers:
                with pytest.raises(CommunicatorBusy):
                    await agent.read(region[:], peer.region("rows")[:], timeout=1.0)
            self.fabric.unhold()
            await region.released(timeout=2.0)
        assert not endpoint.transfers
        assert len(endpoint.leases) == 0
        assert self.fabric.open_handles == 0
        target[:] = HANDED_OUT
        await asyncio.sleep(0.3)
        assert (target == HANDED_OUT).all(), "I-3: memory was written after it was handed out again"
        assert endpoint._served == 0
        assert len(asyncio.all_tasks()) == 3, asyncio.all_tasks()  # this one and two pollers
        assert not self.noise, self.noise
        assert not self.fabric.violations, self.fabric.violations

    # ----------------------------------------------------------------------------- open, exclude, aclose
    async def lives(self, cancels: int) -> None:
        """Whole lives of groups, from a cancelled ``open`` over a cancelled ``exclude`` to cancelled closes."""
        asyncio.get_running_loop().set_exception_handler(lambda _, context: self.noise.append(context))
        while self.cutter.cancels < cancels:
            await self.life()
            assert self.fabric.open_handles == 0
            assert self.fabric.open_registrations == 0
            await asyncio.sleep(0.01)
            assert asyncio.all_tasks() == {asyncio.current_task()}, asyncio.all_tasks()
            assert not self.noise, self.noise
            assert not self.fabric.violations, self.fabric.violations

    async def life(self) -> None:
        """One group's."""
        rows = [PatternWeights(TWICE, rank, (64, 24)) for rank in range(3)]
        rendezvous, engines = MemoryRendezvous(), [LoopEngine(asyncio.get_running_loop()) for _ in rows]
        victim = self.random.randrange(3)

        async def opened(rank: int, timeout: float | None) -> AsyncEplbCommunicator:
            return await AsyncEplbCommunicator.open(
                rank=rank,
                ep_size=3,
                weights=rows[rank].layers,
                placement=TWICE,
                rendezvous=rendezvous,
                settings=self.settings,
                timeout=10.0 if timeout is None else timeout,
                engine=engines[rank],
                native=self.fabric.native,
            )

        async def opened_at_last(rank: int) -> AsyncEplbCommunicator:
            outcome = await self.cutter.cut(lambda timeout: opened(rank, timeout), self.cut_seconds)
            if isinstance(outcome, AsyncEplbCommunicator):
                return outcome
            assert isinstance(outcome, EplbError | asyncio.CancelledError | TimeoutError), repr(outcome)
            await asyncio.sleep(self.random.choice((0.0, 0.0, 0.1)))
            return await opened(rank, 3.0)

        outcomes = await asyncio.gather(
            *(opened_at_last(r) if r == victim else opened(r, None) for r in range(3)), return_exceptions=True
        )
        if isinstance(outcomes[victim], HandshakeError):  # others had met the start that was cancelled, and are open
            for outcome in outcomes:
                if isinstance(outcome, AsyncEplbCommunicator):
                    assert await outcome.aclose() == ()
            outcomes = await asyncio.gather(*(opened(r, None) for r in range(3)), return_exceptions=True)
        comms = [outcome for outcome in outcomes if isinstance(outcome, AsyncEplbCommunicator)]
        assert len(comms) == 3, outcomes
        assert all(len(engine._closers) == 1 for engine in engines)
        await asyncio.gather(*(comm.migrate(WITHOUT[0], timeout=5.0) for comm in comms))
        await asyncio.gather(*(comm.migrate(TWICE, timeout=5.0) for comm in comms))
        await self.exclude(comms, rows)
        for comm in comms:
            await self.cutter.cut(lambda timeout: comm.aclose(timeout), self.cut_seconds, lambda: comm._closing)  # noqa: B023
            assert await comm.aclose(self.random.choice((0.0, None))) == ()
            assert not comm._engine._closers
            assert not comm._engine.immortal

    async def exclude(self, comms: list[AsyncEplbCommunicator], rows: list[PatternWeights]) -> None:
        """A rank is excluded by a call that is cut off: said or not said; said again, the others go on without it."""
        dead = self.random.randrange(3)
        others = [comm for rank, comm in enumerate(comms) if rank != dead]
        outcome = await self.cutter.cut(lambda timeout: others[0].exclude(dead), self.cut_seconds)
        assert outcome is None or isinstance(outcome, asyncio.CancelledError | TimeoutError), repr(outcome)
        await asyncio.sleep(0.5)
        assert len({comm.health().members for comm in others}) == 1
        for comm in others:
            await comm.exclude(dead)
        reports = await asyncio.gather(*(comm.migrate(WITHOUT[dead], timeout=5.0) for comm in others))
        all_report(reports)
        assert all(comm.health().phase == "idle" for comm in others)
        assert sum(rows[comm.health().rank].wrong_bytes(WITHOUT[dead]) for comm in others) == 0
        assert rows[dead].wrong_bytes(comms[dead].placement) == 0
