"""Calls a hook, so that nothing that it does comes back to who tells of an event."""

from __future__ import annotations

import contextvars
import inspect
import logging
import time
from collections.abc import Callable

from eplb_async.telemetry.event import Event, Hook

_log = logging.getLogger("eplb_async.telemetry")

Emit = Callable[..., None]
"""Takes the name of an event and its fields by keyword; see :meth:`Emitter.emit`."""


class Emitter:
    """Tells one hook of the events of one rank, in the context of who made this.

    Args:
        hook: The hook.
        group: Name of the group.
        rank: The rank that events happen on.

    Attributes:
        find: Gives the hook; an owner that must be free to go replaces it by one that looks for it weakly.
        errors: How often the hook has raised.
    """

    def __init__(self, hook: Hook, *, group: str, rank: int) -> None:
        if not callable(hook):
            raise TypeError(f"telemetry={hook!r} cannot be called; give a function of one event, or a hook")
        if inspect.iscoroutinefunction(hook):
            raise TypeError(
                f"telemetry={hook!r} would have to be awaited; it is called, so it must be a plain function"
            )
        self.find: Callable[[], Hook | None] = lambda: hook
        self.errors = 0
        self._group = group
        self._rank = rank
        self._context = contextvars.copy_context()

    def emit(self, name: str, **fields: object) -> None:
        """Tell the hook of an event, from any thread; never raises for what the hook does."""
        hook = self.find()
        if hook is None:
            return
        try:
            # A copy: one context cannot be entered by two threads, or again by what the hook calls.
            self._context.copy().run(hook, Event(name, self._group, self._rank, time.time(), fields))
        except KeyboardInterrupt:
            raise
        except BaseException:  # also what asyncio would take for a cancel or an exit of its own
            self.errors += 1
            if self.errors == 1:
                _log.exception(
                    "rank %d: the telemetry hook raised at event %r, which is lost to it; further failures are only "
                    "counted. Next: mend the hook, or open without one",
                    self._rank,
                    name,
                )
