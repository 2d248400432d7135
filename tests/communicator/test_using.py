"""Who uses a layer sees one placement of it, an apply waits for them and is waited for; each wait is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st

from eplb_async.communicator import MigrationReport, session
from eplb_async.communicator.using import Users
from eplb_async.core.messages import Ping
from eplb_async.core.placement import Placement
from eplb_async.engine import Engine, LoopEngine
from eplb_async.errors import ActivationTimeout, CommunicatorClosed, MigrationAborted, MigrationTimeout
from eplb_async.settings import Settings
from eplb_async.testing import run
from eplb_async.testing.cluster import LocalCluster
from tests.communicator.groups import NEW, OLD, THREE, THREE_NEW, all_report, eventually

pytestmark = pytest.mark.timeout(60)


def settings(**more: Any) -> Settings:
    return Settings(secret=b"the cluster's secret", **{"activation_timeout": 2.0, **more})


async def waits_for_users(c: LocalCluster, rank: int = 0) -> None:
    await eventually(lambda: bool(c.comms[rank].health().in_use))


# ------------------------------------------------------------------------------------------ one layer and its users
def test_an_apply_waits_for_those_inside_and_those_who_come_wait_for_it() -> None:
    """Writer first: nobody enters the layer behind an apply; other layers are free; rows and placement agree."""

    async def main() -> None:
        async with LocalCluster(OLD, settings=settings()) as c:
            comm, rows = c.comms[0], c.rows[0]
            async with comm.using(1) as placement:
                assert placement == OLD
                migrating = asyncio.ensure_future(c.migrate(NEW))
                await waits_for_users(c)
                assert comm.placement == OLD.with_layers(NEW, 1)
                async with comm.using(0) as other, comm.using(2):
                    assert other == OLD.with_layers(NEW, 1)
                coming = asyncio.ensure_future(comm.using(1).__aenter__())
                await asyncio.sleep(1.0)
                assert not coming.done()
                assert not migrating.done()
                assert rows.wrong_bytes(comm.placement) == 0
                assert comm.placement.local(0)[1].tolist() == placement.local(0)[1].tolist()
            left = asyncio.get_running_loop().time()
            entered = await coming
            assert asyncio.get_running_loop().time() - left < 0.5, "it was woken, not timed out (virtual seconds)"
            assert entered.local(0)[1].tolist() == NEW.local(0)[1].tolist()
            await comm.using(1).__aexit__()
            all_report(await migrating)
            assert comm.placement == NEW
            assert c.wrong_bytes() == 0
            assert comm.health().in_use == {}

    run(main())


def test_health_says_how_many_use_the_layer_that_waits() -> None:
    async def main() -> None:
        async with LocalCluster(OLD, settings=settings()) as c:
            comm = c.comms[0]
            async with comm.using(2), comm.using(2), comm.using(0):
                assert comm.health().in_use == {}
                migrating = asyncio.ensure_future(c.migrate(NEW))
                await eventually(lambda: comm.health().in_use == {0: 1})
                await asyncio.sleep(0.1)
                assert c.comms[1].placement == NEW, "the other rank waits for nobody"
                health = comm.health()
                assert health.phase == "activating"
                assert "layer 0 is committed and waits for 1 users to leave it" in str(health)
                comm.using(0).__exit__()
                await eventually(lambda: comm.health().in_use == {2: 2})
                assert comm.health().phase == "activating"
                comm.using(0).__enter__()
            all_report(await migrating)
            assert comm.health().phase == "idle"

    run(main())


def test_the_watchdog_says_what_to_look_for(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with LocalCluster(OLD, settings=settings()) as c:
            async with c.comms[0].using(1):
                migrating = asyncio.ensure_future(c.migrate(NEW, timeout=8.0))
                await asyncio.sleep(6.0)
            all_report(await migrating)

    run(main())
    assert "activating" in caplog.text
    assert "layer 1 is committed and waits for 1 users to leave it" in caplog.text
    assert "inside of using() for that layer" in caplog.text


def test_one_who_comes_waits_for_so_long_and_no_longer() -> None:
    async def main() -> None:
        async with LocalCluster(OLD, settings=settings()) as c:
            comm, loop = c.comms[0], asyncio.get_running_loop()
            async with comm.using(1):
                migrating = asyncio.ensure_future(c.migrate(NEW))
                await waits_for_users(c)
                begun = loop.time()
                with pytest.raises(
                    ActivationTimeout, match=r"layer 1 was not entered within 2 s: .* 1 users"
                ) as caught:
                    async with comm.using(1):
                        pass
                assert loop.time() - begun == pytest.approx(2.0, abs=0.01)
                assert (caught.value.layer, caught.value.step, caught.value.ranks) == (1, 0, (0,))
                assert "enters again waits for itself" in str(caught.value), "this one did"
                assert comm.health().in_use == {1: 1}
            all_report(await migrating)

    run(main())


def test_one_who_is_cancelled_while_entering_is_not_inside() -> None:
    async def main() -> None:
        async with LocalCluster(OLD, settings=settings()) as c:
            comm = c.comms[0]
            async with comm.using(1):
                migrating = asyncio.ensure_future(c.migrate(NEW))
                await waits_for_users(c)
                comings = [asyncio.ensure_future(comm.using(1).__aenter__()) for _ in range(3)]
                await asyncio.sleep(0.1)
                comings[0].cancel()
                await asyncio.wait(comings[:1])
                assert comings[0].cancelled()
            comings[1].cancel()  # in the moment in which it may enter
            all_report(await migrating)
            assert (await comings[2]).local(0)[1].tolist() == NEW.local(0)[1].tolist()
            assert comings[1].cancelled()
            comm.using(1).__exit__()
            all_report(await c.migrate(OLD))

    run(main())


# -------------------------------------------------------------------------------------------- what migrate says
def test_a_deadline_that_passes_while_a_layer_is_in_use_says_so_and_the_next_waits() -> None:
    """ActivationTimeout on this rank, a report on the others; committed stays committed; what comes next waits."""

    async def main() -> None:
        async with LocalCluster(OLD, settings=settings()) as c:
            comm = c.comms[0]
            async with comm.using(2):
                mine, other = await c.migrate(NEW, timeout=3.0)
                assert isinstance(other, MigrationReport)
                assert isinstance(mine, ActivationTimeout), mine
                assert (mine.layer, mine.step, mine.ranks, mine.committed_layers) == (2, 0, (0,), 3)
                assert "layer 2 is committed, and its 1 users on rank 0" in str(mine)
                assert comm.health().phase == "activating"
                for call in (
                    lambda: comm.migrate(OLD, timeout=1.0),
                    lambda: comm.suspend(timeout=1.0),
                    lambda: comm.rebind(timeout=1.0),
                    lambda: comm.updating_weights(timeout=1.0).__aenter__(),
                ):
                    with pytest.raises(MigrationTimeout, match="layer 2 is committed and waits for 1 users"):
                        await call()
                assert comm.placement == OLD.with_layers(NEW, 2)
            all_report(await c.migrate(OLD))
            assert c.wrong_bytes() == 0

    run(main())


def test_users_that_come_in_the_way_behind_the_deadline_do_not_hold_the_caller() -> None:
    """Layer 0 is in use at the deadline; when it is left another is: the caller has its answer, and it stays so."""

    async def main() -> None:
        async with LocalCluster(OLD, settings=settings()) as c:
            comm = c.comms[0]
            async with comm.using(1):
                async with comm.using(0):
                    results = await c.migrate(NEW, timeout=1.0)
                    assert isinstance(results[0], ActivationTimeout)
                    assert results[0].layer == 0
                await eventually(lambda: comm.health().in_use == {1: 1})
            await eventually(lambda: comm.health().phase == "idle")
            assert c.wrong_bytes() == 0

    run(main())


def test_a_rank_that_cannot_vote_for_its_users_says_so_to_all() -> None:
    """Staging for one layer: what waits for its users holds the staging, and the next layer cannot be voted for."""

    async def main() -> None:
        async with LocalCluster(OLD, settings=settings(staging_layers=1)) as c:
            async with c.comms[0].using(0):
                calls = (comm.migrate(NEW, timeout=timeout) for comm, timeout in zip(c.comms, (1.0, 9.0), strict=True))
                mine, other = await asyncio.gather(*calls, return_exceptions=True)
                assert isinstance(mine, ActivationTimeout), mine
                assert mine.committed_layers == 1
                assert isinstance(other, MigrationAborted), other
                assert other.origin == 0
                assert "layer 0 is committed and waits for 1 users to leave it" in other.reason
            await eventually(lambda: all(comm.health().phase == "idle" for comm in c.comms))
            assert [comm.placement for comm in c.comms] == [OLD.with_layers(NEW, 1)] * 2
            all_report(await c.migrate(NEW))

    run(main())


def test_a_layer_in_use_outlives_a_cancel() -> None:
    async def main() -> None:
        async with LocalCluster(OLD, settings=settings()) as c:
            comm = c.comms[0]
            async with comm.using(0):
                migrating = [asyncio.ensure_future(comm.migrate(NEW, timeout=30.0)) for comm in c.comms]
                await waits_for_users(c)
                migrating[0].cancel()
                await asyncio.wait(migrating[:1])
                assert migrating[0].cancelled()
                await asyncio.sleep(1.0)
                assert comm.placement == OLD
            await asyncio.wait(migrating[1:])
            await eventually(lambda: comm.health().phase == "idle")
            assert comm.placement == c.comms[1].placement
            all_report(await c.migrate(NEW))
            assert c.wrong_bytes() == 0

    run(main())


# ------------------------------------------------------------------------------------------------------- the end
def test_a_close_waits_for_the_users_of_a_committed_layer() -> None:
    async def main() -> None:
        async with LocalCluster(OLD, settings=settings()) as c:
            comm = c.comms[0]
            async with comm.using(0):
                migrating = asyncio.ensure_future(c.migrate(NEW))
                await eventually(lambda: comm.health().phase == "activating")
                closing = asyncio.ensure_future(comm.aclose(timeout=10.0))
                await asyncio.sleep(1.0)
                assert not closing.done()
                with pytest.raises(CommunicatorClosed, match="layer 1 cannot be used: the communicator is closed"):
                    async with comm.using(1):
                        pass
            assert await closing == ()
            await migrating
            assert comm.placement == NEW
            assert c.wrong_bytes() == 0

    run(main())


def test_a_close_says_which_layers_it_could_not_apply(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with LocalCluster(OLD, settings=settings()) as c:
            comm = c.comms[0]
            async with comm.using(1), comm.using(1):
                migrating = asyncio.ensure_future(c.migrate(NEW))
                await eventually(lambda: comm.health().phase == "activating")
                why = "committed and not applied: 2 users of layer 1 had not left"
                assert await comm.aclose(timeout=1.0) == (f"layer 1, {why}", f"layer 2, {why}")
                assert comm.placement == OLD.with_layers(NEW, 1)
                assert c.wrong_bytes() == 0
            await migrating
            assert c.wrong_bytes() == 0

    run(main())
    assert "broken" not in caplog.text


def test_users_without_a_migration_do_not_hold_a_close() -> None:
    async def main() -> None:
        async with LocalCluster(OLD, settings=settings()) as c, c.comms[0].using(0):
            begun = asyncio.get_running_loop().time()
            assert await c.comms[0].aclose() == ()
            assert asyncio.get_running_loop().time() - begun < 1.0

    run(main())


def test_a_fenced_rank_applies_what_was_committed_and_lets_nobody_in() -> None:
    async def main() -> None:
        async with LocalCluster(THREE, settings=settings()) as c:
            comm = c.comms[2]
            async with comm.using(2):
                migrating = asyncio.ensure_future(c.migrate(THREE_NEW))
                await eventually(lambda: comm.health().phase == "activating")
                coming = asyncio.ensure_future(comm.using(2).__aenter__())
                await asyncio.gather(c.comms[0].exclude(2), c.comms[1].exclude(2))
                comm._session.driver.send(0, Ping(term=0))  # it speaks up, as with watch(), and is told
                await eventually(lambda: comm.health().phase == "fenced")
                with pytest.raises(CommunicatorClosed, match="fenced"):
                    await coming
                with pytest.raises(CommunicatorClosed, match="fenced"):
                    async with comm.using(0):
                        pass
                assert comm.placement == THREE.with_layers(THREE_NEW, 2)
            await migrating
            await eventually(lambda: comm.placement == THREE_NEW)
            await eventually(lambda: not comm.health().in_use and comm._session.driver.attempt is None)
            with pytest.raises(CommunicatorClosed, match="fenced"):
                async with comm.using(2):
                    pass
            assert c.wrong_bytes([2]) == 0

    run(main())


def test_on_cuda_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that were queued inside would run when the ``with`` is over."""
    monkeypatch.setattr(session, "_on_cuda", lambda weights: True)

    async def main() -> None:
        async with LocalCluster(OLD, settings=settings()) as c:
            with pytest.raises(RuntimeError, match=r"CUDA.*comm\.step\(\)"):
                c.comms[0].using(0)
            all_report(await c.migrate(NEW))

    run(main())


