"""Ranks that are out: migrating without them, and experts that were lost with them."""

from __future__ import annotations

import asyncio
import contextvars
import re
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import uvloop
from safetensors.torch import save_file

from eplb_async.communicator import AsyncEplbCommunicator, MigrationReport
from eplb_async.core.placement import Placement
from eplb_async.engine import LoopEngine
from eplb_async.errors import (
    CommunicatorBusy,
    CommunicatorClosed,
    ExpertLoadFailed,
    ExpertsLost,
    MigrationAborted,
    MigrationTimeout,
    PlacementError,
)
from eplb_async.settings import Settings
from eplb_async.testing import run
from eplb_async.testing.cluster import LocalCluster, MemoryRendezvous
from eplb_async.testing.memory import MemoryFabric
from eplb_async.testing.patterns import PatternWeights
from tests.communicator.groups import all_report

# Rank 2 alone holds experts 4 and 5; experts 0 and 1 have a copy on it, too.
OLD = Placement([[0, 1, -1, -1, 2, 3, -1, -1, 4, 5, 0, 1]] * 2, ep_size=3)
WITHOUT = Placement([[0, 1, 4, -1, 2, 3, 5, 4, -1, -1, -1, -1]] * 2, ep_size=3)


async def without_rank_2(cluster: LocalCluster) -> None:
    """Rank 2 dies, and the others are in a view without it."""
    cluster.kill(2)
    await asyncio.gather(*(comm.exclude(2) for comm in cluster.comms[:2]))
    async with asyncio.timeout(60.0):
        while any(comm.health().members != (0, 1) for comm in cluster.comms[:2]):
            await asyncio.sleep(0.01)


def in_a_smaller_view(test: Callable[[LocalCluster], Awaitable[None]], **options: Any) -> None:
    """Run a test with ranks 0 and 1 of three; every byte must be right afterwards, and every READ accounted for."""
    fabric = options.setdefault("fabric", MemoryFabric())

    async def main() -> None:
        async with LocalCluster(OLD, **options) as cluster:
            await without_rank_2(cluster)
            await test(cluster)
            assert cluster.wrong_bytes([0, 1]) == 0
            assert cluster.comms[0].placement == cluster.comms[1].placement
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main())
    assert not fabric.violations


def test_c29_lost_experts_are_reported_on_every_rank_before_any_read() -> None:
    """All at once, by layer; nothing is posted, nothing changes, and with ``load_expert`` it works."""

    async def test(cluster: LocalCluster) -> None:
        posts = cluster.fabric.posts
        for error in await cluster.migrate(WITHOUT, ranks=[0, 1]):
            assert isinstance(error, ExpertsLost)
            assert isinstance(error, PlacementError)
            assert error.lost == {0: (4, 5), 1: (4, 5)}
            assert "ranks 0, 1 for layer 0: experts 4, 5; layer 1: experts 4, 5; pass load_expert" in str(error)
        assert cluster.fabric.posts == posts
        assert [comm.placement for comm in cluster.comms[:2]] == [OLD, OLD]
        reports = await cluster.migrate(WITHOUT, ranks=[0, 1], load_expert=cluster.rows[0].load)
        assert [report.loads for report in reports if isinstance(report, MigrationReport)] == [2, 4]
        assert cluster.comms[0].placement == WITHOUT

    in_a_smaller_view(test)


def test_a_placement_that_uses_a_rank_that_is_out_is_refused_with_ranks_and_slots() -> None:
    """At once, on each rank by itself, before anything is sent."""

    async def test(cluster: LocalCluster) -> None:
        sent = [comm._session.driver.protocol.snapshot() for comm in cluster.comms[:2]]
        still = Placement([[0, 1, 4, 5, 2, 3, 0, 4, -1, 3, -1, -1]] * 2, ep_size=3)
        (error,) = await cluster.migrate(still, ranks=[0], load_expert=cluster.rows[0].load)
        assert type(error) is PlacementError
        assert "members are ranks 0, 1): rank 2, slot 1 of layer 0 (expert 3), slot 1 of layer 1 (expert 3)" in str(
            error
        )
        assert "No member holds layer 0: experts 4, 5" in str(error)
        assert [comm._session.driver.protocol.snapshot() for comm in cluster.comms[:2]] == sent

    in_a_smaller_view(test)


