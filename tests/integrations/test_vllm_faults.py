"""Rounds of the vLLM drop-in in memory, under a virtual clock: each fault where it hurts, and the round after it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
import torch

from eplb_async.engine import LoopEngine
from eplb_async.errors import NixlPeerDisconnected, NixlTransferFailed, NixlTransferTimeout
from eplb_async.integrations.vllm.fence import Fence
from eplb_async.integrations.vllm.messages import Cause, Codec, Kind, Message
from eplb_async.integrations.vllm.posts import posts_of, read_all
from eplb_async.integrations.vllm.tensors import Fetch, Tensors
from eplb_async.nixl.endpoint import Endpoint
from eplb_async.settings import Settings
from eplb_async.testing import FaultPlan, MemoryFabric, run

SETTINGS = Settings(secret=b"a key of thirty-two bytes, or so", max_post_bytes=4096, close_timeout=1.0)
EXPERTS, ROW = 4, 4096
DIGEST = b"d" * 16


class Rank:
    """One rank: every expert it receives is of the rank after it."""

    def __init__(self, rank: int, size: int, fabric: MemoryFabric) -> None:
        self.rank, self.size = rank, size
        rows = torch.arange(EXPERTS, dtype=torch.uint8).add(10 * rank + 1).repeat(ROW, 1).t().contiguous()
        self.tensors = Tensors([[rows]], [torch.zeros_like(rows)])
        self.endpoint = Endpoint(
            f"vllm/{rank}",
            LoopEngine(asyncio.get_running_loop()),
            SETTINGS,
            fabric.native,
            on_notification=lambda peer, data: self.fence.on_notification(peer, data),
            on_disconnect=lambda peer: self.fence.on_disconnect(peer),
        )
        self.fence = Fence(rank, size, Codec(bytes(32), size), self.endpoint)
        self.endpoint.register_many(self.tensors.regions())

    def meet(self, others: list[Rank]) -> None:
        self.others = {other.rank: other for other in others if other is not self}
        self.fence.meet({rank: self.endpoint.add_peer(r.endpoint.metadata()) for rank, r in self.others.items()})

    @property
    def source(self) -> int:
        return (self.rank + 1) % self.size

    async def call(self, timeout: float = 5.0, layer: int = 0) -> None:
        self.tensors.buffer[0].zero_()
        fetches = [Fetch(self.source, expert, expert, EXPERTS - 1 - expert) for expert in range(EXPERTS)]
        layouts = {rank: other.tensors.layout for rank, other in self.others.items()}
        posts = posts_of(fetches, 0, self.tensors, layouts, rank=self.rank, settings=SETTINGS)
        deadline = asyncio.get_running_loop().time() + timeout
        read: Callable[[], Awaitable[None]] = lambda: read_all(  # noqa: E731
            self.endpoint, posts, self.fence.peers, deadline=deadline
        )
        await self.fence.run(layer, DIGEST, read, deadline=deadline, patience=timeout)

    def arrived(self) -> bool:
        wanted = self.others[self.source].tensors.weights.layers[0]["0"].flip(0)
        return bool(torch.equal(self.tensors.buffer[0], wanted))


def with_ranks(
    size: int, faults: FaultPlan, test: Callable[[list[Rank], MemoryFabric], Coroutine[Any, Any, None]]
) -> None:
    async def main() -> None:
        fabric = MemoryFabric(faults)
        ranks = [Rank(rank, size, fabric) for rank in range(size)]
        for rank in ranks:
            rank.meet(ranks)
        try:
            await test(ranks, fabric)
        finally:
            for rank in ranks:
                await rank.fence.close(0.5)
                await rank.endpoint.close(0.5)
        assert not fabric.violations
        assert not fabric.open_handles

    run(main())


async def all_call(ranks: list[Rank], timeout: float = 5.0) -> list[BaseException | None]:
    return await asyncio.gather(*(rank.call(timeout) for rank in ranks), return_exceptions=True)


def all_failed(answers: list[BaseException | None], kind: type[BaseException] = NixlTransferFailed) -> None:
    assert all(isinstance(answer, kind) for answer in answers), answers
    assert all(str(answer).startswith("NIXL transfer failed with state=") for answer in answers)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_every_row_arrives(size: int) -> None:
    async def test(ranks: list[Rank], _: MemoryFabric) -> None:
        for _round in range(3):
            assert await all_call(ranks) == [None] * size
            assert all(rank.arrived() for rank in ranks)

    with_ranks(size, FaultPlan(), test)


@pytest.mark.parametrize("nth", range(10))
@pytest.mark.parametrize("pair", [("vllm/0", "vllm/1"), ("vllm/1", "vllm/0"), ("vllm/2", "vllm/0")])
@pytest.mark.parametrize("what", ["drop_notif", "duplicate_notif"])
def test_lost_and_doubled_messages_cost_time_only(nth: int, pair: tuple[str, str], what: str) -> None:
    async def test(ranks: list[Rank], _: MemoryFabric) -> None:
        for _round in range(3):
            assert await all_call(ranks) == [None] * 3
            assert all(rank.arrived() for rank in ranks)

    with_ranks(3, getattr(FaultPlan(), what)(pair[0], receiver=pair[1], nth=nth), test)


def test_end_of_a_round_that_comes_in_the_turn_in_which_the_reads_end() -> None:
    async def test(ranks: list[Rank], _: MemoryFabric) -> None:
        loop, fence = asyncio.get_running_loop(), ranks[1].fence
        end = Message(Kind.END, 0, 1, 1, cause=Cause.FAILED, origin=0, text="rank 0: it fell")

        async def read() -> None:
            loop.call_soon(fence.on_notification, "vllm/0", Codec(bytes(32), 2).encode(end))

        other = asyncio.ensure_future(ranks[0].call())
        with pytest.raises(NixlTransferFailed, match="it fell"):
            await fence.run(0, DIGEST, read, deadline=loop.time() + 5, patience=5)
        with pytest.raises(NixlTransferFailed, match="it fell"):
            await other
        assert await all_call(ranks) == [None, None]

    with_ranks(2, FaultPlan(), test)


def test_read_that_cannot_be_made_fails_all_and_the_next_round_works() -> None:
    async def test(ranks: list[Rank], _: MemoryFabric) -> None:
        answers = await all_call(ranks)
        all_failed(answers)
        assert "rank 1: NIXL transfer failed" in str(answers[2])
        assert answers[1].rank == 2  # type: ignore[union-attr]
        assert await all_call(ranks) == [None] * 3
        assert all(rank.arrived() for rank in ranks)

    with_ranks(3, FaultPlan().fail_read("vllm/1", nth=2, phase="make"), test)


def test_read_that_hangs_times_out_for_all_and_its_row_stays_leased_until_it_ends() -> None:
    async def test(ranks: list[Rank], fabric: MemoryFabric) -> None:
        all_failed(await all_call(ranks), NixlTransferTimeout)
        reader = ranks[1]
        leased = [row for row in range(EXPERTS) if reader.endpoint.leases.holder(reader.tensors.intervals(row))]
        assert leased == [1]  # the third row that it posted
        assert not await reader.endpoint.released(reader.tensors.intervals(1), 1.0)
        fabric.unhold("vllm/1")
        assert await reader.endpoint.released(reader.tensors.intervals(1), 1.0)
        assert await all_call(ranks) == [None] * 3
        assert all(rank.arrived() for rank in ranks)

    with_ranks(3, FaultPlan().hold_read("vllm/1", nth=1), test)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_rank_that_dies_before_or_in_the_round_fails_the_others_long_before_their_deadline(victim: int) -> None:
    async def test(ranks: list[Rank], fabric: MemoryFabric) -> None:
        assert await all_call(ranks) == [None] * 3
        others = [rank for rank in ranks if rank.rank != victim]
        calls = asyncio.gather(*(rank.call(60.0) for rank in others), return_exceptions=True)
        await asyncio.sleep(0.5)
        fabric.kill(f"vllm/{victim}")
        started = asyncio.get_running_loop().time()
        all_failed(await calls, NixlPeerDisconnected)
        all_failed(await all_call(others, 60.0), NixlPeerDisconnected)
        assert asyncio.get_running_loop().time() - started < 2.0

    with_ranks(3, FaultPlan(), test)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_rank_that_stops_lets_the_others_time_out_and_the_round_after_it_works(victim: int) -> None:
    async def test(ranks: list[Rank], fabric: MemoryFabric) -> None:
        fabric.stop(f"vllm/{victim}")
        others = [rank for rank in ranks if rank.rank != victim]
        answers = await all_call(others, 1.0)
        all_failed(answers, NixlTransferTimeout)
        assert all(f"rank {victim}" in str(answer) or victim == 0 for answer in answers), answers
        await asyncio.sleep(0.01)  # what they said last has arrived; it heard none of it
        fabric.resume(f"vllm/{victim}")
        assert await all_call(ranks) == [None] * 3
        assert all(rank.arrived() for rank in ranks)

    with_ranks(3, FaultPlan(), test)


def test_call_that_is_interrupted_fails_the_others_and_the_next_round_works() -> None:
    async def test(ranks: list[Rank], _: MemoryFabric) -> None:
        calls = [asyncio.ensure_future(rank.call()) for rank in ranks[:2]]
        await asyncio.sleep(0.1)
        calls[0].cancel()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(answers[0], asyncio.CancelledError)
        assert "rank 0: its call was interrupted" in str(answers[1])
        all_failed([(await asyncio.gather(ranks[2].call(), return_exceptions=True))[0]])  # it owes this round a failure
        assert await all_call(ranks) == [None] * 3

    with_ranks(3, FaultPlan(), test)


@pytest.mark.parametrize("leaver", [0, 2])
def test_rank_that_closes_after_a_round_lets_all_end_it_well(leaver: int) -> None:
    async def test(ranks: list[Rank], _: MemoryFabric) -> None:
        async def call_and_close(rank: Rank) -> None:
            await rank.call()
            if rank.rank == leaver:
                await rank.fence.close(1.0)
                await rank.endpoint.close(1.0)

        assert await asyncio.gather(*map(call_and_close, ranks), return_exceptions=True) == [None] * 3
        others = [rank for rank in ranks if rank.rank != leaver]
        all_failed(await all_call(others), NixlPeerDisconnected)

    with_ranks(3, FaultPlan().drop_notif("vllm/0", receiver="vllm/1", nth=1), test)


def test_what_is_not_authentic_or_not_its_senders_is_dropped() -> None:
    async def test(ranks: list[Rank], _: MemoryFabric) -> None:
        first, _second, third = ranks
        peer = third.fence.peers[0]
        third.endpoint.notify(peer, b"nonsense that is long enough to be a message" * 3)
        forged = Codec(bytes(32), 3).encode(first.fence._member.fail(1, "x"))  # type: ignore[arg-type]
        third.endpoint.notify(peer, forged)
        await asyncio.sleep(3.0)
        assert sum(first.fence.dropped.values()) == 2
        assert "it is in another rank's name" in first.fence.dropped
        assert await all_call(ranks) == [None] * 3

    with_ranks(3, FaultPlan(), test)


def test_strangers_messages_of_any_size_cost_a_bounded_number_of_lines(caplog: pytest.LogCaptureFixture) -> None:
    async def test(ranks: list[Rank], _: MemoryFabric) -> None:
        fence, codec = ranks[0].fence, Codec(bytes(32), 100)
        for size in range(2000):
            fence.on_notification("vllm/1", bytes(size))
            fence.on_notification("vllm/1", codec.encode(Message(Kind.FAIL, 2 + size % 98, origin=size % 100)))
        assert sum(fence.dropped.values()) == 4000
        assert len(fence.dropped) <= 5
        assert len(caplog.records) <= 5 * 12

    with_ranks(2, FaultPlan(), test)
