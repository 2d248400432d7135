"""Entries and digests: what a row carries, and that no other row passes for it (I-16)."""

from __future__ import annotations

import asyncio
import builtins
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eplb_async.communicator import AsyncEplbCommunicator
from eplb_async.core.placement import Placement
from eplb_async.engine import Engine, LoopEngine
from eplb_async.errors import EplbError, IntegrityError
from eplb_async.settings import Settings
from eplb_async.testing import MemoryFabric, run
from eplb_async.weights import DIGEST_BYTES, MAX_VERSION, Digester, ExpertWeights, Wanted
from eplb_async.weights.entries import ENTRY_BYTES, check_digest, check_entry, entry_rows, pack_entries, suspects

experts = st.integers(0, (1 << 31) - 1)
versions = st.integers(0, MAX_VERSION)
digests = st.binary(min_size=DIGEST_BYTES, max_size=DIGEST_BYTES)


def wanted(expert: int = 5, version: int = 2) -> Wanted:
    return Wanted(layer=3, expert=expert, version=version, rank=1, slot=4)


def digest_of(layer: int, tensors: list[torch.Tensor], rows: list[int]) -> list[bytes]:
    """Digests, made where they are asked for."""

    async def main() -> list[bytes]:
        return await Digester(LoopEngine(asyncio.get_running_loop())).digests(layer, tensors, rows)

    return run(main())


# ------------------------------------------------------------------------------------------------------- entries
def test_entries_say_which_expert_and_version_a_row_is() -> None:
    """C4, I-16: another expert, an empty slot, another version, or memory that holds no entry at all."""
    weights = ExpertWeights([[torch.zeros(4, 8)]], 4, entries=True)
    weights.write_entries(0, [5, 6, -1, 7], 2)
    entries = [row.numpy().tobytes() for row in weights.rows(0, 1)]
    check_entry(entries[0], wanted())
    for entry, meant, said in [
        (entries[1], wanted(), "wanted expert 5 of weight version 2, the source holds expert 6"),
        (entries[2], wanted(), "holds expert -1"),
        (entries[0], wanted(version=3), "version 2; it changed"),
        (b"\xdd" * 32, wanted(), "carries no entry"),
        (b"\0" * 32, wanted(0, 0), "carries no entry"),
    ]:
        with pytest.raises(IntegrityError, match=f"layer 3, expert . from slot 4 of rank 1: .*{said}") as caught:
            check_entry(entry, meant)
        parts = (caught.value.layer, caught.value.expert, caught.value.rank, caught.value.slot)
        assert parts == (3, meant.expert, 1, 4)


@given(st.lists(st.tuples(experts | st.just(-1), digests), min_size=1, max_size=5), versions)
def test_every_entry_passes_for_what_it_was_packed_for(slots: list[tuple[int, bytes]], version: int) -> None:
    """Any expert, version and digest comes back; each entry has its 32 bytes."""
    packed = pack_entries([expert for expert, _ in slots], version, [digest for _, digest in slots])
    assert len(packed) == ENTRY_BYTES * len(slots)
    for at, (expert, digest) in enumerate(slots):
        entry = packed[at * ENTRY_BYTES :][:ENTRY_BYTES]
        check_entry(entry, wanted(expert, version))
        check_digest(entry, digest, wanted(expert, version))


