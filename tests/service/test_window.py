"""The load window against one that keeps every step; what it refuses; threads."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eplb_async.core.placement import Placement
from eplb_async.errors import PlacementError
from eplb_async.policy import rebalance_experts
from eplb_async.service.balance import balancedness, layer_balancedness
from eplb_async.service.window import LoadWindow
from eplb_async.testing.placements import random_placement

LAYERS, EXPERTS, LOCAL, RANKS = 3, 5, 4, 2
PLACEMENT = random_placement(
    np.random.default_rng(0), num_layers=LAYERS, num_logical=EXPERTS, num_local_experts=LOCAL, ep_size=RANKS
)
DTYPES = (np.int64, np.int32, np.uint8, np.uint64, np.float32, np.float64)


def some_placements(rng: np.random.Generator, count: int, empty: int) -> list[Placement]:
    """The second differs from the first in one layer, and so on, as in a migration; the last in all."""
    sizes = {"num_layers": LAYERS, "num_logical": EXPERTS, "num_local_experts": LOCAL, "ep_size": RANKS}
    first, last = (random_placement(rng, **sizes, empty=empty) for _ in range(2))
    return [first, *(first.with_layers(last, upto) for upto in range(1, count - 1)), last]


def by_expert(counts: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """Loads of a step, one number at a time."""
    loads = np.zeros((LAYERS, EXPERTS))
    for layer in range(LAYERS):
        for column, expert in enumerate(slots[layer]):
            if expert >= 0:
                loads[layer, expert] += counts[layer, column]
    return loads


class EveryStep:
    """Keeps every step, and forgets by the words of the documentation: whole buckets."""

    def __init__(self, steps: int, buckets: int) -> None:
        self.steps, self.size = steps, -(-steps // buckets)
        self.buckets: list[list[tuple[np.ndarray, int]]] = [[]]

    def add(self, loads: np.ndarray, steps: int = 1) -> None:
        held = self.count(self.buckets[-1:])
        if held and held + steps > self.size:
            self.buckets.append([])
        self.buckets[-1].append((loads, steps))
        while self.count(self.buckets) > self.steps and len(self.buckets) > 1:
            del self.buckets[0]

    @staticmethod
    def count(buckets: list[list[tuple[np.ndarray, int]]]) -> int:
        return sum(steps for bucket in buckets for _, steps in bucket)

    def loads(self) -> tuple[np.ndarray, int]:
        loads = [loads for bucket in self.buckets for loads, _ in bucket]
        return np.sum([np.zeros((LAYERS, EXPERTS)), *loads], axis=0), self.count(self.buckets)


@given(data=st.data())
def test_the_window_is_what_every_step_says(data: st.DataObject) -> None:
    """Any kinds, dtypes and placements, mixed, with looks in between; each step by the placement of that step."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    steps, buckets = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 5))
    placements = some_placements(rng, 4, data.draw(st.integers(0, 2)))
    window = LoadWindow(placements[0], steps=steps, buckets=buckets, rank=1)
    reference, recorded = EveryStep(steps, buckets), 0
    for _ in range(data.draw(st.integers(0, 30))):
        placement = placements[data.draw(st.integers(0, 3))]
        kind = data.draw(st.sampled_from(["slots", "experts", "local", "add", "look"]))
        slots = {"slots": placement.physical_to_logical_map, "local": placement.local(1)}.get(kind)
        width = EXPERTS if slots is None else slots.shape[1]
        counts = rng.integers(0, 200, (LAYERS, width)).astype(data.draw(st.sampled_from(DTYPES)))
        number = data.draw(st.integers(0, 7)) if kind == "add" else 1
        if kind == "look":
            np.testing.assert_array_equal(window.loads()[0], reference.loads()[0])
            continue
        loads = counts.astype(np.float64) if slots is None else by_expert(counts, slots)
        reference.add(loads, number)
        recorded += number
        if kind == "add":
            window.add(counts, number)
        else:
            given = torch.from_numpy(counts) if data.draw(st.booleans()) and counts.dtype != np.uint64 else counts
            window.record(given, placement, data.draw(st.sampled_from([None, kind])))
    found, covered = window.loads()
    expected, expected_covered = reference.loads()
    np.testing.assert_array_equal(found, expected)
    assert covered == expected_covered
    assert window.recorded == recorded


