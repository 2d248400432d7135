"""The groups that most of these tests move experts in, and what they ask of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from eplb_async.communicator import MigrationReport
from eplb_async.core.placement import Placement
from eplb_async.testing import MemoryFabric
from eplb_async.testing.cluster import LocalCluster

OLD = Placement([[0, 1, 2, 3]] * 3, ep_size=2)
NEW = Placement([[2, 1, 0, 3]] * 3, ep_size=2)
"""Each rank has one expert to read from the other."""
THREE = Placement([[0, 1, 0, 2, 1, 2]] * 3, ep_size=3)
THREE_NEW = Placement([[2, 1, 0, 0, 1, 2]] * 3, ep_size=3)
"""Every expert is on two of three ranks: one may go."""


async def eventually(condition: Callable[[], bool], timeout: float = 60.0) -> None:
    """Wait, on virtual time, until a condition holds."""
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.001)


def all_report(results: list[Any]) -> None:
    """Every rank's migration has worked."""
    assert all(isinstance(result, MigrationReport) for result in results), results


async def migrates(cluster: LocalCluster, placement: Placement) -> None:
    """A migration of all that works, every byte right."""
    all_report(await cluster.migrate(placement))
    assert cluster.wrong_bytes() == 0


def posts(fabric: MemoryFabric, rank: int) -> int:
    """READs that a rank has posted."""
    return sum(reader.startswith(f"default/{rank}.") for reader, _, _ in fabric.log)
