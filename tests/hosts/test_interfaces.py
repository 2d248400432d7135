"""Which network interfaces UCX takes, and what is said where they are the wrong ones."""

from __future__ import annotations

from typing import Any

import pytest

from eplb_async.core.placement import Placement
from eplb_async.testing.processes import Failure
from tests.hosts.conftest import Begin, Site
from tests.hosts.moves import insist, migrate
from tests.hosts.netns import ip

pytestmark = pytest.mark.faults  # real processes that wait for deadlines: run by `pytest -m faults`, not by default

OLD, NEW = Placement([[0, 1]] * 2, ep_size=2), Placement([[1, 0]] * 2, ep_size=2)
ETH0, ETH1, ETH7 = ({"UCX_NET_DEVICES": f"eth{number}"} for number in (0, 1, 7))


def refused(site: Site) -> list[Failure]:
    """What ``open`` raises on each rank."""
    for rank in range(2):
        site.ranks.send(rank, "open")
    answers: list[Any] = [site.ranks.receive(rank, 20.0) for rank in range(2)]
    assert all(isinstance(answer, Failure) for answer in answers), answers
    return answers


def test_an_interface_that_is_not_there_is_named(begin: Begin) -> None:
    """NIXL itself says NIXL_ERR_BACKEND, and nothing else."""
    first, second = refused(begin(OLD, open_now=False, timeout=2.0, environments=({}, ETH7)))
    assert second.kind == "NixlTransferFailed"
    assert "UCX_NET_DEVICES names eth7, which this host does not have; it has eth0, lo" in second.text
    assert first.kind == "HandshakeError"
    assert "rank 1: never published its introduction" in first.text


def test_ranks_on_networks_that_do_not_meet_are_told_which_they_are_on(begin: Begin) -> None:
    """Each knows of the other by the rendezvous, and finds no way there."""
    answers = refused(begin(OLD, planes=2, open_now=False, timeout=2.0, environments=(ETH0, ETH1)))
    for rank, answer in enumerate(answers):
        assert answer.kind == "HandshakeError"
        assert f"rank {1 - rank}: NIXL refused the metadata" in answer.text
        assert f"UCX_NET_DEVICES is eth{rank} and UCX_TLS is tcp,self here" in answer.text
        assert "eth0, eth1, lo" in answer.text


def test_an_interface_of_one_address_on_every_host_must_be_left_out(begin: Begin) -> None:
    """As docker0 is: UCX takes it for a way to the peer, and finds itself."""

    def hosts(*environments: dict[str, str]) -> Site:
        site = begin(OLD, open_now=False, timeout=2.0, environments=environments)
        for host in site.hosts:
            ip(
                "link add docker0 type veth peer name container",
                "link set container up",
                "link set docker0 up",
                "address add 172.17.0.1/16 dev docker0",
                namespace=host.namespace,
            )
        return site

    for answer in refused(hosts({})):
        assert answer.kind == "HandshakeError"
        assert "its UCX cannot be reached from here (UCX_NET_DEVICES, a firewall)" in answer.text
    ranks = hosts(ETH0).ranks
    ranks.all("open")
    migrate(ranks, NEW, [0, 1])


def test_a_peer_that_cannot_be_reached_where_it_is(begin: Begin) -> None:
    """It publishes an address on a network that is cut."""
    site = begin(OLD, planes=2, open_now=False, timeout=2.0, environments=({}, ETH1))
    site.hosts[1].cut(plane=1)
    for answer in refused(site):
        assert answer.kind == "HandshakeError"
        assert "its UCX cannot be reached from here (UCX_NET_DEVICES, a firewall)" in answer.text


@pytest.mark.parametrize("plane", [0, 1])
def test_of_two_interfaces_that_ucx_uses_either_stops_it(begin: Begin, plane: int) -> None:
    """UCX shares what it sends between them and does not take one for the other: a migration waits, and goes on."""
    site = begin(OLD, planes=2, row_bytes=(4 << 20,))
    ranks = site.ranks
    site.hosts[1].cut(plane)
    for rank in range(2):
        ranks.send(rank, "migrate", NEW, 1.5)
    answers = [ranks.receive(rank, 20.0) for rank in range(2)]
    assert all(isinstance(answer, Failure) for answer in answers), answers
    assert {answer.kind for answer in answers} <= {
        "MigrationTimeout",
        "MigrationAborted",
        "MigrationInDoubt",
        "NixlTransferTimeout",
    }
    site.hosts[1].restore(plane)
    insist(ranks, NEW, [0, 1])
