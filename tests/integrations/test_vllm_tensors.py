"""Which tensors the vLLM drop-in takes, and which bytes a call moves."""

from __future__ import annotations

import pytest
import torch

from eplb_async.errors import WeightsError
from eplb_async.integrations.vllm.tensors import Fetch, Tensors, blocks_of


def weights(layers: int = 2, experts: int = 6) -> list[list[torch.Tensor]]:
    """As vLLM gives them: one tensor transposed within its rows, one of halves."""
    return [
        [torch.zeros(experts, 8, 16).transpose(1, 2), torch.zeros(experts, 32, dtype=torch.bfloat16)]
        for _ in range(layers)
    ]


def buffer_of(layers: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [torch.empty_like(tensor) for tensor in layers[0]]


def test_neighbouring_rows_are_one_descriptor() -> None:
    layers = weights()
    tensors = Tensors(layers, buffer_of(layers))
    fetches = [Fetch(1, 9, 4, 2), Fetch(1, 8, 3, 1), Fetch(1, 7, 0, 5)]
    (blocks,) = blocks_of(fetches, 1, tensors, tensors.layout)
    row, half = 8 * 16 * 4, 64
    assert blocks.local[:, 1].tolist() == [2 * row, row, 2 * half, half] == blocks.remote[:, 1].tolist()
    first, second = (tensor.data_ptr() for tensor in layers[1])
    assert blocks.remote[:, 0].tolist() == [first + 3 * row, first, second + 3 * half, second]
    assert blocks.local[0, 0] == tensors.buffer[0].data_ptr() + row


def test_row_of_the_buffer_is_known_by_where_it_is_and_what_it_is_like() -> None:
    layers = weights()
    tensors = Tensors(layers, buffer_of(layers))
    one, two = tensors.buffer
    assert tensors.row_of([one[3], two[3]]) == 3
    for bad in ([one[3]], [one[3], two[2]], [one[3].t(), two[3]], [layers[0][0][3], two[3]], [one[3], two[3].half()]):
        with pytest.raises(WeightsError):
            tensors.row_of(bad)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda w, b: b.pop(), "layer 0 has 2 tensors, expert_buffer 1"),
        (lambda w, b: b.__setitem__(1, b[1].float()), r"layer 0, tensor 1: row_bytes is 64, that of .*buffer\[1\] 128"),
        (lambda w, b: b.__setitem__(1, b[1].half()), "dtype is 'bfloat16'"),
        (lambda w, b: b.__setitem__(0, b[0].contiguous()), "element_strides"),
        (lambda w, b: w[1].__setitem__(1, torch.zeros(32, 6).t()), "layer 1, tensor '1': .* not one dense block"),
        (lambda w, b: b.__setitem__(1, torch.zeros(32, 6).t()), r"^expert_buffer\[1\]: .* not one dense block"),
        (lambda w, b: b.__setitem__(0, w[1][0]), "same memory"),
        (lambda w, b: w.clear(), "no layer with tensors"),
        (lambda w, b: w[1].__setitem__(0, w[1][0][:4]), r"layer 1, tensor '0': .* need \[6"),
        (lambda w, b: b.__setitem__(0, None), r"expert_buffer\[0\] is NoneType"),
    ],
)
def test_what_cannot_be_moved_is_refused_by_name(change: object, says: str) -> None:
    layers = weights()
    buffer = buffer_of(layers)
    change(layers, buffer)  # type: ignore[operator]
    with pytest.raises(WeightsError, match=says):
        Tensors(layers, buffer)


def test_tensor_that_moved_is_noticed() -> None:
    layers = weights()
    tensors = Tensors(layers, buffer_of(layers))
    tensors.check_place(1)
    layers[1][1].data = layers[1][1].data.clone()
    tensors.check_place(0)
    with pytest.raises(WeightsError, match="layer 1, tensor 1: it is not where"):
        tensors.check_place(1)
    with pytest.raises(WeightsError, match="tensor 0, row 2"):
        tensors.check_source(0, [2], [tensor[1] for tensor in layers[0]])
    tensors.check_source(0, [0, 1], [tensor[1] for tensor in layers[0]])
    one, two = layers[0]
    with pytest.raises(WeightsError, match="tensor 1, row 0 or 1"):
        tensors.check_source(0, [0, 1], [one[0], two[1]])
