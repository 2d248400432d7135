"""What a communicator tells a hook: ends of migrations and READs, views, peers, its own end; what the hook may do."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from eplb_async.communicator import AsyncEplbCommunicator
from eplb_async.core.placement import Placement
from eplb_async.errors import MigrationInDoubt, MigrationTimeout
from eplb_async.settings import Settings
from eplb_async.telemetry import EVENTS, Event
from eplb_async.testing import FaultPlan, MemoryFabric, run
from eplb_async.testing.cluster import LocalCluster

OLD = Placement([[0, 1, 3, 2, 3, 0, 2, 0, 1]] * 3, ep_size=3)
NEW = Placement([[2, 3, 0, 1, 0, 2, 0, 1, 3]] * 3, ep_size=3)
WITHOUT_2 = Placement([[2, 3, 0, 1, 0, 2, -1, -1, -1]] * 3, ep_size=3)
PAIR = Placement([[0, 1, 2, 3]] * 3, ep_size=2)
TURNED = Placement([[2, 1, 0, 3]] * 3, ep_size=2)


class Tape:
    """Keeps the events of every rank, each checked against the table."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        assert set(event.fields) == set(EVENTS[event.name]), event
        assert event.group == "default"
        self.events.append(event)

    def of(self, rank: int, name: str) -> list[dict[str, Any]]:
        return [dict(event.fields) for event in self.events if (event.rank, event.name) == (rank, name)]

    def cluster(self, placement: Placement, **more: Any) -> LocalCluster:
        more.setdefault("settings", settings())
        return LocalCluster(placement, telemetry=lambda _: self, **more)


def settings(**more: Any) -> Settings:
    return Settings(secret=b"s" * 16, hot_seconds=0, max_stretch_bytes=0, **more)  # a READ for each layer


@pytest.fixture
def tape() -> Iterator[Tape]:
    """A tape that has not complained about an event."""
    yield (tape := Tape())
    assert tape.events


def ended(tape: Tape, rank: int) -> dict[str, Any]:
    """The one migration of a rank."""
    (event,) = tape.of(rank, "migration_ended")
    return event


def test_a_migration_tells_what_its_report_says(tape: Tape) -> None:
    """Outcome, epoch, bytes and seconds; each READ, each layer, and the close."""

    async def main() -> None:
        async with tape.cluster(OLD) as cluster:
            reports: list[Any] = await cluster.migrate(NEW)
            for rank, report in enumerate(reports):
                event = ended(tape, rank)
                reads = tape.of(rank, "read_ended")
                assert event["outcome"] == "done"
                assert event["error"] == ""
                assert (event["epoch"], event["term"]) == (report.epoch, 0)
                assert (event["layers_committed"], event["num_layers"]) == (3, 3)
                assert set(event["seconds"]) == {"plan", "join", "move", "apply", "total"}
                for name in ("bytes_read", "bytes_copied", "reads", "retries", "loads", "polls"):
                    assert event[name] == getattr(report, name), name
                assert event["bytes_by_peer"].keys() == report.gb_per_s.keys()
                assert sum(event["bytes_by_peer"].values()) == report.bytes_read
                assert len(reads) == report.reads
                assert sum(read["bytes"] for read in reads) == report.bytes_read
                assert {read["state"] for read in reads} == {"done"}
                assert {read["peer"] for read in reads} == event["bytes_by_peer"].keys()
                assert tape.of(rank, "layer_applied") == [{"layer": layer, "epoch": report.epoch} for layer in range(3)]
                assert tape.of(rank, "migration_settled") == []
                health = cluster.comms[rank].health()
                assert (health.group, health.telemetry_errors) == ("default", 0)
                assert health.polls >= report.polls > 0
        assert [tape.of(rank, "closed") for rank in range(3)] == [[{"left": ()}]] * 3

    run(main())


