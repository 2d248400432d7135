"""What a real service tells, and how it is shown: rounds that move, rounds that fail, pause."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import numpy as np
from prometheus_client import CollectorRegistry

from eplb_async.core.placement import Placement
from eplb_async.integrations.asgi import eplb_app
from eplb_async.service import EplbService, ServiceSettings
from eplb_async.settings import Settings
from eplb_async.telemetry import EVENTS, Event, PrometheusHook
from eplb_async.testing import run
from eplb_async.testing.cluster import LocalCluster
from eplb_async.threads import Inline

PLACEMENT = Placement.initial(4, 12, ep_size=3, num_redundant=3)
MANUAL = ServiceSettings(step_interval=0, min_interval=0.0, round_timeout=1.0, watch_interval=0.0)


class Local(EplbService):
    """Works in place: the virtual clock waits for no thread."""

    _make_workers = staticmethod(lambda name: Inline())


def test_rounds_are_told_counted_and_shown() -> None:
    """One that moves, one that fails because a rank is stopped, and a pause: events, metrics, /health and /state."""
    tape: list[Event] = []
    registry = CollectorRegistry()
    hook = PrometheusHook(registry)

    def both(event: Event) -> None:
        assert set(event.fields) == set(EVENTS[event.name]), event
        tape.append(event)
        hook(event)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"eplb_async_{name}", {"group": "default", "rank": "0", **labels})

    async def main() -> None:
        settings = Settings(secret=b"s" * 16, idle_tick=0.05)
        async with LocalCluster(PLACEMENT, settings=settings) as cluster:
            services = [Local(comm, settings=MANUAL, telemetry=both) for comm in cluster.comms]
            for service in services:
                await service.__aenter__()
            hook.watch(services[0])
            app = eplb_app(services[0], registry=registry)
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://rank") as client:
                counts = np.tile(1.0 + 100.0 / (1.0 + np.arange(12)) ** 2, (4, 1))
                for service in services:
                    service.record(counts, by="experts")
                report = await services[0].rebalance()
                assert report.outcome == "moved"
                told: Any = next(e for e in tape if (e.rank, e.name) == (0, "rebalance_ended")).fields
                assert (told["outcome"], told["num_moves"]) == ("moved", report.num_moves)
                assert told["balancedness_before"] < told["balancedness_after"]
                assert value("rebalances_total", outcome="moved") == 1
                assert value("balancedness", when="after") == report.balancedness_after
                assert value("service_steps_total") == 1
                state = (await client.get("/state")).json()
                assert state["service"]["last_report"]["outcome"] == "moved"
                assert (await client.get("/health")).status_code == 200

                services[0].pause()
                await asyncio.sleep(0.1)
                assert value("service_paused") == 1
                services[0].resume()
                await asyncio.sleep(0.1)
                cluster.stop(2)
                for _ in range(2):
                    failed = await asyncio.gather(services[0].rebalance(force=True), return_exceptions=True)
                    assert isinstance(failed[0], Exception), failed
                assert value("rebalance_failures") == 2
                assert value("rebalances_total", outcome="failed") == 2
                answer = await client.get("/health")
                assert answer.status_code == 503
                assert any("2 rebalances failed in a row" in p["what"] for p in answer.json()["problems"]), answer.text
                cluster.resume(2)
            names = [event.name for event in tape if event.rank == 0]
            assert names.count("round_failed") == 2
            assert [name for name in names if "pa" in name or "resumed" in name] == [
                "rebalancing_paused",
                "rebalancing_resumed",
            ]
            await asyncio.gather(*(service.aclose() for service in services))

    run(main())
