"""What health says, as Prometheus metrics that are made when they are scraped."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

PHASES = (
    "idle",
    "joined",
    "open",
    "activating",
    "settling",
    "in_doubt",
    "view_change",
    "suspended",
    "closing",
    "closed",
    "fenced",
)


@dataclass(frozen=True, slots=True)
class _Shown:
    """A metric: its name, its text, how it is taken from a health, and the label that its parts have."""

    name: str
    text: str
    take: Callable[[Any], Any]
    label: str = ""
    family: Callable[..., Any] = GaugeMetricFamily

    def empty(self) -> Any:
        labels = ("group", "rank", self.label) if self.label else ("group", "rank")
        return self.family(f"eplb_async_{self.name}", self.text, labels=labels)


def _phases(health: Any) -> dict[str, int]:
    return {phase: int(phase == health.phase) for phase in PHASES}


def _balancedness(health: Any) -> dict[str, float]:
    report = health.last_report
    both = {} if report is None else {"before": report.balancedness_before, "after": report.balancedness_after}
    return {when: value for when, value in both.items() if value is not None}


_COMMUNICATOR = (
    _Shown("phase", "1 for the phase that the communicator is in.", _phases, "phase"),
    _Shown("epoch", "Highest epoch seen.", lambda h: h.epoch),
    _Shown("term", "Number of the view.", lambda h: h.term),
    _Shown("members", "Ranks of the view.", lambda h: len(h.members)),
    _Shown("peers_degraded", "Peers that are not well.", lambda h: len(h.degraded)),
    _Shown("peer_degraded", "1 for each peer that is not well.", lambda h: dict.fromkeys(h.degraded, 1), "peer"),
    _Shown("reads_in_flight", "READs that have not ended.", lambda h: h.reads_in_flight),
    _Shown("oldest_read_seconds", "Age of the oldest READ that has not ended.", lambda h: h.oldest_read_seconds),
    _Shown("quarantined_bytes", "Bytes that READs without an awaiter may write.", lambda h: h.quarantined_bytes),
    _Shown("paused", "1 while no READ is posted because of pause().", lambda h: int(h.paused)),
    _Shown("weight_version", "Weight version of the rows.", lambda h: h.weight_version),
    _Shown("half_written_layers", "Layers whose update did not end well.", lambda h: len(h.half_written)),
    _Shown("polls", "Native polls.", lambda h: h.polls, family=CounterMetricFamily),
    _Shown("dropped_messages", "Control messages dropped.", lambda h: h.dropped, "reason", family=CounterMetricFamily),
    _Shown(
        "callback_errors", "Times on_layer_applied raised.", lambda h: h.callback_errors, family=CounterMetricFamily
    ),
    _Shown("telemetry_errors", "Times the hook raised.", lambda h: h.telemetry_errors, family=CounterMetricFamily),
)
_SERVICE = (
    _Shown("rebalances", "Rounds that have ended.", lambda h: h.rounds, "outcome", family=CounterMetricFamily),
    _Shown("rebalance_failures", "Rounds that failed in a row.", lambda h: h.failures),
    _Shown("balancedness", "Of the last round's loads: as they were, and by its placement.", _balancedness, "when"),
    _Shown("service_paused", "1 while the service is paused.", lambda h: int(h.paused)),
    _Shown("service_steps", "Steps recorded.", lambda h: h.steps, family=CounterMetricFamily),
    _Shown("service_dropped_messages", "Messages dropped.", lambda h: h.dropped, "reason", family=CounterMetricFamily),
)


@dataclass(slots=True)
class _Watched:
    comm: Callable[[], Any]
    service: Callable[[], Any] = lambda: None


class HealthCollector:
    """Asks for the health of what is watched at each scrape, and costs nothing between. Thread-safe."""

    def __init__(self) -> None:
        self._watched: dict[tuple[str, str], _Watched] = {}
        self._lock = threading.Lock()

    def add(self, target: Any) -> tuple[str, str]:
        """Show a communicator, or a service and its communicator, from now on.

        Returns:
            Its group and rank, as labels.
        """
        comm = getattr(target, "comm", target)
        health = comm.health()
        who = (health.group, str(health.rank))
        with self._lock:
            watched = self._watched.get(who)
            if watched is None or watched.comm() is not comm:
                watched = self._watched[who] = _Watched(weakref.ref(comm))
            if comm is not target:
                watched.service = weakref.ref(target)
        return who

    def remove(self, target: Any) -> tuple[str, str] | None:
        """Show it no more; returns what :meth:`add` did, if it was shown."""
        comm = getattr(target, "comm", target)
        with self._lock:
            who = next((who for who, watched in self._watched.items() if watched.comm() is comm), None)
            if who is not None:
                del self._watched[who]
        return who

    def shows(self, who: tuple[str, str]) -> bool:
        """Whether what has these labels is still there."""
        watched = self._watched.get(who)
        return watched is not None and watched.comm() is not None

    def describe(self) -> Iterable[Metric]:
        """Every metric, without samples."""
        return [shown.empty() for shown in (*_COMMUNICATOR, *_SERVICE)]

    def collect(self) -> Iterator[Metric]:
        """Every metric that something is to be said of."""
        with self._lock:
            for who in [who for who, watched in self._watched.items() if watched.comm() is None]:
                del self._watched[who]
            watched = [(who, here.comm(), here.service()) for who, here in self._watched.items()]
        yield from _families(_COMMUNICATOR, {who: comm.health() for who, comm, _ in watched if comm is not None})
        yield from _families(_SERVICE, {who: service.health() for who, _, service in watched if service is not None})


def _families(metrics: Iterable[_Shown], healths: Mapping[tuple[str, str], Any]) -> Iterator[Metric]:
    for shown in metrics if healths else ():
        family = shown.empty()
        for who, health in healths.items():
            value = shown.take(health)
            for label, part in value.items() if shown.label else ((None, value),):
                family.add_metric([*who] if label is None else [*who, str(label)], part)
        yield family
