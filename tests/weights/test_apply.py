"""The copies that stage and apply a layer: the right rows, off the loop, and over only when the event says so."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_async.engine import Engine, LoopEngine
from eplb_async.errors import WeightsError
from eplb_async.testing import run
from eplb_async.weights import Copy, CpuCopier, CudaCopier

CUDA = torch.device("cuda:0")


class FakeStream:
    """A stream whose work is done when the test says so; ``record_event`` marks where it stands."""

    def __init__(self, device: torch.device = CUDA) -> None:
        self.device = device
        self.work: list[Callable[[], object]] = []
        self.done = 0
        self.current = False

    def run(self, steps: int) -> None:
        """Do the next steps."""
        for work in self.work[self.done : self.done + steps]:
            work()
            self.done += 1

    def record_event(self) -> FakeEvent:
        return FakeEvent(self, len(self.work))


class FakeEvent:
    """Completed when the stream has done what was before it; never to be waited for (it would block the loop)."""

    def __init__(self, stream: FakeStream, after: int) -> None:
        self._stream = stream
        self._after = after

    def query(self) -> bool:
        return self._stream.done >= self._after


class DeviceRows:
    """Byte rows that say they are on a device; copies between them are enqueued on the current fake stream."""

    def __init__(self, rows: torch.Tensor, stream: FakeStream, device: torch.device = CUDA) -> None:
        self.rows = rows
        self.shape = rows.shape
        self.device = device
        self._stream = stream

    def __getitem__(self, row: int) -> DeviceRows:
        return DeviceRows(self.rows[row], self._stream, self.device)

    def copy_(self, source: DeviceRows, *, non_blocking: bool) -> None:
        assert non_blocking
        assert self._stream.current, "enqueued on another stream than the one given"
        self._stream.work.append(lambda: self.rows.copy_(source.rows))


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> FakeStream:
    """A fake stream that ``torch.cuda.stream`` accepts."""

    @contextlib.contextmanager
    def current(chosen: FakeStream) -> Iterator[None]:
        chosen.current = True
        yield
        chosen.current = False

    monkeypatch.setattr(torch.cuda, "stream", current)
    return FakeStream()


def bytes_of(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape).to(torch.uint8)


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 5)), unique_by=lambda pair: pair[0]), st.integers(1, 40))
@settings(max_examples=100, deadline=None)
def test_rows_go_where_they_are_told_and_others_stay(pairs: list[tuple[int, int]], row_bytes: int) -> None:
    """Also with gaps between the rows of the target, and one source row to several targets."""
    base, source = bytes_of(8, row_bytes + 3), bytes_of(6, row_bytes)
    wanted = base.clone()
    for to, frm in pairs:
        wanted[to, :row_bytes] = source[frm]
    copy = Copy(base[:, :row_bytes], [to for to, _ in pairs], source, [frm for _, frm in pairs])
    assert copy.nbytes == len(pairs) * row_bytes

    async def main() -> None:
        await CpuCopier(LoopEngine(asyncio.get_running_loop())).copy([copy])

    run(main())
    assert torch.equal(base, wanted)


@pytest.mark.asyncio
async def test_expert_bytes_are_copied_by_the_worker_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """I-1: neither on the user's loop nor on the engine loop."""
    threads: list[str] = []
    offload = Engine.offload

    async def noted(self: Engine, work: Callable[[], Any]) -> Any:
        def working() -> Any:
            threads.append(threading.current_thread().name)
            return work()

        return await offload(self, working)

    monkeypatch.setattr(Engine, "offload", noted)
    engine = Engine("copies")
    target, source = torch.zeros(4, 1000, dtype=torch.uint8), bytes_of(4, 1000)
    try:
        await engine.run(lambda: CpuCopier(engine).copy([Copy(target, [0, 3], source, [3, 0])]))
        await engine.run(lambda: CpuCopier(engine).copy([]))
    finally:
        await engine.astop()
    assert threads == ["copies-copy"]
    assert torch.equal(target[[0, 3]], source[[3, 0]])


def test_cuda_copies_are_over_when_the_event_behind_them_has_completed(stream: FakeStream) -> None:
    """I-18: rows wait for what the server has queued; entries on the CPU are copied; the loop goes on meanwhile."""
    target, source = torch.zeros(4, 16, dtype=torch.uint8), bytes_of(4, 16)
    entries, staged = torch.zeros(4, 32, dtype=torch.uint8), bytes_of(4, 32)
    kernel: list[str] = []
    stream.work.append(lambda: kernel.append("forward"))
    copies = [
        Copy(DeviceRows(target, stream), [0, 2], DeviceRows(source, stream), [1, 1]),  # type: ignore[arg-type]
        Copy(entries, [0, 2], staged, [1, 1]),
    ]

    async def main() -> None:
        copier = CudaCopier(LoopEngine(asyncio.get_running_loop()), lambda: stream)
        copying = asyncio.ensure_future(copier.copy(copies))
        for done in range(3):
            await asyncio.sleep(0.1)  # virtual: whoever blocks the loop or waits without a pause is seen here
            assert not copying.done(), f"over after {done} of 3 steps"
            assert not target[2].any()
            stream.run(1)
        await copying

    run(main())
    assert kernel == ["forward"]
    assert torch.equal(target, torch.stack([source[1], torch.zeros_like(source[1]), source[1], target[3]]))
    assert torch.equal(entries[[0, 2]], staged[[1, 1]])


def test_nothing_to_copy_touches_no_stream() -> None:
    """A layer that stays, or one whose only rows are on the CPU: no stream is asked for, no event recorded."""

    def never() -> Any:
        raise AssertionError("asked for a stream")

    target, source = torch.zeros(2, 8, dtype=torch.uint8), bytes_of(2, 8)

    async def main() -> None:
        copier = CudaCopier(LoopEngine(asyncio.get_running_loop()), never)
        await copier.copy([])
        await copier.copy([Copy(target, [0], source, [1])])

    run(main())
    assert torch.equal(target[0], source[1])


def test_a_stream_of_another_device_is_refused_before_anything_is_copied(stream: FakeStream) -> None:
    """Its event would say nothing about the copies (I-18)."""
    elsewhere = torch.device("cuda:1")
    target, entries = torch.zeros(2, 8, dtype=torch.uint8), torch.zeros(2, 8, dtype=torch.uint8)
    rows = DeviceRows(target, stream, elsewhere)
    copies = [Copy(entries, [0], bytes_of(2, 8), [1]), Copy(rows, [0], rows, [1])]  # type: ignore[arg-type]

    async def main() -> None:
        with pytest.raises(WeightsError, match=r"rows on cuda:1 .* stream of cuda:0"):
            async with asyncio.timeout(60.0):
                await CudaCopier(LoopEngine(asyncio.get_running_loop()), lambda: stream).copy(copies)

    run(main())
    assert not entries.any()
    assert not stream.work
