"""Ranks on several hosts, which are network namespaces: over tcp, with a rendezvous on the first of them."""

from __future__ import annotations

from eplb_async.core.placement import Placement
from tests.hosts.conftest import Begin


def test_two_hosts_migrate(begin: Begin) -> None:
    """Open over the network, there and back, every byte right."""
    old, new = Placement([[0, 1, 2, 3]] * 2, ep_size=2), Placement([[3, 2, 1, 0]] * 2, ep_size=2)
    ranks = begin(old).ranks
    for target in (new, old):
        ranks.all("migrate", target, 20.0)
        assert ranks.all("check", target) == [0, 0]
