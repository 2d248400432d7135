"""What ``load_expert`` gives, as bytes of expert rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eplb_async.core.layout import TensorSpec
from eplb_async.errors import WeightsError
from eplb_async.weights import ExpertWeights
from eplb_async.weights.loaded import loaded_rows
from eplb_async.weights.rows import byte_rows, place_of

DTYPES = [
    *(torch.uint8, torch.int8, torch.bool, torch.int16, torch.float16, torch.bfloat16, torch.int32, torch.float32),
    *(torch.int64, torch.float64, torch.complex64, torch.complex128),
    *(getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu") if hasattr(torch, name)),
]


def specs_of(*tensors: torch.Tensor) -> list[TensorSpec]:
    return [place_of(str(i), tensor).spec for i, tensor in enumerate(tensors)]


@given(
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 4), max_size=3),
    st.randoms(use_true_random=False),
    st.booleans(),
)
def test_the_bytes_are_those_of_a_row_that_holds_the_same_values(
    dtype: torch.dtype, shape: list[int], rng: Any, contiguous: bool
) -> None:
    """I-12: any dtype, NaN payloads included, whatever the order of the row's dimensions or of what is given."""
    order = rng.sample(range(len(shape)), len(shape))
    held = torch.empty((2, *(shape[dim] for dim in order)), dtype=dtype)
    held.view(torch.uint8).reshape(-1)[:] = torch.tensor(
        [rng.randrange(2) if dtype is torch.bool else rng.randrange(256) for _ in range(held.nbytes)], dtype=torch.uint8
    )
    back = [order.index(dim) for dim in range(len(shape))]
    weight = held.permute(0, *(dim + 1 for dim in back))
    assert tuple(weight.shape[1:]) == tuple(shape)
    row = weight[1]
    given_row = row.clone(memory_format=torch.contiguous_format) if contiguous and row.numel() else row
    (found,) = loaded_rows([given_row], specs_of(weight))
    assert torch.equal(found.reshape(-1), byte_rows(weight)[1].reshape(-1) if weight.numel() else found.reshape(-1))
    assert found.numel() == row.nbytes


def test_parameters_conjugates_and_slices_are_taken_for_their_values() -> None:
    """What is given need not own its memory or be free of autograd."""
    weight = torch.zeros(2, 3, dtype=torch.complex64)
    values = torch.tensor([1 + 2j, 3 - 4j, 5j], dtype=torch.complex64)
    for given_row in (
        torch.nn.Parameter(values),
        torch.stack([values, values], dim=1)[:, 1],
        values.conj().clone().conj(),
        values.resolve_conj().conj().conj(),
    ):
        (found,) = loaded_rows({"0": given_row}, specs_of(weight))
        assert torch.equal(found.view(torch.complex64)[0], values)


def test_sizes_one_and_nothing() -> None:
    """A scalar for each expert, and a tensor without elements."""
    scale, empty = torch.tensor([1.0, 2.0]), torch.zeros(2, 0, 7)
    found = loaded_rows([torch.tensor(5.0), torch.zeros(0, 7)], specs_of(scale, empty))
    assert found[0].view(torch.float32).tolist() == [[5.0]]
    assert found[1].numel() == 0


@pytest.mark.parametrize(
    ("given_row", "says"),
    [
        (torch.zeros(4, 3), r"tensor '0': float32 \[4, 3\] is not one expert's row, which is float32 \[3\]"),
        (torch.zeros(3, dtype=torch.float64), "float64"),
        (torch.zeros(3).to_sparse(), "torch.sparse_coo on cpu has no plain bytes"),
        (torch.zeros(3, device="meta"), "on meta has no plain bytes"),
        ([0.0, 0.0, 0.0], "tensor '0': list is not a torch.Tensor"),
    ],
    ids=["whole", "dtype", "sparse", "meta", "list"],
)
def test_what_is_not_one_row_is_refused_by_name(given_row: Any, says: str) -> None:
    """With what is given and what is wanted."""
    with pytest.raises(WeightsError, match=says):
        loaded_rows([given_row], specs_of(torch.zeros(4, 3)))


@pytest.mark.parametrize(
    ("given_all", "says"),
    [
        ("w13", "str is neither a mapping nor a sequence"),
        ({"w13": torch.zeros(3)}, r"tensors \['w2'\] are missing; given are \['w13'\]"),
        (
            {"w13": torch.zeros(3), "w2": torch.zeros(2), "w3": torch.zeros(1)},
            r"tensors \['w3'\] are not of this layer",
        ),
        ([torch.zeros(3)], r"1 tensors, the layer has 2: \['w13', 'w2'\]"),
    ],
)
def test_too_few_and_too_many_are_refused_by_name(given_all: Any, says: str) -> None:
    """Names are the caller's own, from the weights."""
    weights = ExpertWeights([{"w13": torch.zeros(4, 3), "w2": torch.zeros(4, 2)}], 4, entries=False)
    with pytest.raises(WeightsError, match=says):
        loaded_rows(given_all, [place.spec for place in weights.layout.layers[0]])