def test_using_is_refused_where_it_would_promise_nothing() -> None:
    async def main() -> None:
        async with LocalCluster(OLD, settings=settings(activation="step")) as c:
            with pytest.raises(RuntimeError, match=r"layers are applied at steps.*comm\.step\(\)"):
                c.comms[0].using(0)
        async with LocalCluster(OLD, settings=settings()) as c:
            for wrong in (-1, 3, "0", None, [1], 0.5):
                with pytest.raises(ValueError, match="need a number from 0 to 2"):
                    c.comms[0].using(wrong)  # type: ignore[arg-type]
            with c.comms[0].using(np.int64(1)) as placement:  # type: ignore[arg-type]
                assert placement == OLD
            comm = c.comms[0]
        for _ in range(2):
            with pytest.raises(CommunicatorClosed, match="closed"), comm.using(1):
                pass

    run(main())


def test_what_raises_inside_has_left() -> None:
    async def main() -> None:
        async with LocalCluster(OLD, settings=settings()) as c:
            with pytest.raises(KeyError):
                async with c.comms[0].using(0):
                    raise KeyError
            with pytest.raises(KeyError), c.comms[0].using(0):
                raise KeyError
            all_report(await c.migrate(NEW))

    run(main())


# ------------------------------------------------------------------------------------------------------ any order
_MOVE = st.tuples(
    st.sampled_from(["enter", "enter", "leave", "cancel", "wait", "migrate"]), st.integers(0, 3), st.integers(0, 2)
)


