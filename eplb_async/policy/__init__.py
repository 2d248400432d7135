"""Rebalancing: loads in, placement out. Pure numpy; equal arguments give equal results on every rank."""

from eplb_async.policy.rebalance import rebalance_experts
from eplb_async.policy.result import Rebalance, rank_loads

__all__ = ["Rebalance", "rank_loads", "rebalance_experts"]
