"""How long one awaited READ takes, beside a plain READ that spins and one that polls every 0.5 ms.

All three read in the same process from the same source, taking turns, a block of READs each. The source serves as
ranks do; for comparison a second one never pauses, which costs its core.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import numpy as np

from eplb_async.bench.probes import alone
from eplb_async.bench.probes.group import run, started
from eplb_async.bench.probes.source import REGION
from eplb_async.bench.probes.spin import PlainReader
from eplb_async.nixl import AsyncNixlAgent
from eplb_async.settings import Settings

NAME = "latency"
SIZES = {"4 KiB": 4096, "1 MiB": 1 << 20}
SOURCES = {"serving": {}, "spinning": {"hot_seconds": 1.0}}
POLLING_SECONDS = 0.0005
_ROWS, _BLOCK = 16, 25
_HERE, _SOURCE = "eplb_async.bench.probes.latency", "eplb_async.bench.probes.source"

Samples = dict[str, list[list[float]]]
"""Seconds of each READ by contender, one list for each of its blocks."""


def measure(*, quick: bool) -> dict[str, Any]:
    """Measure on both transports, for both sources and all sizes."""
    blocks = 2 if quick else 20
    found: dict[str, Any] = {}
    for transport in ("auto", "tcp"):
        with started(2, transport, open_now=False) as group:
            found[transport] = {}
            for source, settings in SOURCES.items():
                found[transport][source] = {}
                for size, nbytes in SIZES.items():
                    card = run(group, 1, _SOURCE, "serve", _ROWS, nbytes, settings)
                    samples = run(group, 0, _HERE, "read_in_turns", card, nbytes, blocks, timeout=300.0)
                    run(group, 1, _SOURCE, "end")
                    found[transport][source][size] = summary(samples)
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


def bars(transports: dict[str, Any]) -> list[dict[str, Any]]:
    """The bars for 4 KiB, from a source that serves as ranks do."""
    met = []
    for transport, sources in transports.items():
        ratios = sources["serving"]["4 KiB"]["ratios"]
        met.append(alone.at_most(f"awaited 4 KiB READ, {transport}: p50 over raw spin", 1.5, ratios["spin"]))
        met.append(alone.at_most(f"awaited 4 KiB READ, {transport}: p50 over 0.5 ms polling", 0.4, ratios["sleep"]))
    return met


async def read_in_turns(_: object, card: bytes, nbytes: int, blocks: int) -> Samples:
    """Read in blocks, contender after contender, another one first each time; runs in the reader's process."""
    plain = PlainReader(f"plain-{os.getpid()}-{nbytes}", card, nbytes)
    try:
        async with AsyncNixlAgent.open(f"reader-{os.getpid()}-{nbytes}", Settings()) as agent:
            region = await agent.register(np.zeros((_ROWS, nbytes), np.uint8), "target")
            remote = (await agent.add_peer(card)).region(REGION)

            async def ours(row: int) -> float:
                begun = time.perf_counter()
                await agent.read(region[row], remote[row])
                return time.perf_counter() - begun

            async def spin(row: int) -> float:
                return plain.read(row, pause=0.0)

            async def sleep(row: int) -> float:
                return plain.read(row, pause=POLLING_SECONDS)

            contenders = {"ours": ours, "spin": spin, "sleep": sleep}
            samples: Samples = {name: [] for name in contenders}
            for number in range(blocks + 1):
                names = list(contenders)
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    block = [await contenders[name](i % _ROWS) for i in range(_BLOCK)]
                    if number:  # the first one connects
                        samples[name].append(block)
            return samples
    finally:
        plain.close()


if __name__ == "__main__":
    alone.main(NAME, measure)
