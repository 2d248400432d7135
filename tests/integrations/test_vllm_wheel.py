"""vLLM's own ``rearrange_expert_weights_inplace`` with our communicator, and beside vLLM's own one.

vLLM is no dependency and nothing of it is kept here: the test reads four files out of a wheel or an installed vLLM.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import pytest

from tests.integrations.test_vllm_real import RANKS, Group, Start, failed, placements, start
from tests.integrations.vllm_files import unpack, why_not

__all__ = ["start"]

pytestmark = [pytest.mark.faults, pytest.mark.skipif(bool(why_not()), reason=why_not() or "it is there")]
OURS = "eplb_async.integrations.vllm.communicator"
THEIRS = "vllm.distributed.eplb.eplb_communicator"


def with_vllm(group: Group, folder: Path, whose: str = "ours", timeout: float = 20.0) -> Group:
    """Ranks that have loaded vLLM's files, installed ours, and made a communicator."""
    assert group.good("use_vllm", unpack(folder)) == [(True, True)] * group.size
    assert group.good("make_vllms", whose, timeout) == [OURS if whose == "ours" else THEIRS] * group.size
    return group


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("size", [2, 3])
def test_vllms_rearrangement_moves_the_right_bytes(start: Start, tmp_path: Path, transport: str, size: int) -> None:
    first, *others = placements(size, 6)
    group = with_vllm(start(first, transport), tmp_path / "vllm")
    for number, placement in enumerate(others):
        group.good("rearrange", placement, number % 2 == 1)  # every other one in batches
        assert group.good("check", placement) == [0] * size, f"after {number + 1} of them"


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_killed_peer_fails_vllms_rearrangement_on_every_rank(start: Start, tmp_path: Path, transport: str) -> None:
    one, two = placements(3, 2)
    group = with_vllm(start(one, transport), tmp_path / "vllm")
    group.good("rearrange", two)
    for rank in (0, 1):
        group.ranks.send(rank, "run", RANKS, "rearrange", one, False, False)
    time.sleep(0.3)
    started = time.monotonic()
    group.ranks.kill(2)
    failed([group.ranks.receive(rank) for rank in (0, 1)], "NixlPeerDisconnected")
    assert time.monotonic() - started < 10.0


@pytest.mark.parametrize(("row_bytes", "slots"), [((2 << 20, 1 << 20), 16), ((48 << 10, 16 << 10), 128)])
def test_it_is_faster_than_vllms_own_class(
    start: Start, tmp_path: Path, row_bytes: tuple[int, ...], slots: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Alternating, one communicator at a time: vLLM's agent spins. The first move of each is not counted."""
    one, two = placements(2, 2, layers=4, slots=slots)
    group = start(one, "auto", row_bytes=row_bytes)
    whole, alone = [], []
    for _ in range(5):
        seconds = {}
        for whose in ("ours", "theirs"):
            with_vllm(group, tmp_path / "vllm", whose)
            group.good("rearrange", two)
            seconds[whose] = [max(part) for part in zip(*group.good("rearrange", one), strict=True)]
            assert group.good("check", one) == [0, 0]
            group.good("drop")
        ratios = [theirs / ours for theirs, ours in zip(seconds["theirs"], seconds["ours"], strict=True)]
        whole.append(round(ratios[0], 2))
        alone.append(round(ratios[1], 2))
    with capsys.disabled():
        print(f"\nvLLM's class / ours, rows of {row_bytes}: the whole rearrangement {statistics.median(whole)} {whole}")
        print(f"in the communicator alone {statistics.median(alone)} {alone}")
    assert statistics.median(whole) > 1.0
    assert statistics.median(alone) > 1.0
