"""What is posted for a layer: each byte of each row once, and neighbours as one descriptor."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from eplb_async.communicator.job import Job, room_for
from eplb_async.communicator.members import Member
from eplb_async.communicator.reads import _descriptors, by_device
from eplb_async.core.incoming import Incoming
from eplb_async.core.layout import Layout, TensorPlace, TensorSpec
from eplb_async.core.plan import Move
from eplb_async.core.schedule import Batch
from eplb_async.weights import Piece

SLOTS = 16
HERE, THERE = 1 << 20, 1 << 30


def layout(base: int, row_bytes: tuple[int, ...], padding: int) -> Layout:
    """One layer, its tensors one right behind the other, each row followed by some padding."""
    places = []
    for i, size in enumerate(row_bytes):
        spec = TensorSpec(str(i), size, size + padding, SLOTS, (size,), (1,), "uint8", "cpu")
        places.append(TensorPlace(spec, base))
        base += SLOTS * (size + padding)
    return Layout((tuple(places),))


def job_of(moves: list[Move], ours: Layout) -> Job:
    """The job of moves of layer 0."""
    return Job(range(1), Incoming.of_moves(0, [(0, move) for move in moves]), ours)


def post(moves: list[Move], row_bytes: tuple[int, ...], padding: int) -> tuple[Job, Any, Any]:
    """The job of these moves, and the two descriptor lists of all its rows."""
    job = job_of(moves, layout(HERE, row_bytes, 0))
    count, tensors = len(job.moves), len(row_bytes)
    batch = Batch(
        source=1,
        move=np.repeat(np.arange(count), tensors),
        tensor=np.tile(np.arange(tensors), count),
        offset=np.zeros(count * tensors, np.int64),
        length=np.tile(np.array(row_bytes), count),
        nbytes=count * sum(row_bytes),
    )
    peer: Any = None
    source = Member(1, 1 << 16, "", peer, layout(THERE, row_bytes, padding))
    local, remote, memory = _descriptors(job, batch, Piece("DRAM", 0, job.sizes["DRAM"], 0), source)
    assert memory == "DRAM"
    return job, local, remote


@pytest.mark.parametrize("seed", range(8))
def test_every_row_is_read_to_its_place_in_staging(seed: int) -> None:
    """Whatever is merged, byte for byte it is what row by row would read."""
    chance = random.Random(seed)
    slots = chance.sample(range(SLOTS), chance.randint(1, SLOTS))
    row_bytes, padding = (4, 3)[: chance.randint(1, 2)], chance.choice([0, 5])
    job, local, remote = post([Move(0, s, 1, s, (i,)) for i, s in enumerate(slots)], row_bytes, padding)
    read = {
        mine + i: theirs + i
        for (mine, size, _), (theirs, same, _) in zip(local.tolist(), remote.tolist(), strict=True)
        for i in range(size)
        if size == same
    }
    start, wanted = THERE, {}
    for tensor, size in enumerate(row_bytes):
        for row, slot in enumerate(job.moves.source_slot.tolist()):
            for i in range(size):
                at = int(job.offsets[tensor]) + row * size + i
                wanted[at] = start + slot * (size + padding) + i
        start += SLOTS * (size + padding)
    assert read == wanted, f"seed {seed}"


def test_neighbours_are_one_descriptor_and_tensors_are_not() -> None:
    """Slots 3, 5, 4 of a source are read as one, in their order there; a descriptor never spans two tensors."""
    job, local, remote = post([Move(0, slot, 1, slot, (slot,)) for slot in (3, 5, 4)], (256, 256), padding=0)
    assert job.moves.source_slot.tolist() == [3, 4, 5]
    assert local.tolist() == [[0, 768, 0], [768, 768, 0]]
    second = THERE + SLOTS * 256
    assert remote.tolist() == [[THERE + 3 * 256, 768, 0], [second + 3 * 256, 768, 0]]


def test_rows_of_several_layers_are_read_from_where_each_layer_lies() -> None:
    """Row by row the address is that of the row's own layer; staged rows follow each other."""
    places = []
    for layer in range(3):
        spec = TensorSpec("w", 64, 64 + 32 * layer, SLOTS, (64,), (1,), "uint8", "cpu")
        places.append((TensorPlace(spec, THERE + (layer << 16)),))
    moves = [(layer, Move(0, slot, 1, slot, (slot,))) for layer in range(3) for slot in (4, 5)]
    ours = Layout(
        tuple((TensorPlace(TensorSpec("w", 64, 64, SLOTS, (64,), (1,), "uint8", "cpu"), 1),) for _ in range(3))
    )
    job = Job(range(3), Incoming.of_moves(0, moves), ours)
    batch = Batch(1, np.arange(6), np.zeros(6, np.int64), np.zeros(6, np.int64), np.full(6, 64), 6 * 64)
    peer: Any = None
    local, remote, _ = _descriptors(
        job, batch, Piece("DRAM", 0, job.sizes["DRAM"], 0), Member(1, 1, "", peer, Layout(tuple(places)))
    )
    assert local.tolist() == [[0, 128, 0], [128, 64, 0], [192, 64, 0], [256, 64, 0], [320, 64, 0]]
    strides = [64, 96, 128]
    assert remote[:, 0].tolist() == [THERE + 4 * 64] + [
        THERE + (layer << 16) + slot * strides[layer] for layer in (1, 2) for slot in (4, 5)
    ]