def test_a_read_that_fails_ends_the_migration_as_failed_here_and_as_aborted_there(tape: Tape) -> None:
    """Each side says its own; the READ says its state."""

    async def main() -> None:
        faults = FaultPlan().fail_read("default/0.", nth=1)
        async with tape.cluster(PAIR, faults=faults, settings=settings(retry_reads=False)) as cluster:
            await cluster.migrate(TURNED)
            mine, other = ended(tape, 0), ended(tape, 1)
            assert (mine["outcome"], other["outcome"]) == ("failed", "aborted")
            assert "NIXL transfer failed with state=ERR" in mine["error"]
            assert mine["layers_committed"] == other["layers_committed"] < 3
            assert mine["epoch"] == other["epoch"] == 1
            states = [read["state"] for read in tape.of(0, "read_ended")]
            assert states.count("failed") == 1
            assert mine["bytes_read"] == sum(r["bytes"] for r in tape.of(0, "read_ended") if r["state"] == "done")

    run(main())


def test_a_read_that_is_made_again_is_counted_and_its_source_degraded_until_the_next_migration(tape: Tape) -> None:
    """The source that failed is told of, and told well again when the next migration begins."""

    async def main() -> None:
        faults = FaultPlan().fail_read("default/0.", nth=0)
        async with tape.cluster(OLD, faults=faults) as cluster:
            await cluster.migrate(NEW)
            assert ended(tape, 0)["outcome"] == "done"
            assert ended(tape, 0)["retries"] >= 1
            (event,) = tape.of(0, "peer_degraded")
            assert "a READ from it failed" in event["reason"]
            assert tape.of(0, "peer_recovered") == []
            await cluster.migrate(OLD)
            assert tape.of(0, "peer_recovered") == [{"peer": event["peer"]}]

    run(main())


def test_a_deadline_is_a_timeout_and_the_read_too(tape: Tape) -> None:
    """A READ that never ends: the reader's migration times out; the others' is aborted by it."""

    async def main() -> None:
        faults = FaultPlan().hold_read("default/0.", nth=0)
        async with tape.cluster(PAIR, faults=faults) as cluster:
            mine: Any = (await cluster.migrate(TURNED, timeout=2.0))[0]
            assert isinstance(mine, TimeoutError), mine
            assert ended(tape, 0)["outcome"] == "timeout"
            assert "timeout" in [read["state"] for read in tape.of(0, "read_ended")]
            assert ended(tape, 0)["seconds"]["total"] == pytest.approx(2.0, abs=0.1)
            cluster.fabric.unhold()

    run(main())


def test_a_cancel_is_told_at_once_and_the_end_of_its_epoch_when_it_is_known(tape: Tape) -> None:
    """``migration_ended`` belongs to the call; ``migration_settled`` says at which layer all ranks ended."""

    async def main() -> None:
        faults = FaultPlan().hold_read("default/0.", nth=2)
        async with tape.cluster(PAIR, faults=faults) as cluster:
            running = [asyncio.ensure_future(comm.migrate(TURNED, timeout=60.0)) for comm in cluster.comms]
            while cluster.comms[0].health().committed < 1:
                await asyncio.sleep(0.01)
            running[0].cancel()
            await asyncio.wait(running)
            event = ended(tape, 0)
            assert event["outcome"] == "cancelled"
            assert 1 <= event["layers_committed"] < 3
            while cluster.comms[0].health().phase != "idle":
                await asyncio.sleep(0.01)
            (settled,) = tape.of(0, "migration_settled")
            assert settled["epoch"] == event["epoch"] == 1
            assert settled["layers_committed"] == ended(tape, 1)["layers_committed"] >= event["layers_committed"]
            assert "cancelled" in [read["state"] for read in tape.of(0, "read_ended")]
            assert ended(tape, 1)["outcome"] == "aborted"
            cluster.fabric.unhold()

    run(main())


def test_a_call_that_is_refused_before_anything_is_sent_has_no_epoch(tape: Tape) -> None:
    """An earlier migration does not settle: the call times out without one."""

    async def main() -> None:
        async with tape.cluster(PAIR) as cluster:
            cluster.stop(1)
            with pytest.raises(MigrationTimeout):
                await cluster.comms[0].migrate(TURNED, timeout=1.0)
            event = ended(tape, 0)
            assert (event["outcome"], event["epoch"], event["reads"]) == ("timeout", 0, 0)
            cluster.resume(1)

    run(main())


