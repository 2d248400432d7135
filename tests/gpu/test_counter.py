"""The attached counter on a CUDA device: behind the engine's kernels, in graphs, and never in the engine's way."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from eplb_async.core.placement import Placement
from eplb_async.service.counter import AttachedCounter
from eplb_async.service.window import LoadWindow

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = torch.device("cuda:0")
OLD = Placement([[0, 1, 2, 0], [0, 1, 2, 0]], ep_size=2)
NEW = Placement([[2, 0, 1, 1], [0, 1, 2, 2]], ep_size=2)


@pytest.fixture
def tensor() -> Iterator[torch.Tensor]:
    yield torch.zeros(2, 4, dtype=torch.int64, device=DEVICE)
    torch.cuda.synchronize()


def keep_busy(stream: torch.cuda.Stream) -> None:
    """Queue a kernel of a few hundred milliseconds, as a server's forward pass is."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_000_000_000)


def test_a_row_is_closed_between_the_kernels_before_and_after_the_apply(tensor: torch.Tensor) -> None:
    """Also where the host is far ahead of the device: closing waits for nothing, and looking waits for the row."""
    counter = AttachedCounter(tensor, lambda: OLD)
    one, stream = torch.ones_like(tensor), torch.cuda.Stream(DEVICE)
    torch.cuda.synchronize()
    keep_busy(stream)
    with torch.cuda.stream(stream):
        tensor.add_(one)
        counter.applied(0, NEW)
        counter.applied(1, NEW)
        tensor.add_(one)
        tensor.add_(one)
        counter.applied(0, OLD)
    assert not stream.query(), "the kernel is too short for this test, or closing waited for it"
    with pytest.raises(TimeoutError, match="has not copied"):
        counter.collect(timeout=0.001)
    collected = counter.collect(timeout=60)
    stream.synchronize()
    collected += counter.collect()
    assert collected.tolist() == [[2 + 2, 1 + 4, 1 + 2], [2 + 2, 1 + 2, 1 + 4]]


def test_a_look_does_not_wait_for_the_engine(tensor: torch.Tensor) -> None:
    """It copies on a stream of its own."""
    counter = AttachedCounter(tensor, lambda: OLD)
    stream = torch.cuda.Stream(DEVICE)
    tensor.add_(1)
    torch.cuda.synchronize()
    keep_busy(stream)
    assert counter.collect().tolist() == [[2, 1, 1]] * 2
    assert not stream.query(), "the kernel is too short for this test, or the look waited for it"


def test_counts_of_a_cuda_graph_are_read(tensor: torch.Tensor) -> None:
    """The graph's kernels count; rows are closed between two replays."""
    counter = AttachedCounter(tensor, lambda: OLD)
    one, graph = torch.ones_like(tensor), torch.cuda.CUDAGraph()
    tensor.add_(one)  # so that the kernel is loaded
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        tensor.add_(one)
    counter.collect()
    for _ in range(3):
        graph.replay()
    counter.applied(0, NEW)
    counter.applied(1, NEW)
    graph.replay()
    torch.cuda.synchronize()
    assert counter.collect().tolist() == [[6 + 1, 3 + 2, 3 + 1], [6 + 1, 3 + 1, 3 + 2]]


def test_a_window_points_at_the_counter(tensor: torch.Tensor) -> None:
    """Copying counts over would wait for the device in each step."""
    with pytest.raises(ValueError, match=r"on cuda:0; attach\(\)"):
        LoadWindow(OLD, steps=4).record(tensor, OLD)
    assert np.array_equal(LoadWindow(OLD, steps=4).loads()[0], np.zeros((2, 3)))
