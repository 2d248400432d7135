"""A rank is lost under load: it is named, the engines of the others go on, balancing too, or it is said why not."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eplb_async.core.placement import Placement
from eplb_async.testing.processes import RankProcesses
from tests.real.conftest import Start
from tests.real.stepping import BEGUN, Board
from tests.service.engine import ROWS
from tests.service.ranks import MODULE, everywhere, serve, stepping, stopped, until

TWICE = Placement(np.tile(np.r_[0:8, 8:12, 0:4, 4:12], (3, 1)), ep_size=3)
"""Each of twelve experts on two of the three ranks."""
SETTINGS = {"activation": "step", "step_margin": 2, "idle_tick": 0.1}
WATCH = 0.2
ROUNDS: dict[str, Any] = {
    "step_interval": 150,
    "window_steps": 100,
    "min_interval": 0.0,
    "backoff": 0.2,
    "backoff_max": 0.2,
    "watch_interval": WATCH,
}


def begun(
    start: Start, folder: Path, placement: Placement, transport: str, *, loads: bool = False
) -> tuple[RankProcesses, Board]:
    """Engines that step under services, at some step before the first round."""
    loop = "uvloop" if transport == "tcp" else "asyncio"
    ranks = start(placement, transport=transport, settings=SETTINGS, row_bytes=ROWS, loop=loop, logs=str(folder))
    serve(ranks, loads=loads, **ROUNDS)
    board = stepping(ranks, folder / "board", period=100)
    until(lambda: board.words[BEGUN].min() >= 20)
    return ranks, board


def named(ranks: RankProcesses, lost: int, alive: Iterable[int]) -> float:
    """Wait until health() and /health of the others name the rank; answers after how many seconds."""
    begin = time.monotonic()
    until(lambda: all(lost in health["degraded"] for health in ranks.all("health", ranks=alive)), 10.0)
    seconds = time.monotonic() - begin
    for rank in alive:
        answer = ranks.call(rank, "run", "tests.real.telemetry", "asked", "/health")
        assert answer["status"] == 503, answer
        assert lost in [problem.get("rank") for problem in answer["body"]["problems"]], answer
    return seconds


def everywhere_of(ranks: RankProcesses, function: str, of: int, asked: Iterable[int]) -> None:
    """Wait until ranks say something of another one."""
    for rank in asked:
        ranks.send(rank, "run", MODULE, function, of)
    answers = [ranks.receive(rank) for rank in asked]
    assert not any(answers), answers


def moved(ranks: RankProcesses, rank: int) -> int:
    return int(everywhere(ranks, "health", only=[rank])[rank]["rounds"].get("moved", 0))


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("transport", "lost", "how"),
    [
        ("auto", 0, "killed"),
        ("tcp", 2, "killed"),
        ("auto", 0, "killed while it moves"),
        ("auto", 2, "killed while it moves"),
        ("tcp", 0, "killed while it moves"),
        ("tcp", 2, "killed while it moves"),
        ("auto", 2, "stopped"),
        ("tcp", 0, "stopped"),
    ],
)
def test_the_others_go_on_without_a_rank_that_is_lost(
    start: Start, tmp_path: Path, transport: str, how: str, lost: int
) -> None:
    """SIGKILL: all by itself. SIGSTOP is no proof of a death: it takes the caller's word, and the rank is fenced."""
    ranks, board = begun(start, tmp_path, TWICE, transport, loads="moves" in how)
    alive = tuple(rank for rank in range(3) if rank != lost)
    if "moves" in how:
        ranks.call(lost, "run", MODULE, "moving", lost)
    ranks.stop(lost) if how == "stopped" else ranks.kill(lost)
    seconds = named(ranks, lost, alive)
    print(f"\n{transport}, rank {lost} {how}: named after {seconds:.1f} s, watched every {WATCH} s")
    if how == "stopped":
        at = board.words[BEGUN].max()
        assert {health["members"] for health in ranks.all("health", ranks=alive)} == {(0, 1, 2)}
        assert board.words[BEGUN].max() <= at + 1, "nobody steps without a member"
        ranks.all("exclude", lost, ranks=alive)
    everywhere_of(ranks, "emptied", lost, alive)
    before = moved(ranks, alive[0])
    until(lambda: moved(ranks, alive[0]) >= before + 3)  # by the steps, as the skew moves on
    if how == "stopped":
        ranks.resume(lost)
        until(lambda: ranks.call(lost, "health")["phase"] in ("fenced", "closed"))
        until(lambda: "fenced" in everywhere(ranks, "health", only=[lost])[lost]["closed"])
    seen = stopped(ranks, board, only=alive)
    steps, changes = board.check(alive)
    print(f"{steps} steps, {changes} changes; rounds {everywhere(ranks, 'health', only=alive)[alive[0]]['rounds']}")
    assert seen[alive[0]]["applied"] == seen[alive[1]]["applied"]
    assert ranks.all("check", ranks=alive) == [0, 0]
    placements = ranks.all("placement", ranks=alive)
    assert placements[0] == placements[1]
    assert (placements[0].local(lost) == -1).all()
    log = (tmp_path / f"rank{alive[0]}.log").read_text()
    assert any(line.startswith(f"rank {lost}") and "Next: " in line for line in log.splitlines()), log


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("transport", "lost"), [("auto", 2), ("tcp", 0)])
def test_a_rank_that_stood_still_for_a_while_is_named_and_all_go_on(
    start: Start, tmp_path: Path, transport: str, lost: int
) -> None:
    """SIGSTOP while it moves, then SIGCONT: nothing is decided without it, and nobody is fenced."""
    ranks, board = begun(start, tmp_path, TWICE, transport)
    ranks.call(lost, "run", MODULE, "moving", lost)
    ranks.stop(lost)
    named(ranks, lost, [rank for rank in range(3) if rank != lost])
    ranks.resume(lost)
    until(lambda: not any(health["degraded"] for health in ranks.all("health")))
    before = moved(ranks, 0)
    until(lambda: moved(ranks, 0) >= before + 2)
    seen = stopped(ranks, board)
    board.check()
    assert seen[0]["applied"] == seen[1]["applied"] == seen[2]["applied"]
    assert ranks.all("check") == [0, 0, 0]
    assert {health["members"] for health in ranks.all("health")} == {(0, 1, 2)}


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("transport", "lost"), [("auto", 0), ("tcp", 2)])
def test_a_rank_that_comes_back_steps_with_the_others_and_is_filled(
    start: Start, tmp_path: Path, transport: str, lost: int
) -> None:
    """What the log says to do: the engines rest, its process starts again, and all reconnect."""
    ranks, board = begun(start, tmp_path, TWICE, transport)
    alive = tuple(rank for rank in range(3) if rank != lost)
    ranks.kill(lost)
    everywhere_of(ranks, "emptied", lost, alive)
    stopped(ranks, board, only=alive)
    board.check(alive)
    steps = {health["step"] for health in ranks.all("health", ranks=alive)}
    assert len(steps) == 1
    ranks.start(lost, ranks.call(alive[0], "placement"))
    ranks.send(lost, "open")
    ranks.all("reconnect", lost, 30.0, ranks=alive)
    assert ranks.receive(lost) is None
    serve(ranks, only=[lost], **ROUNDS)
    board = stepping(ranks, tmp_path / "again", period=100, base=steps.pop())
    everywhere_of(ranks, "filled", lost, range(3))
    before = moved(ranks, lost)
    until(lambda: moved(ranks, lost) >= before + 2)
    seen = stopped(ranks, board)
    board.check()
    assert seen[0]["applied"] == seen[1]["applied"] == seen[2]["applied"]
    assert ranks.all("check") == [0, 0, 0]
    assert len(set(ranks.all("placement"))) == 1
    assert all(not health["degraded"] for health in ranks.all("health"))