@given(steps=st.integers(1, 40), buckets=st.integers(1, 10), extra=st.integers(0, 50))
def test_a_full_window_covers_the_steps_less_a_bucket(steps: int, buckets: int, extra: int) -> None:
    """As documented, also where the steps do not divide; before it is full it has all."""
    window = LoadWindow(PLACEMENT, steps=steps, buckets=buckets)
    ones = np.ones((LAYERS, EXPERTS))
    for number in range(1, steps + extra + 1):
        window.record(ones, PLACEMENT)
        loads, covered = window.loads()
        assert (loads == covered).all()
        assert steps - -(-steps // buckets) < covered <= steps if number > steps else covered == number


def test_counts_do_not_overflow_and_are_the_callers_to_reuse() -> None:
    """Sums go beyond what the dtype holds; an array that is rewritten afterwards changes nothing."""
    window = LoadWindow(PLACEMENT, steps=1000)
    for dtype, most in ((np.uint8, 255), (np.int32, 2**31 - 1), (np.int64, 2**52)):
        counts = np.full((LAYERS, EXPERTS), most, dtype=dtype)
        before = window.loads()[0]
        for _ in range(3):
            window.record(counts, PLACEMENT)
        counts[:] = 0
        assert (window.loads()[0] - before == 3.0 * most).all()


def test_loads_are_a_copy() -> None:
    """Who asked may write into them."""
    window = LoadWindow(PLACEMENT, steps=4)
    window.record(np.ones((LAYERS, EXPERTS)), PLACEMENT)
    window.loads()[0][:] = 7
    assert (window.loads()[0] == 1).all()


def test_counts_on_empty_slots_are_of_no_expert() -> None:
    """Dropped, and told of."""
    window = LoadWindow(Placement([[0, 1, -1, 1]], ep_size=2), steps=4)
    placement = Placement([[0, 1, -1, 1]], ep_size=2)
    window.record(np.array([[1, 2, 4, 8]]), placement)
    window.record(np.array([[1, 2, 4, 8]]), Placement([[-1, 1, 0, -1]], ep_size=2))
    assert window.loads()[0].tolist() == [[1 + 4, 10 + 2]]
    assert window.dropped == 4 + 9


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        (np.ones((LAYERS, 8), dtype=bool), "dtype bool"),
        (np.ones((LAYERS, 8), dtype=complex), "dtype complex128"),
        (np.ones((LAYERS, 8), dtype=object), "dtype object"),
        (np.ones((LAYERS, 8), dtype=np.float16), "dtype float16"),
        (torch.ones(LAYERS, 8, dtype=torch.bfloat16), "dtype torch.bfloat16"),
        (torch.ones(LAYERS, 8, dtype=torch.bool), "dtype bool"),
        (torch.ones(LAYERS, 8, device="meta"), r"on meta; attach\(\)"),
        ([["a"] * 8] * LAYERS, "dtype <U1"),
        (np.full((LAYERS, 8), np.nan), r"count nan at \[0, 0\]"),
        (np.full((LAYERS, 8), np.inf, dtype=np.float32), "count inf"),
        (np.full((LAYERS, 8), -1, dtype=np.int8), r"count -1.0 at \[0, 0\]"),
        (np.full((LAYERS, 8), -0.5), "count -0.5"),
        (np.full((LAYERS, 8), 2**64 - 1, dtype=np.uint64), "count 1.8"),
        (np.full((LAYERS, 8), 1e300), r"count 1e\+300"),
        (
            np.ones((LAYERS, 6)),
            r"\[3, 6\]; they must be \[3, 8\] \(slots\) or \[3, 5\] \(experts\) or \[3, 4\] \(local\)",
        ),
        (np.ones((LAYERS + 1, 8)), r"shape \[4, 8\]"),
        (np.ones(8), r"shape \[8\]"),
        (np.float64(1), r"shape \[\]"),
    ],
)
def test_what_cannot_be_counted_is_refused_by_name(counts: object, says: str) -> None:
    """Before anything changes."""
    window = LoadWindow(PLACEMENT, steps=1)
    window.record(np.ones((LAYERS, 5)), PLACEMENT)
    with pytest.raises(ValueError, match=says):
        window.record(counts, PLACEMENT)
    assert window.recorded == 1
    assert (window.loads()[0] == 1).all()


def test_one_wrong_number_among_many_is_found() -> None:
    """Wherever it is; a negative zero is none."""
    for at in ((0, 0), (2, 7), (1, 3)):
        counts = np.full((LAYERS, 8), -0.0)
        window = LoadWindow(PLACEMENT, steps=4)
        window.record(counts, PLACEMENT)
        counts[at] = -1
        with pytest.raises(ValueError, match=rf"count -1.0 at \[{at[0]}, {at[1]}\]"):
            window.record(counts, PLACEMENT)