def test_in_doubt_is_told_and_how_it_ended_after_the_word(tape: Tape) -> None:
    """Two ranks, one dies with a vote outstanding: in doubt until the caller excludes it."""

    async def main() -> None:
        async with tape.cluster(PAIR, settings=settings(settle_timeout=2.0)) as cluster:
            comm = cluster.comms[1]
            running = asyncio.ensure_future(cluster.migrate(TURNED, timeout=20.0))
            while comm.health().prepared <= comm.health().committed:
                await asyncio.sleep(0)
            cluster.kill(0)
            result = (await running)[1]
            assert isinstance(result, MigrationInDoubt), result
            assert ended(tape, 1)["outcome"] == "in_doubt"
            assert tape.of(1, "migration_settled") == []
            assert tape.of(1, "peer_degraded") == [{"peer": 0, "reason": "disconnected"}]
            await comm.exclude(0)
            while comm.health().phase != "idle":
                await asyncio.sleep(0.01)
            assert len(tape.of(1, "migration_settled")) == 1
            assert tape.of(1, "view_changed")[-1]["members"] == (1,)

    run(main())


def test_a_death_a_view_a_return(tape: Tape) -> None:
    """The dead rank is named, the view told, and when it is back it is well again."""

    async def main() -> None:
        async with tape.cluster(OLD) as cluster:
            cluster.kill(2)
            await cluster.migrate(WITHOUT_2, ranks=(0, 1))
            for rank in (0, 1):
                assert tape.of(rank, "peer_degraded") == [{"peer": 2, "reason": "disconnected"}]
                (view,) = tape.of(rank, "view_changed")
                assert view["members"] == (0, 1)
                assert view["term"] == cluster.comms[rank].health().term
            back = asyncio.ensure_future(cluster.restart(2, OLD))
            await cluster.reconnect(2)
            await back
            for rank in (0, 1):
                assert tape.of(rank, "peer_recovered") == [{"peer": 2}]
                assert tape.of(rank, "view_changed")[-1]["members"] == (0, 1, 2)

    run(main())


def test_a_silent_peer_is_told_of_once_however_long_it_is_silent(tape: Tape) -> None:
    """The hook hears of it when it begins, and when it is heard again."""

    async def main() -> None:
        async with tape.cluster(PAIR) as cluster:
            cluster.comms[0].watch(0.5)
            cluster.stop(1)
            await asyncio.sleep(60)
            (event,) = tape.of(0, "peer_degraded")
            assert event["peer"] == 1
            assert event["reason"].startswith("not heard for")
            assert cluster.comms[0].health().degraded[1] == event["reason"]
            cluster.resume(1)
            await asyncio.sleep(10)
            assert tape.of(0, "peer_recovered") == [{"peer": 1}]
            assert len(tape.of(0, "peer_degraded")) == 1

    run(main())


def test_a_rank_that_was_excluded_alive_tells_that_it_is_fenced(tape: Tape) -> None:
    """And the others who was excluded by whose word."""

    async def main() -> None:
        async with tape.cluster(OLD) as cluster:
            await asyncio.gather(*(cluster.comms[rank].exclude(2) for rank in (0, 1)))
            await cluster.migrate(WITHOUT_2, ranks=(0, 1))
            await cluster.migrate(OLD, ranks=(2,), timeout=5.0)
            assert len(tape.of(2, "fenced")) == 1
            assert tape.of(0, "peer_degraded") == [{"peer": 2, "reason": "excluded by the caller"}]

    run(main())


def test_a_recycled_agent_is_told_of_and_its_polls_still_count(tape: Tape) -> None:
    """``rebind`` replaces the agent; the polls of the old one stay in health."""

    async def main() -> None:
        async with tape.cluster(PAIR) as cluster:
            await cluster.migrate(TURNED)
            before = cluster.comms[0].health()
            await cluster.comms[0].rebind()
            (event,) = tape.of(0, "agent_recycled")
            assert event["reason"] == "weights were rebound"
            after = cluster.comms[0].health()
            assert after.recycled == 1
            assert after.polls >= before.polls

    run(main())


