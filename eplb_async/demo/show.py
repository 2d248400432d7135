"""The demonstration's parent: starts the ranks, drives the rounds, shows and checks."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from eplb_async.demo.rank import Work, main

_START_SECONDS = 120.0
_ROUND_SECONDS = 180.0


class DemoFailed(Exception):
    """A rank died or did not answer."""


def run(work: Work, *, as_json: bool) -> int:
    """Run the demonstration.

    Returns:
        Exit status: 0 if every byte on every rank was right.
    """
    with _progress(work, quiet=as_json) as step:
        try:
            results, idle = _drive(work, step)
        except DemoFailed as error:
            print(f"demo failed: {error}", file=sys.stderr)
            return 1
    summary = summarise(work, results, idle)
    if as_json:
        print(json.dumps(summary))
    else:
        _table(work, summary)
    return 0 if summary["verified"] else 1


def summarise(work: Work, results: list[list[dict[str, Any]]], idle: list[float]) -> dict[str, Any]:
    """Fold the ranks' rounds into one record; lag is the worst rank's."""
    seconds = sum(max(rank["seconds"] for rank in each) for each in results)
    moved = sum(rank["bytes"] for each in results for rank in each)
    worst = {"p50": 0.0, "p99": 0.0, "max": 0.0}
    for rank in range(work.ranks):
        lags = np.array([lag for each in results for lag in each[rank]["lags"]] or [0.0]) * 1e3
        for name, value in zip(worst, np.percentile(lags, [50, 99, 100]).tolist(), strict=True):
            worst[name] = round(max(worst[name], value), 3)
    return {
        "verified": all(rank["wrong"] == 0 for each in results for rank in each),
        "bytes": moved,
        "seconds": round(seconds, 4),
        "gb_per_s": round(moved / seconds / 1e9, 3),
        "loop_lag_ms": worst,
        "idle_cpu": round(max(idle), 4),
        "rounds": work.rounds,
    }


def _drive(work: Work, step: Callable[[str], None]) -> tuple[list[list[dict[str, Any]]], list[float]]:
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes = []
    try:
        for rank in range(work.ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=main, args=(rank, work, theirs), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        url = _receive(pipes[0], 0, _START_SECONDS)
        for pipe in pipes[1:]:
            pipe.send(url)
        _gather(pipes, _START_SECONDS)
        step(f"{work.ranks} ranks met at {url}")
        results = []
        for number in range(work.rounds):
            _tell(pipes, "go")
            results.append(_gather(pipes, _ROUND_SECONDS))
            wrong = sum(rank["wrong"] for rank in results[-1])
            step(f"round {number + 1}: {'verified' if not wrong else f'{wrong} WRONG BYTES'}")
        _tell(pipes, "idle")
        idle = _gather(pipes, _ROUND_SECONDS)
        _tell(pipes, "close")
        for process in processes:
            process.join(30)
        return results, idle
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join(10)


def _tell(pipes: list[Connection], word: str) -> None:
    for rank, pipe in enumerate(pipes):
        try:
            pipe.send(word)
        except OSError:
            raise DemoFailed(f"rank {rank} is gone; see its messages above") from None


def _gather(pipes: list[Connection], timeout: float) -> list[Any]:
    return [_receive(pipe, rank, timeout) for rank, pipe in enumerate(pipes)]


def _receive(pipe: Connection, rank: int, timeout: float) -> Any:
    if not pipe.poll(timeout):
        raise DemoFailed(f"rank {rank} said nothing for {timeout:g} s")
    try:
        return pipe.recv()
    except EOFError:
        raise DemoFailed(f"rank {rank} died; see its messages above") from None


@contextlib.contextmanager
def _progress(work: Work, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    if quiet:
        yield lambda _: None
        return
    try:
        from rich.progress import Progress
    except ImportError:
        yield print
        return
    with Progress() as bar:
        task = bar.add_task("starting ranks", total=work.rounds + 1)
        yield lambda text: bar.update(task, advance=1, description=text)


def _table(work: Work, summary: dict[str, Any]) -> None:
    lag = summary["loop_lag_ms"]
    rows = {
        "verified": "every byte on every rank" if summary["verified"] else "WRONG BYTES",
        "moved": f"{summary['bytes'] / 1e9:.2f} GB in {work.rounds} migrations, {summary['seconds']:.2f} s",
        "rate": f"{summary['gb_per_s']:.2f} GB/s over {work.ranks} ranks",
        "user-loop lag": f"p50 {lag['p50']:.2f} ms, p99 {lag['p99']:.2f} ms, max {lag['max']:.2f} ms",
        "idle CPU": f"{summary['idle_cpu'] * 100:.2f} % of a core",
    }
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        for name, value in rows.items():
            print(f"{name:14} {value}")
        return
    table = Table(show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)
