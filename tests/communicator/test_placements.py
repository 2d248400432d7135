"""Any placement to any placement, in memory, on virtual time."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_async.communicator import MigrationReport
from eplb_async.settings import Settings
from eplb_async.testing import FaultPlan, MemoryFabric, run
from eplb_async.testing.cluster import LocalCluster
from eplb_async.testing.placements import random_placement
from tests.communicator.groups import all_report


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, int]:
    """Sizes of a group: ranks, slots, experts, empty slots."""
    ep_size = draw(st.integers(1, 4))
    local = draw(st.integers(1, 5))
    logical = draw(st.integers(1, ep_size * local))
    empty = draw(st.integers(0, ep_size * local - logical))
    layers = draw(st.integers(1, 4))
    return {
        "num_layers": layers,
        "num_logical": logical,
        "num_local_experts": local,
        "ep_size": ep_size,
        "empty": empty,
    }


@given(
    shapes(),
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(0, 300), min_size=1, max_size=3),
    st.sampled_from([(1, 1), (64, 3), (1 << 20, 512)]),
    st.booleans(),
    st.sampled_from(["identity", "off"]),
)
@settings(max_examples=150, deadline=None)
def test_any_placement_to_any_placement(
    shape: dict[str, int],
    seed: int,
    row_bytes: list[int],
    limits: tuple[int, int],
    done_in_post: bool,
    verify: str,
) -> None:
    """Redundancy, empty slots, copies on one rank, idle ranks, empty tensors: every byte is right, every time."""
    rng = np.random.default_rng(seed)
    first, second, third = (random_placement(rng, **shape) for _ in range(3))
    fabric = MemoryFabric(done_in_post=done_in_post, needs_target_progress=not done_in_post)
    chosen = Settings(
        max_post_bytes=max(4096, limits[0]), max_post_descriptors=limits[1], verify=verify, secret=b"s" * 16
    )

    async def main() -> None:
        async with LocalCluster(first, row_bytes=row_bytes, fabric=fabric, settings=chosen) as cluster:
            pointers = [rows.pointers() for rows in cluster.rows]
            for epoch, placement in enumerate((second, second, third, first), 1):
                for report in await cluster.migrate(placement):
                    assert isinstance(report, MigrationReport), report
                    assert report.epoch == epoch
                assert all(comm.placement == placement for comm in cluster.comms)
                assert cluster.wrong_bytes() == 0
            assert pointers == [rows.pointers() for rows in cluster.rows]

    run(main())
    assert not fabric.violations
    assert fabric.open_handles == 0


@given(st.integers(0, 2**32 - 1), st.integers(0, 40))
@settings(max_examples=60, deadline=None)
def test_one_failing_read_leaves_all_ranks_at_one_layer(seed: int, nth: int) -> None:
    """I-7, I-9: whatever READ fails, wherever, ranks end equal, and the next migration works or says why not."""
    rng = np.random.default_rng(seed)
    shape = {"num_layers": 4, "num_logical": 6, "num_local_experts": 3, "ep_size": 3, "empty": 0}
    first, second, third = (random_placement(rng, **shape) for _ in range(3))
    faults = FaultPlan().fail_read(nth=nth, status="nixlBackendError")

    async def main() -> None:
        async with LocalCluster(first, faults=faults, settings=Settings(secret=b"s" * 16)) as cluster:
            for placement in itertools.cycle((second, third)):
                results = await cluster.migrate(placement)
                held = {comm.placement for comm in cluster.comms}
                assert len(held) == 1, (results, held)
                assert cluster.wrong_bytes() == 0
                if cluster.fabric.posts > nth:
                    break
            again = await cluster.migrate(first)
            all_report(again)
            assert cluster.wrong_bytes() == 0
        assert not cluster.fabric.violations

    run(main())
