"""How long one awaited READ takes, beside a plain READ that spins and one that polls every 0.5 ms.

All three read in the same process from the same source, taking turns, a block of READs each. The bars are for a READ
of 4 KiB with a notification from a plain source, polled every 0.1 ms: it ends when the source has answered. Without a
notification UCX's own choice of transport has copied the bytes before the post returns, so what is left is what
awaiting costs. A source that serves as ranks do is measured too: it pauses longer while nothing is read.
"""

from __future__ import annotations

import os
import statistics
import time
from itertools import permutations
from typing import Any

import numpy as np

from eplb_async.bench.probes import alone
from eplb_async.bench.probes.group import run, started, transports
from eplb_async.bench.probes.source import REGION
from eplb_async.bench.probes.spin import PlainReader
from eplb_async.nixl import AsyncNixlAgent
from eplb_async.settings import Settings

NAME = "latency"
CASES = {"4 KiB, notified": (4096, b"n"), "4 KiB": (4096, b""), "1 MiB": (1 << 20, b"")}
"""Bytes, and notification."""
SOURCES = {"plain": "serve_plainly", "serving": "serve"}
BAR_CASE, BAR_SOURCE = "4 KiB, notified", "plain"
POLLING_SECONDS = 0.0005
_ROWS, _BLOCK = 16, 25
_HERE, _SOURCE = "eplb_async.bench.probes.latency", "eplb_async.bench.probes.source"

Samples = dict[str, list[list[float]]]
"""Seconds of each READ by contender, one list for each of its blocks."""


def measure(*, quick: bool) -> dict[str, Any]:
    """Measure each case on each transport, from both kinds of source."""
    blocks = 2 if quick else 18
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for transport in transports(quick=quick):
        with started(2, transport, open_now=False) as group:
            found[transport] = {source: {} for source in SOURCES}
            for source, function in SOURCES.items():
                for case, (nbytes, notif) in CASES.items():
                    card = run(group, 1, _SOURCE, function, _ROWS, nbytes)
                    samples = run(group, 0, _HERE, "read_in_turns", card, nbytes, blocks, notif, timeout=300.0)
                    run(group, 1, _SOURCE, "end")
                    found[transport][source][case] = summary(samples)
    return {"reads": blocks * _BLOCK, "transports": found, "bars": bars(found)}


def summary(samples: Samples) -> dict[str, Any]:
    """Percentiles in µs, and ours over each other: medians of the blocks' medians, block by block."""
    told: dict[str, Any] = {}
    for contender, blocks in samples.items():
        p50, p99 = np.percentile(np.concatenate(blocks) * 1e6, [50, 99]).tolist()
        told[contender] = {"p50_us": round(p50, 1), "p99_us": round(p99, 1)}
    medians = {contender: [statistics.median(block) for block in blocks] for contender, blocks in samples.items()}
    told["ratios"] = {
        other: round(statistics.median(a / b for a, b in zip(medians["ours"], medians[other], strict=True)), 3)
        for other in ("spin", "sleep")
    }
    return told


def bars(transports: dict[str, dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """What DESIGN §6 asks of one awaited READ."""
    met = []
    for transport, sources in transports.items():
        ratios = sources[BAR_SOURCE][BAR_CASE]["ratios"]
        met.append(alone.at_most(f"awaited 4 KiB READ, {transport}: p50 over raw spin", 1.5, ratios["spin"]))
        met.append(alone.at_most(f"awaited 4 KiB READ, {transport}: p50 over 0.5 ms polling", 0.4, ratios["sleep"]))
    return met


async def read_in_turns(_: object, card: bytes, nbytes: int, blocks: int, notif: bytes) -> Samples:
    """Read in blocks, contender after contender, each round in another order; runs in the reader's process."""
    plain = PlainReader(f"plain-{os.getpid()}-{nbytes}", card, nbytes)
    try:
        async with AsyncNixlAgent.open(f"reader-{os.getpid()}-{nbytes}", Settings()) as agent:
            region = await agent.register(np.zeros((_ROWS, nbytes), np.uint8), "target")
            remote = (await agent.add_peer(card)).region(REGION)

            async def ours(row: int) -> float:
                begun = time.perf_counter()
                await agent.read(region[row], remote[row], notif=notif)
                return time.perf_counter() - begun

            async def spin(row: int) -> float:
                return plain.read(row, pause=0.0, notif=notif)

            async def sleep(row: int) -> float:
                return plain.read(row, pause=POLLING_SECONDS, notif=notif)

            contenders = {"ours": ours, "spin": spin, "sleep": sleep}
            samples: Samples = {name: [] for name in contenders}
            orders = list(permutations(contenders))
            for number in range(blocks + 1):
                for name in orders[number % len(orders)]:
                    block = [await contenders[name](i % _ROWS) for i in range(_BLOCK)]
                    if number:  # the first one connects
                        samples[name].append(block)
            return samples
    finally:
        plain.close()


if __name__ == "__main__":
    alone.main(NAME, measure)
