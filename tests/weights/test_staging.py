"""Staging: no two live pieces overlap, what a READ may still write is not handed out, nobody waits for ever."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_async.core.placement import Placement
from eplb_async.errors import WeightsError
from eplb_async.testing import run
from eplb_async.weights import Piece, Staging, make_buffers
from tests.weights.ranks import migrate, opened

CPU = {"DRAM": torch.device("cpu")}
CAPACITY = 4096
SIZES = st.fixed_dictionaries({"DRAM": st.integers(0, CAPACITY)}, optional={"VRAM": st.integers(0, 1024)})


@dataclass
class World:
    """A staging whose leases are a set of pieces; every piece handed out is checked against those in use."""

    staging: Staging
    live: list[Piece] = field(default_factory=list)
    leased: list[Piece] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.staging.leased = lambda start, end: any(
            start < piece.address + piece.nbytes and piece.address < end for piece in self.leased
        )

    def took(self, pieces: tuple[Piece, ...], sizes: dict[str, int]) -> None:
        assert {piece.memory: piece.nbytes for piece in pieces} == sizes
        for piece in pieces:
            buffer = self.staging.buffers[piece.memory]
            assert piece.start % 256 == 0
            assert piece.nbytes == 0 or piece.start + piece.nbytes <= buffer.numel()
            assert piece.address == buffer.data_ptr() + piece.start
            for other in (*self.live, *self.leased):
                assert (
                    piece.memory != other.memory
                    or piece.start + piece.nbytes <= other.start
                    or other.start + other.nbytes <= piece.start
                ), f"{piece} overlaps {other}"
        self.live += pieces

    def gave(self, pieces: tuple[Piece, ...], *, leased: bool) -> None:
        self.live = [piece for piece in self.live if piece not in pieces]
        if leased:
            self.leased += pieces
        self.staging.free(pieces)


def world() -> World:
    return World(Staging({m: torch.zeros(n, dtype=torch.uint8) for m, n in (("DRAM", CAPACITY), ("VRAM", 1024))}))


@given(st.lists(st.tuples(st.sampled_from(["take", "give", "give leased", "end", "again"]), SIZES, st.integers(0, 99))))
@settings(max_examples=300, deadline=None)
def test_no_two_pieces_in_use_overlap_and_all_is_free_at_the_end(
    steps: list[tuple[str, dict[str, int], int]],
) -> None:
    """I-3: whatever is taken, given back, given back leased, or given back twice, in any order."""
    w = world()
    taken: list[tuple[Piece, ...]] = []
    given_back: list[tuple[Piece, ...]] = []
    for what, sizes, pick in steps:
        if what == "take" and (pieces := w.staging.try_allocate(sizes)) is not None:
            w.took(pieces, sizes)
            taken.append(pieces)
        elif what.startswith("give") and taken:
            pieces = taken.pop(pick % len(taken))
            w.gave(pieces, leased=what == "give leased")
            given_back.append(pieces)
        elif what == "end" and w.leased:
            w.leased.pop(pick % len(w.leased))
        elif what == "again" and given_back:
            w.staging.free(given_back[pick % len(given_back)])
        assert w.staging.reclaim() == sum(piece.nbytes for piece in w.leased)
    for pieces in taken:
        w.gave(pieces, leased=False)
    w.leased.clear()
    whole = {"DRAM": CAPACITY, "VRAM": 1024}
    assert w.staging.fits(whole)
    assert w.staging.try_allocate(whole) is not None


@given(st.lists(st.tuples(SIZES, st.integers(0, 20), st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=12))
@settings(max_examples=150, deadline=None)
def test_whoever_waits_gets_its_pieces_once_they_are_free(jobs: list[tuple[dict[str, int], int, int, int]]) -> None:
    """No wake-up is lost: with many waiting, some freed leased, all come through (or the virtual loop says who not)."""

    async def main() -> None:
        w = world()

        async def job(sizes: dict[str, int], start: int, held: int, lease: int) -> None:
            await asyncio.sleep(start)
            _, pieces = await w.staging.allocate(sizes)
            w.took(pieces, sizes)
            await asyncio.sleep(held)
            w.gave(pieces, leased=lease > 0)
            if lease:
                await asyncio.sleep(lease)
                w.leased = [piece for piece in w.leased if piece not in pieces]
                w.staging.wake()

        async with asyncio.timeout(10_000):
            await asyncio.gather(*(job(*each) for each in jobs))
        assert w.staging.try_allocate({"DRAM": CAPACITY, "VRAM": 1024}) is not None

    run(main())


def test_a_smaller_choice_is_taken_only_where_held_memory_leaves_no_room_for_the_larger() -> None:
    """Used memory comes back, so it is waited for; held memory may never."""

    async def main() -> None:
        w = world()
        large, small = {"DRAM": CAPACITY}, {"DRAM": 256}
        used = w.staging.try_allocate(small)
        assert used is not None
        waiter = asyncio.ensure_future(w.staging.allocate(large, small))
        await asyncio.sleep(1)
        assert not waiter.done()
        w.staging.free(used)
        nth, pieces = await waiter
        assert nth == 0
        (piece,) = pieces
        w.staging.leased = lambda start, end: start < piece.address + 256  # a READ may still write its first bytes
        waiter = asyncio.ensure_future(w.staging.allocate(large, small))
        await asyncio.sleep(1)
        assert not waiter.done()
        w.staging.free(pieces)
        nth, pieces = await waiter
        assert nth == 1
        assert pieces[0].start >= 256

    run(main())


def test_a_cancelled_wait_takes_nothing() -> None:
    """Freed and cancelled in the same turn: the pieces stay free."""

    async def main() -> None:
        w = world()
        _, first = await w.staging.allocate({"DRAM": CAPACITY})
        waiter = asyncio.ensure_future(w.staging.allocate({"DRAM": CAPACITY}))
        await asyncio.sleep(0)
        w.staging.free(first)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        assert w.staging.try_allocate({"DRAM": CAPACITY}) is not None

    run(main())


def test_all_sizes_or_none() -> None:
    """A size that does not fit in one memory leaves the other untouched."""
    w = world()
    assert w.staging.try_allocate({"DRAM": 100, "VRAM": 2000}) is None
    assert w.staging.try_allocate({"DRAM": CAPACITY}) is not None


def test_fits_looks_only_at_what_is_held() -> None:
    """What is in use will be given back; what is held may never be."""
    w = world()
    pieces = w.staging.try_allocate({"DRAM": 3000})
    assert pieces is not None
    assert w.staging.fits({"DRAM": CAPACITY})
    w.gave(pieces, leased=True)
    assert not w.staging.fits({"DRAM": CAPACITY})
    assert w.staging.fits({"DRAM": 1024})
    w.leased.clear()
    assert w.staging.fits({"DRAM": CAPACITY})


@pytest.mark.parametrize("nbytes", [1, 100, 256, 1000])
def test_default_staging_holds_that_many_layers_at_once(nbytes: int) -> None:
    """Layers whose size is no multiple of the alignment too: READs of the next layer overlap the apply of this one."""
    staging = Staging(make_buffers(None, {"DRAM": nbytes}, CPU, layers=3, num_layers=4))
    assert all(staging.try_allocate({"DRAM": nbytes}) for _ in range(3))
    assert staging.try_allocate({"DRAM": nbytes}) is None


def test_staging_that_cannot_be_used_is_refused() -> None:
    """Too small (with both numbers), of another shape, dtype, or device, or no buffer at all."""
    needed = {"DRAM": 1000}
    for given_, message in [
        (999, "999 bytes .* 1000 bytes"),
        (-1, "1000 bytes"),
        (torch.zeros(999, dtype=torch.uint8), "999 bytes .* 1000 bytes"),
        (torch.zeros(1000), "flat, contiguous uint8"),
        (torch.zeros(10, 100, dtype=torch.uint8), "flat, contiguous uint8"),
        (torch.zeros(2000, dtype=torch.uint8)[::2], "flat, contiguous uint8"),
        (torch.zeros(1000, dtype=torch.uint8, device="meta"), "on meta, the weights are on cpu"),
        (1e9, "not float"),
    ]:
        with pytest.raises(WeightsError, match=message):
            make_buffers(given_, needed, CPU, layers=2, num_layers=4)  # type: ignore[arg-type]


def test_the_callers_buffer_goes_where_the_weights_are() -> None:
    """A CPU buffer given for weights on a device is refused, not used for their entries and else ignored."""
    devices = CPU | {"VRAM": torch.device("cuda:0")}
    for needed in ({"DRAM": 32, "VRAM": 1000}, {"VRAM": 1000, "DRAM": 32}):
        with pytest.raises(WeightsError, match="on cpu, the weights are on cuda:0"):
            make_buffers(torch.zeros(4096, dtype=torch.uint8), needed, devices, layers=2, num_layers=4)


def test_the_callers_buffer_is_what_reads_land_in() -> None:
    """Taken as it is, also a part of a larger one; nothing outside of it is written."""
    outer = torch.full((3000,), 0xEE, dtype=torch.uint8)
    given_ = outer[100:2900]
    old, new = Placement([[0, 1, 2, 3]], ep_size=2), Placement([[3, 2, 1, 0]], ep_size=2)

    async def main() -> None:
        weights = [[[torch.full((2, 500), 10 + rank, dtype=torch.uint8)]] for rank in range(2)]
        async with opened(old, weights, staging=[given_, None]) as comms:
            await migrate(comms, new)
        assert weights[0][0][0].eq(11).all()

    run(main())
    assert (outer[:100] == 0xEE).all()
    assert (outer[2900:] == 0xEE).all()
    assert (given_ == 11).sum() >= 1000
