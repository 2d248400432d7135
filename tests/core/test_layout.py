"""Layouts: addresses, what must agree between ranks, and what a peer cannot make us believe."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_async.core.layout import Layout, TensorPlace, TensorSpec, compare

SPEC = TensorSpec(
    name="w13",
    row_bytes=128,
    row_stride=192,
    num_rows=4,
    row_shape=(4, 8),
    element_strides=(8, 1),
    dtype="float32",
    device="cpu",
)
EMPTY = replace(SPEC, name="g_idx", row_bytes=0, row_stride=0, row_shape=(4, 0), element_strides=(0, 1), dtype="int32")
AGREED = {
    "name": "w2",
    "row_bytes": 64,
    "row_shape": (8, 4),
    "element_strides": (1, 4),
    "dtype": "float8_e4m3fn",
    "num_rows": 3,
}
FREE = {"row_stride": 256, "device": "cuda:1"}


def layout(*layers, base=4096):
    """Tensors one after the other from ``base`` on."""
    return Layout(tuple(tuple(TensorPlace(spec, base * (i + 1)) for i, spec in enumerate(specs)) for specs in layers))


specs = st.builds(
    lambda changes: replace(SPEC, **changes),
    st.fixed_dictionaries({}, optional={name: st.just(value) for name, value in {**AGREED, **FREE}.items()}),
)
layouts = st.lists(st.lists(specs, max_size=3), max_size=3).map(lambda layers: layout(*layers))


def test_addresses_follow_base_and_stride():
    """One row, several, in the shape that was asked for."""
    mine = layout([SPEC, SPEC])
    assert mine.row_address(0, 1, 3) == 8192 + 3 * 192
    found = mine.addresses(0, 0, [[0, 2], [3, 1]])
    assert found.tolist() == [[4096, 4480], [4672, 4288]]
    assert found.dtype == np.int64
    assert mine.addresses(0, 0, []).tolist() == []
    assert mine.layer_bytes(0) == 256


def test_c16_a_row_outside_the_tensor_is_named():
    """Layer, tensor, row and range, before NIXL sees an address."""
    for slot in (-1, 4):
        with pytest.raises(IndexError, match=rf"layer 0, tensor 1 \('w13'\): row {slot} is outside \[0, 4\)"):
            layout([EMPTY, SPEC]).addresses(0, 1, [0, slot])


@given(layouts)
def test_a_layout_survives_serialisation_as_tuples_and_as_lists(mine):
    """Through JSON and back it is the same layout, and nothing differs."""
    again = Layout.from_plain(json.loads(json.dumps(mine.to_plain())))
    assert again == mine == Layout.from_plain(mine.to_plain())
    assert compare(mine, again) == []


@given(layouts, layouts)
def test_whether_anything_differs_is_the_same_both_ways_round(mine, theirs):
    """Both ranks accept each other, or neither does."""
    assert (compare(mine, theirs) == []) == (compare(theirs, mine) == [])


@pytest.mark.parametrize("part", AGREED)
def test_c26_a_difference_is_reported_with_both_values(part):
    """Each part that must agree, by layer and tensor."""
    other = replace(SPEC, **{part: AGREED[part]})
    assert compare(layout([SPEC], [EMPTY, SPEC]), layout([SPEC], [EMPTY, other])) == [
        f"layer 1, tensor 1 ('w13'): {part} is {getattr(SPEC, part)!r} here, {AGREED[part]!r} there"
    ]


@pytest.mark.parametrize("part", FREE)
def test_what_is_a_ranks_own_may_differ(part):
    """Strides between rows, devices and addresses."""
    assert compare(layout([SPEC]), layout([replace(SPEC, **{part: FREE[part]})], base=64)) == []


def test_c25_a_tensor_that_only_one_rank_has_is_named():
    """Another number of tensors or layers."""
    scale = replace(SPEC, name="scale")
    assert compare(layout([SPEC], [SPEC, scale]), layout([SPEC], [SPEC])) == [
        "layer 1: 2 tensors here, 1 there; only here: 'scale'"
    ]
    assert compare(layout([SPEC]), layout([SPEC, SPEC, scale])) == [
        "layer 0: 1 tensors here, 3 there; only there: 'scale', 'w13'"
    ]
    assert compare(layout([SPEC]), layout()) == ["number of layers: 1 here, 0 there"]


def test_c17_an_empty_tensor_needs_no_memory():
    """No bytes, address 0: present and valid."""
    mine = layout([EMPTY], base=0)
    mine.check()
    assert mine.layer_bytes(0) == 0


@pytest.mark.parametrize(
    ("changes", "address", "message"),
    [
        ({"num_rows": 0}, 1, "num_rows 0 is outside"),
        ({"num_rows": 1 << 40}, 1, "num_rows 1099511627776 is outside"),
        ({"row_bytes": -1}, 1, "row_bytes -1 is negative"),
        ({"row_stride": 127}, 1, "row_stride 127 is below row_bytes 128"),
        ({}, 0, "address 0 is not"),
        ({}, -8, "address -8 is not"),
        ({}, (1 << 63) - 3 * 192 - 128, "rows end at 0x8000000000000000"),
        ({"row_shape": (1,) * 65}, 1, "65 dimensions"),
        ({"row_shape": (4, -8)}, 1, "negative size"),
        ({"element_strides": (1,)}, 1, "do not fit row_shape"),
    ],
)
def test_numbers_that_cannot_be_memory_are_refused(changes, address, message):
    """Each is named with its layer and tensor."""
    bad = TensorPlace(replace(SPEC, **changes), address)
    mine = Layout(((TensorPlace(SPEC, 1),), (TensorPlace(SPEC, 1), bad)))
    with pytest.raises(ValueError, match=rf"layer 1, tensor 1 \('w13'\): .*{message}"):
        mine.check()
    with pytest.raises(ValueError, match=message):
        Layout.from_plain(mine.to_plain())


def test_what_a_peer_describes_as_we_do_shares_our_description():
    """Hundreds of peers cost their addresses; what differs is kept as the peer says it."""
    scale = replace(SPEC, name="scale")
    mine = layout([SPEC, scale], [SPEC])
    theirs = layout([SPEC, replace(scale, device="cuda:3")], [SPEC], base=1 << 20)
    taken = Layout.from_plain(theirs.to_plain(), like=mine)
    assert taken == theirs
    assert taken.layers[0][0].spec is mine.layers[0][0].spec
    assert taken.layers[0][1].spec.device == "cuda:3"
    assert Layout.from_plain(layout([SPEC], [SPEC, SPEC], [SPEC]).to_plain(), like=mine).layers[1][1].spec == SPEC


@pytest.mark.parametrize("address", [0, -8, (1 << 63) - 3 * 192 - 128, 1 << 64, 1.0, True])
def test_a_shared_description_does_not_spare_the_address_its_check(address):
    """As `test_numbers_that_cannot_be_memory_are_refused`, with all else as ours."""
    mine = layout([SPEC])
    ((record,),) = mine.to_plain()
    with pytest.raises(ValueError, match=r"layer 0, tensor 0.*(address|rows end)"):
        Layout.from_plain((((*record[:-1], address),),), like=mine)


def test_the_last_address_is_still_valid():
    """Rows may end just below 2**63."""
    end = Layout(((TensorPlace(SPEC, (1 << 63) - 1 - 3 * 192 - 128),),))
    end.check()
    assert end.row_address(0, 0, 3) == (1 << 63) - 1 - 128


def test_counts_are_bounded():
    """Too many layers or tensors."""
    with pytest.raises(ValueError, match="65537 layers; at most 65536"):
        Layout(((),) * 65537).check()
    with pytest.raises(ValueError, match="layer 0: 4097 tensors; at most 4096"):
        layout([SPEC] * 4097).check()


GOOD = layout([SPEC]).to_plain()[0][0]


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        (None, "layout is a NoneType, not a sequence"),
        ([7], "layer 0 is a int, not a sequence"),
        ([["x"]], "layer 0, tensor 0 is a str, not a sequence"),
        ([[GOOD[:-1]]], "8 fields instead of 9"),
        ([[(7, *GOOD[1:])]], "name is a int, not a string"),
        ([[("n" * 257, *GOOD[1:])]], "name has 257 characters; at most 256"),
        ([[(*GOOD[:-1], 1.0)]], "address is a float, not an integer"),
        ([[(*GOOD[:-1], True)]], "address is a bool, not an integer"),
        ([[(*GOOD[:-1], 1 << 64)]], "address does not fit 64 bits"),
        ([[(*GOOD[:4], 8, *GOOD[5:])]], "row_shape is a int, not a sequence"),
        ([[(*GOOD[:4], ["8"], *GOOD[5:])]], "row_shape is a str, not an integer"),
    ],
)
def test_damaged_plain_layouts_are_refused(plain, message):
    """From a peer anything may come; the part at fault is named."""
    with pytest.raises(ValueError, match=message):
        Layout.from_plain(plain)
