"""Services of real ranks, from outside: what a test has them do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from eplb_async.testing.processes import Failure, RankProcesses
from tests.real.stepping import BEGUN, STOP, Board

MODULE = "tests.service.serving"


def everywhere(ranks: RankProcesses, function: str, *args: Any, only: Iterable[int] = ()) -> dict[int, Any]:
    """Have every rank run something with its number as first argument; answers by rank."""
    chosen = tuple(only) or tuple(range(ranks.spec.placement.ep_size))
    for rank in chosen:
        ranks.send(rank, "run", MODULE, function, rank, *args)
    answers = {rank: ranks.receive(rank, 120.0) for rank in chosen}
    assert not any(isinstance(answer, Failure) for answer in answers.values()), answers
    return answers


def serve(
    ranks: RankProcesses,
    *,
    gate: str = "",
    loads: bool = False,
    metrics: bool = False,
    only: Iterable[int] = (),
    **settings: Any,
) -> None:
    """Open a service on every rank; see ``serving.serve``."""
    everywhere(ranks, "serve", settings, gate, loads, metrics, only=only)


def stepping(ranks: RankProcesses, path: Path, **how: int) -> Board:
    """Have the engines of all ranks step."""
    size = ranks.spec.placement.ep_size
    board = Board(str(path), size)
    everywhere(ranks, "step", str(path), size, how)
    return board


def stopped(ranks: RankProcesses, board: Board, *, after: int = 20, only: Iterable[int] = ()) -> dict[int, Any]:
    """Have the engines stop after the same step, and wait until no round runs; answers what each has seen."""
    board.words[STOP] = board.words[BEGUN].max() + after
    return everywhere(ranks, "stop", only=only)


def until(condition: Callable[[], Any], timeout: float = 60.0) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it does not come true"
        time.sleep(0.01)
