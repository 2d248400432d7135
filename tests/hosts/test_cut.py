"""Hosts that are cut off in the middle of READs: how all ranks end, and that they migrate again."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from eplb_async.core.placement import Placement
from eplb_async.testing.processes import Failure, RankProcesses
from tests.hosts.conftest import Begin, Site
from tests.hosts.moves import insist, migrate

pytestmark = pytest.mark.faults  # real processes that wait for deadlines: run by `pytest -m faults`, not by default

MIB = 1 << 20
OLD = Placement([[0, 1, 2, 2, 3, 0, 3, 1, 2]] * 3, ep_size=3)
NEW = Placement([[3, 0, 1, 1, 2, 3, 0, 2, 3]] * 3, ep_size=3)
ALL = [0, 1, 2]
ROWS = {"row_bytes": (8 * MIB,)}
SETTINGS = {"settle_timeout": 1.0, "close_timeout": 1.0}
MEGABITS = 800
TIMEOUT = 1.5
LATE = {"NixlTransferTimeout", "MigrationTimeout", "MigrationAborted", "MigrationInDoubt"}
GONE = {"NixlPeerDisconnected", "MigrationAborted", "MigrationInDoubt"}


def without(placement: Placement, rank: int) -> Placement:
    """With nothing on a rank."""
    return placement.with_rank(rank, [[-1] * 3] * 3)


def committed(ranks: RankProcesses, members: list[int]) -> int:
    """How many layers hold ``NEW``: as many on all members, every byte right (I-7)."""
    found = ranks.all("placement", ranks=members)
    assert len(set(found)) == 1, [placement.physical_to_logical_map[:, 0] for placement in found]
    assert ranks.all("check", ranks=members) == [0] * len(members)
    return next(n for n in range(4) if OLD.with_layers(NEW, n) == found[0])


def under_way(site: Site, victim: int, timeout: float) -> None:
    """Begin a migration on all, over slow links, and return when READs of the victim are under way."""
    for host in site.hosts:
        host.limit(MEGABITS)
    for rank in ALL:
        site.ranks.send(rank, "migrate", NEW, timeout)
    site.ranks.send(victim, "reading")
    assert site.ranks.receive(victim) is None


def endings(ranks: RankProcesses, kinds: set[str]) -> set[str]:
    """The kinds of error that the migration raised, one on each rank, and each one of these."""
    answers = [ranks.receive(rank, 30.0) for rank in ALL]
    found = {getattr(answer, "kind", str(answer)) for answer in answers}
    assert found <= kinds, answers
    return found


def comes_back(ranks: RankProcesses, victim: int) -> None:
    """The victim opens again where it runs, or anew where UCX has aborted it, and the others have it back."""
    if ranks.exit_code(victim, 0.0) is None:
        ranks.send(victim, "reopen")
    else:
        ranks.start(victim)
        ranks.send(victim, "open")
    ranks.all("reconnect", victim, 60.0, ranks=[rank for rank in ALL if rank != victim])
    assert not isinstance(answer := ranks.receive(victim), Failure), answer
    healths: list[dict[str, Any]] = ranks.all("health")
    assert [health["members"] for health in healths] == [(0, 1, 2)] * 3
    assert not any(health["degraded"] for health in healths), healths


@pytest.mark.parametrize("victim", [0, 2])
def test_a_host_cut_off_mid_read_and_excluded_comes_back(begin: Begin, tmp_path: Path, victim: int) -> None:
    """All end at one layer, the others go on without it; the link returns: it is fenced, opens again, all migrate."""
    roomy = {**SETTINGS, "staging_layers": 4}  # nobody recycles: those cut off could not be told that they are out
    site = begin(OLD, rendezvous=f"file://{tmp_path}/rendezvous", settings=roomy, **ROWS)
    ranks, others = site.ranks, [rank for rank in ALL if rank != victim]
    under_way(site, victim, TIMEOUT)
    site.hosts[victim].cut()
    assert "NixlTransferTimeout" in endings(ranks, LATE)
    ranks.all("exclude", victim, ranks=others)
    ranks.all("members", *others, ranks=others)
    before = committed(ranks, others)
    assert ranks.call(victim, "check") == 0
    assert ranks.call(victim, "placement") == OLD.with_layers(NEW, before)
    migrate(ranks, without(NEW, victim), others)
    site.hosts[victim].restore()
    try:
        answer = ranks.call(victim, "migrate", NEW, 20.0)
        assert isinstance(answer, Failure)
        assert ranks.call(victim, "health")["phase"] == "fenced", answer
        assert ranks.call(victim, "check") == 0
    except TimeoutError:  # UCX aborts a source of queued READs whose reader is gone (docs/decisions/0002)
        assert ranks.exit_code(victim) == -signal.SIGABRT
    assert ranks.all("check", without(NEW, victim), ranks=others) == [0, 0], "the return has changed something"
    comes_back(ranks, victim)
    migrate(ranks, NEW, ALL)
    migrate(ranks, OLD, ALL)


@pytest.mark.parametrize(("victim", "how"), [(0, "cut"), (2, "cut"), (0, "silence")])
def test_a_link_that_returns_after_the_deadline_needs_nobodys_word(begin: Begin, victim: int, how: str) -> None:
    """Cut off, or heard by one host no more: the migration fails on all, at one layer; once back, all migrate."""
    site = begin(OLD, settings=SETTINGS, **ROWS)
    ranks, host, other = site.ranks, site.hosts[victim], site.hosts[2 - victim]
    under_way(site, victim, TIMEOUT)
    host.cut() if how == "cut" else host.silence(other)
    found = endings(ranks, LATE)
    # Who is cut off hears of no other's deadline and meets its own. Where two still hear the third, its may come first.
    assert how == "silence" or "NixlTransferTimeout" in found
    host.restore() if how == "cut" else host.speak(other)
    ranks.all("phase", "idle")
    committed(ranks, ALL)
    insist(ranks, NEW, ALL)
    migrate(ranks, OLD, ALL)
    assert [health["members"] for health in ranks.all("health")] == [(0, 1, 2)] * 3


@pytest.mark.parametrize("victim", [0, 2])
def test_a_cut_shorter_than_the_deadline_loses_nothing(begin: Begin, victim: int) -> None:
    """READs that were under way go on where they were, and every rank returns its report."""
    site = begin(OLD, settings=SETTINGS, **ROWS)
    ranks = site.ranks
    under_way(site, victim, 60.0)
    site.hosts[victim].cut()
    time.sleep(1.0)  # so long is the cut
    ranks.send(victim, "reading")  # answered at once: READs are under way still
    assert ranks.receive(victim, 5.0) is None
    site.hosts[victim].restore()
    reports = [ranks.receive(rank) for rank in ALL]
    assert not any(isinstance(report, Failure) for report in reports), reports
    assert ranks.all("check", NEW) == [0, 0, 0]
    assert not any(health["quarantined_bytes"] for health in ranks.all("health"))


@pytest.mark.parametrize("victim", [0, 2])
def test_a_majority_goes_on_by_proof_and_a_minority_does_not(begin: Begin, tmp_path: Path, victim: int) -> None:
    """The kernel gives the silent up after a second: two of three make a view, and the third can make none."""
    given_up = ({"UCX_TCP_USER_TIMEOUT": "1s"},)
    url = f"file://{tmp_path}/rendezvous"
    site = begin(OLD, rendezvous=url, environments=given_up, settings=SETTINGS, **ROWS)
    ranks, others = site.ranks, [rank for rank in ALL if rank != victim]
    under_way(site, victim, 40.0)
    site.hosts[victim].cut()
    endings(ranks, GONE)
    ranks.all("members", *others, ranks=others)
    before = committed(ranks, others)
    migrate(ranks, without(NEW, victim), others)
    alone = ranks.call(victim, "health")
    assert alone["members"] == (0, 1, 2)
    assert set(alone["degraded"]) == set(others)
    assert ranks.call(victim, "check") == 0
    assert ranks.call(victim, "placement") == OLD.with_layers(NEW, before)
    site.hosts[victim].restore()
    answer = ranks.call(victim, "migrate", NEW, 1.5)
    assert isinstance(answer, Failure)
    assert "MigrationAborted" in answer.bases or answer.kind == "MigrationInDoubt", answer
    assert f"without ranks {others} there is no majority" in answer.text or answer.kind == "MigrationInDoubt", answer
    comes_back(ranks, victim)
    migrate(ranks, NEW, ALL)


def test_opening_towards_a_host_that_does_not_answer_ends_in_time(begin: Begin, tmp_path: Path) -> None:
    """It publishes itself, and nothing reaches it: the others say so when their time is up, not TCP's."""
    site = begin(OLD, rendezvous=f"file://{tmp_path}/rendezvous", open_now=False, timeout=3.0)
    ranks = site.ranks
    for host in site.hosts[:2]:
        host.silence(site.hosts[2])
    for rank in ALL:
        ranks.send(rank, "open")
    answers = [ranks.receive(rank, 20.0) for rank in ALL]
    for answer in answers[:2]:
        assert isinstance(answer, Failure)
        assert answer.kind == "HandshakeError"
        assert "rank 2: it published an introduction but did not answer" in answer.text


