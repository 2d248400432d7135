"""N ranks of one group in one loop, in memory: for tests of what uses the communicator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType

from eplb_async.communicator import AsyncEplbCommunicator, MigrationReport
from eplb_async.communicator.loading import LoadExpert
from eplb_async.core.placement import Placement
from eplb_async.engine import LoopEngine
from eplb_async.settings import Settings
from eplb_async.telemetry.event import Hook
from eplb_async.testing.faults import FaultPlan
from eplb_async.testing.memory import MemoryFabric
from eplb_async.testing.patterns import PatternWeights


class MemoryRendezvous:
    """A rendezvous in a dict."""

    url = "memory://"
    trusted = True

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._counters: dict[str, int] = {}

    def set(self, key: str, value: bytes) -> None:
        """Store a value."""
        self.values[key] = value

    def get(self, key: str) -> bytes | None:
        """A value, or None."""
        return self.values.get(key)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter."""
        self._counters[key] = self._counters.get(key, 0) + amount
        return self._counters[key]

    def delete(self, key: str) -> None:
        """Forget a value."""
        self.values.pop(key, None)

    def close(self) -> None:
        """Nothing to let go of."""


class LocalCluster:
    """Ranks that share one loop, best a virtual one (:func:`eplb_async.testing.run`).

    Args:
        placement: Where the experts are at first.
        row_bytes: Bytes of an expert row in each tensor.
        faults: What goes wrong; agents are named ``default/{rank}.``.
        settings: Settings of every rank, or of each in order.
        fabric: The network; default a new one with ``faults``.
        nodes: Host label of each rank; default all are on this one.
        on_layer_applied: Gives the callback of each rank, or ``None``.
        telemetry: Gives the telemetry hook of each rank, or ``None``.
    """

    def __init__(
        self,
        placement: Placement,
        *,
        row_bytes: Sequence[int] = (64, 24),
        faults: FaultPlan | None = None,
        settings: Settings | Sequence[Settings] | None = None,
        fabric: MemoryFabric | None = None,
        nodes: Sequence[str] | None = None,
        on_layer_applied: Callable[[int], Callable[[int, Placement], object] | None] = lambda _: None,
        telemetry: Callable[[int], Hook | None] = lambda _: None,
    ) -> None:
        self.fabric = fabric or MemoryFabric(faults)
        self.rendezvous = MemoryRendezvous()
        self.rows = [PatternWeights(placement, rank, row_bytes) for rank in range(placement.ep_size)]
        self.comms: list[AsyncEplbCommunicator] = []
        self.dead: set[int] = set()
        self._buried: list[AsyncEplbCommunicator] = []
        self._row_bytes = row_bytes
        self._placement = placement
        self._nodes = nodes
        chosen = settings or Settings(secret=b"the cluster's secret")
        self._settings = [chosen] * placement.ep_size if isinstance(chosen, Settings) else list(chosen)
        self._on_layer_applied = on_layer_applied
        self._telemetry = telemetry

    async def __aenter__(self) -> LocalCluster:
        opening = [asyncio.ensure_future(self._open(rank)) for rank in range(self._placement.ep_size)]
        await asyncio.wait(opening)
        opened = [task.result() for task in opening if task.exception() is None]
        if len(opened) < len(opening):
            await asyncio.gather(*(comm.aclose() for comm in opened))
        self.comms = [task.result() for task in opening]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(comm.aclose() for comm in (*self.comms, *self._buried)))

    async def migrate(
        self,
        placement: Placement,
        *,
        timeout: float = 30.0,
        ranks: Iterable[int] | None = None,
        load_expert: LoadExpert | None = None,
    ) -> list[MigrationReport | Exception]:
        """Have ranks migrate at once; a rank's failure takes the place of its report."""
        chosen = range(len(self.comms)) if ranks is None else ranks

        async def one(rank: int) -> MigrationReport | Exception:
            try:
                return await self.comms[rank].migrate(placement, timeout=timeout, load_expert=load_expert)
            except Exception as error:
                return error

        return list(await asyncio.gather(*map(one, chosen)))

    def wrong_bytes(self, ranks: Iterable[int] | None = None) -> int:
        """Bytes that differ from what each rank's own placement says."""
        chosen = range(len(self.comms)) if ranks is None else ranks
        return sum(self.rows[rank].wrong_bytes(self.comms[rank].placement) for rank in chosen)

    def kill(self, rank: int) -> None:
        """Have a rank die."""
        self.dead.add(rank)
        self.fabric.kill(f"default/{rank}.")

    async def restart(self, rank: int, placement: Placement | None = None, *, timeout: float = 30.0) -> None:
        """Have a rank that died or is over open again, with weights as a placement says.

        Args:
            rank: It.
            placement: Where it says the experts are; default as at first.
            timeout: Seconds for ``open``.
        """
        self.dead.discard(rank)
        rows = PatternWeights(placement or self._placement, rank, self._row_bytes)
        comm = await self._open(rank, rows, placement, timeout)
        self._buried.append(self.comms[rank])
        self.rows[rank], self.comms[rank] = rows, comm

    async def reconnect(
        self, rank: int, *, timeout: float = 30.0, ranks: Iterable[int] | None = None
    ) -> list[Exception | None]:
        """Have ranks, default all others, reconnect to one at once; a failure takes the place of its ``None``."""
        chosen = [q for q in range(len(self.comms)) if q != rank and q not in self.dead] if ranks is None else ranks

        async def one(other: int) -> Exception | None:
            try:
                await self.comms[other].reconnect(rank, timeout=timeout)
            except Exception as error:
                return error
            return None

        return list(await asyncio.gather(*map(one, chosen)))

    def stop(self, rank: int) -> None:
        """Have a rank stop, as SIGSTOP does to what it sends and serves."""
        self.fabric.stop(f"default/{rank}.")

    def resume(self, rank: int) -> None:
        """Have a stopped rank go on."""
        self.fabric.resume(f"default/{rank}.")

    async def _open(
        self,
        rank: int,
        rows: PatternWeights | None = None,
        placement: Placement | None = None,
        timeout: float = 30.0,
    ) -> AsyncEplbCommunicator:
        return await AsyncEplbCommunicator.open(
            rank=rank,
            ep_size=self._placement.ep_size,
            weights=(rows or self.rows[rank]).layers,
            placement=placement or self._placement,
            rendezvous=self.rendezvous,
            node=None if self._nodes is None else self._nodes[rank],
            settings=self._settings[rank],
            on_layer_applied=self._on_layer_applied(rank),
            telemetry=self._telemetry(rank),
            timeout=timeout,
            engine=LoopEngine(asyncio.get_running_loop()),
            native=self.fabric.native,
        )