@given(experts, versions, digests, st.integers(0, ENTRY_BYTES * 8 - 1))
def test_no_bit_of_an_entry_can_flip_unseen(expert: int, version: int, digest: bytes, at: int) -> None:
    """One flipped bit anywhere is an IntegrityError of the one check or the other."""
    entry = bytearray(pack_entries([expert], version, [digest]))
    entry[at // 8] ^= 1 << at % 8
    with pytest.raises(IntegrityError):  # noqa: PT012
        check_entry(bytes(entry), wanted(expert, version))
        check_digest(bytes(entry), digest, wanted(expert, version))


def test_writing_entries_keeps_the_digests_that_are_not_given() -> None:
    """A version counts up for all layers; the digests of those that were not rewritten stay."""
    weights = ExpertWeights([[torch.zeros(2, 8)]], 2, entries=True)
    kept = [bytes([slot]) * DIGEST_BYTES for slot in (1, 2)]
    weights.write_entries(0, [0, 1], 0, kept)
    weights.write_entries(0, [1, -1], 9)
    entries = [row.numpy().tobytes() for row in weights.rows(0, 1)]
    check_entry(entries[0], wanted(1, 9))
    check_entry(entries[1], wanted(-1, 9))
    for entry, digest in zip(entries, kept, strict=True):
        check_digest(entry, digest, wanted())


# ------------------------------------------------------------------------------------------------------- digests
@given(st.data())
def test_a_digest_is_of_the_bytes_of_all_tensors_and_of_nothing_else(data: st.DataObject) -> None:
    """Equal bytes have one digest wherever they lie; any flipped byte, or another layer, has another."""
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    rows = [
        torch.tensor(data.draw(st.lists(st.integers(0, 255), min_size=n, max_size=n)), dtype=torch.uint8) for n in sizes
    ]
    dense = [row.repeat(3, 1) for row in rows]
    apart = [torch.zeros(2, len(row) + 5, dtype=torch.uint8)[:, 2 : len(row) + 2] for row in rows]
    for tensor, row in zip(apart, rows, strict=True):
        tensor[1] = row
    (first, again), (other,) = digest_of(2, dense, [0, 2]), digest_of(2, apart, [1])
    assert first == again == other
    assert len(first) == DIGEST_BYTES
    assert digest_of(3, dense, [0]) != [first]
    tensor = data.draw(st.integers(0, len(sizes) - 1))
    byte = data.draw(st.integers(0, sizes[tensor] - 1))
    dense[tensor][0, byte] ^= data.draw(st.integers(1, 255))
    changed, unchanged = digest_of(2, dense, [0, 1])
    assert changed != first
    assert unchanged == first


def test_digests_are_pinned() -> None:
    """Ranks of different versions of this library, or of xxhash, compare them."""
    tensors = [torch.arange(10, dtype=torch.uint8).view(2, 5), torch.arange(6, dtype=torch.uint8).view(2, 3)]
    assert [digest.hex() for digest in digest_of(1, tensors, [0, 1])] == [
        "bdf0da3dc2d9c58c25f1cb6bfd4bda4e",  # xxh3_128 of 0 1 2 3 4 0 1 2, seed 1
        "e918801529a2bc1de42f91948a0f21b1",
    ]


def test_a_wrong_digest_says_where_it_came_from_and_what_to_do() -> None:
    """Layer, expert, slot, rank and version; which tensor differs is not known."""
    entry = pack_entries([5], 2, [b"d" * 16])
    check_digest(entry, b"d" * 16, wanted())
    with pytest.raises(IntegrityError, match=r"layer 3, expert 5 from slot 4 of rank 1: .*version 2.*updating_weights"):
        check_digest(entry, b"e" * 16, wanted())


@pytest.mark.asyncio
async def test_a_cancelled_digest_ends_when_the_worker_has_stopped() -> None:
    """Nothing reads the rows once the cancelled task is over: their memory may be freed."""
    engine = Engine("digests")
    reading, go = threading.Event(), threading.Event()
    reads: list[int] = []

    class Slow:
        device = torch.device("cpu")
        is_cuda = False

        def numpy(self) -> Slow:
            return self

        def __getitem__(self, row: int) -> np.ndarray[Any, Any]:
            reading.set()
            go.wait(20)
            reads.append(row)
            return np.zeros(4, np.uint8)

    async def main() -> None:
        tensors: Any = [Slow()]
        task = asyncio.ensure_future(Digester(engine).digests(0, tensors, range(5)))
        while not reading.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        for _ in range(3):
            await asyncio.sleep(0.001)
        assert not task.done()
        go.set()
        await asyncio.wait([task])
        assert task.cancelled()
        assert reads == [0]

    try:
        await engine.run(main)
    finally:
        await engine.astop()


def test_without_xxhash_full_is_refused_before_anything_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the extra; nothing was made. The other modes do not import it."""
    original = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "xxhash":
            raise ImportError("no xxhash")
        return original(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "xxhash", raising=False)
    monkeypatch.setattr(builtins, "__import__", missing)
    fabric = MemoryFabric()

    async def opened(verify: Any) -> AsyncEplbCommunicator:
        return await AsyncEplbCommunicator.open(
            rank=0,
            ep_size=1,
            weights=[[torch.zeros(1, 8)]],
            placement=Placement([[0]], ep_size=1),
            rendezvous=None,
            settings=Settings(secret=b"s" * 16, verify=verify),
            native=fabric.native,
        )

    with pytest.raises(EplbError, match=r"eplb-async\[verify\]"):
        run(opened("full"))
    assert not fabric.agents


def test_entries_that_differ_are_found_at_once() -> None:
    """Those that ``check_entry`` refuses are the suspects, and no others."""
    meant = [wanted(expert=expert) for expert in (5, 6, 7, 8)]
    rows = entry_rows([5, 9, 7, 8], meant[0].version).numpy().copy()
    rows[2, 0] ^= 1  # no entry at all
    rows[3, 8] ^= 1  # another version
    assert suspects(rows, [one.expert for one in meant], meant[0].version) == [1, 2, 3]
    for i in (1, 2, 3):
        with pytest.raises(IntegrityError):
            check_entry(rows[i].tobytes(), meant[i])
    check_entry(rows[0].tobytes(), meant[0])
