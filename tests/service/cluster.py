"""A service on each rank of a `LocalCluster`, in one loop under the virtual clock, without threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np

from eplb_async.core.placement import Placement
from eplb_async.service import EplbService, RebalanceReport, ServiceSettings
from eplb_async.settings import Settings
from eplb_async.testing.cluster import LocalCluster
from eplb_async.threads import Inline

SECRET = b"the cluster's secret"
MANUAL = ServiceSettings(step_interval=0, min_interval=0.0)


class LocalService(EplbService):
    """Works in place: the virtual clock waits for no thread."""

    _make_workers = staticmethod(lambda name: Inline())


def skewed(placement: Placement, hot: int = 0) -> np.ndarray[Any, Any]:
    """Counts of one step by expert: a few carry most of it."""
    counts = 1.0 + 100.0 / (1.0 + (np.arange(placement.num_logical) - hot) % placement.num_logical) ** 2
    return np.tile(counts, (placement.num_layers, 1))


class Services:
    """A cluster with a service on each rank; all that a test wants of them together.

    Args:
        placement: Where the experts are at first.
        settings: Of every service, or of each.
        step: Whether layers are applied at steps.
        without: Ranks that have no service.
        of_rank: Further arguments of a rank's service.
        options: Further arguments of every service.
    """

    def __init__(
        self,
        placement: Placement | None = None,
        *,
        settings: ServiceSettings = MANUAL,
        step: bool = False,
        without: tuple[int, ...] = (),
        of_rank: Callable[[Services, int], dict[str, Any]] = lambda group, rank: {},
        **options: Any,
    ) -> None:
        self.placement = placement or Placement.initial(4, 12, ep_size=3, num_redundant=3)
        activation: Any = "step" if step else "immediate"
        chosen = Settings(secret=SECRET, activation=activation, idle_tick=0.05)
        self.cluster = LocalCluster(self.placement, settings=chosen)
        self.services: dict[int, EplbService] = {}
        self._all: list[EplbService] = []
        self._settings = settings
        self._without = without
        self._of_rank = of_rank
        self._options = options

    async def __aenter__(self) -> Services:
        await self.cluster.__aenter__()
        for rank in range(self.placement.ep_size):
            if rank not in self._without:
                await self.start(rank)
        return self

    async def start(self, rank: int, **options: Any) -> EplbService:
        chosen = {"settings": self._settings} | self._options | self._of_rank(self, rank) | options
        service = LocalService(self.cluster.comms[rank], **chosen)
        self.services[rank] = await service.__aenter__()
        self._all.append(service)
        return service

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(service.aclose() for service in self._all))
        await self.cluster.__aexit__(kind, error, trace)

    def record(self, steps: int = 1, *, hot: int = 0, ranks: tuple[int, ...] | None = None) -> None:
        """Every rank counts its share of the same skewed load."""
        for rank, service in self.services.items():
            if ranks is None or rank in ranks:
                for _ in range(steps):
                    service.record(skewed(self.placement, hot), by="experts")

    async def rebalance(self, rank: int = 0, **options: Any) -> RebalanceReport | BaseException:
        """What a rank's call gives, or raises."""
        try:
            return await self.services[rank].rebalance(**options)
        except Exception as error:
            return error

    async def idle(self) -> None:
        """Until no rank is in a round."""
        while any(s.health().phase not in ("idle", "paused", "closed") for s in self.services.values()):
            await asyncio.sleep(0.01)
