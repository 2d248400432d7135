"""Parts of the agent that its contract does not show: whole READs, pauses, many extents at once."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest

from eplb_async.engine import LoopEngine
from eplb_async.errors import NixlTransferTimeout, WeightsError
from eplb_async.nixl import AsyncNixlAgent
from eplb_async.nixl.leases import Leases
from eplb_async.nixl.memory import Memory
from eplb_async.nixl.poller import Pacing, Progress
from eplb_async.settings import Settings
from eplb_async.testing import FaultPlan, MemoryFabric, run


def test_an_error_speaks_of_the_whole_read() -> None:
    """A READ of sixteen posts, the second of which never ends: bytes and seconds are those of all (I-5)."""
    fabric = MemoryFabric(FaultPlan().hold_read("reader", nth=2))
    settings = Settings(max_post_bytes=4096, max_peer_requests_in_flight=1, close_timeout=1)

    async def main() -> NixlTransferTimeout:
        engine = LoopEngine(asyncio.get_running_loop())
        async with (
            AsyncNixlAgent.open("source", settings, engine=engine, native=fabric.native) as source,
            AsyncNixlAgent.open("reader", settings, engine=engine, native=fabric.native) as reader,
        ):
            await source.register(np.ones((16, 4096), np.uint8), "rows")
            target = await reader.register(np.zeros((16, 4096), np.uint8), "target")
            peer = await reader.add_peer(await source.metadata())
            with pytest.raises(NixlTransferTimeout) as caught:
                await reader.read(target[:], peer.region("rows")[:], timeout=3)
            fabric.unhold("reader")
            await target.released(timeout=1)
            return caught.value

    error = run(main())
    assert error.nbytes == 16 * 4096
    assert 3 <= error.elapsed < 3.1


def test_no_pause_is_longer_than_max_pause() -> None:
    """While something is in flight: none while hot, then 2 % of the quiet, from an eighth of ``max_pause`` up to it."""
    pacing = Pacing(Settings(hot_seconds=0.002, max_pause=0.008))
    pacing.after(0.0, progress=Progress.SURE, active=True)
    pauses = [pacing.after(now, progress=Progress.NONE, active=True) for now in (0.001, 0.01, 0.05, 0.2, 0.4, 60.0)]
    assert pauses == pytest.approx([0.0, 0.001, 0.001, 0.004, 0.008, 0.008])


def test_idle_pauses_are_as_long_as_the_quiet_up_to_the_idle_tick() -> None:
    """Soon after something happened an idle agent looks often, then ever more rarely; anything seen starts anew."""
    pacing = Pacing(Settings(hot_seconds=0.002, max_pause=0.002, idle_tick=1.0))
    pacing.after(0.0, progress=Progress.SURE, active=False)
    pauses = [pacing.after(now, progress=Progress.NONE, active=False) for now in (0.001, 0.002, 0.1, 0.5, 3.0, 60.0)]
    assert pauses == [0.0, 0.002, 0.1, 0.5, 1.0, 1.0]
    assert pacing.after(61.0, progress=Progress.SURE, active=False) == 0.0
    assert pacing.after(61.01, progress=Progress.NONE, active=False) == pytest.approx(0.01)


def test_a_minute_of_idling_takes_few_laps() -> None:
    """Once a second, and a handful before that."""
    pacing, now, laps = Pacing(Settings()), 0.0, 0
    while now < 60:
        now += pacing.after(now, progress=Progress.NONE, active=False) or 0.0005
        laps += 1
    assert laps < 60 + 20


class Registry:
    """As much of a native agent as memory needs."""

    def __init__(self) -> None:
        self.live: set[int] = set()

    def register(self, extents: list[Any]) -> int:
        self.live.add(extents[0].address)
        return extents[0].address

    def deregister(self, token: int) -> None:
        self.live.remove(token)


def test_many_extents_are_registered_at_once() -> None:
    """In any order, in less time than looking at each pair would take; repeated ones once, overlaps not at all."""
    rows = np.zeros((20_000, 8), np.uint8)
    native = Registry()
    memory = Memory(native, Leases())  # type: ignore[arg-type]
    started = time.monotonic()
    order = np.random.default_rng(0).permutation(len(rows)).tolist()
    regions = memory.register([(rows[i], f"row {i}") for i in order] + [(rows[0], "again")])
    assert time.monotonic() - started < 10
    assert len(native.live) == len(rows)
    with pytest.raises(WeightsError, match="overlap in part"):
        memory.register([(rows[5:7], "two")])
    for region in regions:
        if region.name in ("again", "row 0"):
            memory.deregister(region)
    assert len(native.live) == len(rows) - 1