NOT_ENOUGH = Placement(np.tile(np.arange(12), (3, 1)), ep_size=3)
ALONE = Placement(np.tile([0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5], (3, 1)), ep_size=3)


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("placement", "why"),
    [
        (NOT_ENOUGH, "12 experts do not fit: bring a rank back"),
        (ALONE, "experts 4, 5; pass load_expert (to migrate(), or to the service) on every rank"),
    ],
    ids=["too few slots", "experts are lost"],
)
def test_what_the_others_cannot_do_is_said_each_round(
    start: Start, tmp_path: Path, transport: str, placement: Placement, why: str
) -> None:
    """Nothing hangs: the engines step on, rounds fail one after the other, and the log says why and what to do."""
    ranks, board = begun(start, tmp_path, placement, transport)
    ranks.kill(2)
    named(ranks, 2, (0, 1))
    at = int(board.words[BEGUN].max())
    until(lambda: everywhere(ranks, "health", only=[0])[0]["failures"] >= 3)
    until(lambda: board.words[BEGUN, :2].min() >= at + 100)
    stopped(ranks, board, only=(0, 1))
    for rank, health in everywhere(ranks, "health", only=(0, 1)).items():
        print(f"\nrank {rank}: {health['last_error']}")
        assert health["rounds"] == {"failed": health["failures"]}, health
        assert why in health["last_error"]
    log = (tmp_path / "rank0.log").read_text()
    lines = [line for line in log.splitlines() if why in line]
    print("\n".join(lines[-2:]))
    assert len(lines) >= 3, log
    assert "Traceback" not in log, "what the default policy cannot do is no bug"
    board.check((0, 1))
    assert set(ranks.all("placement", ranks=(0, 1))) == {placement}
