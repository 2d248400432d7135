"""What happens in a communicator or service, told to hooks as events. The hooks are loaded when they are asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from eplb_async.telemetry.event import EVENTS, Event, Hook

if TYPE_CHECKING:
    from eplb_async.telemetry.logging import logging_hook
    from eplb_async.telemetry.prometheus import PrometheusHook

__all__ = ["EVENTS", "Event", "Hook", "PrometheusHook", "logging_hook"]

_HOME = {"PrometheusHook": "prometheus", "logging_hook": "logging"}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
