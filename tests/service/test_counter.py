"""The attached counter: every count once, for the expert that was in its slot, whoever looks when."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eplb_async.core.placement import Placement
from eplb_async.service.counter import AttachedCounter
from eplb_async.testing.cluster import LocalCluster
from eplb_async.testing.placements import random_placement

LAYERS, EXPERTS, LOCAL, RANKS = 3, 5, 4, 2
WIDTHS = {"slots": LOCAL * RANKS, "local": LOCAL, "experts": EXPERTS}


def placed(rng: np.random.Generator) -> Placement:
    return random_placement(
        rng, num_layers=LAYERS, num_logical=EXPERTS, num_local_experts=LOCAL, ep_size=RANKS, empty=1
    )


class Engine:
    """Counts by the placement that each layer has, and knows what is right."""

    def __init__(self, placement: Placement, by: str, dtype: Any = np.int64, start: int = 0, rank: int = 1) -> None:
        self.placement, self.by, self.rank = placement, by, rank
        self.tensor = np.full((LAYERS, WIDTHS[by]), start, dtype=dtype)
        self.right = np.zeros((LAYERS, EXPERTS))
        self.on_empty = 0.0
        self.counter = AttachedCounter(self.tensor, lambda: self.placement, by=by, rank=self.rank)

    def slots(self) -> np.ndarray:
        if self.by == "experts":
            return np.broadcast_to(np.arange(EXPERTS), (LAYERS, EXPERTS))
        return self.placement.physical_to_logical_map if self.by == "slots" else self.placement.local(self.rank)

    def step(self, counts: np.ndarray) -> None:
        with np.errstate(over="ignore"):
            self.tensor += counts.astype(self.tensor.dtype)
        for layer, column in np.ndindex(*counts.shape):
            expert = self.slots()[layer, column]
            if expert >= 0:
                self.right[layer, expert] += counts[layer, column]
            else:
                self.on_empty += counts[layer, column]

    def apply(self, layer: int, new: Placement) -> None:
        """As the communicator does it: the placement says so first, then the callbacks."""
        slots = self.placement.physical_to_logical_map.copy()
        slots[layer] = new.physical_to_logical_map[layer]
        self.placement = Placement(slots, ep_size=RANKS, num_logical=EXPERTS)
        self.counter.applied(layer, self.placement)


def hooked(counter: AttachedCounter, before: Callable[[], object], after: Callable[[], object]) -> None:
    """Have something happen while a collect is under way: before and after it copies."""
    copy_all = counter._copy_all

    def copy(*args: Any, **how: Any) -> Any:
        before()
        found = copy_all(*args, **how)
        after()
        return found

    counter._copy_all = copy  # type: ignore[method-assign]


@given(data=st.data())
def test_every_count_is_collected_once_under_its_expert(data: st.DataObject) -> None:
    """Steps, applies and collects in any order, and steps and applies in the midst of a collect; int32 wraps around."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    by = data.draw(st.sampled_from(list(WIDTHS)))
    dtype = data.draw(st.sampled_from([np.int32, np.int64]))
    engine = Engine(placed(rng), by, dtype, start=data.draw(st.sampled_from([0, np.iinfo(dtype).max - 50, -50])))
    collected = np.zeros((LAYERS, EXPERTS))

    def act(actions: list[str]) -> None:
        for action in actions:
            if action == "step":
                engine.step(rng.integers(0, 30, engine.tensor.shape))
            else:
                engine.apply(int(rng.integers(0, LAYERS)), placed(rng))

    some = st.lists(st.sampled_from(["step", "apply"]), max_size=4)
    meanwhile: list[list[str]] = [[], []]
    hooked(engine.counter, lambda: act(meanwhile[0]), lambda: act(meanwhile[1]))
    for _ in range(data.draw(st.integers(0, 6))):
        act(data.draw(some))
        meanwhile = [data.draw(some), data.draw(some)]
        collected += engine.counter.collect()
    meanwhile = [[], []]
    collected += engine.counter.collect()
    np.testing.assert_array_equal(collected, engine.right)
    assert engine.counter.dropped == engine.on_empty
    assert engine.counter.resets == 0
    assert not engine.counter.collect().any()


