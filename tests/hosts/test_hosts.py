"""Ranks on several hosts, which are network namespaces: over tcp, with a rendezvous on the first of them."""

from __future__ import annotations

import signal

import pytest

from eplb_async.core.placement import Placement
from eplb_async.testing.processes import Failure
from tests.hosts.conftest import Begin
from tests.hosts.moves import migrate

OLD = Placement([[0, 1, 2, 2, 3, 0, 3, 1, 2]] * 3, ep_size=3)
NEW = Placement([[3, 0, 1, 1, 2, 3, 0, 2, 3]] * 3, ep_size=3)
BAD = {"delay": 0.005, "loss": 0.01}


def test_two_hosts_migrate(begin: Begin) -> None:
    """Open over the network, there and back, every byte right."""
    old, new = Placement([[0, 1, 2, 3]] * 2, ep_size=2), Placement([[3, 2, 1, 0]] * 2, ep_size=2)
    ranks = begin(old).ranks
    for target in (new, old):
        migrate(ranks, target, [0, 1])


@pytest.mark.faults
def test_late_and_lost_frames_change_nothing_but_the_time(begin: Begin) -> None:
    """Late by 10 ms from host to host, one frame of fifty lost: open, there and back, close."""
    site = begin(OLD, bad=True, open_now=False, row_bytes=(1 << 20, 4096))
    for host in site.hosts:
        host.worsen(**BAD)
    ranks = site.ranks
    ranks.all("open")
    for target in (NEW, OLD):
        migrate(ranks, target, [0, 1, 2])
    assert ranks.all("close") == [()] * 3


@pytest.mark.faults
def test_a_rank_killed_on_a_bad_network_comes_back(begin: Begin) -> None:
    """Its host's kernel says so: the others notice at once, go on, and have a new process back."""
    site = begin(OLD, bad=True, row_bytes=(1 << 20,))
    for host in site.hosts:
        host.worsen(**BAD)
    ranks = site.ranks
    for rank in range(3):
        ranks.send(rank, "migrate", NEW, 60.0)
    ranks.send(0, "reading")
    assert ranks.receive(0) is None
    ranks.kill(2)
    answers = [ranks.receive(rank, 30.0) for rank in (0, 1)]
    assert all(isinstance(answer, Failure) for answer in answers), answers
    assert {answer.kind for answer in answers} <= {"NixlPeerDisconnected", "MigrationAborted"}
    assert ranks.exit_code(2) == -signal.SIGKILL
    assert ranks.all("check", ranks=[0, 1]) == [0, 0]
    ranks.start(2)
    ranks.send(2, "open")
    ranks.all("reconnect", 2, 60.0, ranks=[0, 1])
    assert not isinstance(answer := ranks.receive(2), Failure), answer
    migrate(ranks, NEW, [0, 1, 2])


@pytest.mark.faults
def test_an_agent_reads_from_another_host(begin: Begin) -> None:
    """The agent layer alone: READs at once, on a bad network, every byte right."""
    site = begin(OLD, bad=True, open_now=False)
    for host in site.hosts:
        host.worsen(**BAD)
    blob = site.ranks.call(0, "run", "tests.hosts.lone", "serve")
    readers = [1, 2]
    for rank in readers:
        site.ranks.send(rank, "run", "tests.hosts.lone", "read", blob, 8)
    assert [site.ranks.receive(rank) for rank in readers] == [[True] * 8] * 2
    assert site.ranks.call(0, "run", "tests.hosts.lone", "leave") is None
