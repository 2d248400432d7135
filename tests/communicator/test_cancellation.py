"""2 000 cancels at random moments, in memory on virtual time: nothing is lost, torn, leaked or written late.

Each seed is one run with its cancels, made in the ways of ``cuts``: of ``migrate`` and ``rebind`` in a group of 2 to
4 ranks (``cancel_run``), of an agent's READs, and of ``open``, ``exclude`` and ``aclose`` (``cancel_calls``). READs
are slow, held or land late. ``test_any_moment[seed17]`` repeats seed 17.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from eplb_async.testing import MemoryFabric, run
from tests.communicator.cancel_calls import Calls
from tests.communicator.cancel_run import Run

CANCELS = 25
MIGRATIONS, READS, LIVES = 60, 10, 10  # runs of CANCELS each: 2 000 in all


@pytest.fixture(scope="module", autouse=True)
def _cheap() -> Iterator[None]:
    """Leave what is imported out of the collections that every run makes; on virtual time there is none to yield to."""
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eplb_async.nixl.poller.os.sched_yield", lambda: None)
        yield
    gc.unfreeze()


@pytest.mark.parametrize("seed", range(MIGRATIONS), ids=lambda seed: f"seed{seed}")
def test_any_moment(seed: int) -> None:
    """I-3, I-7, I-9, I-10: cut off at any moment, all ranks end at one layer, and the next migration works."""
    this = Run(seed)
    run(this.go(CANCELS))
    check_nothing_left(this.fabric, this.noise)
    assert this.cutter.cancels >= CANCELS


@pytest.mark.parametrize("seed", range(READS), ids=lambda seed: f"seed{seed}")
def test_reads_of_an_agent(seed: int) -> None:
    """I-3, I-10: a READ that is cut off writes nothing after its memory was granted again."""
    this = Calls(seed)
    run(this.reads(CANCELS))
    check_nothing_left(this.fabric, this.noise)


@pytest.mark.parametrize("seed", range(LIVES), ids=lambda seed: f"seed{seed}")
def test_open_exclude_and_close(seed: int) -> None:
    """I-4, I-9, I-10: what begins or ends something can be cut off, and said again."""
    this = Calls(seed)
    run(this.lives(CANCELS))
    check_nothing_left(this.fabric, this.noise)


def check_nothing_left(fabric: MemoryFabric, noise: list[dict[str, Any]]) -> None:
    """Every handle, registration and agent was given back, and nothing was complained of."""
    gc.collect()
    assert not noise, noise
    assert not fabric.violations, fabric.violations
    assert fabric.open_handles == 0, fabric
    assert fabric.open_registrations == 0, fabric
    assert all(agent.destroyed for agent in fabric.agents.values()), fabric
