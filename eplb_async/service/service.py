"""``EplbService``: what keeps the experts of a server balanced while it answers."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb_async.communicator import AsyncEplbCommunicator
from eplb_async.communicator.loading import LoadExpert
from eplb_async.core.placement import Placement
from eplb_async.policy.result import Rebalance
from eplb_async.service.report import RebalanceReport, ServiceHealth
from eplb_async.service.settings import ServiceSettings

__all__ = ["EplbService", "Policy"]

Policy = Callable[[NDArray[np.float64], Placement], Placement | Rebalance]


class EplbService:
    """Load balancing of one rank: ``async with EplbService(comm) as service``. One on each rank of the group.

    Bound to the loop that the communicator is bound to; :meth:`record`, :meth:`forward`, :meth:`idle`, :meth:`pause`,
    :meth:`resume` and :meth:`health` may be called in any thread.

    Args:
        comm: The communicator. The service does not close it.
        policy: ``policy(loads, placement)`` with loads ``[num_layers, num_logical]`` float64, summed over the ranks,
            gives the placement to move to; called in a thread, on the coordinator. Default `rebalance_experts`, with
            the placement as it is.
        settings: Default from ``EPLB_ASYNC_SERVICE_*``.
        load_expert: Given to ``comm.migrate``; supplies experts whose only copies were on ranks that are out.
        telemetry: Called with each `Event`, on this loop.
    """

    def __init__(
        self,
        comm: AsyncEplbCommunicator,
        *,
        policy: Policy | None = None,
        settings: ServiceSettings | None = None,
        load_expert: LoadExpert | None = None,
        telemetry: Callable[[Any], object] | None = None,
    ) -> None:
        self.comm = comm
        self.settings = settings or ServiceSettings.from_env()
        raise NotImplementedError

    async def __aenter__(self) -> EplbService:
        raise NotImplementedError

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def record(self, counts: Any, *, by: str | None = None, placement: Placement | None = None) -> None:
        """Add the counts of one step to the window; from any thread, in microseconds. See `LoadWindow.record`.

        Do not call it for dummy steps, and leave padding tokens out of the counts.

        Args:
            counts: Tokens of that step, integers or floats, numpy or torch on CPU: ``[num_layers, num_physical]``,
                ``[num_layers, num_logical]`` or ``[num_layers, num_local_experts]``.
            by: ``"slots"``, ``"experts"`` or ``"local"``; default by the width.
            placement: Where the experts were in that step; default as they were when the last ``forward()`` was
                entered, else as they are now.
        """
        raise NotImplementedError

    def attach(self, counter: Any, *, by: str | None = None) -> None:
        """Read loads from a tensor that the engine counts in, instead of :meth:`record`. See `AttachedCounter`."""
        raise NotImplementedError

    def forward(self, number: int | None = None) -> Any:
        """Around each forward pass, ``with`` or ``async with``: ``comm.step()``, and remembers its placement.

        Args and errors are those of ``AsyncEplbCommunicator.step``.
        """
        raise NotImplementedError

    def idle(self, number: int | None = None) -> None:
        """The engine stops stepping for now: ``comm.idle()``."""
        self.comm.idle(number)

    async def rebalance(self, *, force: bool = False, timeout: float | None = None) -> RebalanceReport:
        """Ask for a round now, and wait for its end on this rank; any rank may ask, and one round serves all who do.

        Cancelled or timed out: the round goes on in the background.

        Args:
            force: Whether to move also for less than ``min_gain``, and within ``min_interval``.
            timeout: Seconds to wait; default long enough for every deadline of a round.

        Raises:
            RebalanceTimeout: The timeout passed.
            CommunicatorClosed: The service, or its communicator, is closed or fenced.
            EplbError: The round failed: the cause, on the rank where it failed, `RebalanceFailed` on the others.
        """
        raise NotImplementedError

    def pause(self) -> None:
        """Take part in no round until :meth:`resume`, so that none is decided; one that moves goes on."""
        raise NotImplementedError

    def resume(self) -> None:
        """End a :meth:`pause`."""
        raise NotImplementedError

    def health(self) -> ServiceHealth:
        """What is going on now. Thread-safe."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """Take part in no round any more; ends the one that runs, on all ranks. Idempotent.

        The communicator stays open. Cancelled: closing goes on in the background.
        """
        raise NotImplementedError