def test_a_rank_alone_is_told_at_once_and_loads_for_itself() -> None:
    """The last rank has nobody to agree with."""

    async def main() -> None:
        old, alone = Placement([[0, -1, 1, -1]], ep_size=2), Placement([[0, 1, -1, -1]], ep_size=2)
        async with LocalCluster(old) as cluster:
            cluster.kill(1)
            await cluster.comms[0].exclude(1)
            (error,) = await cluster.migrate(alone, ranks=[0])
            assert isinstance(error, ExpertsLost)
            (report,) = await cluster.migrate(alone, ranks=[0], load_expert=cluster.rows[0].load)
            assert isinstance(report, MigrationReport), report
            assert cluster.wrong_bytes([0]) == 0

    run(main())


@pytest.mark.parametrize("who", [0, 1])
def test_one_rank_without_load_expert_ends_it_for_all(who: int) -> None:
    """It is told what is lost, the other that every rank must pass it; nobody hangs, and the next one works."""

    async def test(cluster: LocalCluster) -> None:
        load = cluster.rows[0].load
        calls = [cluster.migrate(WITHOUT, ranks=[rank], load_expert=None if rank == who else load) for rank in (0, 1)]
        (one,), (two,) = await asyncio.gather(*calls)
        lacking, other = (one, two) if who == 0 else (two, one)
        assert isinstance(lacking, ExpertsLost)
        assert isinstance(other, MigrationAborted)
        assert "every rank passes load_expert" in str(other)
        reports = await cluster.migrate(WITHOUT, ranks=[0, 1], load_expert=load)
        all_report(reports)

    in_a_smaller_view(test)


@pytest.mark.parametrize("verify", ["off", "identity", "full"])
def test_what_is_loaded_is_a_source_like_any_other(verify: str) -> None:
    """I-16: its entry says what it is, so peers READ it later and no loader is asked again."""

    async def test(cluster: LocalCluster) -> None:
        await cluster.migrate(WITHOUT, ranks=[0, 1], load_expert=cluster.rows[0].load)
        swapped = Placement([[5, 2, 3, -1, 0, 1, 4, 4, -1, -1, -1, -1]] * 2, ep_size=3)
        for report in await cluster.migrate(swapped, ranks=[0, 1]):
            assert isinstance(report, MigrationReport), report
            assert (report.loads, report.retries) == (0, 0)
            assert report.reads > 0

    in_a_smaller_view(test, settings=Settings(secret=b"s" * 16, verify=verify))  # type: ignore[arg-type]


def test_each_rank_loads_what_it_needs_once_on_an_awaitable_too() -> None:
    """One call for several slots, one at a time; an ``async def`` is awaited on the user's loop."""
    calls: list[tuple[int, int]] = []
    running = 0

    async def test(cluster: LocalCluster) -> None:
        async def load(layer: int, expert: int) -> dict[str, torch.Tensor]:
            nonlocal running
            running += 1
            assert running <= 2, "two calls at once on one rank"
            calls.append((layer, expert))
            await asyncio.sleep(0.01)
            running -= 1
            tensors = cluster.rows[0].load(layer, expert)
            return {"1": tensors[1], "0": tensors[0]}

        twice = Placement([[0, 1, 4, 4, 2, 3, 5, 4, -1, -1, -1, -1]] * 2, ep_size=3)
        reports = await cluster.migrate(twice, ranks=[0, 1], load_expert=load)
        all_report(reports)
        assert sorted(calls) == [(0, 4), (0, 4), (0, 5), (1, 4), (1, 4), (1, 5)]

    in_a_smaller_view(test)


