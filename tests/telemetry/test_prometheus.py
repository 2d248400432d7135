"""Metrics: counted from events, taken from health at the scrape, and what becomes of them when a communicator goes."""

from __future__ import annotations

import asyncio
import gc
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from eplb_async.core.events import Phase
from eplb_async.core.placement import Placement
from eplb_async.settings import Settings
from eplb_async.telemetry import EVENTS, PrometheusHook
from eplb_async.telemetry.gauges import PHASES
from eplb_async.testing import run
from eplb_async.testing.cluster import LocalCluster

OLD = Placement([[0, 1, 3, 2, 3, 0, 2, 0, 1]] * 3, ep_size=3)
NEW = Placement([[2, 3, 0, 1, 0, 2, 0, 1, 3]] * 3, ep_size=3)
WITHOUT_2 = Placement([[2, 3, 0, 1, 0, 2, -1, -1, -1]] * 3, ep_size=3)
PAGE = Path(__file__).parents[2] / "docs" / "telemetry.md"


def cluster_of(hook: Any) -> LocalCluster:
    settings = Settings(secret=b"s" * 16, hot_seconds=0)
    return LocalCluster(OLD, telemetry=lambda _: hook, settings=settings)


@dataclass
class Scrape:
    """What a scrape shows."""

    registry: CollectorRegistry
    values: dict[tuple[str, frozenset[tuple[str, str]]], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for family in self.registry.collect():
            for sample in family.samples:
                key = (sample.name.removeprefix("eplb_async_"), frozenset(sample.labels.items()))
                assert key not in self.values, key
                self.values[key] = sample.value

    def of(self, name: str, rank: int = 0, **labels: str) -> float | None:
        return self.values.get((name, frozenset({"group": "default", "rank": str(rank), **labels}.items())))


def test_what_is_counted_is_what_the_reports_say() -> None:
    """Migrations, bytes by peer, seconds by phase, READ latency; one hook for three ranks in one registry."""

    async def main() -> None:
        registry = CollectorRegistry()
        hook = PrometheusHook(registry)
        async with cluster_of(hook) as cluster:
            for comm in cluster.comms:
                hook.watch(comm)
            reports: list[Any] = await cluster.migrate(NEW)
            seen = Scrape(registry)
            for rank, report in enumerate(reports):
                assert seen.of("migrations_total", rank, outcome="done") == 1
                by_peer = {p: seen.of("read_bytes_total", rank, peer=str(p)) for p in report.gb_per_s}
                assert sum(by_peer.values()) == report.bytes_read > 0  # type: ignore[arg-type]
                assert seen.of("copied_bytes_total", rank) == report.bytes_copied
                assert seen.of("reads_total", rank, state="done") == report.reads
                assert seen.of("read_seconds_count", rank) == report.reads
                assert seen.of("migration_seconds_count", rank, phase="total") == 1
                assert seen.of("migration_seconds_sum", rank, phase="move") == pytest.approx(report.seconds["move"])
                assert seen.of("layers_applied_total", rank) == 3
                assert seen.of("epoch", rank) == 1
                assert seen.of("members", rank) == 3
                assert seen.of("phase", rank, phase="idle") == 1
                assert seen.of("phase", rank, phase="open") == 0
                assert seen.of("peers_degraded", rank) == 0
                assert seen.of("polls_total", rank) == cluster.comms[rank].health().polls

    run(main())


def test_a_dead_rank_is_named_and_views_are_counted() -> None:
    """``peer_degraded`` has a series for each peer that is not well, and no other."""

    async def main() -> None:
        registry = CollectorRegistry()
        hook = PrometheusHook(registry)
        async with cluster_of(hook) as cluster:
            hook.watch(cluster.comms[0])
            cluster.kill(2)
            await cluster.migrate(WITHOUT_2, ranks=(0, 1))
            seen = Scrape(registry)
            assert seen.of("peer_degraded", peer="2") == 1
            assert seen.of("peer_degraded", peer="1") is None
            assert (seen.of("peers_degraded"), seen.of("members"), seen.of("view_changes_total")) == (1, 2, 1)
            assert seen.of("members", rank=1) is None  # not watched

    run(main())


def test_after_a_close_the_phase_is_closed_and_another_of_that_rank_takes_its_place() -> None:
    """Counters stay and go on; gauges go with the communicator, or with unwatch."""

    async def main() -> None:
        registry = CollectorRegistry()
        first, second = PrometheusHook(registry), PrometheusHook(registry)
        cluster = cluster_of(first)
        async with cluster:
            first.watch(cluster.comms[0])
            await cluster.migrate(NEW)
        assert Scrape(registry).of("phase", phase="closed") == 1
        async with cluster_of(second) as again:
            second.watch(again.comms[0])
            await again.migrate(NEW)
            seen = Scrape(registry)
            assert seen.of("phase", phase="idle") == 1
            assert seen.of("migrations_total", outcome="done") == 2
            cluster.comms.clear()
            gc.collect()
            assert Scrape(registry).of("epoch") == 1
            second.unwatch(again.comms[0])
            second.unwatch(again.comms[0])
            assert Scrape(registry).of("epoch") is None
            second.watch(again.comms[0])
        again.comms.clear()
        gc.collect()
        seen = Scrape(registry)
        assert seen.of("epoch") is None
        assert seen.of("migrations_total", outcome="done") == 2

    run(main())


class Service:
    """As much of a service as is watched."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self.last_report: Any = None

    def health(self) -> Any:
        return SimpleNamespace(
            rounds={"moved": 3, "failed": 1},
            failures=1,
            paused=True,
            steps=77,
            dropped={"foreign": 2},
            last_report=self.last_report,
        )


def test_a_service_is_shown_with_its_communicator() -> None:
    """Watched after its communicator, it is added; balancedness is shown where it is known."""

    async def main() -> None:
        registry = CollectorRegistry()
        hook = PrometheusHook(registry)
        async with cluster_of(hook) as cluster:
            service = Service(cluster.comms[0])
            hook.watch(cluster.comms[0])
            assert Scrape(registry).of("service_steps_total") is None
            hook.watch(service)
            seen = Scrape(registry)
            assert seen.of("epoch") == 0
            assert seen.of("rebalances_total", outcome="moved") == 3
            assert (seen.of("rebalance_failures"), seen.of("service_paused")) == (1, 1)
            assert (seen.of("service_steps_total"), seen.of("service_dropped_messages_total", reason="foreign")) == (
                77,
                2,
            )
            assert seen.of("balancedness", when="before") is None
            service.last_report = SimpleNamespace(balancedness_before=0.5, balancedness_after=None)
            assert Scrape(registry).of("balancedness", when="before") == 0.5
            assert Scrape(registry).of("balancedness", when="after") is None
            hook.watch(cluster.comms[0])
            assert Scrape(registry).of("service_paused") == 1

    run(main())


@pytest.mark.asyncio
async def test_the_lag_of_a_loop_that_blocks_is_seen_and_only_while_it_is_watched() -> None:
    """A loop that is blocked runs its timers late by that much; nothing ticks for what is gone."""
    registry = CollectorRegistry()
    hook = PrometheusHook(registry)
    comm: Any = type("Comm", (), {"health": lambda _: SimpleNamespace(group="default", rank=0)})()

    async def ticks(more_than: float) -> float:
        while (count := registry.get_sample_value("eplb_async_loop_lag_seconds_count", labels) or 0) <= more_than:
            await asyncio.sleep(0.001)
        return count

    labels = {"group": "default", "rank": "0"}
    metrics = hook._metrics
    registry.unregister(metrics.health)  # there is not much of a health to show
    hook.watch(comm, lag_interval=0.001)
    ticker = metrics._tickers["default", "0"]
    hook.watch(comm, lag_interval=0.001)
    assert metrics._tickers["default", "0"] is ticker
    count = await ticks(2)
    time.sleep(0.3)  # noqa: ASYNC251  the point of the test
    await ticks(count)
    late = {"le": "0.2", **labels}
    below = registry.get_sample_value("eplb_async_loop_lag_seconds_bucket", late)
    assert registry.get_sample_value("eplb_async_loop_lag_seconds_count", labels) > below  # type: ignore[operator]
    hook.unwatch(comm)
    while ticker.ticks:
        await asyncio.sleep(0.001)
    hook.watch(comm, lag_interval=0.001)
    again = metrics._tickers["default", "0"]
    assert again is not ticker
    del comm
    gc.collect()
    while again.ticks:
        await asyncio.sleep(0.001)


def test_what_cannot_be_watched_is_refused() -> None:
    """Named, before anything is changed."""
    hook = PrometheusHook(CollectorRegistry())
    with pytest.raises(TypeError, match="no communicator and no service"):
        hook.watch("a string")
    registry = CollectorRegistry()
    Gauge("eplb_async_epoch", "not ours", registry=registry)
    with pytest.raises(ValueError, match=r"[Dd]uplicate"):
        PrometheusHook(registry)


def test_every_phase_has_its_series() -> None:
    """The phases of the protocol, and those that health adds."""
    assert set(PHASES) == {phase.value for phase in Phase} | {"activating", "view_change", "closing", "suspended"}


def _metrics() -> set[str]:
    registry = CollectorRegistry()
    PrometheusHook(registry)
    collectors: Any = registry._collector_to_names
    families = [family for collector in collectors for family in collector.describe()]
    return {family.name + ("_total" if family.type == "counter" else "") for family in families}


def test_the_page_lists_the_metrics_that_exist() -> None:
    """Exactly these, each with a row."""
    rows = re.findall(r"^\| `(eplb_async_\w+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted(_metrics())


def test_the_page_lists_the_events_and_their_fields() -> None:
    """Exactly these, in the order of the table in the code."""
    text = PAGE.read_text(encoding="utf-8").partition("## Events")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|([^|]*)\|", text, re.MULTILINE)
    assert [(name, tuple(re.findall(r"`(\w+)`", fields))) for name, fields in rows] == list(EVENTS.items())


def test_the_alerts_of_the_page_ask_for_metrics_that_exist() -> None:
    """Every name in PromQL is one of ours, with what Prometheus appends to a histogram."""
    named = set(re.findall(r"eplb_async_\w+", PAGE.read_text(encoding="utf-8")))
    histograms = {name for name in named if name.endswith(("_bucket", "_count", "_sum"))}
    assert {re.sub(r"_(bucket|count|sum)$", "", name) for name in histograms} | (named - histograms) <= _metrics()


def test_without_the_package_the_error_names_the_extra() -> None:
    """Asked for, it says what to install; nothing else needs it, and nothing loads it before."""
    code = """
import sys
import eplb_async.telemetry.emitter
loaded = [name for name in sys.modules if name.split(".")[0] in ("prometheus_client", "asyncio", "torch")]
assert not loaded, loaded
assert "eplb_async.telemetry.logging" not in sys.modules
sys.modules["prometheus_client"] = None
try:
    eplb_async.telemetry.PrometheusHook
except eplb_async.EplbError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "pip install 'eplb-async[prometheus]'" in done.stdout, done


def test_a_scrape_is_text() -> None:
    """And has every health metric once."""

    async def main() -> None:
        registry = CollectorRegistry()
        hook = PrometheusHook(registry)
        async with cluster_of(hook) as cluster:
            for comm in cluster.comms:
                hook.watch(comm)
            await cluster.migrate(NEW)
            text = generate_latest(registry).decode()
            assert text.count("# TYPE eplb_async_phase gauge") == 1
            assert 'eplb_async_epoch{group="default",rank="2"} 1.0' in text

    run(main())
