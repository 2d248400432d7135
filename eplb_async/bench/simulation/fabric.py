"""The in-memory fabric over a modelled network: READs take the time that NICs let them, messages are counted."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable

from eplb_async.bench.simulation.network import Network
from eplb_async.core.wire import kind_of
from eplb_async.settings import Settings
from eplb_async.testing.memory import MemoryFabric, MemoryNative

__all__ = ["NetworkFabric"]


class NetworkFabric(MemoryFabric):
    """Agents named ``{group}/{rank}.{…}``, as a communicator names its own, on a modelled network.

    Args:
        network: The network between the ranks.
        factor: Modelled bytes that each real byte stands for.
        message_seconds: What a control message costs the rank that sends it, and the one that takes it; a rank
            deals with one at a time.

    Attributes:
        sent: Control messages by (rank, kind).
        received: As ``sent``.
        wake: What has a rank look for what has come, by rank; a model need not poll to find out.
        message_bytes: Bytes of control messages.
    """

    def __init__(self, network: Network, *, factor: float = 1.0, message_seconds: float = 0.0) -> None:
        super().__init__(latency=network.latency)
        self.network = network
        self.sent: Counter[tuple[int, str]] = Counter()
        self.received: Counter[tuple[int, str]] = Counter()
        self.wake: dict[int, Callable[[], object]] = {}
        self.message_bytes = 0
        self._factor = factor
        self._cost = message_seconds
        self._ranks: dict[str, int] = {}
        self._free_at: dict[int, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def native(self, name: str, settings: Settings) -> MemoryNative:
        """Make an agent."""
        self._ranks[name] = int(name.rpartition("/")[2].partition(".")[0])
        return super().native(name, settings)

    def forget_counts(self) -> None:
        """Count messages from zero."""
        self.sent.clear()
        self.received.clear()
        self.message_bytes = 0

    def begin_read(self, reader: str, source: str, nbytes: int) -> Callable[[], float]:
        """A READ is on its way through both NICs."""
        self._follow()
        flow = self.network.begin(self._ranks[source], self._ranks[reader], nbytes * self._factor, self.now())
        if self._timer is None or self._timer.when() > self.now():
            self._set_timer(self.now())  # once for all READs of this turn
        return lambda: math.inf if flow.arrives is None else flow.arrives

    def begin_message(self, sender: str, receiver: str, message: bytes) -> float:
        """A control message is on its way; it waits for its turn at both ends."""
        one, other = self._ranks[sender], self._ranks[receiver]
        kind = kind_of(message)
        self.sent[one, kind] += 1
        self.received[other, kind] += 1
        self.message_bytes += len(message)
        arrives = self._turn(other, self._turn(one, self.now()) + self.latency)
        self._wake_at(other, arrives)
        return arrives

    def _follow(self) -> None:
        """Follow the network up to now, and wake who has something to find."""
        for flow in self.network.advance(self.now()):
            assert flow.arrives is not None
            self._wake_at(flow.reader, flow.arrives)

    def _set_timer(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(at, self._expire) if at < math.inf else None

    def _expire(self) -> None:
        self._follow()
        self._set_timer(self.network.next_end)

    def _wake_at(self, rank: int, at: float) -> None:
        wake = self.wake.get(rank)
        if wake is not None:
            asyncio.get_running_loop().call_at(at, wake)

    def _turn(self, rank: int, at: float) -> float:
        done = self._free_at[rank] = max(at, self._free_at.get(rank, 0.0)) + self._cost
        return done
