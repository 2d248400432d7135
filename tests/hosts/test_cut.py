"""Hosts that are cut off in the middle of READs: how all ranks end, and that they migrate again."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from eplb_async.core.placement import Placement
from eplb_async.testing.processes import Failure, RankProcesses
from tests.hosts.conftest import Begin, Site

pytestmark = pytest.mark.faults  # real processes that wait for deadlines: run by `pytest -m faults`, not by default

MIB = 1 << 20
OLD = Placement([[0, 1, 2, 2, 3, 0, 3, 1, 2]] * 3, ep_size=3)
NEW = Placement([[3, 0, 1, 1, 2, 3, 0, 2, 3]] * 3, ep_size=3)
ALL = [0, 1, 2]
SLOW = {"row_bytes": (8 * MIB,)}
SETTINGS = {"settle_timeout": 1.0, "close_timeout": 1.0}
MEGABITS = 800
TIMEOUT = 2.0


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
    """Begin a migration on all, slowly, and return when the victim's READs are under way."""
    for host in site.hosts:
        host.limit(MEGABITS)
    for rank in ALL:
        site.ranks.send(rank, "migrate", NEW, timeout)
    site.ranks.send(victim, "reading")
    assert site.ranks.receive(victim) is None


def ended(ranks: RankProcesses) -> list[Failure]:
    """How the migration failed on each rank; none has waited for longer than its deadlines."""
    answers = [ranks.receive(rank, TIMEOUT + SETTINGS["settle_timeout"] + 10.0) for rank in ALL]
    kinds = [getattr(answer, "kind", answer) for answer in answers]
    assert set(kinds) <= {"NixlTransferTimeout", "MigrationTimeout", "MigrationAborted", "MigrationInDoubt"}, answers
    assert "NixlTransferTimeout" in kinds, f"no READ was under way: {kinds}"
    return answers


def migrate(ranks: RankProcesses, placement: Placement, members: list[int]) -> None:
    """All members move to a placement, and have the right bytes."""
    ranks.all("migrate", placement, 40.0, ranks=members)
    assert ranks.all("check", placement, ranks=members) == [0] * len(members)


def comes_back(ranks: RankProcesses, victim: int) -> None:
    """The victim opens again where it runs, or anew where UCX has aborted it, and the others have it back."""
    others = [rank for rank in ALL if rank != victim]
    try:
        ranks.send(victim, "reopen")
    except OSError:
        ranks.start(victim)
        ranks.send(victim, "open")
    ranks.all("reconnect", victim, 40.0, ranks=others)
    assert not isinstance(answer := ranks.receive(victim), Failure), answer
    healths: list[dict[str, Any]] = ranks.all("health")
    assert [health["members"] for health in healths] == [(0, 1, 2)] * 3
    assert not any(health["degraded"] for health in healths), healths


@pytest.mark.parametrize("victim", [0, 2])
def test_a_host_cut_off_mid_read_and_excluded_comes_back(begin: Begin, tmp_path: object, victim: int) -> None:
    """All end at one layer, the others go on without it; the link returns, it is fenced, opens again, all migrate."""
    site = begin(OLD, rendezvous=f"file://{tmp_path}/rendezvous", settings=SETTINGS, **SLOW)
    ranks, others = site.ranks, [rank for rank in ALL if rank != victim]
    under_way(site, victim, TIMEOUT)
    site.hosts[victim].cut()
    ended(ranks)
    ranks.all("exclude", victim, ranks=others)
    before = committed(ranks, others)
    assert ranks.call(victim, "check") == 0
    assert ranks.call(victim, "placement") == OLD.with_layers(NEW, before)
    migrate(ranks, without(NEW, victim), others)
    site.hosts[victim].restore()
    try:
        answer = ranks.call(victim, "migrate", NEW, 10.0)
        assert isinstance(answer, Failure)
        print(answer.kind, answer.text)
        assert ranks.call(victim, "health")["phase"] == "fenced"
        assert ranks.call(victim, "check") == 0
    except TimeoutError:  # UCX aborts a source of queued READs whose reader is gone (docs/decisions/0002)
        assert ranks.exit_code(victim) == -signal.SIGABRT
    assert ranks.all("check", without(NEW, victim), ranks=others) == [0, 0]
    comes_back(ranks, victim)
    migrate(ranks, NEW, ALL)
    migrate(ranks, OLD, ALL)


