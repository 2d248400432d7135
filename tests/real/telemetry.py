"""A rank's hooks: metrics of its own registry, and a tape of events with the threads that they came on."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

from prometheus_client import CollectorRegistry

from eplb_async.communicator import AsyncEplbCommunicator
from eplb_async.integrations.asgi import eplb_app
from eplb_async.telemetry import Event, Hook, PrometheusHook

_registry = CollectorRegistry()
_metrics = PrometheusHook(_registry)
_tape: list[tuple[str, str, dict[str, Any]]] = []


def hook(rank: int) -> Hook:
    def both(event: Event) -> None:
        _metrics(event)
        _tape.append((event.name, threading.current_thread().name, dict(event.fields)))

    return both


async def tape(comm: AsyncEplbCommunicator) -> list[tuple[str, str, dict[str, Any]]]:
    """What was told so far."""
    return list(_tape)


async def scraped(comm: AsyncEplbCommunicator) -> dict[str, float]:
    """What a scrape shows, by name and labels, once the lag was looked at."""
    _metrics.watch(comm, lag_interval=0.001)
    while True:
        samples = [sample for family in _registry.collect() for sample in family.samples]
        told = {
            f"{s.name}{sorted(v for k, v in s.labels.items() if k not in ('group', 'rank'))}": s.value for s in samples
        }
        if told.get("eplb_async_loop_lag_seconds_count[]"):
            return told
        await asyncio.sleep(0.001)


async def lost(comm: AsyncEplbCommunicator) -> dict[str, Any]:
    """Watch the members until one is told not to be well; answers what was told."""
    comm.watch(0.2)
    while not (told := [fields for name, _, fields in _tape if name == "peer_degraded"]):
        await asyncio.sleep(0.001)
    return told[0]


async def asked(comm: AsyncEplbCommunicator, path: str) -> dict[str, Any]:
    """What the application answers."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing is received")

    await eplb_app(comm)({"type": "http", "method": "GET", "path": path, "headers": []}, receive, send)
    return {"status": sent[0]["status"], "body": json.loads(sent[1]["body"])}
