"""Everything a caller may do, at random and at once, with ranks that die, stop and start again, in memory.

Each seed is one group of 2 to 4 ranks. In each round all have a script, cut off here and there, and an owner may
come in between; something may go wrong; and then the group is mended: whatever happened, that must be possible with
the calls of the public face alone, and all ranks migrate again with every byte right. ``test_anything[17]`` repeats
seed 17; ``SEEDS=1000`` in the environment makes it a long run.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from eplb_async.communicator import AsyncEplbCommunicator
from eplb_async.core.placement import Placement
from eplb_async.errors import ActivationTimeout, CommunicatorClosed, EplbError
from eplb_async.settings import Settings
from eplb_async.testing import FaultPlan, MemoryFabric, run
from eplb_async.testing.cluster import LocalCluster
from tests.communicator.groups import all_report

SEEDS = int(os.environ.get("SEEDS", "48"))
SETTLE = 1.0
SLACK = 12.0  # virtual seconds beyond its own deadline in which any call must have ended: settling, agents that change


@pytest.fixture(scope="module", autouse=True)
def _cheap_collections() -> Iterator[None]:
    """Leave what is imported out of the collections that every run makes."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Complaints(logging.Handler):
    """What went wrong without anybody being told: failures of tasks and callbacks."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Note a record that carries a traceback."""
        if record.exc_info:
            self.found.append(f"{record.name}: {record.getMessage()}: {record.exc_info[1]!r}")


class World:
    """One seed: a group, its weights in all their versions, and who does what."""

    def __init__(self, seed: int, *, steps: bool = False) -> None:
        self.random = random.Random(seed)
        self.steps = steps
        self.engines: Engines | None = None
        self._numbers = np.random.default_rng(seed)
        self.ep_size = self.random.randint(2, 4)
        self.num_layers = self.random.randint(1, 3)
        self.num_logical = self.random.choice((3, 3, 2 * self.ep_size))
        self.num_slots = 3
        self.settings = Settings(
            secret=b"s" * 16,
            settle_timeout=SETTLE,
            close_timeout=2.0,
            staging_layers=self.random.randint(1, 2),
            max_post_descriptors=self.random.choice((1, 3, 512)),
            max_pause=0.02,
            hot_seconds=0.0002,
            idle_tick=0.5,
            verify=self.random.choice(("off", "identity", "full", "full")),
            retry_reads=self.random.random() < 0.8,
            max_peers_in_flight=self.random.choice((1, 2, 4)),
            max_requests_in_flight=self.random.choice((1, 3, 32)),
            activation="step" if steps else "immediate",
            step_margin=seed % 3,
            activation_timeout=1.0,
        )
        self.fabric = MemoryFabric(
            latency=self.random.choice((20e-6, 1e-3, 20e-3)),
            needs_target_progress=self.random.random() < 0.5,
            bytes_per_second=self.random.choice((1e5, 1e10)),
        )
        self.generations: list[list[int]] = [[0] * self.num_layers]
        """By weight version: which bytes each layer holds."""
        self.cluster = LocalCluster(self.placement(), row_bytes=(24, 16), settings=self.settings, fabric=self.fabric)
        self.anchor = self.random.randrange(self.ep_size)
        """A rank that stays, so that there is a group to come back to."""
        self.down: set[int] = set()
        """Ranks that were killed and have not opened again."""
        self.log: list[str] = []

    # ------------------------------------------------------------------------------------------- placements
    def placement(self, ranks: list[int] | None = None) -> Placement:
        """A random one on these ranks, default all."""
        chosen = list(range(self.ep_size)) if ranks is None else ranks
        ids = np.full((self.num_layers, self.ep_size, self.num_slots), -1)
        for layer in range(self.num_layers):
            spare = len(chosen) * self.num_slots - self.num_logical
            extra = self._numbers.integers(-1, self.num_logical, spare)
            row = self._numbers.permutation(np.concatenate([np.arange(self.num_logical), extra]))
            ids[layer, chosen] = row.reshape(len(chosen), self.num_slots)
        flat = ids.reshape(self.num_layers, -1)
        return Placement(flat, ep_size=self.ep_size, num_logical=self.num_logical)

    def fits(self, ranks: list[int]) -> bool:
        """Whether these can hold every expert."""
        return len(ranks) * self.num_slots >= self.num_logical

    # ---------------------------------------------------------------------------------------------- weights
    def rewrite(self, rank: int, version: int) -> None:
        """Bring a rank's rows to a version."""
        rows = self.cluster.rows[rank]
        rows.generations = list(self.generations[version])
        rows.fill(self.cluster.comms[rank].placement)

    def changed(self, rank: int, version: int) -> list[int] | None:
        """Layers that a rank has to write for a version."""
        rows = self.cluster.rows[rank]
        half = self.cluster.comms[rank].health().half_written
        layers = {at for at in range(self.num_layers) if rows.generations[at] != self.generations[version][at]}
        return sorted(layers | set(half)) or None

    def new_version(self) -> int:
        """Other bytes in some layers."""
        last = self.generations[-1]
        self.generations.append([g + self.random.randint(0, 1) for g in last])
        return len(self.generations) - 1

    def load(self, rank: int, *, how: str) -> Any:
        """A ``load_expert`` of one kind."""

        def plain(layer: int, expert: int) -> Any:
            rows = self.cluster.rows[rank]
            generation = rows.generations[layer]
            rows.generations[layer] = self.generations[self.cluster.comms[rank].health().weight_version][layer]
            try:
                return rows.load(layer, expert)
            finally:
                rows.generations[layer] = generation

        async def slow(layer: int, expert: int) -> Any:
            await asyncio.sleep(self.random.choice((0.0, 0.01, 0.3)))
            return plain(layer, expert)

        def bad(layer: int, expert: int) -> Any:
            raise OSError("no such file")

        return {"plain": plain, "slow": slow, "bad": bad}[how]


