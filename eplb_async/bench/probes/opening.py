"""How long ``open`` takes against the number of peers, and whether a late peer delays meeting the others.

The first NIXL agent of a process takes UCX about half a second, whatever else is done: that is measured apart, before
``open``. All ranks run on this machine, so with more of them than it has cores the curve shows their common work too.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from typing import Any

from eplb_async.bench.probes import alone
from eplb_async.bench.probes.group import answer, run, started, transports
from eplb_async.nixl.bindings import NixlNative, load

NAME = "open"
PEERS, QUICK_PEERS = (1, 2, 4, 8), (1, 2)
_ROUNDS, _LATE_SECONDS, _QUICK_LATE_SECONDS = 3, 2.0, 0.7
_HERE = "eplb_async.bench.probes.opening"


def measure(*, quick: bool) -> dict[str, Any]:
    """The curve on each transport, and one late peer of as many as the curve ends with."""
    peers = QUICK_PEERS if quick else PEERS
    return {
        "cores": os.cpu_count(),
        "curves": {
            transport: [opening(count, transport, rounds=1 if quick else _ROUNDS) for count in peers]
            for transport in transports(quick=quick)
        },
        "late_peer": late_peer(peers[-1], _QUICK_LATE_SECONDS if quick else _LATE_SECONDS),
        "bars": [],
    }


def opening(peers: int, transport: str, *, rounds: int) -> dict[str, float]:
    """Open ``peers + 1`` ranks at once, with fresh processes each round; medians of rank 0.

    Returns:
        ``first_agent`` is what the first agent of its process took; ``seconds`` of ``open`` after that, ``cpu_seconds``
        that its process spent on it, and when the first and the last peer met it, in seconds from the start of the
        exchange.
    """
    names = ("first_agent", "seconds", "cpu_seconds", "first_met", "last_met")
    found: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        with started(peers + 1, transport, open_now=False, rendezvous=_free_url()) as group:
            found["first_agent"].append(group.all("run", _HERE, "first_agent")[0])
            before = run(group, 0, _HERE, "cpu_seconds")
            begun = time.perf_counter()
            for rank in range(peers + 1):
                group.send(rank, "open")
            answer(group, 0)
            found["seconds"].append(time.perf_counter() - begun)
            for rank in range(1, peers + 1):
                answer(group, rank)
            found["cpu_seconds"].append(run(group, 0, _HERE, "cpu_seconds") - before)
            met = run(group, 0, _HERE, "met_seconds").values()
            found["first_met"].append(min(met))
            found["last_met"].append(max(met))
    return {"peers": peers, **{name: round(statistics.median(each), 4) for name, each in found.items()}}


def late_peer(peers: int, late: float) -> dict[str, float]:
    """Open ``peers + 1`` ranks, the last one ``late`` seconds after the others.

    Returns:
        When rank 0 had met the last of the others, and the late one, in seconds from the start of the exchange.
    """
    with started(peers + 1, "auto", open_now=False, rendezvous=_free_url()) as group:
        group.all("run", _HERE, "first_agent")
        for rank in range(peers):
            group.send(rank, "open")
        time.sleep(late)  # how late the last rank is
        group.send(peers, "open")
        for rank in range(peers + 1):
            answer(group, rank)
        met = run(group, 0, _HERE, "met_seconds")
    last = met.pop(peers)
    return {
        "peers": peers,
        "late_seconds": late,
        "others_met": round(max(met.values()), 4),
        "late_one_met": round(last, 4),
    }


async def first_agent(_: object) -> float:
    """Seconds that it takes to make the first NIXL agent of this process, once NIXL is imported; it is destroyed."""
    load()
    begun = time.perf_counter()
    native = NixlNative(f"first-{os.getpid()}")
    seconds = time.perf_counter() - begun
    native.destroy()
    return seconds


async def met_seconds(comm: Any) -> dict[int, float]:
    """Seconds until each peer had been met, from the start of the exchange; runs in a rank's process."""
    return dict(comm._session.met_seconds)


async def cpu_seconds(_: object) -> float:
    """CPU seconds of this process so far."""
    return time.process_time()


def _free_url() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{free.getsockname()[1]}"


if __name__ == "__main__":
    alone.main(NAME, measure)
