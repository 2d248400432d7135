"""The parts of the example server: its answers depend on nothing but the question, and a lost rank is named."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from eplb_async import Placement
from eplb_async.testing.placements import random_placement
from examples.moe_server.app import make_app
from examples.moe_server.batching import Batcher, Overloaded, Unavailable
from examples.moe_server.engine import Engine
from examples.moe_server.model import Model, ModelConfig
from examples.moe_server.ranks import ExchangeFailed, Kind, Ranks
from examples.moe_server.traffic import Traffic, answers, reference

CONFIG = ModelConfig(layers=3, experts=8, width=32, hidden=16, seed=5)
PROMPTS = Traffic(CONFIG, variants=2)
QUESTIONS = [prompt for topic in PROMPTS._prompts for prompt in topic]
SECONDS = 20.0


class Balancer:
    """Steps without switching; counts what is recorded."""

    def __init__(self) -> None:
        self.recorded: Any = 0
        self.idles: list[int] = []

    def forward(self, number: int) -> contextlib.nullcontext[Any]:
        return contextlib.nullcontext(SimpleNamespace(term=7))

    def idle(self, number: int) -> None:
        self.idles.append(number)

    def record(self, counts: Any, *, by: str) -> None:
        assert by == "local"
        self.recorded = self.recorded + counts


class Group:
    """Engines of one process, each in its thread, over real sockets."""

    def __init__(self, placement: Placement, max_batch: int = 5, rearrange: Callable[[], object] | None = None) -> None:
        ends = Ranks.connect(placement.ep_size)
        self.ranks = [Ranks(r, ends[r], width=CONFIG.width, timeout=SECONDS) for r in range(placement.ep_size)]
        self.models = [Model(CONFIG, placement, rank) for rank in range(placement.ep_size)]
        self.balancers = [Balancer() for _ in self.ranks]
        self.batcher = Batcher(width=CONFIG.width, max_batch=max_batch)
        self.engines = [
            Engine(
                rank,
                self.models[rank],
                self.ranks[rank],
                self.balancers[rank],
                batcher=None if rank else self.batcher,
                rearrange=rearrange,
            )
            for rank in range(placement.ep_size)
        ]

    def __enter__(self) -> Group:
        for engine in self.engines:
            engine.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.batcher.close("the test is over")
        for engine in self.engines:
            engine.join(SECONDS)
            assert not engine.is_alive()

    def ask(self, prompts: list[tuple[int, ...]]) -> list[list[int]]:
        futures = [self.batcher.submit(list(prompt), 6) for prompt in prompts]
        return [future.result(SECONDS) for future in futures]


def end_sockets(ranks: Ranks) -> None:
    """As the end of its process does; here the rank itself may notice it, and close them, meanwhile."""
    for one in ranks._sockets.values():
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


def a_placement(seed: int, ranks: int) -> Placement:
    rng = np.random.default_rng(seed)
    return random_placement(rng, num_layers=3, num_logical=8, num_local_experts=8 // ranks + 2, ep_size=ranks)


@pytest.fixture(scope="module")
def right() -> list[list[int]]:
    return reference(CONFIG, QUESTIONS, 6)


@pytest.mark.parametrize("max_batch", [1, 3, 64])
def test_answers_do_not_depend_on_the_batch(right: list[list[int]], max_batch: int) -> None:
    """One by one, a few, all at once: the same tokens."""
    model = Model(CONFIG, CONFIG.initial_placement(1), 0)
    assert answers(model, QUESTIONS, 6, max_batch) == right
    assert len({tuple(answer) for answer in right}) > len(right) // 2


@pytest.mark.parametrize(("seed", "ranks"), [(0, 2), (1, 2), (2, 4)])
def test_answers_do_not_depend_on_the_placement(right: list[list[int]], seed: int, ranks: int) -> None:
    """Random placements with copies, over ranks that exchange what they compute; every token is counted once."""
    with Group(a_placement(seed, ranks)) as group:
        assert group.ask(QUESTIONS) == right
    engine = group.engines[0]
    assert [other.failed for other in group.engines] == [""] * ranks
    assert {other.steps for other in group.engines} == {engine.steps}
    assert all(balancer.idles == group.balancers[0].idles for balancer in group.balancers)
    recorded = np.stack([balancer.recorded.sum(axis=1) for balancer in group.balancers], axis=1)
    assert np.array_equal(recorded, engine.rank_tokens)
    assert recorded.sum() == 3 * 2 * len(QUESTIONS) * (4 + 6 - 1)


def test_a_wrong_expert_changes_the_answers(right: list[list[int]]) -> None:
    """Weights and routing that differ do not go unnoticed: two experts of one layer are exchanged."""
    model = Model(CONFIG, CONFIG.initial_placement(1), 0)
    for tensor in model.weights[1]:
        tensor[[0, 1]] = tensor[[1, 0]]
    assert answers(model, QUESTIONS, 6) != right


def test_routing_is_refreshed_in_place(right: list[list[int]]) -> None:
    """Layer by layer to another placement, with the weights that belong to it: the answers stay."""
    one, two = a_placement(3, 1), a_placement(4, 1)
    model, other = Model(CONFIG, one, 0), Model(CONFIG, two, 0)
    for layer in range(CONFIG.layers):
        model.weights[layer] = other.weights[layer]
        model.routing.refresh(layer, two)
        assert answers(model, QUESTIONS, 6) == right


def test_traffic_on_one_topic_is_skewed() -> None:
    """The busiest expert of each layer has more than twice its share, and less with all topics."""

    def busiest(skew: Any) -> float:
        traffic = Traffic(ModelConfig(layers=3, experts=8, width=128, hidden=8), skew=skew)
        model = Model(traffic.config, traffic.config.initial_placement(1), 0)
        x = model.trunk.start([token for _ in range(64) for token in traffic.next()], torch.zeros(256, 128))
        _, counts = model.forward(x, lambda _, y: y)
        return float((counts.max(axis=1) / counts.sum(axis=1)).min())

    assert busiest("one") > 2 / 8 > busiest("uniform")


@pytest.mark.parametrize("lost", [0, 2])
def test_a_lost_rank_is_named_by_all(lost: int) -> None:
    """A rank whose sockets end stops the others at once, which say which it was; requests are refused."""
    with Group(a_placement(5, 4)) as group:
        group.ask(QUESTIONS[:2])
        end_sockets(group.ranks[lost])
        for engine in group.engines:
            engine.join(SECONDS)
    others = [engine for rank, engine in enumerate(group.engines) if rank != lost]
    assert {engine.lost for engine in others} == {lost}
    assert all(f"rank {lost}" in engine.failed for engine in others)
    with pytest.raises(Unavailable):
        group.batcher.submit([1], 1)


def test_what_is_exchanged_is_checked() -> None:
    """Another step, or another term, is refused, and says which rank is out of step."""
    ends = Ranks.connect(2)
    ours, theirs = (Ranks(rank, ends[rank], width=4, timeout=5.0) for rank in range(2))
    y = torch.ones(2, 4)

    def other(term: int, step: int) -> threading.Thread:
        def exchange() -> None:
            with contextlib.suppress(ExchangeFailed):
                theirs.add_up(y, term=term, step=step, layer=0)

        thread = threading.Thread(target=exchange)
        thread.start()
        return thread

    thread = other(1, 9)
    assert torch.equal(ours.add_up(y, term=1, step=9, layer=0), 2 * y)
    thread.join(SECONDS)
    for term, step in ((1, 8), (2, 9)):
        thread = other(term, step)
        with pytest.raises(ExchangeFailed, match=f"rank 1 is out of step: it is in layer 0, term {term}, step {step}"):
            ours.add_up(y, term=1, step=9, layer=0)
        thread.join(SECONDS)
    ours.close(lost=1)
    theirs.close()


def test_a_silent_rank_is_named() -> None:
    """One that is there and says nothing is named when the time is over."""
    ends = Ranks.connect(2)
    ours = Ranks(0, ends[0], width=4, timeout=0.05)
    with pytest.raises(ExchangeFailed, match=r"rank 1 said nothing for 0\.05 s in step 3"):
        ours.add_up(torch.ones(1, 4), term=0, step=3, layer=0)
    assert Ranks(1, ends[1], width=4, timeout=0.05).hear(lambda: True) is None
    ours.close(lost=1)
    for one in ends[1].values():
        one.close()


def test_the_engine_rearranges_between_two_steps(right: list[list[int]]) -> None:
    """All ranks do, once, and the answers stay."""
    done: list[str] = []
    with Group(a_placement(6, 2), rearrange=lambda: done.append(threading.current_thread().name)) as group:
        group.ask(QUESTIONS[:3])
        group.engines[0].request_rearrange()
        assert group.ask(QUESTIONS) == right
    assert sorted(done) == ["engine 0", "engine 1"]
    assert Kind.REARRANGE < 0


def test_the_queue_is_bounded_and_forgets_who_left() -> None:
    """Too many are refused; a cancelled request is neither run nor answered; closing answers what is there."""
    trunk = Model(CONFIG, CONFIG.initial_placement(1), 0).trunk
    batcher = Batcher(width=CONFIG.width, max_batch=2, max_wait=0.0, max_queue=3)
    futures = [batcher.submit([1, 2], 1) for _ in range(3)]
    with pytest.raises(Overloaded):
        batcher.submit([1], 1)
    futures[0].cancel()
    batch = batcher.take(0.0)
    assert batch is not None
    assert [one.future for one in batch] == futures[1:]
    assert batcher.depth == {"running": 2, "waiting": 0}
    futures[1].cancel()
    batcher.close("closing")
    steps = 0
    while batch := batcher.take(0.0):
        batcher.advance(batch, torch.zeros(len(batch), CONFIG.width), trunk)
        steps += 1
    assert (batch, steps, len(futures[2].result(0))) == (None, 2, 1)
    with pytest.raises(Unavailable, match="closing"):
        batcher.submit([1], 1)


async def status_of_half_a_request(app: Any) -> int:
    """Of one whose client hangs up in the middle of its body."""
    came = iter([{"type": "http.request", "body": b'{"pro', "more_body": True}, {"type": "http.disconnect"}])
    sent: list[Any] = []

    async def receive() -> Any:
        return next(came)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/generate", "query_string": b"", "headers": []}
    await app(scope, receive, send)
    return int(sent[0]["status"])


@pytest.mark.asyncio
async def test_the_front_end_answers_checks_and_refuses(right: list[list[int]]) -> None:
    """Bad fields are named with 400; a full queue is 503 with Retry-After; a lost rank is 503 and named."""

    async def no_rebalance(force: bool) -> Any:
        raise TimeoutError(f"force is {force}")

    with Group(a_placement(7, 2)) as group:
        app = make_app(group.engines[0], group.batcher, rebalance=no_rebalance, state=lambda: {"ranks": 2}, rank=None)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=SECONDS) as http:
            asked = [http.post("/generate", json={"prompt": one, "max_tokens": 6}) for one in QUESTIONS[:8]]
            assert [answer.json()["tokens"] for answer in await asyncio.gather(*asked)] == right[:8]
            assert (await http.post("/generate", json={"prompt": "text", "max_tokens": 2})).status_code == 200
            for field, body in {
                "prompt": {"prompt": [1, 256]},
                "max_tokens": {"prompt": [1], "max_tokens": True},
                "body": [1],
            }.items():
                answer = await http.post("/generate", json=body)
                assert (answer.status_code, answer.json()["field"]) == (400, field)
            for content in (b"{", b"[" * 60_000, b"\xff", b"9" * 60_000, b" " * 100_000):
                answer = await http.post("/generate", content=content)
                assert (answer.status_code, answer.json()["field"]) == (400, "body")
            assert await status_of_half_a_request(app) == 408
            assert (await http.post("/eplb/rebalance?force=maybe")).status_code == 400
            assert "force is True" in (await http.post("/eplb/rebalance?force=true")).text
            assert (await http.get("/eplb")).json()["ranks"] == 2
            assert (await http.get("/health")).status_code == 200
            group.batcher._max_queue = 0
            answer = await http.post("/generate", json={"prompt": [1]})
            assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
            end_sockets(group.ranks[1])
            for engine in group.engines:
                await asyncio.to_thread(engine.join, SECONDS)
            assert (await http.get("/health")).json()["problems"][0]["rank"] == 1
            answer = await http.post("/generate", json={"prompt": [1]})
            assert answer.status_code == 503
            assert "rank 1 is gone" in answer.text
