"""Starts the ranks of a scenario on this machine, and ends them, whatever happens."""

from __future__ import annotations

import json
import multiprocessing
import time
from multiprocessing.connection import Connection, wait
from typing import Any

from eplb_async.bench.group import Place
from eplb_async.bench.rank import child
from eplb_async.bench.scenario import Scenario
from eplb_async.errors import EplbError
from eplb_async.rendezvous import TcpRendezvous

__all__ = ["BenchFailed", "launch"]

_START_SECONDS, _ROUND_SECONDS = 240.0, 30.0


class BenchFailed(EplbError):
    """A scenario came to no end: a rank failed, died or did not answer."""


def launch(scenario: Scenario, *, rounds: int) -> dict[str, Any]:
    """Run a scenario in processes of its own, since a transport is chosen once in the life of a process.

    Raises:
        BenchFailed: A rank failed, died or did not answer in time; says which. All have been ended.
    """
    store = TcpRendezvous.host("127.0.0.1", 0, timeout=60.0, secret=None)
    host, port = store.url.removeprefix("tcp://").rsplit(":", 1)
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["eplb_async.bench.rank"])
    pipes: list[Connection] = []
    processes: list[Any] = []
    try:
        for rank in range(scenario.ranks):
            ours, theirs = context.Pipe()
            place = Place(rank, scenario.ranks, host, int(port), hosted=True)
            process = context.Process(target=child, args=(place, scenario.to_json(), rounds, theirs), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        answers = _answers(scenario, pipes, time.monotonic() + _START_SECONDS + _ROUND_SECONDS * rounds)
        for process in processes:
            process.join(30)
        return answers[0]
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join(10)
        for pipe in pipes:
            pipe.close()
        store.close()


def _answers(scenario: Scenario, pipes: list[Connection], deadline: float) -> list[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    while len(found) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in found]
        ready = wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            silent = [rank for rank in range(len(pipes)) if rank not in found]
            raise BenchFailed(f"scenario {scenario.name}: ranks {silent} came to no end in time")
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                answer = json.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except (EOFError, OSError):
                raise BenchFailed(f"scenario {scenario.name}: rank {rank} died; see its messages above") from None
            if "failed" in answer:
                raise BenchFailed(f"scenario {scenario.name}: rank {rank} failed: {answer['failed']}")
            found[rank] = answer["found"]
    return [found[rank] for rank in range(len(pipes))]