Call = Callable[[], Awaitable[object]]


def call_of(world: World, rank: int, what: str, about: Any, limit: float, loader: str) -> Call:
    """What a rank does, as a call; ``about`` is a placement, or a rank."""
    choose, comm = world.random, world.cluster.comms[rank]

    async def update() -> None:
        version = choose.choice((len(world.generations) - 1, comm.health().weight_version))
        if version < comm.health().weight_version:
            return
        async with comm.updating_weights(world.changed(rank, version), version=version, timeout=limit):
            fails = choose.random()
            if fails < 0.05:
                raise OSError("own")
            await asyncio.sleep(choose.choice((0.0, 0.01, 0.2)))
            world.rewrite(rank, version)
            if fails < 0.1:
                raise OSError("own")

    async def suspend() -> None:
        await comm.suspend(timeout=limit)
        for tensors in world.cluster.rows[rank].layers:
            for tensor in tensors:
                tensor.data = torch.empty(0, dtype=torch.uint8)

    async def nap() -> None:
        await suspend()
        await asyncio.sleep(choose.choice((0.0, 0.1, 1.0)))
        wake(world, rank)
        await comm.resume()

    async def pause() -> None:
        try:
            comm.pause()
            comm.limit(choose.choice((0, 0, 1000)))
            await asyncio.sleep(choose.choice((0.0, 0.1, 1.0)))
            comm.limit(0)
        finally:
            wake(world, rank)
            await comm.resume()

    async def migrate() -> None:
        load = None if loader == "none" else world.load(rank, how=choose.choice((loader, loader, "plain")))
        await comm.migrate(about, timeout=limit, load_expert=load)

    calls: dict[str, Call] = {
        "migrate": migrate,
        "reconnect": lambda: comm.reconnect(about, timeout=limit),
        "update": update,
        "suspend": suspend,
        "nap": nap,
        "pause": pause,
        "rebind": lambda: comm.rebind(timeout=limit),
    }
    return calls[what]


async def script(world: World, rank: int, aims: list[tuple[str, Any]], loader: str) -> None:
    """What all ranks are to do, one after the other, each tried twice at most."""
    choose = world.random
    for what, about in aims:
        for _ in range(2):
            limit = choose.choice((0.0, 10 ** choose.uniform(-3, 0), *[2.0, 3.0] * 4))
            call = call_of(world, rank, what, about, limit, loader)
            if await bounded(world, rank, what, limit, call, cut=choose.random() < 0.1):
                break


async def aside(world: World, rank: int) -> None:
    """Something of its owner's meanwhile."""
    what = world.random.choice(("update", "update", "suspend", "nap", "nap", "nap", "rebind", "pause", "pause"))
    await asyncio.sleep(10 ** world.random.uniform(-5, 0))
    await bounded(
        world, rank, what, 2.0, call_of(world, rank, what, None, 2.0, "none"), cut=world.random.random() < 0.2
    )


def wake(world: World, rank: int) -> None:
    """Allocate weights that were freed, and write the rows of the rank's version into them."""
    rows = world.cluster.rows[rank]
    for tensors in rows.layers:
        for tensor, nbytes in zip(tensors, rows.row_bytes, strict=True):
            if not tensor.numel():
                tensor.data = torch.zeros(world.num_slots, nbytes, dtype=torch.uint8)
    rows.fill(world.cluster.comms[rank].placement)


