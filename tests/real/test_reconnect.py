"""Real ranks that die, stop, and come back: the others migrate on, and all migrate again (C3, C14)."""

from __future__ import annotations

import signal
import socket
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from eplb_async.core.placement import Placement
from eplb_async.testing.processes import Failure, RankProcesses
from tests.real.conftest import Start

pytestmark = pytest.mark.faults  # minutes of real processes: run by `pytest -m faults`, not by default

MIB = 1 << 20
OLD = Placement([[0, 1, 2, 2, 3, 0, 3, 1, 2]] * 3, ep_size=3)
NEW = Placement([[3, 0, 1, 1, 2, 3, 0, 2, 3]] * 3, ep_size=3)


def without(placement: Placement, rank: int) -> Placement:
    """With nothing on a rank."""
    return placement.with_rank(rank, [[-1] * 3] * 3)


def cut_short(ranks: RankProcesses, victim: int) -> None:
    """A migration of all, in whose READs the victim is killed; the others end equal."""
    for rank in range(3):
        ranks.send(rank, "migrate", NEW, 30.0)
    others = [rank for rank in range(3) if rank != victim]
    reader = others[0]
    ranks.send(reader, "reading")
    assert ranks.receive(reader) is None
    ranks.kill(victim)
    answers = [ranks.receive(rank) for rank in others]
    assert all(isinstance(answer, Failure) for answer in answers), answers
    assert {answer.kind for answer in answers} <= {"NixlPeerDisconnected", "MigrationAborted", "MigrationInDoubt"}


def back(ranks: RankProcesses, rank: int, command: str = "open") -> None:
    """The rank opens, the others reconnect; all are in one view and agree where the experts are."""
    others = [other for other in range(3) if other != rank]
    ranks.send(rank, command)
    ranks.all("reconnect", rank, 60.0, ranks=others)
    assert not isinstance(answer := ranks.receive(rank), Failure), answer
    healths: list[dict[str, Any]] = ranks.all("health")
    assert [health["members"] for health in healths] == [(0, 1, 2)] * 3
    assert not any(health["degraded"] for health in healths)
    assert len(set(ranks.all("placement"))) == 1
    assert ranks.all("check") == [0, 0, 0]


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_killed_mid_read_comes_back_and_all_migrate(start: Start, victim: int) -> None:
    """C3 on tcp: SIGKILL in the READs; the others migrate; restart, reconnect, migrate, twice over."""
    ranks = start(OLD, row_bytes=(12 * MIB,), transport="tcp")
    others = [rank for rank in range(3) if rank != victim]
    cut_short(ranks, victim)
    assert all(health["degraded"] == {victim: "disconnected"} for health in ranks.all("health", ranks=others))
    ranks.all("migrate", without(NEW, victim), 60.0, ranks=others)
    assert ranks.all("check", without(NEW, victim), ranks=others) == [0, 0]
    ranks.start(victim)
    back(ranks, victim)
    ranks.all("migrate", NEW, 60.0)
    assert ranks.all("check", NEW) == [0, 0, 0]
    ranks.all("migrate", OLD, 60.0)
    assert ranks.all("check", OLD) == [0, 0, 0]


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_died_idle_comes_back_with_nothing_loaded(start: Start, transport: str, victim: int) -> None:
    """Nobody has noticed its death; it opens with -1 for its slots, and gets its experts by the next migration."""
    ranks = start(OLD, transport=transport)
    ranks.kill(victim)
    ranks.exit_code(victim)
    ranks.start(victim, without(OLD, victim))
    back(ranks, victim)
    assert ranks.call(victim, "placement") == without(OLD, victim)
    ranks.all("migrate", NEW, 60.0)
    assert ranks.all("check", NEW) == [0, 0, 0]


@pytest.mark.parametrize("noticed", [False, True])
def test_survivors_are_met_at_the_agents_they_have_now(start: Start, transport: str, noticed: bool) -> None:
    """They were recycled since, past the dead rank, so what they published in ``open`` leads nowhere."""
    ranks = start(OLD, transport=transport, loop="uvloop")
    ranks.kill(1)
    ranks.exit_code(1)
    if noticed:
        ranks.all("exclude", 1, ranks=[0, 2])
    for rank in (0, 2):
        ranks.call(rank, "rebind")
    ranks.start(1)
    back(ranks, 1)
    ranks.all("migrate", NEW, 60.0)
    assert ranks.all("check", NEW) == [0, 0, 0]