@pytest.mark.parametrize("failure", [ValueError("no"), asyncio.CancelledError(), SystemExit(3)], ids=repr)
def test_what_a_hook_raises_is_logged_once_and_counted_and_changes_nothing(
    failure: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    """Not even what asyncio would take for a cancel or an exit."""

    def hook(event: Event) -> None:
        raise failure

    async def main() -> None:
        async with LocalCluster(PAIR, telemetry=lambda rank: hook if rank == 0 else None, settings=settings()) as c:
            assert not [error for error in await c.migrate(TURNED) if isinstance(error, Exception)]
            assert c.comms[0].health().telemetry_errors > 3
            assert c.comms[1].health().telemetry_errors == 0
            assert c.wrong_bytes() == 0

    with caplog.at_level(logging.ERROR, "eplb_async.telemetry"):
        run(main())
    (record,) = [record for record in caplog.records if record.name == "eplb_async.telemetry"]
    assert "the telemetry hook raised at event" in record.getMessage()
    assert record.exc_info is not None


def test_a_hook_may_ask_for_health_and_runs_in_the_context_of_open() -> None:
    """It sees the context variables of who opened, and may call what is thread-safe."""
    variable = contextvars.ContextVar[str]("variable")
    seen: list[tuple[str, str]] = []

    async def main() -> None:
        variable.set("of the opener")
        comms: list[AsyncEplbCommunicator] = []

        def hook(event: Event) -> None:
            if event.name == "layer_applied":
                seen.append((variable.get(), comms[0].health().phase))

        async with LocalCluster(PAIR, telemetry=lambda _: hook, settings=settings()) as cluster:
            comms += cluster.comms
            variable.set("changed since")
            await cluster.migrate(TURNED)

    run(main())
    assert len(seen) == 6
    assert {context for context, _ in seen} == {"of the opener"}


async def _hook(event: Event) -> None:
    """Would have to be awaited."""


@pytest.mark.parametrize(("hook", "words"), [("a string", "cannot be called"), (_hook, "would have to be awaited")])
def test_a_hook_that_is_none_is_refused(hook: Any, words: str) -> None:
    """Before anything is opened."""
    cluster = LocalCluster(PAIR, telemetry=lambda _: hook)

    async def main() -> None:
        async with cluster:
            raise AssertionError("opened")

    with pytest.raises(TypeError, match=words):
        run(main())


def test_nothing_is_built_without_a_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """No event, no emitter, and no clock is read for one."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("built")

    monkeypatch.setattr("eplb_async.telemetry.emitter.Emitter.__init__", refuse)
    monkeypatch.setattr("eplb_async.telemetry.emitter.Event", refuse)
    monkeypatch.setattr("eplb_async.communicator.migrations.Ending", refuse)
    monkeypatch.setattr("eplb_async.communicator.reads.Reads._tell", refuse)

    async def main() -> None:
        async with LocalCluster(PAIR, settings=settings()) as cluster:
            assert not [error for error in await cluster.migrate(TURNED) if isinstance(error, Exception)]
            cluster.kill(1)

    run(main())


def test_the_engine_keeps_no_communicator_alive_that_its_hook_holds() -> None:
    """A hook that holds its communicator is no reason for the engine's thread to hold either."""

    class Holder:
        comm: AsyncEplbCommunicator | None = None

        def __call__(self, event: Event) -> None:
            assert self.comm is None or self.comm.health()

    async def main() -> None:
        holders = [Holder(), Holder()]
        gone: list[weakref.ref[Any]] = [weakref.ref(holder) for holder in holders]
        fabric = MemoryFabric()
        take: Callable[[int], Holder] = holders.__getitem__
        cluster = LocalCluster(PAIR, telemetry=take, settings=settings(), fabric=fabric)
        async with cluster:
            for holder, comm in zip(holders, cluster.comms, strict=True):
                holder.comm = comm
            sessions = [comm._session for comm in cluster.comms]
        cluster._telemetry = lambda _: None
        cluster.comms.clear()
        del holders, take, holder, comm
        gc.collect()
        assert [ref() for ref in gone] == [None, None]
        assert all(session.emitter is not None for session in sessions)
        sessions[0].emitter.emit("closed", left=())  # type: ignore[union-attr]

    run(main())