@pytest.mark.parametrize(
    ("give", "says"),
    [
        (lambda rows, layer, expert: 1 / 0, "ZeroDivisionError"),
        (lambda rows, layer, expert: next(iter(())), "StopIteration"),
        (lambda rows, layer, expert: exit(3), "SystemExit"),
        (lambda rows, layer, expert: None, "NoneType is neither a mapping nor a sequence"),
        (lambda rows, layer, expert: rows.load(layer, expert)[:1], "1 tensors, the layer has 2"),
        (lambda rows, layer, expert: {"0": rows.load(layer, expert)[0]}, r"tensors \['1'\] are missing"),
        (lambda rows, layer, expert: dict(zip("012", rows.load(layer, expert) * 2, strict=False)), "'2'"),
        (
            lambda rows, layer, expert: rows.load(layer, expert)[::-1],
            r"tensor '0': uint8 \[24\] is not .* uint8 \[64\]",
        ),
        (lambda rows, layer, expert: [t.view(torch.int8) for t in rows.load(layer, expert)], "tensor '0': int8"),
    ],
    ids=["raises", "stops", "exits", "none", "few", "missing", "surplus", "shape", "dtype"],
)
def test_a_loader_that_fails_ends_the_epoch_on_all_ranks_and_nothing_is_lost(give: Any, says: str) -> None:
    """Before the vote: the rank raises what it was, the others are told, and the next migration works."""

    async def test(cluster: LocalCluster) -> None:
        rows = cluster.rows[0]

        def load(layer: int, expert: int) -> Any:
            return give(rows, layer, expert) if (layer, expert) == (1, 5) else rows.load(layer, expert)

        one, two = await cluster.migrate(WITHOUT, ranks=[0, 1], load_expert=load)
        assert isinstance(one, MigrationAborted)
        assert isinstance(two, ExpertLoadFailed)
        assert (two.layer, two.expert) == (1, 5)
        assert two.__cause__ is not None
        with pytest.raises(ExpertLoadFailed, match=says):
            raise two
        assert cluster.comms[0].placement in (OLD, OLD.with_layers(WITHOUT, 1))
        assert cluster.wrong_bytes([0, 1]) == 0
        reports = await cluster.migrate(WITHOUT, ranks=[0, 1], load_expert=rows.load)
        all_report(reports)

    in_a_smaller_view(test)


def test_a_loader_that_is_slow_is_bounded_by_the_deadline_and_named() -> None:
    """The message says which call was waited for; the others end too."""

    async def test(cluster: LocalCluster) -> None:
        async def load(layer: int, expert: int) -> list[torch.Tensor]:
            await asyncio.sleep(3600)
            raise AssertionError

        one, two = await cluster.migrate(WITHOUT, ranks=[0, 1], timeout=2.0, load_expert=load)
        for error in (one, two):
            assert isinstance(error, MigrationAborted)
        assert any(isinstance(error, MigrationTimeout) for error in (one, two))
        assert any("load_expert(layer=0, expert=4) of this rank" in str(error) for error in (one, two))

    in_a_smaller_view(test)


@pytest.mark.parametrize("turns", [1, 5, 20, 60, 120, 250])
def test_i10_a_cancel_while_loading_ends_at_once_on_all_ranks(turns: int) -> None:
    """The user's coroutine is cancelled with it."""

    async def test(cluster: LocalCluster) -> None:
        ended: list[bool] = []

        async def load(layer: int, expert: int) -> list[torch.Tensor]:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                ended.append(True)
                raise
            raise AssertionError

        other = asyncio.ensure_future(cluster.migrate(WITHOUT, ranks=[1], load_expert=load))
        task = asyncio.ensure_future(cluster.comms[0].migrate(WITHOUT, load_expert=load, timeout=30.0))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=0.001)
        assert task.cancelled()
        if turns > 100:
            (error,) = await other
            assert isinstance(error, MigrationAborted)
            assert ended
        else:
            other.cancel()
        async with asyncio.timeout(60.0):
            while any(comm.health().phase != "idle" for comm in cluster.comms[:2]):
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        reports = await cluster.migrate(WITHOUT, ranks=[0, 1], load_expert=cluster.rows[0].load)
        all_report(reports)

    in_a_smaller_view(test)