def test_threads_lose_nothing_and_count_nothing_twice() -> None:
    """One thread steps and applies in turns, two collect as fast as they can."""
    rng = np.random.default_rng(1)
    engine = Engine(placed(rng), "slots")
    collected = [np.zeros((LAYERS, EXPERTS)) for _ in range(2)]
    over = threading.Event()

    def collect(mine: np.ndarray) -> None:
        while not over.is_set():
            mine += engine.counter.collect()

    collectors = [threading.Thread(target=collect, args=(mine,)) for mine in collected]
    for thread in collectors:
        thread.start()
    for step in range(400):
        engine.step(rng.integers(0, 30, engine.tensor.shape))
        if step % 3 == 0:
            engine.apply(step % LAYERS, placed(rng))
    over.set()
    for thread in collectors:
        thread.join(60)
    np.testing.assert_array_equal(sum(collected) + engine.counter.collect(), engine.right)


class Event:
    """Of a stream that is behind: over when ``over`` says so."""

    def __init__(self, over: Callable[[], bool]) -> None:
        self.query = over


class Stream:
    """Stands in for one of CUDA: copies are made at once, but are known to be over only when it has caught up."""

    def __init__(self) -> None:
        self.queued = self.over = 0
        self.awaited: list[Event] = []

    def record_event(self) -> Event:
        self.queued += 1
        at, behind = self.queued, tuple(self.awaited)
        return Event(lambda: self.over >= at and all(event.query() for event in behind))

    def wait_event(self, event: Event) -> None:
        self.awaited.append(event)


def test_rows_of_a_device_are_counted_when_their_copies_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """In order; a device that is late ends the call in time, and what it has is returned by a later one."""
    engine_stream, own_stream = Stream(), Stream()
    own_stream.over = 10**9  # it waits for nothing but the events of the other
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: engine_stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    rng = np.random.default_rng(9)
    engine = Engine(placed(rng), "slots")
    counter, collected = engine.counter, np.zeros((LAYERS, EXPERTS))
    counter._device, counter._stream = torch.device("cuda"), own_stream
    monkeypatch.setattr(counter, "_host_memory", lambda *shape: torch.empty(shape, dtype=torch.int64))
    for late in (True, False, True, True, False):
        for layer in (0, 1, 0, 2, 0):
            engine.step(rng.integers(0, 30, engine.tensor.shape))
            engine.apply(layer, placed(rng))
            engine_stream.over += layer == 1
        if late:
            with pytest.raises(TimeoutError, match="cuda has not copied the counter"):
                counter.collect(timeout=0)
        else:
            engine_stream.over = engine_stream.queued
            collected += counter.collect()
    np.testing.assert_array_equal(collected, engine.right)


@pytest.mark.asyncio
async def test_a_migration_closes_each_layer_on_every_rank() -> None:
    """With communicators: what was counted before, at and after it is each expert's."""
    rng = np.random.default_rng(11)
    before, after = placed(rng), placed(rng)
    engines: list[Engine] = []

    def callback(rank: int) -> Callable[[int, Placement], object]:
        return lambda layer, placement: applied(engines[rank], layer, placement)

    def applied(engine: Engine, layer: int, placement: Placement) -> None:
        engine.step(np.ones(engine.tensor.shape))  # what came in until this layer changed
        engine.apply(layer, placement)

    async with LocalCluster(before, on_layer_applied=callback) as cluster:
        engines += [Engine(before, "local", rank=rank) for rank in range(RANKS)]
        await cluster.migrate(after)
        for engine in engines:
            engine.step(np.ones(engine.tensor.shape))
            assert engine.placement == after
            np.testing.assert_array_equal(engine.counter.collect(), engine.right)
            assert engine.right.sum() + engine.on_empty == (LAYERS + 1) * engine.tensor.size


def test_a_counter_set_to_zero_goes_on_from_there(caplog: pytest.LogCaptureFixture) -> None:
    """Each row is told of in ``resets``, and the log has one line."""
    engine = Engine(placed(np.random.default_rng(2)), "experts", np.int32)
    engine.tensor += 100
    assert (engine.counter.collect() == 100).all()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            engine.tensor[:] = 0
            engine.tensor += 7
            assert (engine.counter.collect() == 7).all()
            engine.tensor += 50
            assert (engine.counter.collect() == 50).all()
    assert engine.counter.resets == 2 * LAYERS
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "layer 0 went down" in caplog.text


def test_a_reset_shows_in_a_row_if_any_of_it_went_down() -> None:
    """The others of the row were set to zero with it, even if they have come further since."""
    engine = Engine(placed(np.random.default_rng(2)), "experts")
    engine.tensor[:] = 10
    engine.counter.collect()
    engine.tensor[1] = [3, 50, 0, 10, 11]
    assert engine.counter.collect().tolist() == [[0] * 5, [3, 50, 0, 10, 11], [0] * 5]
    assert engine.counter.resets == 1


