"""The counter of steps by itself: what it lets begin, what it holds up and for how long, from any thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from eplb_async.communicator.steps import Steps
from eplb_async.engine import Engine, LoopEngine
from eplb_async.errors import ActivationTimeout, CommunicatorClosed
from eplb_async.testing import run

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine("steps")
    yield engine
    assert engine.stop()


def some_steps(steps: Steps, count: int) -> None:
    for _ in range(count):
        with steps.next():
            pass


async def is_time(steps: Steps, layer: int) -> bool:
    """Whether a layer may be applied now."""
    try:
        async with asyncio.timeout(0.01):
            return await steps.reached(layer)
    except TimeoutError:
        return False


def virtual(margin: int = 2, timeout: float = 5.0) -> Steps:
    return Steps(LoopEngine(asyncio.get_running_loop()), margin=margin, timeout=timeout)


@pytest.mark.parametrize("margin", [0, 1, 5])
def test_the_hold_is_the_first_step_that_is_not_begun_undecided(margin: int) -> None:
    """In a step, between two, and idle: it waits before exactly that one, and goes on when it knows."""

    async def main() -> None:
        steps = virtual(margin)
        assert (steps.voted(0), steps.hold) == (1 + margin, 1), "an engine that never stepped is idle"
        steps.decide()
        async with steps.next():
            assert steps.voted(0) == 2 + margin
        for _ in range(margin):
            async with steps.next():
                pass
        entering = asyncio.ensure_future(steps.next().__aenter__())
        await asyncio.sleep(1.0)
        assert not entering.done()
        steps.decide()
        await entering
        assert steps.number == 2 + margin
        await steps.__aexit__()
        assert steps.voted(1) == 3 + 2 * margin
        steps.decide()
        steps.idle()
        assert (steps.voted(1), steps.hold) == (3 + 2 * margin, 3 + margin)

    run(main())


def test_a_layer_is_applied_after_the_step_before_its_own_and_never_inside_of_one() -> None:
    async def main() -> None:
        steps = virtual()
        async with steps.next():
            steps.commit(0, 4)
        for number in (2, 3):
            assert not await is_time(steps, 0)
            async with steps.next():
                assert steps.number == number
                assert not await is_time(steps, 0)
        assert await is_time(steps, 0)
        entering = asyncio.ensure_future(steps.next().__aenter__())
        await asyncio.sleep(1.0)
        assert not entering.done(), "step 4 began before the layer was applied"
        steps.applied(0)
        await entering

    run(main())


def test_an_engine_that_skips_numbers_has_the_layer_applied_before_the_first_step_that_is_not_below() -> None:
    async def main() -> None:
        steps = virtual()
        async with steps.next(10):
            steps.commit(0, 13)
        entering = asyncio.ensure_future(steps.next(100).__aenter__())
        await asyncio.sleep(0)
        assert await steps.reached(0)
        assert not entering.done()
        steps.applied(0)
        await entering
        assert steps.number == 100

    run(main())


def test_idle_brings_forward_what_was_voted_before_and_nothing_else() -> None:
    """After step 5, margin 2: votes from before have holds up to 8, votes of step 6 and later from 9 on."""

    async def main() -> None:
        for at, first in ((6, 6), (7, 6), (8, 6), (9, 9), (5, 5)):
            for known in (False, True):
                steps = virtual()
                some_steps(steps, 5)
                if known:
                    steps.commit(0, at)
                steps.idle()
                if not known:
                    steps.commit(0, at)
                assert steps.due == {0: first}
                assert await is_time(steps, 0) == (first <= 6)

    run(main())


def test_a_rank_that_came_back_says_after_which_step_it_is_idle() -> None:
    """What the others brought forward, it brings forward too; then it counts on from there."""

    async def main() -> None:
        steps = virtual()
        for wrong in (-1, 1 << 32, True, "7"):
            with pytest.raises(ValueError, match="is before step 0, or above"):
                steps.idle(wrong)  # type: ignore[arg-type]
        steps.idle(1000)
        assert (steps.voted(0), steps.hold) == (1003, 1001)
        steps.commit(0, 1003)
        steps.decide()
        assert await is_time(steps, 0)
        steps.applied(0)
        async with steps.next():
            assert steps.number == 1001
        with pytest.raises(ValueError, match="is before step 1001"):
            steps.idle(1000)

    run(main())


def test_idle_holds_the_next_step_until_what_was_voted_before_is_known() -> None:
    """Another rank may know the decision, and have applied the layer: the step after idling must not run without."""

    async def main() -> None:
        steps = virtual()
        async with steps.next():
            assert steps.voted(0) == 4
        steps.idle()
        entering = asyncio.ensure_future(steps.next().__aenter__())
        await asyncio.sleep(1.0)
        assert not entering.done()
        steps.commit(0, 4)
        steps.decide()
        assert await is_time(steps, 0)
        steps.applied(0)
        await entering
        assert steps.number == 2

    run(main())


def test_a_step_that_cannot_begin_gives_the_migration_up_and_then_itself() -> None:
    """Bounded twice; it has not begun, and can be entered again."""
    asked: list[str] = []

    async def main() -> None:
        steps = virtual(margin=0, timeout=3.0)
        steps.give_up = asked.append
        steps.awaited = lambda: {2, 1}
        async with steps.next():
            steps.voted(4)
        loop = asyncio.get_running_loop()
        begun = loop.time()
        with pytest.raises(ActivationTimeout, match=r"step 2 cannot begin: .* layer 4 .* ranks \[1, 2\]") as caught:
            async with steps.next():
                pass
        assert loop.time() - begun == pytest.approx(6.0, abs=0.01)
        assert (caught.value.layer, caught.value.step, caught.value.ranks) == (4, 2, (1, 2))
        assert asked == [
            "layer 4 was not decided before step 2, which has waited 3 s for it, for ranks [1, 2]",
        ]
        steps.decide()
        async with steps.next():
            assert steps.number == 2

    run(main())


def test_a_cancelled_entry_has_not_begun() -> None:
    async def main() -> None:
        steps = virtual(margin=0)
        steps.voted(0)
        entering = asyncio.ensure_future(steps.next().__aenter__())
        await asyncio.sleep(0.1)
        entering.cancel()
        await asyncio.gather(entering, return_exceptions=True)
        assert steps.number == 0
        steps.commit(0, 1)
        assert await is_time(steps, 0)

    run(main())


def test_a_plain_with_in_the_engine_loops_own_thread_is_refused_where_it_would_wait() -> None:
    async def main() -> None:
        steps = virtual(margin=0)
        some_steps(steps, 3)
        steps.voted(0)
        with pytest.raises(RuntimeError, match="async with"):
            some_steps(steps, 1)
        assert steps.number == 3

    run(main())


# -------------------------------------------------------------------------------------------------- threads
def test_threads_never_begin_a_step_at_or_above_a_hold_that_is_undecided(engine: Engine) -> None:
    """One thread steps as fast as it can while the engine loop votes: no step is begun at the hold before the end."""
    steps = Steps(engine, margin=0, timeout=20.0)
    over = threading.Event()
    failure: list[BaseException] = []

    def hammer() -> None:
        try:
            while not over.is_set():
                some_steps(steps, 1)
        except BaseException as error:
            failure.append(error)

    async def vote() -> int:
        late = 0
        for layer in range(1500):
            hold = steps.voted(layer)  # margin 0: what is sent is what is held
            for _ in range(3):
                late += steps.number >= hold
                await asyncio.sleep(0)
            late += steps.number >= hold
            at = hold + layer % 3
            steps.commit(layer, at)
            steps.decide()
            assert await steps.reached(layer)
            late += steps.number >= at
            await asyncio.sleep(0)
            late += steps.number >= at
            steps.applied(layer)
        return late

    thread = threading.Thread(target=hammer)
    thread.start()
    try:
        assert asyncio.run(engine.run(vote)) == 0
    finally:
        over.set()
        thread.join(30)
    assert not failure
    assert steps.number > 1500


def test_a_blocked_thread_is_woken_by_the_decision_and_by_the_end(engine: Engine) -> None:
    steps = Steps(engine, margin=0, timeout=20.0)
    some_steps(steps, 1)
    ends: list[object] = []

    def one() -> None:
        try:
            some_steps(steps, 1)
            ends.append(steps.number)
        except CommunicatorClosed as error:
            ends.append(str(error))

    for end in (steps.decide, lambda: steps.end("fenced: by test")):
        engine.post(lambda: steps.voted(0))
        while steps.hold > steps.number + 1:
            time.sleep(0.001)
        thread = threading.Thread(target=one)
        thread.start()
        while steps._wake is None:
            time.sleep(0.001)
        engine.post(end)
        thread.join(30)
        assert not thread.is_alive()
    assert ends == [2, "the communicator is fenced: by test"]


def test_a_thread_is_told_after_its_time(engine: Engine) -> None:
    steps = Steps(engine, margin=0, timeout=0.05)
    engine.post(lambda: steps.voted(0))
    while steps.hold != 1:
        time.sleep(0.001)
    with pytest.raises(ActivationTimeout):
        some_steps(steps, 1)


def test_the_end_of_each_step_is_marked(engine: Engine) -> None:
    marks: list[int] = []
    steps = Steps(engine, margin=0, timeout=1.0, mark=lambda: marks.append(steps.number))
    some_steps(steps, 3)
    assert marks == [1, 2, 3]
