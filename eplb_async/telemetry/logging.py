"""Events as log records: one readable line, and every field of its own for formatters that write JSON."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from eplb_async.telemetry.event import Event, Hook

__all__ = ["logging_hook"]

_OFTEN = ("read_ended", "layer_applied")
_TROUBLE = {
    "broken": logging.ERROR,
    "fenced": logging.ERROR,
    "peer_degraded": logging.WARNING,
    "round_failed": logging.WARNING,
}
_WELL = {
    "migration_ended": ("outcome", ("done", "cancelled")),
    "read_ended": ("state", ("done", "cancelled")),
    "rebalance_ended": ("outcome", ("moved", "not_worth_it", "too_soon", "paused", "no_load")),
}


def logging_hook(logger: logging.Logger | None = None, *, level: int = logging.INFO) -> Hook:
    """A hook that writes events to a logger.

    What ends badly is a warning, what puts the rank out of its group an error. READs and layers that go well are many,
    and written at ``DEBUG``. Records carry ``eplb_event``, ``eplb_group``, ``eplb_rank`` and ``eplb_<field>`` for each
    field. Handlers run on the engine's thread: give slow ones a ``logging.handlers.QueueHandler``.

    Args:
        logger: Where to; default the logger ``eplb_async.events``.
        level: Level of everything else that goes well.
    """
    target = logger or logging.getLogger("eplb_async.events")

    def hook(event: Event) -> None:
        at = _level(event, level)
        if target.isEnabledFor(at):
            extra = {"eplb_event": event.name, "eplb_group": event.group, "eplb_rank": event.rank}
            extra |= {f"eplb_{name}": value for name, value in event.fields.items()}
            target.log(at, "%s", _line(event), extra=extra)

    return hook


def _level(event: Event, level: int) -> int:
    if event.name in _TROUBLE:
        return _TROUBLE[event.name]
    field, good = _WELL.get(event.name, ("", ()))
    if field and event.fields.get(field) not in good:
        return logging.WARNING
    return logging.DEBUG if event.name in _OFTEN else level


def _line(event: Event) -> str:
    parts = [f"{name}={_text(value)}" for name, value in event.fields.items()]
    what = event.name.replace("_", " ")
    return " ".join([f"rank {event.rank} of {event.group!r}: {what}" + (":" if parts else ""), *parts])


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_text(part)}" for key, part in value.items()) + "}"
    if isinstance(value, str):
        return repr(" ".join(value.split())) if not value.isidentifier() else value
    return str(value)