@pytest.mark.parametrize("how", ["cut", "silence"])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_link_that_returns_after_the_deadline_needs_nobody_s_word(begin: Begin, victim: int, how: str) -> None:
    """Cut off, or heard by one host no more: the migration fails on all, at one layer; once back, all migrate."""
    site = begin(OLD, settings=SETTINGS, **SLOW)
    ranks, host, other = site.ranks, site.hosts[victim], site.hosts[2 - victim]
    under_way(site, victim, TIMEOUT)
    host.cut() if how == "cut" else host.silence(other)
    ended(ranks)
    host.restore() if how == "cut" else host.speak(other)
    for rank in ALL:
        ranks.send(rank, "phase", "idle")
    assert [ranks.receive(rank, 20.0) for rank in ALL] == [None] * 3
    committed(ranks, ALL)
    migrate(ranks, NEW, ALL)
    migrate(ranks, OLD, ALL)
    assert [health["members"] for health in ranks.all("health")] == [(0, 1, 2)] * 3


@pytest.mark.parametrize("victim", [0, 2])
def test_a_cut_shorter_than_the_deadline_loses_nothing(begin: Begin, victim: int) -> None:
    """The READs under way go on where they were, and every rank returns its report."""
    site = begin(OLD, settings=SETTINGS, **SLOW)
    under_way(site, victim, 40.0)
    site.hosts[victim].cut()
    site.ranks.send(1, "waiting_for", victim) if victim == 0 else site.ranks.send(0, "waiting_for", 1, 2)
    print(site.ranks.all("health"))
    site.hosts[victim].restore()


def test_opening_towards_a_host_that_does_not_answer_ends_in_time(begin: Begin, tmp_path: object) -> None:
    """It has published itself and is cut off then: the others say so when their time is up, not TCP's."""
    site = begin(OLD, rendezvous=f"file://{tmp_path}/rendezvous", open_now=False, timeout=3.0)
    site.ranks.send(2, "open")
    site.ranks.send(0, "open")
    assert isinstance(site.ranks.receive(0), Failure)
    for rank in (0, 1):
        site.hosts[rank].silence(site.hosts[2])
        site.ranks.send(rank, "open")
    for rank in (0, 1):
        answer = site.ranks.receive(rank, 15.0)
        assert isinstance(answer, Failure)
        assert answer.kind == "HandshakeError"
        print(answer.text)
        assert "rank 2" in answer.text


def test_a_new_agent_does_not_wait_for_a_host_that_is_cut_off(begin: Begin) -> None:
    """Quarantine has eaten the staging, so agents are recycled; one that is cut off holds nobody up, and comes along."""
    site = begin(OLD, settings={**SETTINGS, "staging_layers": 1}, **SLOW)
    ranks, hosts = site.ranks, site.hosts
    under_way(site, 2, TIMEOUT)
    for host in hosts[:2]:
        host.silence(hosts[2])
    ended(ranks)
    assert any(health["quarantined_bytes"] for health in ranks.all("health"))
    for rank in ALL:
        ranks.send(rank, "migrate", NEW, TIMEOUT)
    answers = [ranks.receive(rank, 15.0) for rank in ALL]
    for answer in answers: print(answer.kind, answer.text)
    for health in ranks.all("health"): print(health)
    for host in hosts[:2]:
        host.speak(hosts[2])
    committed(ranks, ALL)
    migrate(ranks, NEW, ALL)
    migrate(ranks, OLD, ALL)
