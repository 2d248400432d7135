"""What happens in a communicator or service, told to hooks as events. The hooks are loaded when they are asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eplb_async._lazy import lazy
from eplb_async.telemetry.event import EVENTS, Event, Hook

if TYPE_CHECKING:
    from eplb_async.telemetry.logging import logging_hook
    from eplb_async.telemetry.prometheus import PrometheusHook

__all__ = ["EVENTS", "Event", "Hook", "PrometheusHook", "logging_hook"]

_HOME = {"PrometheusHook": "prometheus", "logging_hook": "logging"}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(__name__, _HOME)