def test_a_stopped_rank_is_replaced_and_its_reads_are_not_waited_for(start: Start) -> None:
    """C14 on tcp: SIGSTOP in the READs, exclude, a new process for that rank; the agents with its READs recycle."""
    settings = {"staging_layers": 1, "settle_timeout": 2.0}
    ranks = start(OLD, row_bytes=(12 * MIB,), transport="tcp", settings=settings)
    for rank in (0, 2):
        ranks.send(rank, "migrate", NEW, 4.0)
    ranks.send(0, "waiting_for", 1)
    assert ranks.receive(0) is None
    ranks.stop(2)  # it has joined, and serves no READ
    ranks.send(1, "migrate", NEW, 4.0)
    assert all(isinstance(ranks.receive(rank, 40), Failure) for rank in (0, 1))
    assert max(health["quarantined_bytes"] for health in ranks.all("health", ranks=[0, 1])) > 0
    ranks.all("exclude", 2, ranks=[0, 1])
    ranks.start(2)
    back(ranks, 2)
    ranks.all("migrate", NEW, 60.0)
    assert ranks.all("check", NEW) == [0, 0, 0]
    healths = ranks.all("health")
    assert sum(health["recycled"] for health in healths) >= 1
    assert [health["quarantined_bytes"] for health in healths] == [0, 0, 0]
    ranks.all("migrate", OLD, 60.0)
    assert ranks.all("check", OLD) == [0, 0, 0]


def test_a_fenced_rank_opens_again_in_its_process(start: Start, transport: str) -> None:
    """SIGSTOP, exclude, the others migrate, SIGCONT: it finds itself fenced, opens again, and is back."""
    ranks = start(OLD, transport=transport)
    ranks.stop(2)
    ranks.all("exclude", 2, ranks=[0, 1])
    target = without(NEW, 2)
    ranks.all("migrate", target, 60.0, ranks=[0, 1])
    ranks.resume(2)
    answer = ranks.call(2, "migrate", NEW, 20.0)
    assert isinstance(answer, Failure)
    assert ranks.call(2, "health")["phase"] == "fenced"
    assert ranks.all("check", target, ranks=[0, 1]) == [0, 0], "the stopped rank's return changed something"
    back(ranks, 2, "reopen")
    ranks.all("migrate", NEW, 60.0)
    assert ranks.all("check", NEW) == [0, 0, 0]


def tcp_url() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{free.getsockname()[1]}"


def test_without_the_rendezvous_that_died_with_rank_0_the_error_says_so(start: Start) -> None:
    """A tcp:// rendezvous ends with rank 0; the others go on, and are told who has to host it."""
    ranks = start(OLD, rendezvous=tcp_url(), settings={"secret": b"s" * 16})
    ranks.kill(0)
    assert ranks.exit_code(0) == -signal.SIGKILL
    for rank in (1, 2):
        ranks.send(rank, "reconnect", 0, 3.0)
    for rank in (1, 2):
        answer = ranks.receive(rank)
        assert isinstance(answer, Failure)
        assert answer.kind == "HandshakeError"
        assert "rank 0 hosts it anew when it opens" in answer.text
    target = without(NEW, 0)
    ranks.all("migrate", target, 60.0, ranks=[1, 2])
    assert ranks.all("check", target, ranks=[1, 2]) == [0, 0]


@pytest.mark.parametrize("secret", [b"s" * 16, None], ids=["secret", "none"])
def test_rank_0_hosts_its_rendezvous_anew(start: Start, transport: str, secret: bytes | None) -> None:
    """SIGKILL of rank 0 ends the store; its next process hosts another, by which all ranks come back, too."""
    ranks = start(OLD, rendezvous=tcp_url(), transport=transport, settings={"secret": secret})
    for victim in (0, 0, 2):
        ranks.kill(victim)
        ranks.exit_code(victim)
        ranks.start(victim)
        back(ranks, victim)
        ranks.all("migrate", NEW, 60.0)
        assert ranks.all("check", NEW) == [0, 0, 0]
        ranks.all("migrate", OLD, 60.0)
        assert ranks.all("check", OLD) == [0, 0, 0]


@pytest.mark.parametrize("by_agent", [True, False], ids=["agent", "rank 0"])
def test_ranks_come_back_by_the_store_of_their_launcher(start: Start, transport: str, by_agent: bool) -> None:
    """``env://``: any rank killed and started again with its variables is had back, whoever hosts the store."""
    agent = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), False)
    port = agent.port
    if not by_agent:
        del agent
    variables = {
        "RANK": "{rank}",
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": str(by_agent),
    }
    ranks = start(OLD, rendezvous="env://", transport=transport, variables=variables)
    for victim in (0, 2):
        ranks.kill(victim)
        ranks.exit_code(victim)
        ranks.start(victim)
        back(ranks, victim)
        ranks.all("migrate", NEW, 60.0)
        assert ranks.all("check", NEW) == [0, 0, 0]
        ranks.all("migrate", OLD, 60.0)
        assert ranks.all("check", OLD) == [0, 0, 0]
    if by_agent:
        held = agent.num_keys()
        ranks.all("close")
        assert agent.num_keys() == held
