"""On a CUDA device: copies on the given stream, their event, staging, and migrations between two processes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import torch

from eplb_async.engine import Engine
from eplb_async.errors import WeightsError
from eplb_async.weights import Copy, CudaCopier, Digester, ExpertWeights, make_buffers
from tests.weights.rank import run_both

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = torch.device("cuda:0")
MIB = 1 << 20


def bytes_of(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, device=DEVICE).to(torch.uint8)


def keep_busy(stream: torch.cuda.Stream, cycles: int = 1_000_000_000) -> None:
    """Queue a kernel of a few hundred milliseconds, as a server's forward pass is."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(cycles)


@pytest.mark.asyncio
async def test_copies_wait_for_their_turn_on_the_stream_without_blocking_any_loop() -> None:
    """I-18: behind the server's kernel; over when their event has completed; both loops go on meanwhile."""
    stream = torch.cuda.Stream(DEVICE)
    target, source = torch.zeros(8, MIB, dtype=torch.uint8, device=DEVICE), bytes_of(8, MIB)
    entries, staged = torch.zeros(8, 32, dtype=torch.uint8), bytes_of(8, 32).cpu()
    torch.cuda.synchronize()
    engine = Engine("cuda")
    copier = CudaCopier(engine, lambda: stream)
    lags: list[float] = []

    async def tick() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            lags.append(time.perf_counter() - before)

    try:
        await engine.run(lambda: copier.copy([Copy(target, [7], source, [7])]))  # once, so that all is loaded
        ticker = asyncio.ensure_future(engine.run(tick))
        keep_busy(stream)
        copying = asyncio.ensure_future(
            engine.run(
                lambda: copier.copy([Copy(target, [0, 3, 5], source, [3, 3, 0]), Copy(entries, [0], staged, [1])])
            )
        )
        await asyncio.sleep(0.05)
        assert not stream.query(), "the kernel is too short for this test"
        assert not copying.done()
        await copying
        assert stream.query(), "said to be over before the stream was"
        ticker.cancel()
        await asyncio.gather(ticker, return_exceptions=True)
    finally:
        await engine.astop()
    assert len(lags) > 20
    assert max(lags) < 0.1
    assert torch.equal(target[[0, 3, 5]], source[[3, 3, 0]])
    assert not target[[1, 2, 4, 6]].any()
    assert torch.equal(entries[0], staged[1])


@pytest.mark.asyncio
async def test_copies_wait_for_what_a_step_has_queued_on_a_stream_of_its_own() -> None:
    """I-18: the step's kernels read the rows; and what the callback of an apply queues is done when it is over."""
    stream, of_the_step = torch.cuda.Stream(DEVICE), torch.cuda.Stream(DEVICE)
    target, source = torch.zeros(2, MIB, dtype=torch.uint8, device=DEVICE), bytes_of(2, MIB)
    torch.cuda.synchronize()
    engine = Engine("cuda")
    copier = CudaCopier(engine, lambda: stream)
    mark = copier.mark
    assert mark is not None
    try:
        await engine.run(lambda: copier.copy([Copy(target, [1], source, [1])]))  # once, so that all is loaded
        keep_busy(of_the_step)
        with torch.cuda.stream(of_the_step):
            mark()
        copying = asyncio.ensure_future(engine.run(lambda: copier.copy([Copy(target, [0], source, [0])])))
        await asyncio.sleep(0.05)
        assert not of_the_step.query(), "the kernel is too short for this test"
        assert not copying.done()
        await copying
        assert of_the_step.query(), "the rows changed under the step"
        await engine.run(lambda: copier.call(lambda: torch.cuda._sleep(1_000_000_000)))
        assert stream.query(), "the callback's work was not waited for, or was on another stream"
    finally:
        await engine.astop()
    assert torch.equal(target, source)


@pytest.mark.asyncio
async def test_copies_allocate_nothing_on_the_device() -> None:
    """A server's memory is full: a layer is applied without a temporary of its size."""
    stream = torch.cuda.Stream(DEVICE)
    target, source = torch.zeros(16, MIB, dtype=torch.uint8, device=DEVICE), bytes_of(16, MIB)
    torch.cuda.synchronize()
    engine = Engine("cuda")
    try:
        before = torch.cuda.memory_allocated(DEVICE)
        torch.cuda.reset_peak_memory_stats(DEVICE)
        rows = list(range(16))
        await engine.run(lambda: CudaCopier(engine, lambda: stream).copy([Copy(target, rows, source, rows[::-1])]))
        assert torch.cuda.max_memory_allocated(DEVICE) == before
    finally:
        await engine.astop()
    assert torch.equal(target, source.flip(0))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.asyncio
async def test_a_stream_of_another_device_is_refused() -> None:
    """Its event would say nothing about the copies."""
    target, stream = torch.zeros(2, 64, dtype=torch.uint8, device=DEVICE), torch.cuda.Stream("cuda:1")
    engine = Engine("cuda")
    try:
        with pytest.raises(WeightsError, match="stream of cuda:1"):
            await engine.run(lambda: CudaCopier(engine, lambda: stream).copy([Copy(target, [0], target, [1])]))
    finally:
        await engine.astop()


def test_staging_is_on_the_device_and_entries_on_the_cpu() -> None:
    """I-16: entries are checked by the CPU; rows land where they will be copied from."""
    weights = ExpertWeights([[torch.zeros(4, 64, device=DEVICE, dtype=torch.bfloat16)]], 4, entries=True)
    assert [rows.device.type for rows, _ in weights.regions()] == ["cuda", "cpu"]
    assert weights.rows(0, 0).data_ptr() == weights.layers[0]["0"].data_ptr()
    needed, devices = {"VRAM": 512, "DRAM": 128}, {"VRAM": DEVICE, "DRAM": torch.device("cpu")}
    buffers = make_buffers(None, needed, devices, layers=2, num_layers=4)
    assert {memory: buffer.device for memory, buffer in buffers.items()} == devices
    given = torch.zeros(1024, dtype=torch.uint8, device=DEVICE)
    assert make_buffers(given, needed, devices, layers=2, num_layers=4)["VRAM"].data_ptr() == given.data_ptr()
    with pytest.raises(WeightsError, match="on cpu, the weights are on cuda:0"):
        make_buffers(given.cpu(), needed, devices, layers=2, num_layers=4)


@pytest.mark.asyncio
async def test_digests_of_a_device_are_those_of_the_host_and_wait_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """I-16: brought over in slices on a stream of their own, while the server's kernel goes on."""
    monkeypatch.setattr("eplb_async.weights.digests._SLICE", 100_000)
    tensors = [bytes_of(4, MIB + 7), bytes_of(4, 33)]
    torch.cuda.synchronize()
    engine = Engine("cuda")
    digester = Digester(engine)
    stream = torch.cuda.Stream(DEVICE)
    try:
        on_host = await engine.run(lambda: digester.digests(3, [rows.cpu() for rows in tensors], [0, 3]))
        await engine.run(lambda: digester.digests(3, tensors, [0]))  # once, so that all is loaded
        keep_busy(stream)
        on_device = await engine.run(lambda: digester.digests(3, tensors, [0, 3]))
        assert not stream.query(), "waited for the server's kernel"
    finally:
        await engine.astop()
    assert on_device == on_host


def test_real_ranks_move_cuda_tensors_of_every_dtype(tmp_path: Path) -> None:
    """C15, C17, C26 on a device, over NIXL between two processes."""
    run_both(tmp_path, "cuda:0", {"UCX_TLS": "tcp,self,cuda_copy"})