async def bounded(world: World, rank: int, what: str, limit: float, call: Call, *, cut: bool) -> bool:
    """Do it, perhaps cut it off; it ends in time, well or with an error of ours. Returns whether it went well."""
    choose, loop = world.random, asyncio.get_running_loop()
    await asyncio.sleep(choose.choice((0.0, 0.0, 10 ** choose.uniform(-5, -0.5))))
    started = loop.time()
    task = asyncio.ensure_future(call())
    if cut:
        if choose.random() < 0.5:
            for _ in range(choose.randint(0, 80)):
                await asyncio.sleep(0)
        else:
            await asyncio.sleep(10 ** choose.uniform(-5, 0.3))
        task.cancel()
    done, _ = await asyncio.wait([task], timeout=limit + SLACK)
    took = loop.time() - started
    if not done:
        health = str(world.cluster.comms[rank].health())
        task.cancel()
        raise AssertionError(f"I-11: {what} with timeout={limit} on rank {rank} has not ended: {health}")
    if task.cancelled():
        world.log.append(f"  rank {rank} {what}({limit:g}): cancelled after {took:.4f}")
        return False
    error = task.exception()
    world.log.append(f"  rank {rank} {what}({limit:g}): {error or 'well'} after {took:.4f}")
    own = isinstance(error, OSError) and str(error) == "own"
    member = isinstance(error, ValueError) and what == "reconnect"
    assert error is None or own or member or isinstance(error, EplbError), (rank, what, repr(error))
    return error is None


