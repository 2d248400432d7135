"""A modelled network: every rank has a NIC with a rate in and a rate out, shared fairly by the flows through it.

Rates are max-min fair, as congestion control makes them on a network whose core is not the bottleneck: no flow
can get more without taking from one that has no more than it. They hold until a flow begins or ends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Flow", "Network"]

_Longs = NDArray[np.int64]
_Floats = NDArray[np.float64]
_SAME = 1e-9


@dataclass(slots=True, eq=False)
class Flow:
    """One READ's bytes on their way.

    Attributes:
        source: Rank that is read.
        reader: Rank that reads.
        nbytes: Bytes.
        arrives: Seconds at which the last byte, and the news of it, are at the reader; ``None`` while not known.
    """

    source: int
    reader: int
    nbytes: float
    arrives: float | None = None


class Network:
    """The flows between ranks, and how far each has come.

    Args:
        ranks: Ranks, each with a NIC of its own.
        bytes_per_second: Of each NIC, in either direction.
        latency: Seconds that a message, or the end of a READ, takes on its way.
        nodes: Host of each rank ``[ranks]``; default each has its own.
        node_bytes_per_second: Of each rank, in either direction, with ranks of its node, beside the NIC;
            default such READs go through the NIC.
        resolution: Seconds; flows that would end within that of each other end together. 0 is exact, and slow
            with thousands of flows.

    Attributes:
        now: Seconds up to which flows have been followed.
        delivered: Bytes that have arrived, by reader ``[ranks]``.
        served: Bytes that have left, by source ``[ranks]``.
    """

    def __init__(
        self,
        ranks: int,
        *,
        bytes_per_second: float,
        latency: float = 0.0,
        nodes: Sequence[int] | None = None,
        node_bytes_per_second: float | None = None,
        resolution: float = 0.0,
    ) -> None:
        self.now = 0.0
        self.latency = latency
        self.delivered = np.zeros(ranks)
        self.served = np.zeros(ranks)
        self._ranks = ranks
        self._resolution = resolution
        self._nodes = list(nodes) if nodes is not None and node_bytes_per_second is not None else None
        within = node_bytes_per_second or bytes_per_second
        # Lanes: out and in of each NIC, then out and in of each rank within its node.
        self._capacity = np.repeat([bytes_per_second, bytes_per_second, within, within], ranks).astype(np.float64)
        self._flows: list[Flow] = []
        self._begun: list[Flow] = []
        self._out = self._into = np.empty(0, dtype=np.int64)
        self._left = self._rate = np.empty(0)
        self._ends = math.inf

    def begin(self, source: int, reader: int, nbytes: float, now: float) -> Flow:
        """Have bytes flow from ``now`` on, up to which the network has been followed."""
        if now != self.now:
            raise ValueError(f"a flow begins at {now} and the network stands at {self.now}: advance it first")
        flow = Flow(source, reader, nbytes)
        self._begun.append(flow)
        return flow

    def advance(self, now: float) -> list[Flow]:
        """Follow all flows up to a time; returns those that ended meanwhile."""
        ended: list[Flow] = []
        while self.now < now:
            self._join()
            until = min(now, self._ends)
            self._left -= self._rate * (until - self.now)
            self.now = until
            if until == self._ends:
                ended += self._leave()
        return ended

    @property
    def next_end(self) -> float:
        """When the next flow ends, if none begins before; infinite if there is none."""
        self._join()
        return self._ends

    @property
    def active(self) -> int:
        """Flows on their way."""
        return len(self._flows) + len(self._begun)

    # -------------------------------------------------------------------------------------------- within
    def _join(self) -> None:
        """Flows that begin now."""
        if not self._begun:
            return
        begun, self._begun = self._begun, []
        self._flows += begun
        lanes = np.array([self._lanes(flow) for flow in begun], dtype=np.int64).T
        self._out = np.concatenate([self._out, lanes[0]])
        self._into = np.concatenate([self._into, lanes[1]])
        self._left = np.concatenate([self._left, [flow.nbytes for flow in begun]])
        self._share()

    def _leave(self) -> list[Flow]:
        """Flows that end now."""
        ended = self._left <= self._rate * (self._resolution + _SAME * self.now)
        gone = [self._flows[i] for i in np.flatnonzero(ended).tolist()]
        for flow in gone:
            flow.arrives = self.now + self.latency
            self.delivered[flow.reader] += flow.nbytes
            self.served[flow.source] += flow.nbytes
        stay = ~ended
        self._flows = [self._flows[i] for i in np.flatnonzero(stay).tolist()]
        self._out, self._into, self._left = self._out[stay], self._into[stay], self._left[stay]
        self._share()
        return gone

    def _share(self) -> None:
        self._rate = fair_rates(self._out, self._into, self._capacity)
        self._ends = self.now + max(0.0, float((self._left / self._rate).min())) if self._flows else math.inf

    def _lanes(self, flow: Flow) -> tuple[int, int]:
        near = self._nodes is not None and self._nodes[flow.source] == self._nodes[flow.reader]
        first = 2 * self._ranks if near else 0
        return first + flow.source, first + self._ranks + flow.reader


def fair_rates(out: _Longs, into: _Longs, capacity: _Floats) -> _Floats:
    """Max-min fair rates of flows, each through two lanes.

    Every round fixes the flows of those lanes that leave none of their flows less than its other lane would.

    Args:
        out: First lane of each flow ``[n]``.
        into: Second lane of each flow ``[n]``.
        capacity: Rate of each lane ``[lanes]``.

    Returns:
        Rates ``[n]``, in the unit of ``capacity``.
    """
    rate = np.zeros(out.size)
    left = capacity.copy()
    open_ = np.arange(out.size)
    lanes = capacity.size
    while open_.size:
        a, b = out[open_], into[open_]
        share = left / np.maximum(1, np.bincount(a, minlength=lanes) + np.bincount(b, minlength=lanes))
        fair = np.minimum(share[a], share[b])
        slack = share * (1 - _SAME)
        less = np.bincount(a, fair < slack[a], lanes) + np.bincount(b, fair < slack[b], lanes)
        fixed = (less[a] == 0) | (less[b] == 0)
        chosen = open_[fixed]
        rate[chosen] = fair[fixed]
        used = np.bincount(out[chosen], rate[chosen], lanes) + np.bincount(into[chosen], rate[chosen], lanes)
        left = np.maximum(0.0, left - used)
        open_ = open_[~fixed]
    return rate