@given(moves=st.lists(_MOVE, max_size=40))
@budget(max_examples=25, deadline=None)
def test_in_any_order_nobody_inside_sees_a_change_and_all_ends_well(moves: list[tuple[str, int, int]]) -> None:
    """Four users enter, leave and give up as they like, while migrations go back and forth."""

    async def main() -> None:
        async with LocalCluster(OLD, settings=settings(activation_timeout=100.0)) as c:
            comm = c.comms[0]
            users: dict[int, tuple[int, asyncio.Task[tuple[Placement, Any]]]] = {}
            migrating: asyncio.Future[Any] | None = None
            targets = [NEW, OLD]

            async def enter(layer: int) -> tuple[Placement, Any]:
                placement = await comm.using(layer).__aenter__()
                return placement, [rows.clone() for rows in c.rows[0].layers[layer]]

            def look() -> None:
                for layer, task in users.values():
                    if task.done():
                        placement, seen = task.result()
                        assert comm.placement.local(0)[layer].tolist() == placement.local(0)[layer].tolist()
                        assert all(map(torch.equal, c.rows[0].layers[layer], seen))

            def leave(user: int) -> None:
                layer, task = users.pop(user)
                if task.done():
                    comm.using(layer).__exit__()
                else:
                    task.cancel()

            for what, user, layer in moves:
                if what == "enter" and user not in users:
                    users[user] = (layer, asyncio.ensure_future(enter(layer)))
                elif (what == "leave" and user in users and users[user][1].done()) or (
                    what == "cancel" and user in users
                ):
                    leave(user)
                elif what == "wait":
                    await asyncio.sleep(0.01 * 10**layer)
                elif what == "migrate" and (migrating is None or migrating.done()):
                    if migrating is not None:
                        all_report(migrating.result())
                    migrating = asyncio.ensure_future(c.migrate(targets[0], timeout=1000.0))
                    targets.reverse()
                await asyncio.sleep(0)
                look()
            for user in list(users):
                leave(user)
            if migrating is not None:
                all_report(await migrating)
            all_report(await c.migrate(NEW))
            assert c.wrong_bytes() == 0
            assert not any(use.inside or use.shut or use.waiting for use in comm._session.users.uses.values())

    run(main())


