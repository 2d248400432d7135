"""Placement: what it accepts, what it refuses and how it says so."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eplb_async.core.placement import Placement
from eplb_async.errors import PlacementError


@st.composite
def placements(draw):
    """Any placement: every expert somewhere, the other slots empty or extra copies."""
    ep_size, local, num_layers = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    num_logical = draw(st.integers(1, ep_size * local))
    extra = st.integers(-1, num_logical - 1)
    spare = ep_size * local - num_logical
    rows = [
        draw(st.permutations([*range(num_logical), *draw(st.lists(extra, min_size=spare, max_size=spare))]))
        for _ in range(num_layers)
    ]
    return Placement(rows, ep_size=ep_size, num_logical=num_logical)


@given(placements())
def test_inverse_lists_exactly_the_slots_of_each_expert(placement):
    """logical_to_physical_map and logical_replica_count say the same as the map."""
    for layer, row in enumerate(placement.physical_to_logical_map.tolist()):
        for expert in range(placement.num_logical):
            slots = [physical for physical, held in enumerate(row) if held == expert]
            padded = placement.logical_to_physical_map[layer, expert].tolist()
            assert padded == slots + [-1] * (len(padded) - len(slots))
            assert placement.logical_replica_count[layer, expert] == len(slots)
    assert placement.logical_to_physical_map.shape[2] == placement.logical_replica_count.max()


@given(placements())
def test_equal_content_is_equal_with_equal_hash_and_digest(placement):
    """A rebuilt placement is the same one."""
    again = Placement(placement.physical_to_logical_map, ep_size=placement.ep_size, num_logical=placement.num_logical)
    assert again == placement
    assert hash(again) == hash(placement)
    assert again.digest() == placement.digest()
    assert len(again.digest()) == 16


def test_digest_covers_the_sizes_as_well_as_the_ids():
    """Same ids, another ep_size or shape: another digest."""
    digests = {
        Placement([[0, 1, 1, 0]], ep_size=2).digest(),
        Placement([[0, 1, 1, 0]], ep_size=4).digest(),
        Placement([[0, 1], [1, 0]], ep_size=2).digest(),
        Placement([[0, 1, 0, 1]], ep_size=2).digest(),
    }
    assert len(digests) == 4


def test_digest_is_the_same_on_every_platform_and_version():
    """Ranks compare digests, so the encoding is pinned."""
    assert Placement([[0, 1, 1, 0]], ep_size=2).digest().hex() == "5de87ab19c637b681baad74d77fe4c9c"


@pytest.mark.parametrize("convert", [list, np.array, torch.tensor, lambda ids: np.array(ids, dtype=np.uint8)])
def test_accepts_lists_numpy_and_torch(convert):
    """Whatever holds integers in two dimensions."""
    placement = Placement(convert([[0, 1], [1, 0]]), ep_size=2)
    assert placement.physical_to_logical_map.tolist() == [[0, 1], [1, 0]]
    assert placement.physical_to_logical_map.dtype == np.int32


def test_is_immutable_and_detached_from_its_argument():
    """Neither the caller's array nor the attributes can change it."""
    ids = np.array([[0, 1]])
    placement = Placement(ids, ep_size=2)
    ids[0, 0] = 1
    assert placement.physical_to_logical_map.tolist() == [[0, 1]]
    for array in (
        placement.physical_to_logical_map,
        placement.logical_to_physical_map,
        placement.logical_replica_count,
        placement.local(0),
    ):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
    with pytest.raises(AttributeError):
        placement.ep_size = 1


def test_sizes_and_views_of_a_small_placement():
    """Two layers, five logical experts on two ranks of three slots."""
    placement = Placement([[0, 1, 2, 3, 4, 0], [4, 3, 2, 1, 0, -1]], ep_size=2)
    assert (placement.num_layers, placement.num_physical, placement.num_logical) == (2, 6, 5)
    assert (placement.num_local_experts, placement.num_redundant) == (3, 1)
    assert placement.local(1).tolist() == [[3, 4, 0], [1, 0, -1]]
    assert placement.logical_to_physical_map is placement.logical_to_physical_map
    assert repr(placement).startswith("Placement(num_layers=2, num_logical=5, num_physical=6, ep_size=2, digest=")
    with pytest.raises(IndexError, match=r"rank 2 is outside \[0, 2\)"):
        placement.local(2)


def test_several_copies_on_one_rank_are_allowed():
    """A rank may hold an expert twice."""
    assert Placement([[1, 1, 0, 2]], ep_size=2).logical_replica_count.tolist() == [[1, 2, 1]]