def test_a_loader_that_cancels_itself_is_a_failure_and_one_that_migrates_or_closes_is_refused() -> None:
    """Neither hangs."""

    async def main() -> None:
        async with LocalCluster(Placement([[0, -1, 1, -1]], ep_size=2)) as cluster:
            comm = cluster.comms[1]
            cluster.kill(0)
            await comm.exclude(0)
            refused: list[str] = []

            async def load(layer: int, expert: int) -> list[torch.Tensor]:
                for call in (lambda: comm.migrate(OLD), comm.aclose):
                    try:
                        await call()
                    except CommunicatorBusy as error:
                        refused.append(str(error).split(":")[0])
                raise asyncio.CancelledError

            alone = Placement([[-1, -1, 0, 1]], ep_size=2)
            (error,) = await cluster.migrate(alone, ranks=[1], load_expert=load)
            assert isinstance(error, ExpertLoadFailed)
            assert "cancelled" in str(error)
            assert refused == ["cannot migrate", "cannot close from within load_expert"]
            assert cluster.wrong_bytes([1]) == 0

    run(main())


def test_what_is_no_callable_is_refused_at_once() -> None:
    """Before anything is sent."""

    async def test(cluster: LocalCluster) -> None:
        (error,) = await cluster.migrate(WITHOUT, ranks=[0], load_expert="checkpoint")  # type: ignore[arg-type]
        assert isinstance(error, TypeError)

    in_a_smaller_view(test)


def test_the_page_loads_from_safetensors(tmp_path: Path) -> None:
    """The example of docs/leaving.md, run as it stands: a checkpoint on disk, weights that stack gate and up."""
    page = (Path(__file__).parents[2] / "docs" / "leaving.md").read_text()
    example: dict[str, Any] = {}
    for body in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        exec(compile(body, "docs/leaving.md", "exec"), example)
    width, hidden, experts = 6, 4, 4
    projections = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    checkpoint = {
        f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight": torch.randn(shape, dtype=torch.float32)
        for layer in range(2)
        for expert in range(experts)
        for name, shape in projections.items()
    }
    save_file(checkpoint, tmp_path / "model.safetensors")
    load_expert = example["from_safetensors"](tmp_path / "model.safetensors", torch.bfloat16)

    old = Placement([[0, 1, -1, -1, 2, 3, -1, -1]] * 2, ep_size=2)
    spare = Placement([[0, 1, 2, 3, 0, 1, 2, 3]] * 2, ep_size=2)
    alone = example["without"](old, 1, spare)

    def held(rank: int) -> list[dict[str, torch.Tensor]]:
        layers = []
        for layer, slots in enumerate(old.local(rank).tolist()):
            rows = [load_expert(layer, expert) if expert >= 0 else load_expert(layer, 0) for expert in slots]
            layers.append({name: torch.stack([row[name] for row in rows]) for name in ("w13", "w2")})
        return layers

    async def main() -> None:
        weights, fabric, rendezvous = [held(0), held(1)], MemoryFabric(), MemoryRendezvous()
        comm, other = await asyncio.gather(
            *(
                AsyncEplbCommunicator.open(
                    rank=rank,
                    ep_size=2,
                    weights=weights[rank],
                    placement=old,
                    rendezvous=rendezvous,
                    settings=Settings(secret=b"s" * 16),
                    engine=LoopEngine(asyncio.get_running_loop()),
                    native=fabric.native,
                )
                for rank in range(2)
            )
        )
        await other.aclose()
        await example["rebalance"](comm, alone, load_expert)
        for layer in range(2):
            for expert in range(experts):
                for name, tensor in load_expert(layer, expert).items():
                    assert torch.equal(weights[0][layer][name][expert], tensor)
        await comm.aclose()

    run(main())


