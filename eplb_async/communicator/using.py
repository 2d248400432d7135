"""Who uses which layer of this rank: an apply of a layer waits for them, and who comes meanwhile waits for it.

Entering is fast because it takes no lock. Who enters says so first and looks at the door afterwards; an apply shuts the
door first and looks afterwards who is inside. So one of them sees the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Generator

from eplb_async.communicator.waits import block, wait
from eplb_async.core.placement import Placement
from eplb_async.engine import LoopEngine
from eplb_async.errors import ActivationTimeout, CommunicatorClosed


class Use:
    """One layer for those who use it: ``with`` or ``async with`` it, in any thread, any number at once.

    Attributes:
        layer: The layer.
        inside: As long as there are users inside.
        shut: Whether who comes has to wait, and who leaves has to say so.
        waiting: Wakes each who waits to enter.
    """

    __slots__ = ("_current", "_users", "inside", "layer", "shut", "waiting")

    def __init__(self, layer: int, users: Users, current: Callable[[], Placement]) -> None:
        self.layer = layer
        self.inside: list[None] = []
        self.shut = False
        self.waiting: set[Callable[[], object]] = set()
        self._users = users
        self._current = current

    def __enter__(self) -> Placement:
        self.inside.append(None)
        if self.shut:
            self._users.step_back(self)
            self._users.refuse_own_thread()
            block(lambda wake, now: self._users.waits(self, wake, now))
        return self._current()

    def __exit__(self, *_: object) -> None:
        self.inside.pop()
        if self.shut:
            self._users.left()

    async def __aenter__(self) -> Placement:
        self.inside.append(None)
        if self.shut:
            self._users.step_back(self)
            await wait(lambda wake, now: self._users.waits(self, wake, now))
        return self._current()

    async def __aexit__(self, *_: object) -> None:
        self.inside.pop()
        if self.shut:
            self._users.left()


class Users:
    """The users of all layers, and the apply that waits for those of one.

    Args:
        engine: The engine loop.
        rank: This rank.
        num_layers: Layers.
        timeout: Seconds that one who comes waits for an apply.
        current: Where the experts are now.
        changed: Called on the engine loop when an apply begins to wait, and when it does not any more.
    """

    def __init__(
        self,
        engine: LoopEngine,
        *,
        rank: int,
        num_layers: int,
        timeout: float,
        current: Callable[[], Placement],
        changed: Callable[[], object],
    ) -> None:
        self.uses = {layer: Use(layer, self, current) for layer in range(num_layers)}
        self._engine = engine
        self._rank = rank
        self._timeout = timeout
        self._changed = changed
        self._lock = threading.Lock()
        self._over = ""
        self._abandoned = False
        self._awaited: Use | None = None
        self._news = asyncio.Event()

    # ------------------------------------------------------------------------------------ those who use it
    def waits(self, use: Use, wake: Callable[[], object], now: Callable[[], float]) -> Generator[float, None, None]:
        """Yields how long to wait, until the caller is inside.

        Raises:
            ActivationTimeout: The apply did not end in time; the caller is not inside.
            CommunicatorClosed: This rank is out of the group; the caller is not inside.
        """
        deadline = now() + self._timeout
        try:
            while not self._enters(use, wake):
                left = deadline - now()
                if left <= 0:
                    raise self._timed_out(use)
                yield left
        finally:
            with self._lock:
                use.waiting.discard(wake)

    def step_back(self, use: Use) -> None:
        """One who wanted to enter found the door shut."""
        use.inside.pop()
        self.left()

    def left(self) -> None:
        """One has left a layer whose door is shut."""
        with contextlib.suppress(CommunicatorClosed):
            self._engine.post(self._news.set)

    def refuse_own_thread(self) -> None:
        """Refuse to block the thread that would have to apply the layer.

        Raises:
            RuntimeError: It is the caller's.
        """
        if threading.get_ident() == self._engine.thread_id and not self._over:
            raise RuntimeError("this thread runs the engine loop, and would wait for itself; use `async with`")

    def _enters(self, use: Use, wake: Callable[[], object]) -> bool:
        self._engine.check_process()
        with self._lock:
            if self._over:
                raise CommunicatorClosed(f"layer {use.layer} cannot be used: the communicator is {self._over}")
            if use.shut:
                use.waiting.add(wake)
            else:
                use.inside.append(None)
            return not use.shut

    def _timed_out(self, use: Use) -> ActivationTimeout:
        count = len(use.inside)
        why = (
            f"a migration is to apply it and waits for its {count} users to leave. One who is inside and enters again "
            "waits for itself; see health()"
            if count
            else "a migration is applying it, which has not ended; see health()"
        )
        return ActivationTimeout(
            f"layer {use.layer} was not entered within {self._timeout:g} s: {why}, then enter again",
            layer=use.layer,
            step=0,
            ranks=(self._rank,),
        )

    # ------------------------------------------------------------------------------------- the engine loop
    async def reached(self, layer: int) -> bool:
        """Shut a committed layer's door, and wait until nobody is inside; :meth:`applied` opens it again.

        Returns:
            False if it is not to be applied any more.
        """
        use = self.uses[layer]
        with self._lock:
            use.shut = True
        return not use.inside or await self._emptied(use)

    def shut_if_empty(self, layer: int) -> bool:
        """Shut one more committed layer's door, to apply it together with others, if nobody is inside.

        It is never waited for: who is inside one layer may want to enter another whose door is shut.
        """
        use = self.uses[layer]
        with self._lock:
            use.shut = True
        if use.inside:
            self.applied(layer)
            return False
        return True

    async def _emptied(self, use: Use) -> bool:
        self._awaited = use
        self._changed()
        try:
            while True:
                self._news.clear()
                if not use.inside:
                    return True
                if self._abandoned:
                    return False
                await self._news.wait()
        finally:
            self._awaited = None
            self._changed()

    def applied(self, layer: int) -> None:
        """The layer is applied, or is not now: who waits may enter."""
        use = self.uses[layer]
        with self._lock:
            use.shut = bool(self._over)
            for wake in use.waiting:
                wake()

    def end(self, why: str) -> None:
        """This rank is out of the group: nobody enters any more, and what is due is applied when the users leave."""
        with self._lock:
            self._over = self._over or why
            for use in self.uses.values():
                use.shut = True
                for wake in use.waiting:
                    wake()

    def abandon(self) -> dict[int, int]:
        """Wait for no users any more; returns those that were waited for."""
        waited = self.waiting
        self._abandoned = True
        self._news.set()
        return waited

    @property
    def waiting(self) -> dict[int, int]:
        """Number of users of the layer that is committed and waits for them, by layer. Safe from any thread."""
        use = self._awaited
        return {} if use is None else {use.layer: len(use.inside)}