class Engines:
    """The engines of all ranks in lock-step, each in a task: no step ends before every rank that lives has begun it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._of = list(world.cluster.comms)
        self.idle_after = max(comm.health().step for comm in self._of)
        self._begun, self._done = [self.idle_after] * world.ep_size, [self.idle_after] * world.ep_size
        self._seen: dict[tuple[int, int], dict[Placement, int]] = defaultdict(dict)  # by term and step
        self._tasks = [asyncio.ensure_future(self._run(rank)) for rank in range(world.ep_size)]

    def _living(self) -> list[int]:
        """Ranks that step; one that has come back is to run the step after the one that the others are in."""
        comms = self.world.cluster.comms
        living = [rank for rank, comm in enumerate(comms) if rank not in self.world.down and not is_out(comm)]
        for rank in living:
            if self._of[rank] is not comms[rank]:
                self._of[rank] = comms[rank]
                self._begun[rank] = self._done[rank] = max(self._begun)
        return living

    def are_idle(self) -> bool:
        """Whether no engine has stepped yet."""
        return max(self._begun) == self.idle_after

    async def _until_all(self, counts: list[int], number: int) -> None:
        while any(counts[rank] < number for rank in self._living()):
            await asyncio.sleep(0.01)

    async def _run(self, rank: int) -> None:
        world, choose = self.world, self.world.random
        while True:
            await asyncio.sleep(choose.choice((0.001, 0.02, 0.05)))
            if rank not in self._living():
                continue
            comm, number = world.cluster.comms[rank], self._done[rank] + 1
            await self._until_all(self._done, number - 1)
            with contextlib.suppress(CommunicatorClosed, ActivationTimeout):
                async with comm.step(number) as step:
                    placement, term, self._begun[rank] = comm.placement, step.term, number
                    seen = self._seen[term, number]
                    seen[placement] = rank
                    assert len(seen) == 1, f"step {number} of term {term} ran with {seen}"
                    await self._until_all(self._begun, number)
                    same_view = step.term == term  # where a rank comes back, its slots are new to all
                    assert not same_view or comm.placement == placement, f"step {number} of rank {rank} saw two"
                if self._of[rank] is comm:
                    self._done[rank] = number

    async def stop(self) -> None:
        """No more steps; what is due is applied."""
        for task in self._tasks:
            assert not task.done(), task.exception()
            task.cancel()
        await asyncio.wait(self._tasks)
        for comm in self.world.cluster.comms:
            idle(self.world, comm)


def idle(world: World, comm: AsyncEplbCommunicator) -> None:
    """No engine steps: this rank says after which step."""
    if world.steps:
        comm.idle(max(other.health().step for other in world.cluster.comms))


async def watch(world: World) -> None:
    """``health`` and ``placement`` always work."""
    while True:
        for comm in world.cluster.comms:
            assert str(comm.health())
            assert comm.placement.num_layers == world.num_layers
        await asyncio.sleep(0.037)


def kill(world: World, rank: int) -> None:
    world.down.add(rank)
    world.cluster.kill(rank)


async def trouble(world: World, victim: int, plan: str) -> None:
    """Something goes wrong."""
    choose, cluster = world.random, world.cluster
    await asyncio.sleep(10 ** choose.uniform(-4, 0.2))
    world.log.append(f"  {plan} rank {victim}")
    if plan == "kill":
        kill(world, victim)
    elif plan == "stop":
        cluster.stop(victim)
        await asyncio.sleep(10 ** choose.uniform(-3, 0.3))
        cluster.resume(victim)
    elif plan == "close":
        await cluster.comms[victim].aclose(timeout=choose.choice((0.0, 0.1, 2.0)))
    elif plan == "exclude":
        by = [q for q in range(world.ep_size) if q != victim and q not in world.down]
        for rank in choose.sample(by, choose.randint(1, len(by))):
            with contextlib.suppress(CommunicatorClosed):
                await cluster.comms[rank].exclude(victim)


def faults(world: World) -> FaultPlan:
    """READs and messages that go wrong in this round."""
    choose, plan = world.random, FaultPlan()
    for _ in range(choose.randint(0, 2)):
        reader, nth = f"default/{choose.randrange(world.ep_size)}.", choose.randint(0, 5)
        kind = choose.choice(("fail", "hold", "late", "damage"))
        if kind == "fail":
            plan.fail_read(reader, nth=nth, phase=choose.choice(("make", "post", "poll")))
        elif kind == "hold":
            plan.hold_read(reader, nth=nth)
        elif kind == "late":
            plan.late_landing(reader, nth=nth, delay=choose.choice((0.01, 0.5)))
        elif kind == "damage" and world.settings.verify == "full":
            plan.damage_read(reader, nth=nth)
    return plan


def is_out(comm: AsyncEplbCommunicator) -> bool:
    return comm.health().phase in ("closed", "fenced") or comm._calls.closed


async def one_round(world: World, number: int) -> None:
    choose, cluster = world.random, world.cluster
    living = list(range(world.ep_size))
    cluster.fabric.faults = faults(world)
    others = [rank for rank in living if rank != world.anchor]
    out: int | None = None
    aims: list[tuple[str, Any]] = [("migrate", world.placement()) for _ in range(choose.randint(1, 2))]
    if choose.random() < 0.4:  # a rank is out already
        out = choose.choice(others)
        kill(world, out)
        for rank in living:
            if rank != out:
                await cluster.comms[rank].exclude(out)
        living.remove(out)
        others.remove(out)
        aims = [("reconnect", out), ("migrate", world.placement())]
        if world.fits(living):
            without = ("migrate", world.placement(living))
            aims = choose.choice((aims, [without], [without, *aims]))
        await asyncio.sleep(choose.choice((0.0, 0.1, 1.0)))
    if choose.random() < 0.3 and world.fits([world.anchor]):  # else what is lost then could not come back
        world.new_version()
    loader = choose.choice(("none", "plain", "slow", "slow", "bad"))
    wants = ", ".join(what for what, _ in aims)
    world.log.append(f"round {number}: {wants}, out {out}, faults {cluster.fabric.faults}, loader {loader}")
    tasks: list[Awaitable[object]] = []
    for rank in living:
        if choose.random() < 0.95:
            tasks.append(script(world, rank, aims, loader))
        if choose.random() < 0.25:
            tasks.append(aside(world, rank))
    if out is not None and choose.random() < 0.8:
        limit = choose.choice((0.5, 3.0, 6.0))
        claimed = choose.choice((cluster.comms[world.anchor].placement, world.cluster._placement))

        async def open_and_go_on() -> None:
            opening = lambda: reopen(world, out, claimed, timeout=limit)  # noqa: E731
            if await bounded(world, out, "open", limit, opening, cut=choose.random() < 0.2):
                await script(world, out, aims[-1:], loader)

        tasks.append(open_and_go_on())
    if others and choose.random() < 0.5:
        tasks.append(trouble(world, choose.choice(others), choose.choice(("kill", "stop", "close", "exclude"))))
    watching = asyncio.ensure_future(watch(world))
    world.engines = Engines(world) if world.steps else None
    try:
        await asyncio.gather(*tasks)
    finally:
        if world.engines is not None:
            await world.engines.stop()
            world.engines = None
        done = watching.done()
        watching.cancel()
        await asyncio.wait([watching])
    assert not done, watching.exception()


async def reopen(world: World, rank: int, claim: Placement, *, timeout: float = 30.0) -> None:
    """A rank starts again, with the bytes of version 0."""
    cluster = world.cluster
    await cluster.restart(rank, claim, timeout=timeout)
    if world.engines is None or world.engines.are_idle():
        idle(world, cluster.comms[rank])
    world.down.discard(rank)
    cluster.rows[rank].generations = list(world.generations[cluster.comms[rank].health().weight_version])


async def mend(world: World) -> None:
    """Whatever happened: with what the public face offers, all ranks migrate again."""
    cluster = world.cluster
    world.log.append("mend")
    everybody = range(world.ep_size)
    for rank in everybody:
        cluster.resume(rank)
    cluster.fabric.faults = FaultPlan()
    cluster.fabric.unhold()
    excluded = {
        rank
        for rank in everybody
        for comm in cluster.comms
        if not is_out(comm) and comm._session.driver.protocol._view.declared >> rank & 1
    }
    await asyncio.sleep(2 * SETTLE)
    lost = sorted({r for r in everybody if r in world.down or is_out(cluster.comms[r])} | excluded)
    lost += [
        rank
        for rank in everybody
        if rank not in lost
        and any(rank not in c.health().members for r, c in enumerate(cluster.comms) if r not in lost)
    ]
    assert world.anchor not in lost, cluster.comms[world.anchor].health()
    staying = [rank for rank in everybody if rank not in lost]
    world.log.append(f"  lost {lost}")
    for rank in lost:
        if rank not in world.down:
            await cluster.comms[rank].aclose()
            kill(world, rank)
    for rank in staying:
        for dead in lost:
            await cluster.comms[rank].exclude(dead)
    async with asyncio.timeout(30.0):
        for rank in staying:
            while (health := cluster.comms[rank].health()).phase not in ("idle", "suspended") or set(
                health.members
            ) != set(staying):
                await asyncio.sleep(0.1)
    for rank in staying:
        wake(world, rank)
        await cluster.comms[rank].resume()
    version = max(cluster.comms[rank].health().weight_version for rank in staying)
    for rank in staying:
        health = cluster.comms[rank].health()
        if health.weight_version != version or health.half_written:
            layers = world.changed(rank, version)
            async with cluster.comms[rank].updating_weights(layers, version=version):
                world.rewrite(rank, version)
    same(world, staying)
    for rank in lost:
        if rank in staying:
            continue
        claim = cluster.comms[staying[0]].placement
        if version:  # its own are of an older version: the others take them over
            await migrates(world, world.placement(staying), staying)
        opening = asyncio.ensure_future(reopen(world, rank, claim))
        back = await cluster.reconnect(rank, ranks=staying)
        assert set(back) == {None}, back
        await opening
        staying = sorted([*staying, rank])
        same(world, staying)
    await migrates(world, world.placement(), list(everybody))


def same(world: World, ranks: list[int]) -> None:
    """All agree, and have the bytes that they say."""
    comms = [world.cluster.comms[rank] for rank in ranks]
    assert len({comm.placement for comm in comms}) == 1, {
        r: world.cluster.comms[r].placement.physical_to_logical_map.tolist() for r in ranks
    }
    assert len({comm.health().term for comm in comms}) == 1
    assert world.cluster.wrong_bytes(ranks) == 0, [world.cluster.wrong_bytes([rank]) for rank in ranks]


async def migrates(world: World, new: Placement, ranks: list[int]) -> None:
    load = {rank: world.load(rank, how="plain") for rank in ranks}
    await asyncio.sleep(1.2)
    results = await asyncio.gather(
        *(world.cluster.comms[r].migrate(new, timeout=30.0, load_expert=load[r]) for r in ranks), return_exceptions=True
    )
    all_report(results)
    assert all(world.cluster.comms[rank].placement == new for rank in ranks)
    same(world, ranks)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_anything(seed: int) -> None:
    """Whatever is done and goes wrong, the group can be mended, and nothing is lost or left."""
    anything(World(seed))


@pytest.mark.parametrize("seed", range(SEEDS // 8))
def test_anything_while_engines_step(seed: int) -> None:
    """The same, with layers that are applied at steps: no step of one term runs with two placements."""
    anything(World(seed, steps=True))


def anything(world: World) -> None:
    """Run it."""
    complaints = Complaints()
    logging.getLogger().addHandler(complaints)

    async def main() -> None:
        async with world.cluster:
            for number in range(world.random.randint(1, 3)):
                await one_round(world, number)
                await mend(world)
        await asyncio.sleep(0.01)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    try:
        run(main())
        gc.collect()
        assert not complaints.found
        assert not world.fabric.violations
        assert world.fabric.open_handles == 0
    except BaseException:
        print(f"{world.settings}, anchor {world.anchor}\n" + "\n".join(world.log))
        raise
    finally:
        logging.getLogger().removeHandler(complaints)