def test_a_new_agent_does_not_wait_for_a_host_that_is_cut_off(begin: Begin) -> None:
    """Quarantine has eaten the staging, so agents are recycled: connecting holds nobody up, and all come along."""
    site = begin(OLD, settings={**SETTINGS, "staging_layers": 1}, **ROWS)
    ranks, hosts = site.ranks, site.hosts
    under_way(site, 2, TIMEOUT)
    for host in hosts[:2]:
        host.silence(hosts[2])
    assert "NixlTransferTimeout" in endings(ranks, LATE)
    assert any(health["quarantined_bytes"] for health in ranks.all("health"))
    for rank in ALL:
        ranks.send(rank, "migrate", NEW, TIMEOUT)
    endings(ranks, LATE)
    for host in hosts[:2]:
        host.speak(hosts[2])
    insist(ranks, NEW, ALL)
    migrate(ranks, OLD, ALL)
    healths = ranks.all("health")
    assert sum(health["recycled"] for health in healths) >= 1
    assert [health["members"] for health in healths] == [(0, 1, 2)] * 3


def test_with_the_rendezvous_cut_off_too_every_call_ends(begin: Begin) -> None:
    """Rank 0 hosts it: the others go on, cannot have it back, and are told so; all close in their time."""
    site = begin(OLD, settings=SETTINGS)
    ranks, others = site.ranks, [1, 2]
    site.hosts[0].cut()
    ranks.all("exclude", 0, ranks=others)
    ranks.all("members", *others, ranks=others)
    migrate(ranks, without(NEW, 0), others)
    for rank in others:
        ranks.send(rank, "reconnect", 0, 2.0)
    for rank in others:
        answer = ranks.receive(rank, 20.0)
        assert isinstance(answer, Failure)
        assert answer.kind == "HandshakeError"
        assert "rank 0 is not back within 2 s" in answer.text
    for rank in ALL:
        ranks.send(rank, "close")
    assert not any(isinstance(ranks.receive(rank, 20.0), Failure) for rank in ALL)