# -------------------------------------------------------------------------------------------------------- threads
@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine("using")
    yield engine
    assert engine.stop()


def made(engine: LoopEngine, timeout: float = 20.0, num_layers: int = 2) -> Users:
    return Users(engine, rank=0, num_layers=num_layers, timeout=timeout, current=lambda: OLD, changed=lambda: None)


def test_threads_are_never_inside_while_the_layer_is_applied(engine: Engine) -> None:
    """Three threads enter and leave as fast as they can while the engine loop applies: none is inside meanwhile."""
    users = made(engine)
    version = [0, 0]
    over = threading.Event()
    torn: list[object] = []
    entered = [0] * 3

    def hammer(mine: int) -> None:
        try:
            while not over.is_set():
                with users.uses[mine % 2]:
                    before = version[mine % 2]
                    entered[mine] += 1
                    if before % 2 or version[mine % 2] != before:
                        torn.append((mine, before))
        except BaseException as error:
            torn.append(error)

    async def apply() -> None:
        for count in range(1500):
            layer = count % 2
            assert await users.reached(layer)
            version[layer] += 1  # odd: half applied
            await asyncio.sleep(0)
            version[layer] += 1
            users.applied(layer)

    threads = [threading.Thread(target=hammer, args=(mine,)) for mine in range(3)]
    for thread in threads:
        thread.start()
    try:
        asyncio.run(engine.run(apply))
    finally:
        over.set()
        for thread in threads:
            thread.join(30)
    assert not torn
    assert min(entered) > 0
    assert not any(use.inside or use.shut or use.waiting for use in users.uses.values())


