"""What a migration will cost, before anything moves: bytes by kind and by rank, the busiest ranks, a time.

The time is a **lower bound**. Across nodes every rank has one NIC, which carries ``gbps`` in and as much out at the
same time; within a node every rank moves ``local_gbps`` in and as much out::

    NIC    = max over ranks of max(bytes in, bytes out) across nodes        * 8 / (gbps * 1e9)
    local  = max over ranks of max(bytes in, bytes out) within their nodes  * 8 / (local_gbps * 1e9)
    seconds = max(NIC, local)

Local copies count within a node, in and out; what is loaded counts nowhere. Left out is all that a real
migration adds: latency, READs that wait for staging or for each other, votes, the copy out of staging.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eplb_async.core.placement import spell_experts
from eplb_async.core.plan import MigrationPlan
from eplb_async.core.spelling import counted, spell_bytes

__all__ = ["Forecast", "Share"]

_Longs = NDArray[np.int64]
_Mask = NDArray[np.bool_]


class Share(NamedTuple):
    """Moves of one kind: how many experts, and their bytes."""

    experts: int
    """How many experts."""
    nbytes: int
    """Their bytes, all tensors together."""


@dataclass(frozen=True, eq=False)
class Forecast:
    """What a plan moves, in bytes; ``str()`` of it is a short report.

    An expert that a rank needs in several slots of a layer is one move: it is READ, copied or loaded once.

    Attributes:
        plan: The plan.
        bytes_per_expert: Bytes of one expert, all its tensors together, for each layer ``[num_layers]``.
        gbps: Gigabits (1e9) per second of one rank's NIC, each way; ``None`` if not known.
        local_gbps: Gigabits per second that one rank moves within its node, each way; ``None`` if not known.
    """

    plan: MigrationPlan
    bytes_per_expert: tuple[int, ...]
    gbps: float | None = None
    local_gbps: float | None = None

    def __post_init__(self) -> None:
        if len(self.bytes_per_expert) != self.plan.new.num_layers:
            raise ValueError(f"{len(self.bytes_per_expert)} layer sizes for {self.plan.new.num_layers} layers")
        if min(self.bytes_per_expert) < 0:
            raise ValueError(f"an expert has {min(self.bytes_per_expert)} bytes; it must have 0 or more")
        for name in ("gbps", "local_gbps"):
            rate = getattr(self, name)
            if rate is not None and not (math.isfinite(rate) and rate > 0):
                raise ValueError(f"{name} is {rate}; it must be above 0")

    # ------------------------------------------------------------------------------------------ by kind
    @property
    def unchanged_slots(self) -> int:
        """Slots that hold the same expert before and after."""
        old, new = self._maps
        return int(np.count_nonzero((old == new) & (new >= 0)))

    @property
    def emptied_slots(self) -> int:
        """Slots that hold an expert before and none after; that moves nothing."""
        old, new = self._maps
        return int(np.count_nonzero((old >= 0) & (new < 0)))

    @property
    def local_copies(self) -> Share:
        """What ranks copy from themselves."""
        return self._share(self.plan.source == self.plan.reader)

    @property
    def reads_on_node(self) -> Share:
        """READs between ranks of one node."""
        return self._share(self._read & ~self._across)

    @property
    def reads_across_nodes(self) -> Share:
        """READs between ranks of different nodes."""
        return self._share(self._across)

    @property
    def loads(self) -> Share:
        """Lost experts that ranks load."""
        return self._share(self.plan.source < 0)

    @property
    def lost(self) -> Mapping[int, tuple[int, ...]]:
        """Experts that no member holds, ascending, by layer; ``migrate`` needs ``load_expert`` for them."""
        return self.plan.lost

    @property
    def layers_touched(self) -> tuple[int, ...]:
        """Layers in which any slot changes, ascending."""
        old, new = self._maps
        return tuple(np.flatnonzero((old != new).any(axis=1)).tolist())

    # ------------------------------------------------------------------------------------------ by rank
    @cached_property
    def matrix(self) -> _Longs:
        """Bytes by source and reader, int64 ``[ep_size, ep_size]``, read-only; local copies on the diagonal."""
        kept, size = self.plan.source >= 0, self.plan.new.ep_size
        matrix = np.zeros((size, size), dtype=np.int64)
        np.add.at(matrix, (self.plan.source[kept], self.plan.reader[kept]), self._nbytes[kept])
        return _read_only(matrix)

    @cached_property
    def bytes_in(self) -> _Longs:
        """Bytes that each rank READs, int64 ``[ep_size]``; ``MigrationReport.bytes_read`` to come."""
        return self._by_rank(self.plan.reader, self._nbytes * self._read)

    @cached_property
    def bytes_out(self) -> _Longs:
        """Bytes that are READ from each rank, int64 ``[ep_size]``."""
        return self._by_rank(self.plan.source, self._nbytes * self._read)

    @cached_property
    def bytes_copied(self) -> _Longs:
        """Bytes that each rank copies out of staging, int64 ``[ep_size]``; ``MigrationReport.bytes_copied`` to come.

        Whatever moved is copied into each of its slots, however it came.
        """
        return self._by_rank(self.plan.reader, self._nbytes * np.diff(self.plan.target_offsets))

    @property
    def hottest_source(self) -> int | None:
        """The rank that most bytes are READ from, the lowest of equals; ``None`` if nothing is READ."""
        return _busiest(self.bytes_out)

    @property
    def hottest_reader(self) -> int | None:
        """The rank that READs most bytes, the lowest of equals; ``None`` if nothing is READ."""
        return _busiest(self.bytes_in)

    @property
    def staging_bytes(self) -> int:
        """Bytes of staging that the busiest layer of the busiest rank fills."""
        return self.plan.max_incoming(self.bytes_per_expert)

    # ------------------------------------------------------------------------------------------ in time
    @property
    def seconds(self) -> float | None:
        """The lower bound of the module's docstring; ``None`` where no rate is given."""
        return max((seconds for seconds, _, _ in self._bounds), default=None)

    @cached_property
    def _bounds(self) -> tuple[tuple[float, int, str], ...]:
        """For each rate that is given: seconds, the rank that needs them, and what of it is busy."""
        links = (
            (self.gbps, self._across, "NIC"),
            (self.local_gbps, (self.plan.source >= 0) & ~self._across, "local bandwidth"),
        )
        found = []
        for rate, chosen, name in links:
            if rate is not None:
                ways = (self._by_rank(rank, self._nbytes * chosen) for rank in (self.plan.reader, self.plan.source))
                busy = np.maximum(*ways)
                found.append((int(busy.max()) * 8 / (rate * 1e9), int(busy.argmax()), f"{name} at {rate:g} Gb/s"))
        return tuple(found)

    # ------------------------------------------------------------------------------------------ to show
    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON takes it: numbers, lists, and layers of ``lost`` as text."""
        new = self.plan.new
        kinds = {name: getattr(self, name) for name in ("local_copies", "reads_on_node", "reads_across_nodes", "loads")}
        return {
            "layers": new.num_layers,
            "slots": new.num_physical,
            "ranks": new.ep_size,
            "members": list(self.plan.members),
            "nodes": self._num_nodes,
            "bytes_per_expert": list(self.bytes_per_expert),
            "unchanged_slots": self.unchanged_slots,
            "emptied_slots": self.emptied_slots,
            **{name: {"experts": share.experts, "bytes": share.nbytes} for name, share in kinds.items()},
            "lost": {str(layer): list(experts) for layer, experts in self.lost.items()},
            "layers_touched": list(self.layers_touched),
            "bytes_in": self.bytes_in.tolist(),
            "bytes_out": self.bytes_out.tolist(),
            "bytes_copied": self.bytes_copied.tolist(),
            "hottest_source": self.hottest_source,
            "hottest_reader": self.hottest_reader,
            "staging_bytes": self.staging_bytes,
            "gbps": self.gbps,
            "local_gbps": self.local_gbps,
            "seconds": self.seconds,
            "matrix": self.matrix.tolist(),
        }

    def __str__(self) -> str:
        new, members = self.plan.new, len(self.plan.members)
        out = f", {new.ep_size - members} of them out" if members < new.ep_size else ""
        lines = [
            f"{counted(new.num_layers, 'layer')} of {counted(new.num_physical, 'slot')} on "
            f"{counted(new.ep_size, 'rank')}{out}, {counted(self._num_nodes, 'node')}",
            _line("unchanged", f"{counted(self.unchanged_slots, 'slot'):>14}"),
            _line("emptied", f"{counted(self.emptied_slots, 'slot'):>14}"),
            _line("local copies", _spell_share(self.local_copies)),
            _line("READs on a node", _spell_share(self.reads_on_node)),
            _line("READs across nodes", _spell_share(self.reads_across_nodes)),
            _line("loaded", _spell_share(self.loads)),
            _line("layers touched", f"{len(self.layers_touched)} of {new.num_layers}"),
            _line("hottest source", self._spell_hottest(self.hottest_source, self.bytes_out)),
            _line("hottest reader", self._spell_hottest(self.hottest_reader, self.bytes_in)),
            _line("staging", f"{spell_bytes(self.staging_bytes)} for the busiest layer of the busiest rank"),
        ]
        if self._bounds:
            seconds, rank, what = max(self._bounds)
            why = f"rank {rank}'s {what}" if seconds else "nothing moves where a rate is given"
            lines.append(_line("takes at least", f"{seconds:.3g} s ({why})"))
        if self.lost:
            lines.append(_line("lost", self._spell_lost()))
        return "\n".join(lines)

    # --------------------------------------------------------------------------------------------- within
    @property
    def _maps(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        return self.plan.old.physical_to_logical_map, self.plan.new.physical_to_logical_map

    @cached_property
    def _nbytes(self) -> _Longs:
        """Bytes of each move ``[M]``."""
        return np.array(self.bytes_per_expert, dtype=np.int64)[self.plan.layer]

    @cached_property
    def _read(self) -> _Mask:
        """Which moves are READs ``[M]``."""
        read: _Mask = (self.plan.source >= 0) & (self.plan.source != self.plan.reader)
        return read

    @cached_property
    def _across(self) -> _Mask:
        """Which moves are READs from another node ``[M]``."""
        across: _Mask = self._read & (self.plan.node[self.plan.source] != self.plan.node[self.plan.reader])
        return across

    @property
    def _num_nodes(self) -> int:
        return len(set(self.plan.node[list(self.plan.members)].tolist()))

    def _share(self, chosen: _Mask) -> Share:
        return Share(int(np.count_nonzero(chosen)), int(self._nbytes[chosen].sum()))

    def _by_rank(self, rank: NDArray[np.int32], nbytes: _Longs) -> _Longs:
        """Bytes of moves ``[M]`` added up by a rank of each, ``[ep_size]``; those of rank -1 must be 0."""
        total = np.zeros(self.plan.new.ep_size, dtype=np.int64)
        np.add.at(total, rank, nbytes)
        return _read_only(total)

    def _spell_hottest(self, rank: int | None, nbytes: _Longs) -> str:
        if rank is None:
            return "none"
        mean = int(nbytes.sum()) / len(self.plan.members)
        return f"rank {rank}, {spell_bytes(int(nbytes[rank]))} (the mean is {spell_bytes(mean)})"

    def _spell_lost(self) -> str:
        marked = np.zeros((self.plan.new.num_layers, self.plan.new.num_logical), dtype=np.bool_)
        for layer, experts in self.lost.items():
            marked[layer, list(experts)] = True
        return spell_experts(marked)


def _busiest(nbytes: _Longs) -> int | None:
    return int(nbytes.argmax()) if nbytes.any() else None


def _read_only(array: _Longs) -> _Longs:
    array.setflags(write=False)
    return array


def _line(name: str, text: str) -> str:
    return f"{name:<20}{text}"


def _spell_share(share: Share) -> str:
    return f"{counted(share.experts, 'expert'):>14} {spell_bytes(share.nbytes):>10}"
