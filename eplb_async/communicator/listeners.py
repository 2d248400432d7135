"""Who is told of each layer that was applied."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable

from eplb_async.core.placement import Placement

AppliedCallback = Callable[[int, Placement], object]
"""Called with a layer that was applied, and where the experts are then."""


class Listeners:
    """The callbacks of one communicator, each with the context it was given in.

    The communicator holds this and the engine thread only looks at it: a callback may hold the communicator.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told: tuple[tuple[str, AppliedCallback, contextvars.Context], ...] = ()

    def __len__(self) -> int:
        return len(self._told)

    def add(self, callback: AppliedCallback, name: str = "") -> Callable[[], None]:
        """Tell a callback, too, after those that were added before; callable from any thread.

        Args:
            callback: It.
            name: What it is called in the log; default by its own name.

        Returns:
            Stops telling it; again it does nothing.

        Raises:
            TypeError: It cannot be called.
        """
        if not callable(callback):
            raise TypeError(f"a callback for applied layers cannot be {callback!r}, which is not callable")
        shown = name or f"on_applied({getattr(callback, '__qualname__', type(callback).__name__)})"
        entry = (shown, callback, contextvars.copy_context())
        with self._lock:
            self._told += (entry,)

        def remove() -> None:
            with self._lock:
                self._told = tuple(other for other in self._told if other is not entry)

        return remove

    def tell(self, layer: int, placement: Placement) -> list[tuple[str, BaseException]]:
        """Call all of them in order, also after one has raised; returns who raised, and what."""
        failed: list[tuple[str, BaseException]] = []
        for name, callback, context in self._told:
            try:
                context.run(callback, layer, placement)
            except BaseException as error:  # a CancelledError would end the apply, a SystemExit the engine
                failed.append((name, error))
        return failed
