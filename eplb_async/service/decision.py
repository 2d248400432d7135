"""What the coordinator makes of the loads of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb_async.core.placement import Placement
from eplb_async.errors import PlacementError
from eplb_async.policy import rebalance_experts
from eplb_async.policy.result import Rebalance
from eplb_async.service.balance import balancedness
from eplb_async.service.payloads import Loads, Verdict
from eplb_async.service.report import Outcome
from eplb_async.service_settings import ServiceSettings

__all__ = ["Policy", "count_moves", "decide", "misplaced"]

Policy = Callable[[NDArray[np.float64], Placement], Placement | Rebalance]
"""Loads ``[num_layers, num_logical]`` and where the experts are, to where they are to be."""


def decide(
    answers: Mapping[int, Loads],
    placement: Placement,
    *,
    members: Collection[int],
    policy: Policy | None,
    settings: ServiceSettings,
    force: bool,
) -> Verdict:
    """Run the policy and the gates.

    Args:
        answers: Loads of each member.
        placement: Where the experts are.
        members: Ranks of the view. If others still hold experts, or one of these holds none and is given some, it is
            worth moving whatever the gain is.
        policy: The policy; ``None`` for the default one.
        settings: Gates.
        force: Whether any change is worth it.

    Returns:
        The verdict, without term and round.

    Raises:
        PlacementError: The policy's answer is no placement that this group could have now.
        TypeError: It is no placement at all.
        Exception: What the policy raised.
    """
    loads = np.sum([answer.loads for answer in answers.values()], axis=0)
    out = sorted(set(range(placement.ep_size)) - set(members))
    must = _holders(placement).intersection(out)
    if not loads.any() and not must:
        steps = {rank: answer.steps for rank, answer in sorted(answers.items())}
        return _verdict("no_load", f"no load on any rank; steps recorded by rank: {steps}")
    before = balancedness(loads, placement, ranks=members)
    found = _ask(policy or _default(settings, out), loads, placement)
    after, moves = balancedness(loads, found, ranks=members), count_moves(placement, found)
    holders = _holders(found)
    if held := sorted(holders.intersection(out)):
        raise PlacementError(f"the policy places experts on ranks {held}, which are out of the group")
    if settings.max_moves and moves > settings.max_moves:
        raise PlacementError(f"the policy moves {moves} slots; max_moves is {settings.max_moves}")
    known: dict[str, Any] = {"before": before, "after": after, "moves": moves}
    gain = after - before
    if found == placement:
        return _verdict("not_worth_it", "the policy keeps the placement", **known)
    filled = sorted((holders - _holders(placement)).intersection(members))
    if not (must or filled or force or gain >= settings.min_gain):
        return _verdict("not_worth_it", f"the gain {gain:.4f} is below min_gain {settings.min_gain:g}", **known)
    why = f"forced, gain {gain:.4f}" if force else ""
    why = f"ranks {filled} hold no experts" if filled else why
    why = f"ranks {sorted(must)} are out and hold experts" if must else why
    return _verdict("moved", why, placement=found, **known)


def misplaced(placement: Placement, members: Collection[int]) -> bool:
    """Whether a rank that is out holds experts, or a member holds none: a round is due whatever the loads are."""
    return _holders(placement) != set(members)


def count_moves(old: Placement, new: Placement) -> int:
    """Slots of ``new`` that receive an expert that their rank does not hold in ``old``; both are of the same sizes."""
    shape = (new.num_layers, new.ep_size, new.num_logical + 1)
    held = np.zeros(shape, dtype=bool)
    layers, ranks = np.ogrid[: new.num_layers, : new.ep_size]
    by_rank = (new.num_layers, new.ep_size, -1)
    held[layers[..., None], ranks[..., None], old.physical_to_logical_map.reshape(by_rank)] = True
    wanted = new.physical_to_logical_map.reshape(by_rank)
    return int((~held[layers[..., None], ranks[..., None], wanted] & (wanted >= 0)).sum())


def _holders(placement: Placement) -> set[int]:
    """Ranks that hold experts, in some layer."""
    return {rank for rank in range(placement.ep_size) if (placement.local(rank) >= 0).any()}


def _ask(policy: Policy, loads: NDArray[np.float64], placement: Placement) -> Placement:
    found: object = policy(loads.copy(), placement)
    if isinstance(found, Rebalance):
        found = found.placement
    if not isinstance(found, Placement):
        raise TypeError(f"the policy gave a {type(found).__name__}, not a Placement or a Rebalance")
    placement.require_same_sizes(found)
    return found


def _default(settings: ServiceSettings, out: Collection[int]) -> Policy:
    def policy(loads: NDArray[np.float64], placement: Placement) -> Rebalance:
        return rebalance_experts(
            loads,
            placement.num_physical,
            settings.num_groups,
            settings.num_nodes,
            placement.ep_size,
            current=placement,
            max_moves=settings.max_moves or None,
            min_gain=0.0,  # the gain that counts is that of the balancedness
            out=out,
        )

    return policy


def _verdict(outcome: Outcome, reason: str, **known: Any) -> Verdict:
    return Verdict(term=0, round=0, outcome=outcome, reason=reason, **known)
