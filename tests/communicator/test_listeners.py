"""Callbacks of applied layers: any number, in order, none in the way of another or of the communicator's end."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
import weakref

import pytest

from eplb_async.communicator.listeners import Listeners
from eplb_async.core.placement import Placement
from eplb_async.testing import run
from eplb_async.testing.cluster import LocalCluster
from tests.communicator.groups import all_report

OLD, NEW = Placement([[0, 1]] * 3, ep_size=2), Placement([[1, 0]] * 3, ep_size=2)


def test_all_are_told_in_order_with_the_placement_that_is_true_then() -> None:
    told: list[tuple[str, int]] = []

    async def main() -> None:
        async with LocalCluster(OLD, on_layer_applied=lambda _: lambda layer, _: told.append(("open", layer))) as c:
            comm = c.comms[0]
            target = [NEW]

            def first(layer: int, placement: Placement) -> None:
                told.append(("first", layer))
                assert placement == comm.placement
                assert placement.local(0)[layer] == [target[0].local(0)[layer]]
                assert c.rows[0].wrong_bytes(placement) == 0

            comm.on_applied(first)
            remove = comm.on_applied(lambda layer, _: told.append(("second", layer)))
            await c.migrate(NEW)
            mine = [(who, layer) for who, layer in told if who != "open"]
            assert mine == [(who, layer) for layer in range(3) for who in ("first", "second")]
            assert told.count(("open", 0)) == 2, "each rank has its own"
            told.clear()
            target[0] = OLD
            for _ in range(2):
                remove()
            await c.migrate(OLD)
            assert {who for who, _ in told} == {"open", "first"}

    run(main())


def test_one_added_in_mid_epoch_is_told_of_the_layers_that_come() -> None:
    told: list[int] = []

    async def main() -> None:
        async with LocalCluster(OLD) as c:
            comm = c.comms[0]
            removes = []

            def at_first(layer: int, placement: Placement) -> None:
                removes.append(comm.on_applied(lambda layer, _: told.append(layer)))
                remove()

            remove = comm.on_applied(at_first)
            await c.migrate(NEW)
            assert told == [1, 2]
            assert len(removes) == 1

    run(main())


def test_one_that_raises_is_named_and_counted_and_the_others_are_told(caplog: pytest.LogCaptureFixture) -> None:
    told: list[int] = []

    def refuse(layer: int, placement: Placement) -> None:
        raise ValueError(f"no room for layer {layer}")

    async def main() -> None:
        async with LocalCluster(OLD, on_layer_applied=lambda _: refuse) as c:
            comm = c.comms[0]
            comm.on_applied(refuse)
            comm.on_applied(lambda layer, _: told.append(layer))
            await c.migrate(NEW)
            assert comm.health().callback_errors == 6
            assert "refuse) failed for layer 2: ValueError: no room for layer 2" in comm.health().last_error
            assert told == [0, 1, 2]
            assert c.wrong_bytes() == 0

    run(main())
    assert "on_layer_applied failed for layer 0, which is applied" in caplog.text
    assert "on_applied(" in caplog.text
    assert "no room for layer 1" in caplog.text, "the log has the traceback"


@pytest.mark.parametrize("kind", [asyncio.CancelledError, SystemExit, KeyboardInterrupt, GeneratorExit])
def test_nothing_that_one_raises_ends_the_apply(kind: type[BaseException]) -> None:
    """I-7: neither what ends tasks nor what ends threads."""

    def leave(layer: int, placement: Placement) -> None:
        raise kind("so there")

    async def main() -> None:
        async with LocalCluster(OLD, on_layer_applied=lambda _: leave) as c:
            reports = await c.migrate(NEW)
            all_report(reports)
            assert c.comms[0].health().callback_errors == 3
            assert kind.__name__ in c.comms[0].health().last_error
            assert c.wrong_bytes() == 0

    run(main())


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(TypeError, match="not callable"):
        Listeners().add("refresh")  # type: ignore[arg-type]


def test_each_runs_in_the_context_it_was_added_in() -> None:
    request: contextvars.ContextVar[str] = contextvars.ContextVar("request")
    seen: list[str] = []
    listeners = Listeners()
    request.set("the one who adds")
    listeners.add(lambda *_: seen.append(request.get()))
    request.set("another")
    thread = threading.Thread(target=listeners.tell, args=(0, OLD))
    thread.start()
    thread.join(10)
    assert seen == ["the one who adds"]


@pytest.mark.filterwarnings("ignore:.*never closed:ResourceWarning")
def test_a_callback_that_holds_the_communicator_does_not_keep_it_alive() -> None:
    async def main() -> None:
        async with LocalCluster(OLD) as c:
            comm = c.comms.pop()
            session = comm._session
            comm.on_applied(lambda *_, comm=comm: comm.health())
            gone = weakref.ref(comm)
            del comm
            gc.collect()
            assert gone() is None
            assert session.listeners() is None
            await session.close(1.0)

    run(main())