@pytest.mark.parametrize(
    ("ids", "sizes", "message"),
    [
        ([0, 1], {}, r"shape \(2,\); it must be \[num_layers, num_physical\]"),
        ([[[0, 1]]], {}, r"shape \(1, 1, 2\)"),
        (np.zeros((0, 2), dtype=int), {}, "is empty"),
        ([[]], {}, "is empty"),
        ([[0, 1], [0]], {}, "not an array of integers"),
        (torch.zeros(1, 2, dtype=torch.bfloat16), {}, "not an array of integers"),
        ([[0.0, 1.5]], {}, "dtype float64"),
        ([[True, False]], {}, "dtype bool"),
        ([["a", "b"]], {}, "dtype"),
        ([[0, 1], [0, -2]], {}, r"layer 1, physical expert 1: id -2 is outside \[-1, 2\)"),
        ([[0, 5, 7]], {"num_logical": 2, "ep_size": 1}, r"id 5 is outside \[-1, 2\) \(and 1 more\)"),
        ([[-1, -1]], {}, "holds no expert"),
        ([[0, 1]], {"ep_size": 0}, "ep_size is 0"),
        ([[0, 1]], {"ep_size": 2.0}, "ep_size is 2.0; it must be an integer"),
        ([[0, 1]], {"num_logical": 0}, "num_logical is 0"),
        ([[0, 1, 2]], {}, r"smallest redundant count that does is 1 \(2 experts per rank\)"),
        ([[0, 1, 2, 0], [0, 3, 3, 1]], {"num_logical": 4}, "layer 0: expert 3; layer 1: expert 2"),
        ([[0, 2**40]], {}, r"do not fit in 2 slots.*layer 0: experts 1, 2, 3, 4, 5, 6, 7, 8$"),
    ],
)
def test_refuses_with_the_part_at_fault(ids, sizes, message):
    """Each way to be wrong has a message that names it."""
    with pytest.raises(PlacementError, match=message):
        Placement(ids, **{"ep_size": 2, **sizes})


def test_a_long_list_of_missing_experts_is_cut_short():
    """Messages stay readable with many layers and experts."""
    with pytest.raises(PlacementError, match=r"layer 0: experts 1, 2, .* and 7 more; .*and 2 more layers"):
        Placement(np.zeros((10, 16), dtype=int), ep_size=2, num_logical=16)


def test_c27_initial_names_the_smallest_redundant_count_that_divides():
    """256 logical experts on 3 ranks need 2 redundant ones, 86 per rank."""
    with pytest.raises(PlacementError, match=r"256 logical and 0 redundant .* ep_size 3; .* 2 \(86 experts per rank\)"):
        Placement.initial(1, 256, ep_size=3)
    assert Placement.initial(1, 256, ep_size=3, num_redundant=2).num_local_experts == 86


def test_c27_initial_refuses_negative_redundancy():
    """-1 is not a count."""
    with pytest.raises(PlacementError, match="num_redundant is -1"):
        Placement.initial(1, 256, ep_size=3, num_redundant=-1)


def test_c27_initial_repeats_experts_from_zero_on():
    """5 logical on 2 ranks with 1 redundant is valid, and so is more than one round."""
    assert Placement.initial(2, 5, ep_size=2, num_redundant=1).local(1).tolist() == [[3, 4, 0]] * 2
    assert Placement.initial(1, 2, ep_size=1, num_redundant=3).physical_to_logical_map.tolist() == [[0, 1, 0, 1, 0]]


def test_with_layers_is_what_is_true_after_a_partial_commit():
    """The first layers come from the new placement, the others stay."""
    old, new = Placement([[0, 1]] * 3, ep_size=2), Placement([[1, 0]] * 3, ep_size=2)
    assert old.with_layers(new, 0) == old
    assert old.with_layers(new, 2).physical_to_logical_map.tolist() == [[1, 0], [1, 0], [0, 1]]
    assert old.with_layers(new, 3) == new
    with pytest.raises(PlacementError, match=r"upto is 4; it must be within \[0, 3\]"):
        old.with_layers(new, 4)
    with pytest.raises(PlacementError, match="num_layers is 3 in the old and 1 in the new"):
        old.with_layers(Placement([[0, 1]], ep_size=2), 1)


def test_is_not_equal_to_another_type():
    """Comparison with anything else is False, not an error."""
    assert Placement([[0, 1]], ep_size=2) != [[0, 1]]
