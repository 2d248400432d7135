"""One rank of a run, started here or by torchrun: joins the others, measures, and on rank 0 hands over."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch

from eplb_async.bench.group import Group, Place
from eplb_async.bench.measure import measure
from eplb_async.bench.scenario import Scenario

__all__ = ["child", "run_rank"]


def run_rank(group: Group, scenario: Scenario, *, rounds: int) -> dict[str, Any]:
    """Measure one scenario on this rank, together with the others.

    Args:
        group: The ranks.
        scenario: What to measure; ``ranks`` is the size of the group.
        rounds: Rounds.

    Returns:
        The summary, the same on every rank.
    """
    torch.set_num_threads(1)
    main = measure(scenario, group, rounds=rounds)
    found: dict[str, Any]
    if scenario.loop == "uvloop":
        import uvloop

        found = uvloop.run(main)
    else:
        found = asyncio.run(main)
    return found


def child(place: Place, values: dict[str, Any], rounds: int, pipe: Connection) -> None:
    """Entry point of a rank's process that the launcher started; it dies with the launcher."""
    os.dup2(2, 1)  # NIXL and UCX log to stdout, which belongs to the launcher's results
    scenario = Scenario.from_json(values)
    if scenario.transport == "tcp":
        os.environ["UCX_TLS"] = "tcp,self"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    threading.Thread(target=_die_with, args=(pipe,), daemon=True, name="bench-launcher").start()
    answer: dict[str, Any]
    try:
        group = Group.join(place)
        answer = {"found": run_rank(group, scenario, rounds=rounds)}
        group.close()
    except Exception as error:
        traceback.print_exc()
        answer = {"failed": f"{type(error).__name__}: {error}"}
    pipe.send_bytes(json.dumps(answer).encode())


def _die_with(pipe: Connection) -> None:
    try:
        pipe.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)  # whatever it is in: nobody is left to hear of it
