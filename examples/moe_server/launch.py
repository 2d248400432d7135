"""The parent: starts the ranks, introduces them, ends them; ends itself if rank 0 does."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

from examples.moe_server.job import Job
from examples.moe_server.rank import main
from examples.moe_server.ranks import Ranks

_START_SECONDS = 120.0
_STOP_SECONDS = 40.0
_ADVICE = "the server answers 503 from here on; restart the job"


class StartFailed(Exception):
    """A rank died or said nothing while starting."""


def run(job: Job) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit status."""
    with _signals() as asked, _processes(job) as (processes, pipes):
        try:
            port = _introduce(job, pipes, asked)
        except StartFailed as error:
            print(f"moe_server: {error}", file=sys.stderr)
            return 1
        if port is None:
            return 0
        print(f"rank processes: {[process.pid for process in processes]}", file=sys.stderr, flush=True)
        print(f"serving on http://127.0.0.1:{port}", flush=True)
        dead = _wait(processes, asked)
        for pipe in pipes:
            with contextlib.suppress(OSError):
                pipe.send("stop")
        deadline = time.monotonic() + _STOP_SECONDS
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return 1 if dead or any(process.exitcode != 0 for process in processes) else 0


def _introduce(job: Job, pipes: list[Connection], asked: int) -> int | None:
    """Returns the front end's port; None where it was asked to stop meanwhile."""
    deadline = time.monotonic() + _START_SECONDS

    def receive(rank: int) -> Any:
        ready = wait([pipes[rank], asked], max(0.0, deadline - time.monotonic()))
        if asked in ready:
            return None
        if not ready:
            raise StartFailed(f"rank {rank} did not start in {_START_SECONDS:g} s")
        try:
            return pipes[rank].recv()
        except EOFError:
            raise StartFailed(f"rank {rank} died while starting; see its messages above") from None

    if job.rebalancing != "vllm":
        if (url := receive(0)) is None:
            return None
        for pipe in pipes[1:]:
            with contextlib.suppress(OSError):
                pipe.send(url)
    answers = [receive(rank) for rank in range(job.ranks)]
    return None if None in answers else int(answers[0])


def _wait(processes: list[Any], asked: int) -> bool:
    """Until it is asked to stop, or rank 0 has ended; returns whether a rank has."""
    alive = {process.sentinel: rank for rank, process in enumerate(processes)}
    dead = False
    while True:
        ready = wait([*alive, asked])
        for sentinel in ready:
            if sentinel in alive:
                rank, dead = alive.pop(sentinel), True
                processes[rank].join(5)
                code = processes[rank].exitcode
                print(f"moe_server: rank {rank} has ended with status {code}; {_ADVICE}", file=sys.stderr, flush=True)
        if asked in ready or 0 not in alive.values():
            return dead


@contextlib.contextmanager
def _processes(job: Job) -> Iterator[tuple[list[Any], list[Connection]]]:
    context = multiprocessing.get_context("spawn")
    sockets = Ranks.connect(job.ranks)
    processes: list[Any] = []
    pipes: list[Connection] = []
    try:
        for rank in range(job.ranks):
            ours, theirs = context.Pipe()
            pipes.append(ours)
            process = context.Process(target=main, args=(rank, job, theirs, sockets[rank]), daemon=True)
            process.start()
            processes.append(process)
            theirs.close()
            for one in sockets[rank].values():
                one.close()  # a rank's ends must be its own, so that they end with it
        yield processes, pipes
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join(10)
        for pipe in pipes:
            pipe.close()


@contextlib.contextmanager
def _signals() -> Iterator[int]:
    """SIGINT and SIGTERM as something to wait for: a descriptor that has bytes then."""
    read, write = os.pipe()
    os.set_blocking(write, False)

    def ask(*_: Any) -> None:
        with contextlib.suppress(OSError):
            os.write(write, b"!")

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield read
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(read)
        os.close(write)