def test_by_decides_where_the_width_does_not() -> None:
    """Without redundant experts slots and experts are as many; of one rank all three."""
    even = Placement([[1, 0, 2, 3]], ep_size=2)
    window = LoadWindow(even, steps=9, rank=0)
    with pytest.raises(ValueError, match=r'by="slots" or by="experts"$'):
        window.record(np.ones((1, 4)), even)
    window.record(np.array([[1, 2, 3, 4]]), even, "slots")
    assert window.loads()[0].tolist() == [[2, 1, 3, 4]]
    window.record(np.array([[1, 2, 3, 4]]), even, "experts")
    assert window.loads()[0].tolist() == [[3, 3, 6, 8]]
    with pytest.raises(ValueError, match=r'by="local" takes \[1, 2\]'):
        window.record(np.ones((1, 4)), even, "local")
    with pytest.raises(ValueError, match="by is 'rows'"):
        window.record(np.ones((1, 4)), even, "rows")
    with pytest.raises(ValueError, match="need the rank"):
        LoadWindow(even, steps=9).record(np.ones((1, 2)), even)


def test_sizes_that_cannot_be_are_refused() -> None:
    """Of the window, of a placement, of a batch of steps."""
    for wrong in ({"steps": 0}, {"steps": 4, "buckets": 0}, {"steps": 4, "rank": 2}):
        with pytest.raises(ValueError, match=r"1 or more|outside"):
            LoadWindow(PLACEMENT, **wrong)
    window = LoadWindow(PLACEMENT, steps=4)
    other = Placement.initial(LAYERS, 6, ep_size=2, num_redundant=2)
    with pytest.raises(PlacementError, match="num_logical is 5 in the old and 6"):
        window.record(np.ones((LAYERS, 8)), other)
    with pytest.raises(ValueError, match="steps is -1"):
        window.add(np.ones((LAYERS, 5)), -1)
    with pytest.raises(ValueError, match=r"takes \[3, 5\]"):
        window.add(np.ones((LAYERS, 8)), 1)
    assert window.recorded == 0


def test_buckets_hold_two_arrays_however_often_the_placement_changes() -> None:
    """Memory is bounded by the sizes: nothing is kept of a placement but the last of each bucket."""
    placements = some_placements(np.random.default_rng(3), 4, 0)
    window = LoadWindow(PLACEMENT, steps=80, buckets=8)
    for step in range(200):
        window.record(np.ones((LAYERS, 8)), placements[step % 4])
    arrays = [array for bucket in window._buckets for array in (bucket.slots, bucket.experts)]
    assert len(arrays) <= 2 * 9
    assert sum(array.nbytes for array in arrays) <= 9 * LAYERS * (8 + 5) * 8


def test_threads_lose_nothing_and_count_nothing_twice() -> None:
    """Four record with placements of their own, while one looks."""
    placements = some_placements(np.random.default_rng(4), 4, 0)
    steps = 500
    window = LoadWindow(PLACEMENT, steps=4 * steps + 1, buckets=7)
    looks: list[int] = []
    over = threading.Event()

    def count(thread: int) -> None:
        rng = np.random.default_rng(thread)
        for _ in range(steps):
            placement = placements[int(rng.integers(0, 4))]
            counts = (placement.physical_to_logical_map == thread).astype(np.int64)
            window.record(counts / counts.sum(axis=1, keepdims=True), placement)

    def look() -> None:
        while not over.is_set():
            loads, covered = window.loads()
            looks.append(covered)
            np.testing.assert_allclose(loads.sum(axis=1), covered)

    threads = [threading.Thread(target=count, args=(number,)) for number in range(4)]
    looker = threading.Thread(target=look)
    for thread in (*threads, looker):
        thread.start()
    for thread in threads:
        thread.join(60)
    over.set()
    looker.join(60)
    loads, covered = window.loads()
    assert covered == window.recorded == 4 * steps
    np.testing.assert_allclose(loads[:, :4], steps)
    assert not loads[:, 4].any()
    assert looks == sorted(looks)
    assert looks


def test_balancedness_is_the_policys() -> None:
    """With ranks that are out, and layers without any load."""
    rng = np.random.default_rng(5)
    loads = rng.lognormal(0, 1, (3, 8))
    loads[1] = 0
    answer = rebalance_experts(loads, 12, 1, 1, 4, out=[2], current=Placement.initial(3, 8, ep_size=4, num_redundant=4))
    assert (answer.placement.local(2) == -1).all()
    np.testing.assert_allclose(layer_balancedness(loads, answer.placement), answer.balancedness)
    assert balancedness(loads, answer.placement) == pytest.approx(answer.balancedness.mean())
    assert balancedness(np.zeros((3, 8)), answer.placement) == 1
    with pytest.raises(ValueError, match=r"shape \[3, 7\]; the placement's are \[3, 8\]"):
        balancedness(loads[:, :7], answer.placement)