# ------------------------------------------------------------------------------------- threads of a real engine
WHO: contextvars.ContextVar[str] = contextvars.ContextVar("WHO", default="nobody")


class Alone:
    """One rank of two with an engine thread of its own, whose peer was excluded before it was ever used."""

    def __init__(self) -> None:
        self.old, self.new = Placement([[0, -1, 1, -1]], ep_size=2), Placement([[0, 1, -1, -1]], ep_size=2)
        self.rows = [PatternWeights(self.old, rank, (64, 24)) for rank in range(2)]
        self.fabric = MemoryFabric(clock=time.monotonic)

    async def open(self) -> AsyncEplbCommunicator:
        rendezvous = MemoryRendezvous()
        one, two = await asyncio.gather(
            *(
                AsyncEplbCommunicator.open(
                    rank=rank,
                    ep_size=2,
                    weights=self.rows[rank].layers,
                    placement=self.old,
                    rendezvous=rendezvous,
                    settings=Settings(secret=b"s" * 16),
                    native=self.fabric.native,
                )
                for rank in range(2)
            )
        )
        await two.aclose()
        async with asyncio.timeout(30.0):
            while one.health().members != (0,):
                await asyncio.sleep(0.01)
        return one


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_threads_loops_and_context(factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """A plain function runs in a thread of its own, a coroutine on the user's loop; both in the caller's context."""
    this = Alone()
    seen: list[tuple[bool, bool, str]] = []

    async def main() -> None:
        comm = await this.open()
        user = threading.get_ident()
        engine = comm._engine.thread_id

        def plain(layer: int, expert: int) -> list[torch.Tensor]:
            seen.append((threading.get_ident() not in (user, engine), WHO.get() == "me", "plain"))
            return this.rows[0].load(layer, expert)

        async def coroutine(layer: int, expert: int) -> list[torch.Tensor]:
            seen.append((threading.get_ident() == user, WHO.get() == "me", "coroutine"))
            await asyncio.sleep(0.001)
            return this.rows[0].load(layer, expert)

        WHO.set("me")
        await comm.migrate(this.new, load_expert=plain)
        assert this.rows[0].wrong_bytes(this.new) == 0
        this.rows[0].layers[0][0][1] = 0
        comm._session.placement = this.old  # expert 1 is lost once more
        await comm.migrate(this.new, load_expert=coroutine)
        assert this.rows[0].wrong_bytes(this.new) == 0
        assert await comm.aclose() == ()

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())
    assert seen == [(True, True, "plain"), (True, True, "coroutine")]


def test_a_loader_that_never_returns_holds_up_neither_deadline_nor_close() -> None:
    """Its thread is left to itself: the migration times out, the next one loads, and close ends."""
    this = Alone()
    release = threading.Event()

    async def main() -> None:
        comm = await this.open()

        def stuck(layer: int, expert: int) -> list[torch.Tensor]:
            release.wait(60)
            raise AssertionError("too late")

        with pytest.raises(MigrationTimeout, match=r"load_expert\(layer=0, expert=1\)"):
            await comm.migrate(this.new, load_expert=stuck, timeout=0.2)
        assert comm.placement == this.old
        running = asyncio.ensure_future(comm.migrate(this.new, load_expert=stuck, timeout=60))
        async with asyncio.timeout(30):
            while not comm._session.driver.attempt or not comm._session.driver.attempt.run:
                await asyncio.sleep(0.01)
        async with asyncio.timeout(30):
            assert await comm.aclose() == ()
        with pytest.raises(CommunicatorClosed):
            await running
        assert this.rows[0].wrong_bytes(this.old) == 0

    try:
        asyncio.run(main())
    finally:
        release.set()
