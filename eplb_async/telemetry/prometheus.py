"""Events and health as Prometheus metrics; needs the extra ``prometheus``."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from eplb_async.errors import EplbError
from eplb_async.telemetry.event import Event
from eplb_async.telemetry.lag import LagTicker

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
    from prometheus_client.exposition import choose_encoder
except ImportError as missing:
    raise EplbError(
        "metrics need the package prometheus_client, which is not installed here: pip install 'eplb-async[prometheus]'"
    ) from missing
else:
    from eplb_async.telemetry.gauges import HealthCollector

__all__ = ["PrometheusHook"]

_WHO = ("group", "rank")
_READ_BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)
_PHASE_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
_LAG_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class PrometheusHook:
    """A hook that counts events, and shows the health of what it watches when it is scraped.

    Give it as ``telemetry=`` to ``open``, and call :meth:`watch` with what was opened. Hooks of one registry share
    their metrics, so any number of communicators may use one hook or one each; ``group`` and ``rank`` tell them apart.

    Args:
        registry: Where the metrics are registered; default ``prometheus_client.REGISTRY``.

    Raises:
        EplbError: The package prometheus_client is not installed (on import).
        ValueError: The registry has metrics of these names that are not ours.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = REGISTRY if registry is None else registry
        self._metrics = _metrics_of(self.registry)

    def __call__(self, event: Event) -> None:
        """Count an event."""
        self._metrics.count(event)

    def watch(self, target: Any, *, lag_interval: float | None = None) -> None:
        """Show the health of a communicator or service in each scrape, and measure how late its loop is.

        Call it on the loop that serves requests; where no loop runs, lag is not measured. The target is held weakly.
        What its health says is shown until it is gone, :meth:`unwatch` is called, or another of the same group and
        rank is watched; after ``aclose`` its phase is ``closed``. Calling it again does no harm, and with a service it
        adds that to its communicator.

        Args:
            target: An ``AsyncEplbCommunicator``, or a service, whose communicator is then watched too.
            lag_interval: Seconds between two looks at the loop's lag; 0 for none. Default 0.1, or as it was before.
        """
        if not callable(getattr(target, "health", None)):
            raise TypeError(f"cannot watch {target!r}: it is no communicator and no service")
        who = self._metrics.health.add(target)
        if lag_interval is None:
            if self._metrics.ticks(who):
                return
            lag_interval = 0.1
        lag = self._metrics.lag  # of a rank whose loop is never looked at there is no series
        ticker = LagTicker(lag_interval, lambda late: lag.labels(*who).observe(late)) if lag_interval > 0 else None
        self._metrics.start_ticker(who, ticker)

    def unwatch(self, target: Any) -> None:
        """Show it no more; what was counted stays."""
        if (who := self._metrics.health.remove(target)) is not None:
            self._metrics.start_ticker(who, None)


class _Metrics:
    """The metrics of one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"eplb_async_{name}", text, (*_WHO, *labels), registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"eplb_async_{name}", text, (*_WHO, *labels), registry=registry, buckets=buckets)

        self.health = HealthCollector()
        registry.register(self.health)
        self.migrations = counter("migrations", "Calls of migrate that have ended.", "outcome")
        self.phases = histogram("migration_seconds", "Wall time of migrations.", _PHASE_BUCKETS, "phase")
        self.retries = counter("read_retries", "Experts that were READ again from another rank.")
        self.bytes_read = counter("read_bytes", "Bytes that READs have brought, by the rank read from.", "peer")
        self.bytes_copied = counter("copied_bytes", "Bytes copied out of staging into rows.")
        self.reads = counter("reads", "READs that have ended.", "state")
        self.read_seconds = histogram("read_seconds", "From post to end of READs that brought bytes.", _READ_BUCKETS)
        self.layers = counter("layers_applied", "Layers that were switched to a new placement.")
        self.views = counter("view_changes", "Views that were installed.")
        self.recycles = counter("agent_recycles", "Times that the NIXL agent was replaced.")
        self.lag = histogram("loop_lag_seconds", "How late the event loop runs a timer.", _LAG_BUCKETS)
        self._tickers: dict[tuple[str, str], LagTicker] = {}
        self._lock = threading.Lock()

    def count(self, event: Event) -> None:
        fields: Any = event.fields
        who = (event.group, str(event.rank))
        match event.name:
            case "read_ended":
                self.reads.labels(*who, fields["state"]).inc()
                if fields["state"] == "done":
                    self.bytes_read.labels(*who, str(fields["peer"])).inc(fields["bytes"])
                    self.read_seconds.labels(*who).observe(fields["seconds"])
            case "layer_applied":
                self.layers.labels(*who).inc()
            case "migration_ended":
                self.migrations.labels(*who, fields["outcome"]).inc()
                self.retries.labels(*who).inc(fields["retries"])
                self.bytes_copied.labels(*who).inc(fields["bytes_copied"])
                for phase, seconds in fields["seconds"].items():
                    self.phases.labels(*who, phase).observe(seconds)
            case "view_changed":
                self.views.labels(*who).inc()
            case "agent_recycled":
                self.recycles.labels(*who).inc()
            case "closed":
                self.start_ticker(who, None)

    def ticks(self, who: tuple[str, str]) -> bool:
        """Whether a loop's lag is measured for this communicator."""
        with self._lock:
            return who in self._tickers and self._tickers[who].ticks

    def start_ticker(self, who: tuple[str, str], ticker: LagTicker | None) -> None:
        """Have this ticker and no other; one that runs on the same loop goes on."""
        with self._lock:
            before = self._tickers.pop(who, None)
            if before is not None and ticker is not None and before.is_like(ticker):
                ticker = before
            elif before is not None:
                before.stop()
            if ticker is not None:
                ticker.start(lambda: self.health.shows(who))
                self._tickers[who] = ticker


def exposition(registry: CollectorRegistry, accept: str = "") -> tuple[str, bytes]:
    """What a registry shows, in the format that an ``Accept`` header asks for: its content type, and the text."""
    try:
        encode, content_type = choose_encoder(accept)
    except Exception:  # it stumbles over some headers that no scraper sends
        encode, content_type = choose_encoder("")
    return content_type, encode(registry)


_lock = threading.Lock()
_of_registry: weakref.WeakKeyDictionary[CollectorRegistry, _Metrics] = weakref.WeakKeyDictionary()


def _metrics_of(registry: CollectorRegistry) -> _Metrics:
    with _lock:
        if registry not in _of_registry:
            _of_registry[registry] = _Metrics(registry)
        return _of_registry[registry]
