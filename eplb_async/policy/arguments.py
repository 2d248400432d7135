"""What the policy is asked, checked."""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from eplb_async.core.placement import Placement
from eplb_async.errors import PlacementError
from eplb_async.policy.table import Bools, Floats, Ints

__all__ = ["Question", "ask"]


@dataclass(frozen=True, slots=True)
class Question:
    """A checked call.

    Attributes:
        load: ``[num_layers, num_logical]``; layers without any load have 1 everywhere.
        idle: Layers without any load, ``[num_layers]``.
        current: What is held now, or None.
        usable: Ranks that may hold experts, ``[num_ranks]``.
        local: Slots of one rank.
        groups: Groups that stay on a node; 1 in global mode.
        nodes: Nodes; 1 in global mode.
        max_moves: Most experts to be received, or None.
        min_gain: Gain below which the current placement stays.
    """

    load: Floats
    idle: Bools
    current: Placement | None
    usable: Bools
    local: int
    groups: int
    nodes: int
    max_moves: int | None
    min_gain: float

    @property
    def slots(self) -> Ints:
        """The current placement as ``[num_layers, num_ranks, local]``."""
        assert self.current is not None
        return self.current.physical_to_logical_map.astype(np.int64).reshape(
            len(self.load), self.usable.size, self.local
        )


def ask(
    load: Any,
    sizes: dict[str, Any],
    *,
    current: Any,
    max_moves: int | None,
    min_gain: float,
    out: Collection[int] | None,
) -> Question:
    """Checks the arguments of ``rebalance_experts``; ``sizes`` are its four numbers by name.

    Raises:
        PlacementError: An argument cannot be; names it.
    """
    loads = _loads(load)
    replicas, groups, nodes, ranks = (_count(value, name) for name, value in sizes.items())
    experts = loads.shape[1]
    _divides(replicas, ranks, "num_replicas", "num_ranks", "every rank has as many slots as any other")
    _divides(ranks, nodes, "num_ranks", "num_nodes", "every node has as many ranks as any other")
    _divides(experts, groups, "num_logical", "num_groups", "every group has as many experts as any other")
    if replicas < experts:
        raise PlacementError(f"num_replicas is {replicas}; {experts} experts need at least as many")
    held = _placement(current, loads.shape, replicas, ranks)
    usable = _usable(held, ranks, out)
    local = replicas // ranks
    if usable.sum() * local < experts:
        raise PlacementError(
            f"{usable.sum()} of {ranks} ranks are left, with {usable.sum() * local} slots; {experts} experts do not "
            "fit: bring a rank back, or open with more slots on each rank"
        )
    if groups % nodes or (usable.reshape(nodes, -1).sum(axis=1) * local < experts // nodes).any():
        groups = nodes = 1
    if max_moves is not None and (max_moves := _count(max_moves, "max_moves", least=0)) >= 0 and held is None:
        raise PlacementError(f"max_moves is {max_moves}; without current there is nothing to move from")
    if not 0 <= min_gain < 1:
        raise PlacementError(f"min_gain is {min_gain}; it must be within [0, 1)")
    idle = np.asarray(loads.max(axis=1) <= 0)
    return Question(
        load=np.where(idle[:, None], 1.0, loads),
        idle=idle,
        current=held,
        usable=usable,
        local=local,
        groups=groups,
        nodes=nodes,
        max_moves=max_moves,
        min_gain=float(min_gain),
    )


def _loads(load: Any) -> Floats:
    try:
        loads = np.asarray(load, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise PlacementError(f"load is not an array of numbers: {error}") from error
    if loads.ndim != 2 or not loads.size:
        raise PlacementError(f"load has shape {loads.shape}; it must be [num_layers, num_logical]")
    checks: dict[str, Bools] = {"NaN": np.isnan(loads), "infinite": np.isinf(loads), "negative": np.less(loads, 0)}
    for name, wrong in checks.items():
        if wrong.any():
            layer, expert = np.argwhere(wrong)[0].tolist()
            more = f" (and {wrong.sum() - 1} more)" if wrong.sum() > 1 else ""
            raise PlacementError(f"load of layer {layer}, expert {expert} is {name}: {loads[layer, expert]}{more}")
    return loads


def _count(value: Any, name: str, *, least: int = 1) -> int:
    try:
        number = operator.index(value)
    except TypeError as error:
        raise PlacementError(f"{name} is {value!r}; it must be an integer") from error
    if number < least:
        raise PlacementError(f"{name} is {number}; it must be {least} or more")
    return number


def _divides(whole: int, parts: int, name: str, of: str, why: str) -> None:
    if whole % parts:
        raise PlacementError(f"{name} {whole} does not divide by {of} {parts}: {why}")


def _placement(current: Any, shape: tuple[int, ...], replicas: int, ranks: int) -> Placement | None:
    if current is None:
        return None
    held = current if isinstance(current, Placement) else Placement(current, ep_size=ranks, num_logical=shape[1])
    sizes = {
        "layers": (held.num_layers, shape[0]),
        "experts": (held.num_logical, shape[1]),
        "slots": (held.num_physical, replicas),
        "ranks": (held.ep_size, ranks),
    }
    wrong = [f"{mine} {name}, not {asked}" for name, (mine, asked) in sizes.items() if mine != asked]
    if wrong:
        raise PlacementError("current does not fit: it has " + "; ".join(wrong))
    return held


def _usable(current: Placement | None, ranks: int, out: Collection[int] | None) -> Bools:
    usable = np.ones(ranks, dtype=np.bool_)
    if out is not None:
        for rank in sorted(out):
            if not 0 <= rank < ranks:
                raise PlacementError(f"out names rank {rank}; it must be within [0, {ranks})")
            usable[rank] = False
    elif current is not None:
        usable &= (current.physical_to_logical_map >= 0).reshape(current.num_layers, ranks, -1).any(axis=(0, 2))
    return usable