def test_rows_with_something_between_them_stay_apart() -> None:
    """Padding between the rows of a source is not read."""
    _, local, _ = post([Move(0, slot, 1, slot, (slot,)) for slot in (3, 4)], (256,), padding=8)
    assert local[:, 1].tolist() == [256, 256]


def test_what_lands_where_leaves_out_what_is_read_again() -> None:
    """Slots and staged rows belong together also where moves were sorted, and moves not kept have none."""
    moves = [Move(0, 7, 2, 1, (4, 6)), Move(0, 8, 1, 9, (5,)), Move(0, 9, 1, 2, (0,))]
    job = job_of(moves, layout(HERE, (4,), 0))

    def landing() -> list[list[int]]:
        return [column.tolist() for column in job.moves.landing(range(1), job.kept)]

    assert landing() == [[0, 4, 5, 6], [0, 0, 0, 0], [0, 2, 1, 2]]
    job.kept[1] = False
    assert landing() == [[0, 4, 6], [0, 0, 0], [0, 2, 2]]
    assert job.sizes == room_for(job.specs, 3)[1]


def test_what_a_source_keeps_on_unlike_devices_is_read_apart() -> None:
    """A rank may keep some of its layers, or tensors, on another device than its readers do."""

    def places(*devices: str) -> tuple[TensorPlace, ...]:
        specs = [TensorSpec(str(i), 8, 8, SLOTS, (8,), (1,), "uint8", device) for i, device in enumerate(devices)]
        return tuple(TensorPlace(spec, THERE) for spec in specs)

    source = Layout((places("cpu", "cpu"), places("cuda:0", "cpu"), places("cuda:0", "cuda:0")))
    layer, tensor = np.repeat([0, 1, 2], 2), np.tile([0, 1], 3)
    batch = Batch(1, move=np.repeat([0, 1, 2], 2), tensor=tensor, offset=np.zeros(6, int), length=tensor + 1, nbytes=9)
    cpu, cuda = by_device(batch, layer, source)
    assert (cpu.source, cpu.move.tolist(), cpu.tensor.tolist(), cpu.nbytes) == (1, [0, 0, 1], [0, 1, 1], 5)
    assert (cuda.source, cuda.move.tolist(), cuda.tensor.tolist(), cuda.nbytes) == (1, [1, 2, 2], [0, 0, 1], 4)
    assert cpu.length.tolist() == [1, 2, 2]
    assert by_device(batch, layer * 0, source) == [batch]