def call(engine: Engine, action: Callable[[], object]) -> None:
    """Run something on the engine loop, and wait until it has run."""
    done = threading.Event()
    engine.post(lambda: (action(), done.set()))
    assert done.wait(30)


def test_a_blocked_thread_is_woken_by_the_apply_and_by_the_end(engine: Engine) -> None:
    users = made(engine)
    use = users.uses[0]
    ends: list[object] = []

    def one() -> None:
        try:
            with use as placement:
                ends.append(placement)
        except CommunicatorClosed as error:
            ends.append(str(error))

    for end in (lambda: users.applied(0), lambda: users.end("fenced: by test")):
        asyncio.run(engine.run(lambda: users.reached(0)))
        thread = threading.Thread(target=one)
        thread.start()
        while not use.waiting:
            time.sleep(0.001)
        call(engine, end)
        thread.join(30)
        assert not thread.is_alive()
    assert ends == [OLD, "layer 0 cannot be used: the communicator is fenced: by test"]


def test_a_thread_is_told_after_its_time_and_is_not_inside(engine: Engine) -> None:
    users = made(engine, timeout=0.05)
    asyncio.run(engine.run(lambda: users.reached(0)))
    with pytest.raises(ActivationTimeout, match=r"a migration is applying it"), users.uses[0]:
        pass
    assert not users.uses[0].inside
    assert not users.uses[0].waiting
    with users.uses[1]:
        pass


def test_a_loop_that_closes_while_its_task_waits_harms_nobody(engine: Engine) -> None:
    """The waiter's loop ends: what wakes it finds it closed, and the apply goes on."""
    users = made(engine)
    asyncio.run(engine.run(lambda: users.reached(0)))

    async def one() -> None:
        async with users.uses[0]:
            pass

    loop = asyncio.new_event_loop()
    task = loop.create_task(one())
    loop.run_until_complete(asyncio.sleep(0.01))
    assert users.uses[0].waiting
    call(engine, lambda: None)
    waiting = users.uses[0].waiting.copy()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        loop.run_until_complete(task)
    loop.close()
    for wake in waiting:
        wake()
    call(engine, lambda: users.applied(0))
    with users.uses[0]:
        pass


def test_a_plain_with_in_the_engine_loops_own_thread_is_refused_where_it_would_wait() -> None:
    async def main() -> None:
        users = made(LoopEngine(asyncio.get_running_loop()))
        with users.uses[0]:
            pass
        assert await users.reached(0)
        with pytest.raises(RuntimeError, match="async with"), users.uses[0]:
            pass
        assert not users.uses[0].inside
        users.end("closed")
        with pytest.raises(CommunicatorClosed), users.uses[0]:
            pass

    run(main())


def test_who_finds_the_door_shut_does_not_keep_an_apply_from_going_on(engine: Engine) -> None:
    """One inside leaves while another knocks: the apply is told by both, and waits for neither for ever."""
    users = made(engine)
    use = users.uses[0]
    use.inside.append(None)
    reached = threading.Event()

    async def apply() -> None:
        assert await users.reached(0)
        reached.set()

    engine.post(lambda: engine.spawn(apply(), "apply"))
    while not users.waiting:
        time.sleep(0.001)
    use.inside.append(None)  # knocks
    use.__exit__()  # the one inside leaves; the other is seen
    assert not reached.wait(0.05)
    users.step_back(use)
    assert reached.wait(30)


def test_a_fork_is_refused(engine: Engine) -> None:
    async def main() -> None:
        async with LocalCluster(OLD, settings=settings()) as c:
            engine = c.comms[0]._engine
            engine.pid += 1
            with pytest.raises(CommunicatorClosed, match="in its fork"):
                c.comms[0].using(0)
            engine.pid = os.getpid()

    run(main())
