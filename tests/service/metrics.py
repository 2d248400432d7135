"""Metrics of one rank's process: its communicator's and its service's events, in a registry that is scraped."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from eplb_async.telemetry import Hook, PrometheusHook

_registry = CollectorRegistry()
_metrics = PrometheusHook(_registry)


def hook(rank: int) -> Hook:
    """The hook; one for all."""
    return _metrics


def watch(target: Any) -> None:
    """Show its health in each scrape, and how late its loop is."""
    _metrics.watch(target, lag_interval=0.01)


def scrape() -> int:
    """Scrape; answers how many series there are."""
    return sum(not line.startswith(b"#") for line in generate_latest(_registry).splitlines())
