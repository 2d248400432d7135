"""One forward pass: a step of the communicator, and where the experts were in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from eplb_async.communicator.steps import Steps
from eplb_async.core.placement import Placement
from eplb_async.service.gates import NEVER

__all__ = ["Forward"]


class _Placed(Protocol):
    @property
    def placement(self) -> Placement: ...


class Forward:
    """What ``with service.forward():`` enters; one for all steps, since they run one after the other.

    Args:
        where: The communicator.
        wake: Called in the thread that steps when the alarm goes off.

    Attributes:
        step: The step that is entered.
        count: Steps entered.
        placement: Where the experts are in the last step that was entered; ``None`` before the first.
        alarm: The count that goes off.
    """

    __slots__ = ("_wake", "_where", "alarm", "count", "placement", "step")

    def __init__(self, where: _Placed, wake: Callable[[], object]) -> None:
        self._where = where
        self._wake = wake
        self.step: Steps
        self.count = 0
        self.placement: Placement | None = None
        self.alarm = NEVER

    def __enter__(self) -> Steps:
        step = self.step.__enter__()
        self.placement = self._where.placement
        self.count += 1
        if self.count >= self.alarm:
            self._ring()
        return step

    def __exit__(self, *exc: object) -> None:
        self.step.__exit__(*exc)

    async def __aenter__(self) -> Steps:
        step = await self.step.__aenter__()
        self.placement = self._where.placement
        self.count += 1
        if self.count >= self.alarm:
            self._ring()
        return step

    async def __aexit__(self, *exc: object) -> None:
        self.step.__exit__(*exc)

    def stepped(self, steps: int) -> None:
        """Steps were run without this."""
        self.count += steps
        if self.count >= self.alarm:
            self._ring()

    def _ring(self) -> None:
        self.alarm = NEVER
        self._wake()
