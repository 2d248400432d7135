"""The example server as a user runs it: answers while experts move, a killed rank, orderly and disorderly ends."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.moe_server.load import Client, Outcome
from examples.moe_server.model import ModelConfig
from examples.moe_server.traffic import Traffic

pytestmark = pytest.mark.faults

ROOT = Path(__file__).parents[2]
SECONDS = 60.0
SMALL = ["--layers", "3", "--hidden", "128"]
CONFIG = ModelConfig(layers=3, hidden=128)


class Server:
    """The program, with a free port."""

    def __init__(self, log: Path, arguments: tuple[str, ...], transport: str) -> None:
        self.log = log
        environment = dict(os.environ, PYTHONPATH=str(ROOT)) | ({"UCX_TLS": "tcp,self"} if transport == "tcp" else {})
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "examples/moe_server", "--port", "0", *SMALL, *arguments],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        self.url = ""
        self.ranks: list[int] = []

    def ready(self) -> None:
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().split()[-1]
        found = re.search(r"rank processes: \[([\d, ]+)\]", self.messages())
        assert found is not None, self.messages()
        self.ranks = [int(pid) for pid in found[1].split(",")]

    def messages(self) -> str:
        return self.log.read_text()

    def wait(self) -> int:
        """Wait for its end; returns its exit status. Nothing is left of it then."""
        status = self.process.wait(SECONDS)
        until(lambda: not any(is_alive(pid) for pid in self.ranks), "the ranks' end")
        return status

    def end(self) -> None:
        self.process.kill()
        for pid in self.ranks:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(SECONDS)
        assert self.process.stdout is not None
        self.process.stdout.close()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not come in {SECONDS:g} s"
        time.sleep(0.02)
    return found


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def begin(*arguments: str, transport: str = "auto") -> Server:
        servers.append(Server(tmp_path / f"{len(servers)}.log", arguments, transport))
        servers[-1].ready()
        return servers[-1]

    yield begin
    for server in servers:
        server.end()


async def under_load(url: str, traffic: Traffic, rebalances: int, seconds: float = 8.0) -> tuple[Outcome, list[Any]]:
    """Load of alternating skew; meanwhile so many rebalances."""
    async with Client(url, traffic) as client:
        loading = asyncio.ensure_future(client.load(15.0, seconds, alternate=seconds / (rebalances + 1)))
        reports = []
        for _ in range(rebalances):
            await asyncio.sleep(seconds / (rebalances + 1))
            reports.append((await client.http.post("/eplb/rebalance?force=true", timeout=SECONDS)).json())
        return await loading, reports


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("mode", "transport"), [("service", "auto"), ("service", "tcp"), ("vllm", "auto")])
def test_every_answer_is_right_while_experts_move(start: Callable[..., Server], mode: str, transport: str) -> None:
    """Eight seconds of load, at least two migrations: none wrong, none failed; SIGTERM ends all in good order."""
    traffic = Traffic(CONFIG, max_tokens=6)
    traffic.solve()
    server = start("--rebalancing", mode, "--step-interval", "0", "--window-steps", "100", transport=transport)
    before = httpx.get(f"{server.url}/eplb").json()["placement"]
    outcome, reports = asyncio.run(under_load(server.url, traffic, 4))
    assert (outcome.wrong, outcome.failed, len(outcome.spans)) == (0, 0, 120), outcome.complaints
    moved = [report for report in reports if report.get("outcome") == "moved"]
    assert len(moved) >= 2, reports
    assert all(report["balancedness_after"] > report["balancedness_before"] for report in moved)
    state = httpx.get(f"{server.url}/eplb").json()
    assert state["placement"] != before
    assert httpx.get(f"{server.url}/health").status_code == 200
    if mode == "service":
        assert state["service"]["rounds"]["moved"] == len(moved)
        assert "eplb_async_migrations_total" in httpx.get(f"{server.url}/metrics").text
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0, server.messages()


@pytest.mark.timeout(180)
def test_a_killed_rank_is_named_and_nobody_hangs(start: Callable[..., Server]) -> None:
    """Under load: /health and the refused requests name it, the log says what to do, and the end leaves nothing."""
    server = start("--ranks", "3", "--step-interval", "50")

    async def kill_under_load() -> Outcome:
        async with Client(server.url, Traffic(CONFIG)) as client:
            loading = asyncio.ensure_future(client.load(10.0, 4.0))
            await asyncio.sleep(2.0)
            os.kill(server.ranks[1], signal.SIGKILL)
            return await loading

    outcome = asyncio.run(kill_under_load())
    assert outcome.spans
    assert outcome.failed
    assert all("503" in complaint and "rank 1" in complaint for complaint in outcome.complaints), outcome.complaints
    health = httpx.get(f"{server.url}/health")
    assert health.status_code == 503
    assert [problem["rank"] for problem in health.json()["problems"]] == [1]
    until(lambda: server.messages().count("restart it") == 2, "what to do, by both that are left")
    server.process.send_signal(signal.SIGINT)
    assert server.wait() == 1


@pytest.mark.timeout(180)
def test_a_rank_killed_while_idle_is_named(start: Callable[..., Server]) -> None:
    """Nobody asks, and /health names it all the same."""
    server = start("--rebalancing", "off")
    os.kill(server.ranks[1], signal.SIGKILL)
    health = until(lambda: (found := httpx.get(f"{server.url}/health")).status_code == 503 and found, "503")
    assert health.json()["problems"][0]["rank"] == 1


@pytest.mark.timeout(180)
@pytest.mark.parametrize("victim", ["parent", "rank 0"])
def test_nothing_is_left_when_the_parent_or_the_front_end_is_killed(start: Callable[..., Server], victim: str) -> None:
    """No rank outlives its parent, and no parent its rank 0."""
    server = start()
    os.kill(server.process.pid if victim == "parent" else server.ranks[0], signal.SIGKILL)
    assert server.wait() == (-signal.SIGKILL if victim == "parent" else 1)