def test_counts_from_before_are_no_load() -> None:
    """The tensor may have been counted in for hours."""
    engine = Engine(placed(np.random.default_rng(2)), "slots", start=10**9)
    assert not engine.counter.collect().any()


def test_a_placement_that_no_apply_tells_of_is_followed() -> None:
    """A rank came back with other experts: noticed by the second look; a layer whose apply is on its way is not."""
    rng = np.random.default_rng(6)
    engine = Engine(placed(rng), "slots")
    new = placed(rng)
    engine.step(np.ones(engine.tensor.shape))
    before = engine.right.copy()
    engine.placement = new
    np.testing.assert_array_equal(engine.counter.collect(), before)
    assert not engine.counter.collect().any()
    engine.step(np.ones(engine.tensor.shape))
    np.testing.assert_array_equal(engine.counter.collect(), engine.right - before)


def test_an_apply_that_is_on_its_way_is_waited_for() -> None:
    """The placement says so a moment before the callback; what the row has until then is of the old one."""
    rng = np.random.default_rng(8)
    engine = Engine(placed(rng), "slots")
    engine.step(np.ones(engine.tensor.shape))
    old, new = engine.placement, placed(rng)
    engine.placement = old.with_layers(new, 1)
    collected = engine.counter.collect()
    engine.placement = old
    engine.step(np.ones(engine.tensor.shape))
    engine.apply(0, new)
    engine.step(np.ones(engine.tensor.shape))
    np.testing.assert_array_equal(collected + engine.counter.collect(), engine.right)


@pytest.mark.parametrize("move", ["data", "resize", "storage"])
def test_a_tensor_that_moved_away_is_noticed(move: str) -> None:
    """Reading it would be reading what the engine does not count in, or memory that is gone."""
    placement = placed(np.random.default_rng(2))
    tensor = torch.zeros(LAYERS, 8, dtype=torch.int64)
    counter = AttachedCounter(tensor, lambda: placement)
    if move == "data":
        tensor.data = torch.zeros(LAYERS, 8, dtype=torch.int64)
    elif move == "resize":
        tensor.resize_(LAYERS, 7)
    else:
        tensor.untyped_storage().resize_(0)
    counter.applied(0, placed(np.random.default_rng(3)))
    with pytest.raises(ValueError, match="attach it again"):
        counter.collect()


def test_a_collect_that_is_stuck_holds_up_the_next_for_a_bounded_time() -> None:
    """And what both would have returned is returned by the next."""
    engine = Engine(placed(np.random.default_rng(2)), "experts")
    engine.step(np.ones(engine.tensor.shape))
    inside, go_on = threading.Event(), threading.Event()

    def stuck() -> None:
        inside.set()
        go_on.wait(60)
        raise TimeoutError

    hooked(engine.counter, stuck, lambda: None)
    failed: list[bool] = []

    def collect() -> None:
        try:
            engine.counter.collect()
        except TimeoutError:
            failed.append(True)

    thread = threading.Thread(target=collect)
    thread.start()
    assert inside.wait(60)
    with pytest.raises(TimeoutError, match="another collect"):
        engine.counter.collect(timeout=0.01)
    go_on.set()
    thread.join(60)
    assert failed
    del engine.counter._copy_all  # the hook
    np.testing.assert_array_equal(engine.counter.collect(), engine.right)


def read_only() -> np.ndarray:
    array = np.zeros((LAYERS, 8), dtype=np.int64)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (torch.zeros(LAYERS, 8), "dtype torch.float32"),
        (torch.zeros(LAYERS, 8, dtype=torch.int16), "dtype torch.int16"),
        (torch.zeros(LAYERS, 8, dtype=torch.int64, device="meta"), "on meta"),
        (torch.zeros(LAYERS, 8, dtype=torch.int64).to_sparse(), "sparse"),
        (torch.zeros(LAYERS, 6, dtype=torch.int64), r"shape \[3, 6\]; they must be"),
        (np.zeros((LAYERS, 8)), "is an array of float64"),
        (read_only(), "read-only"),
        ([[0] * 8] * LAYERS, "is list"),
    ],
)
def test_what_cannot_be_attached_is_refused_by_name(tensor: object, says: str) -> None:
    placement = placed(np.random.default_rng(2))
    with pytest.raises(ValueError, match=says):
        AttachedCounter(tensor, lambda: placement)


def test_a_width_of_several_kinds_needs_by() -> None:
    """As for a window."""
    even = Placement([[1, 0, 2, 3]], ep_size=2)
    with pytest.raises(ValueError, match='by="slots" or by="experts"'):
        AttachedCounter(np.zeros((1, 4), dtype=np.int64), lambda: even)
