"""Which descriptors lie inside registered memory: few are looked up one by one, many by numpy, with one answer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_async.nixl.native import Extent
from eplb_async.nixl.regions import _FEW, Coverage

EXTENTS = [
    Extent("a", 1000, 10, 10, 10),
    Extent("b", 1100, 10, 10, 5),
    Extent("c", 3000, 10, 20, 5),
    Extent("d", 1000, 10, 10, 10, "VRAM", 1),
]
ADDRESSES, LENGTHS = (0, 990, 1000, 1050, 1099, 1100, 1149, 1150, 3000, 3089, 3090), (1, 10, 50, 51, 100, 150)
BLOCK = st.tuples(st.sampled_from(ADDRESSES), st.sampled_from(LENGTHS), st.sampled_from([0, 0, 0, 1]))


@given(block=BLOCK, at=st.integers(0, _FEW), memory=st.sampled_from(["DRAM", "VRAM"]))
def test_few_and_many_are_judged_alike(block: tuple[int, int, int], at: int, memory: str) -> None:
    """One block among good ones, alone or in a list too long to go one by one."""
    coverage = Coverage(EXTENTS)
    inside = (1000, 100, 1 if memory == "VRAM" else 0)
    few = coverage.outside(np.array([block], np.uint64), memory)
    many = coverage.outside(np.array([inside] * at + [block] + [inside] * (_FEW + 1), np.uint64), memory)
    assert (few, many) in [(None, None), (0, at)]


@pytest.mark.parametrize("count", [1, _FEW + 1])
def test_an_end_beyond_all_addresses_is_outside(count: int) -> None:
    """An address and a length that wrap around 2^64 would end where registered memory begins."""
    blocks = np.array([(1000, 10, 0)] * (count - 1) + [(1000, (1 << 64) - 1, 0)], np.uint64)
    assert Coverage(EXTENTS).outside(blocks, "DRAM") == count - 1
