"""Which tensors can be moved, their bytes, whether they moved away, and what ranks must agree on."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_async.communicator import AsyncEplbCommunicator
from eplb_async.core.layout import compare
from eplb_async.core.placement import Placement
from eplb_async.errors import HandshakeError, WeightsError
from eplb_async.testing import MemoryFabric, run
from eplb_async.weights import ENTRY_NAME, ExpertWeights, Wanted
from eplb_async.weights.entries import check_entry
from tests.weights.rank import run_both
from tests.weights.ranks import fill, migrate, open_ranks, opened

DTYPES = [
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e8m0fnu,
    torch.uint8,
    torch.float32,
    torch.bool,
    torch.int64,
    torch.complex64,
]
OLD = Placement([[0, 1, 2, 3, 4, 5, 6, 7]] * 2, ep_size=2)
NEW = Placement([[7, 1, 4, 0, 6, 5, 2, 3], [1, 2, 3, 4, 5, 6, 7, 0]], ep_size=2)


def weights_of(*tensors: Any, entries: bool = False, slots: int = 4) -> ExpertWeights:
    return ExpertWeights([list(tensors)], slots, entries=entries)


def wanted(expert: int, version: int) -> Wanted:
    return Wanted(layer=0, expert=expert, version=version, rank=0, slot=0)


def refused(*tensors: Any, slots: int = 4) -> str:
    with pytest.raises(WeightsError) as caught:
        weights_of(*tensors, slots=slots)
    return str(caught.value)


# ------------------------------------------------------------------------------------------- bytes of the rows
@st.composite
def dense_rows(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A tensor of any dtype, its rows dense in any order of dimensions, and the bytes before and below it."""
    dtype = draw(st.sampled_from(DTYPES))
    slots = draw(st.integers(1, 5))
    shape = draw(st.lists(st.integers(1, 5), max_size=4))
    order = draw(st.permutations(range(len(shape))))
    elements, gap, first = math.prod(shape), draw(st.integers(0, 3)), draw(st.integers(0, 3))
    strides = [0] * len(shape)
    step = 1
    for dim in order:
        strides[dim] = step
        step *= shape[dim]
    size = dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, ((first + slots * (elements + gap)) * size,))
    raw = raw.to(torch.uint8)
    tensor = torch.empty(0, dtype=dtype).set_(raw.untyped_storage(), first, (slots, *shape), (elements + gap, *strides))
    rows = torch.stack([raw[(first + s * (elements + gap)) * size :][: elements * size] for s in range(slots)])
    return tensor, raw, rows


@given(dense_rows())
@settings(max_examples=300, deadline=None)
def test_rows_as_bytes_are_torchs_own(drawn: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    """I-12: any dtype, offset, gap between rows and order of a row's dimensions; writing a row writes the tensor."""
    tensor, raw, wanted = drawn
    slots = tensor.shape[0]
    weights = weights_of(tensor, slots=slots)
    rows = weights.rows(0, 0)
    assert rows.data_ptr() == tensor.data_ptr()
    assert torch.equal(rows, wanted)
    by_stride = sorted(range(1, tensor.dim()), key=lambda d: tensor.stride(d), reverse=True)
    for slot in range(slots):
        inner = tensor[slot].permute([d - 1 for d in by_stride])
        own = inner.contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(rows[slot], own)
    before = raw.clone()
    rows[0] = torch.randint(0, 2, (rows.shape[1],)).to(torch.uint8)
    changed = (raw != before).nonzero().flatten()
    start = tensor.storage_offset() * tensor.element_size()
    assert ((changed >= start) & (changed < start + rows.shape[1])).all()
    place = weights.layout.layers[0][0]
    last = place.address + (slots - 1) * place.spec.row_stride
    assert last == rows[slots - 1].data_ptr()


def test_parameters_and_inference_tensors_are_written_from_any_thread_and_mode() -> None:
    """Gradients, ``inference_mode`` around ``open``, tensors made in it: the copies that apply a layer go through."""
    parameter = torch.nn.Parameter(torch.zeros(4, 2))
    with torch.inference_mode():
        made_in_it = torch.zeros(4, 2)
        weights = weights_of(parameter, made_in_it, entries=True)
    weights.write_entries(0, [0, 1, -1, 2], 7)
    check_entry(weights.rows(0, 2)[3].numpy().tobytes(), wanted(2, 7))
    for tensor in range(2):
        weights.rows(0, tensor)[1].copy_(torch.full((8,), 0x3F, dtype=torch.uint8))
    assert (parameter[1] > 0.7).all()
    assert (made_in_it[1] > 0.7).all()
    assert not parameter[0].any()


def test_empty_tensors_are_part_of_the_layout_but_neither_registered_nor_copied() -> None:
    """C17: the leaf keeps its place, and however it came to be empty it agrees with another empty one."""
    empty, strided = torch.zeros(4, 0, 3, 2), torch.zeros(4, 2, 3, 0).transpose(1, 3)
    weights = weights_of(torch.zeros(4, 8), empty, entries=True)
    assert [place.spec.row_bytes for place in weights.layout.layers[0]] == [32, 0, 32]
    assert [name for _, name in weights.regions()] == ["0/0", ENTRY_NAME]
    assert weights.rows(0, 1).numel() == 0
    assert compare(*(weights_of(tensor).layout for tensor in (empty, strided))) == []


def test_rows_of_other_strides_and_part_of_a_tensor_can_be_moved() -> None:
    """C18: ``x[1:]``, a gap between rows, one slot of any stride, dimensions of size one of any stride."""
    x = torch.arange(40.0).view(5, 8)
    assert weights_of(x[1:]).rows(0, 0).data_ptr() == x.data_ptr() + 32
    assert weights_of(x[1:, :4]).layout.layers[0][0].spec.row_stride == 32
    assert weights_of(x.t()[:1, :1], slots=1).rows(0, 0).shape == (1, 4)
    assert weights_of(torch.ones(1).expand(1, 1, 7)[:, :, :1], slots=1).rows(0, 0).shape == (1, 4)
    assert weights_of(torch.zeros(4)).rows(0, 0).shape == (4, 4)


# ------------------------------------------------------------------------------------------------ what is refused
@pytest.mark.parametrize(
    ("tensor", "strides", "why"),
    [
        (torch.arange(32).view(4, 8)[:, ::2], "(8, 2)", "not one dense block"),
        (torch.arange(32).view(8, 4).t(), "(1, 4)", "not one dense block"),
        (torch.arange(32).view(4, 8).t(), "(1, 8)", "need [4, ...]"),
        (torch.arange(8).expand(4, 8), "(0, 1)", "shared by all experts: leave it out"),
        (torch.ones(1).expand(4), "(0,)", "shared by all experts: leave it out"),
        (torch.ones(4, 1).expand(4, 3), "(1, 0)", "not one dense block"),
        (torch.arange(8).unfold(0, 5, 1), "(1, 1)", "overlap or interleave"),
        (torch.arange(32).view(8, 4).transpose(0, 1).unsqueeze(-1)[:, :1].transpose(1, 2), "(1,", ""),
        (torch.tensor(1.0), "()", "need [4, ...]"),
    ],
)
def test_rows_that_are_not_dense_blocks_are_refused(tensor: torch.Tensor, strides: str, why: str) -> None:
    """C18, C25: names layer, tensor and strides, and says what to do; nothing is made contiguous."""
    if not why:  # experts last, one element each: dense after all
        assert weights_of(tensor).rows(0, 0).shape == (4, 8)
        return
    message = refused(torch.zeros(4), tensor)
    assert "layer 0, tensor '1'" in message
    assert f"strides {strides}" in message
    assert why in message


def _resized() -> torch.Tensor:
    tensor = torch.zeros(4, 8)
    tensor.untyped_storage().resize_(0)
    return tensor


def _fake() -> torch.Tensor:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        return torch.zeros(4, 8)


@pytest.mark.filterwarnings("ignore")  # torch's own, on making some of these
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.zeros(4, 8, device="meta"), "on meta"),
        (lambda: torch.zeros(4, 8).to_sparse(), "sparse_coo"),
        (lambda: torch.quantize_per_tensor(torch.zeros(4, 8), 1.0, 0, torch.qint8), "quantised"),
        (lambda: torch.zeros(4, 8, dtype=torch.complex64).conj(), "conjugated"),
        (lambda: torch.nested.nested_tensor([torch.zeros(2)] * 4), "cannot be moved"),
        (lambda: torch.nn.UninitializedParameter(), "cannot be moved"),
        (lambda: torch._efficientzerotensor((4, 8)), "no memory of its own"),
        (_resized, "no memory of its own"),
        (_fake, "no memory of its own"),
        (lambda: None, "NoneType is not a torch.Tensor"),
    ],
)
def test_tensors_without_plain_memory_of_their_own_are_refused(make: Callable[[], Any], why: str) -> None:
    """Sparse, quantised, meta, nested, lazy, asleep: a WeightsError that names the tensor, whatever torch raises."""
    message = refused(torch.zeros(4), make())
    assert "layer 0, tensor '1'" in message
    assert why in message


@pytest.mark.parametrize(
    ("given_", "why"),
    [
        ([], "sequence of layers"),
        (torch.zeros(4, 8), "sequence of layers"),
        ({"w": torch.zeros(4)}, "sequence of layers"),
        ((layer for layer in [[torch.zeros(4)]]), "sequence of layers"),
        ([torch.zeros(4, 8)], "wrap it in a list"),
        ([(tensor for tensor in [torch.zeros(4)])], "layer 0: generator is neither"),
        ([[torch.zeros(4)], []], "layer 1 has no tensors"),
        ([{1: torch.zeros(4), "1": torch.zeros(4)}], "names of tensors must differ"),
        ([{ENTRY_NAME: torch.zeros(4)}], "is taken"),
        ([{"x" * 300: torch.zeros(4)}], "peers would refuse"),
    ],
)
def test_what_is_not_layers_of_tensors_is_refused(given_: Any, why: str) -> None:
    """One tensor for a layer or for all, generators (empty when asked again), names that collide."""
    with pytest.raises(WeightsError) as caught:
        ExpertWeights(given_, 4, entries=True)
    assert why in str(caught.value)


def test_tied_tensors_of_a_layer_are_registered_once() -> None:
    """C15: the same rows twice in one layer, also as another dtype."""
    x = torch.zeros(4, 8)
    weights = weights_of(x, x, x.view(torch.int32))
    assert len({(rows.data_ptr(), rows.shape) for rows, _ in weights.regions()}) == 1


@pytest.mark.parametrize(
    ("layers", "why"),
    [
        (lambda x: [[x[:4], x[2:6]]], "overlap in part"),
        (lambda x: [[x[:4]], [x[2:6]]], "overlap in part"),
        (lambda x: [[x[:4, :6], x[:4, 2:]]], "overlap in part"),
        (lambda x: [[x[:8].view(4, 2, 8)[:, 0], x[:8].view(4, 2, 8)[:, 1]]], "interleave"),
        (lambda x: [[x[:4]], [x[:4]]], "layer 0, tensor '0' and layer 1, tensor '0' are the same memory"),
        (lambda x: [[x[:4], x[:4]], [x[:4]]], "are the same memory"),
    ],
)
def test_tensors_that_share_memory_otherwise_are_refused(
    layers: Callable[[torch.Tensor], list[list[torch.Tensor]]], why: str
) -> None:
    """C15: in part, with interleaved rows, or across layers."""
    with pytest.raises(WeightsError, match=why):
        ExpertWeights(layers(torch.zeros(8, 8)), 4, entries=False)


def test_one_span_cut_into_other_rows_is_not_tied() -> None:
    """First and last byte agree, rows do not: moving both would write one over the other."""
    x = torch.zeros(16, dtype=torch.uint8)
    with pytest.raises(WeightsError, match="overlap in part"):
        weights_of(x.as_strided((2, 6), (10, 1)), x.view(2, 8), slots=2)


# ------------------------------------------------------------------------------------------ moved since `open`
def test_storage_that_moved_is_noticed_and_rebound() -> None:
    """A Parameter given other memory; after ``rebind`` its rows are the new ones, and the entries are kept."""
    parameter = torch.nn.Parameter(torch.zeros(4, 8))
    weights = weights_of(parameter, entries=True)
    weights.write_entries(0, [3, 1, 2, 0], 5)
    weights.moved()
    old = weights.rows(0, 0)
    parameter.data = torch.ones(4, 8)
    with pytest.raises(WeightsError, match=r"layer 0, tensor '0'.* call rebind\(\)"):
        weights.moved()
    weights.rebind()
    weights.moved()
    assert weights.rows(0, 0).data_ptr() == parameter.data_ptr() != old.data_ptr()
    check_entry(weights.rows(0, 1)[0].numpy().tobytes(), wanted(3, 5))


@pytest.mark.parametrize(
    "change",
    [
        lambda p: setattr(p, "data", p.data.view(4, 4, 2).transpose(1, 2)),
        lambda p: setattr(p, "data", p.data.view(4, 4, 2)),
        lambda p: p.untyped_storage().resize_(0),
        lambda p: p.resize_(4, 4),
    ],
)
def test_another_shape_at_the_same_address_is_noticed(change: Callable[[torch.Tensor], object]) -> None:
    """What is compared was noted at ``open``; the tensor object itself changes with its data."""
    parameter = torch.nn.Parameter(torch.zeros(4, 8), requires_grad=False)
    weights = weights_of(parameter)
    change(parameter)
    with pytest.raises(WeightsError, match="moved since it was registered"):
        weights.moved()


@pytest.mark.parametrize(
    ("later", "why"),
    [
        (lambda a, b: [a], "now have 1 layers, had 2"),
        (lambda a, b: [a, b, b], "now have 3 layers"),
        (lambda a, b: [], "sequence of layers"),
        (lambda a, b: [{"0": a[0]}, {"w": b[0]}], "layer 1: tensors are now"),
        (lambda a, b: [a, [*b, *b]], "layer 1: tensors are now"),
        (lambda a, b: [a, b[0]], "wrap it in a list"),
        (lambda a, b: [a, [None]], "layer 1, tensor '0': NoneType"),
        (lambda a, b: [a, [b[0].to_sparse()]], "layer 1, tensor '0': it is no plain tensor"),
        (lambda a, b: [b, a], "layer 0, tensor '0': it moved"),
    ],
)
def test_a_callable_that_returns_other_weights_later_is_noticed(later: Callable[[Any, Any], Any], why: str) -> None:
    """Other layers, names or things than those that were registered."""
    given_: list[Any] = [[torch.zeros(4, 8)], [torch.zeros(4, 8)]]
    weights = ExpertWeights(lambda: given_, 4, entries=False)
    weights.moved()
    given_ = [[given_[0][0].view(4, 8)], [given_[1][0].detach()]]  # other objects, the same memory
    weights.moved()
    given_ = later(*given_)
    with pytest.raises(WeightsError, match=why):
        weights.moved()


@pytest.mark.parametrize(
    "now",
    [
        [[torch.zeros(4, 16)], [torch.zeros(4, 8)]],
        [[torch.zeros(4, 8).to(torch.int32)], [torch.zeros(4, 8)]],
        [[torch.zeros(4, 8)]],
        [[torch.zeros(4, 8)], [torch.zeros(4, 8), torch.zeros(4)]],
        [[torch.zeros(4, 8)], [torch.zeros(4, 8).t()]],
    ],
)
def test_rebind_refuses_tensors_of_another_kind_and_changes_nothing(now: Any) -> None:
    """Peers hold the old layout: sizes, dtypes or tensors cannot change under them."""
    given_: Any = [[torch.zeros(4, 8)], [torch.zeros(4, 8)]]
    weights = ExpertWeights(lambda: given_, 4, entries=True)
    before, layout, kept = weights.rows(0, 0), weights.layout, given_
    given_ = now
    with pytest.raises(WeightsError):
        weights.rebind()
    assert weights.rows(0, 0) is before
    assert weights.layout is layout
    given_ = kept
    weights.moved()


# ---------------------------------------------------------------------------------------------------- end to end
def test_bytes_move_verbatim_whatever_the_dtype() -> None:
    """C26, I-12: NaN payloads and 0x7F, 0xFF bytes survive; pointers stay; also where rows are transposed or apart."""

    def row(expert: int, nbytes: int) -> torch.Tensor:
        generated = torch.randint(0, 256, (nbytes,), generator=torch.Generator().manual_seed(expert + 1))
        generated[:4] = torch.tensor([0x7F, 0xFF, 0xFF, 0x7F])
        return generated.to(torch.uint8)

    raw = [[torch.zeros(5, 48, dtype=torch.uint8) for _ in range(2 * 6)] for _ in range(2)]
    dtypes = [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8, torch.float32, torch.complex64]
    weights = []
    for rank in range(2):
        for layer in range(2):
            for i in range(6):
                fill(raw[rank][layer * 6 + i][1:], OLD.local(rank)[layer].tolist(), lambda e: row(e, 48))
        tensors = [base[1:].view(dtype) for base, dtype in zip(raw[rank], dtypes * 2, strict=True)]
        tensors[0] = tensors[0].view(4, 6, 4).transpose(1, 2)
        weights.append([tensors[:6], tensors[6:]])
    pointers = [[t.data_ptr() for layer in rank for t in layer] for rank in weights]

    async def main() -> None:
        async with opened(OLD, weights) as comms:
            for placement in (NEW, OLD, NEW):
                await migrate(comms, placement)
                for rank, bases in enumerate(raw):
                    for i, base in enumerate(bases):
                        wanted = [row(e, 48) for e in placement.local(rank)[i // 6].tolist()]
                        assert torch.equal(base[1:], torch.stack(wanted)), (rank, i)
                        assert not base[0].any(), "x[1:]: the row before was written"

    run(main())
    assert pointers == [[t.data_ptr() for layer in rank for t in layer] for rank in weights]


def test_weights_and_scales_move_together() -> None:
    """C25: weight e has scale 10·e, in layer 1 alone; after any migration the ratio holds in every slot."""
    weights: list[Any] = []
    for rank in range(2):
        layers: list[dict[str, torch.Tensor]] = []
        for layer in range(2):
            experts = OLD.local(rank)[layer].tolist()
            layers.append({"w": fill(torch.zeros(4, 6), experts, lambda e: torch.full((6,), float(e)))})
            if layer == 1:
                layers[1]["scale"] = fill(torch.zeros(4), experts, lambda e: torch.tensor(10.0 * e))
        weights.append(layers)

    async def main() -> None:
        async with opened(OLD, weights) as comms:
            for placement in (NEW, OLD, NEW):
                await migrate(comms, placement)
                for rank, layers in enumerate(weights):
                    held = torch.tensor(placement.local(rank)[1].tolist())
                    assert torch.equal(layers[1]["scale"], 10.0 * held)
                    assert torch.equal(layers[1]["w"], held[:, None].expand(4, 6).float())

    run(main())


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"w": torch.zeros(4, 6)}, ["layer 1", "3 tensors here, 2 there", "only here: 'scale'"]),
        (
            {"w": torch.zeros(4, 6, dtype=torch.bfloat16), "scale": torch.zeros(4)},
            ["layer 1", "'w'", "'float32' here, 'bfloat16' there", "row_bytes is 24 here, 12 there"],
        ),
        ({"w": torch.zeros(4, 8), "scale": torch.zeros(4)}, ["layer 1", "'w'", "row_bytes is 24 here, 32 there"]),
        ({"w": torch.zeros(4, 6), "bias": torch.zeros(4)}, ["layer 1", "name is 'scale' here, 'bias' there"]),
        (
            {"w": torch.zeros(4, 3, 2).transpose(1, 2).reshape(4, 6), "scale": torch.zeros(4, 1)},
            ["layer 1", "'scale'", "row_shape is () here, (1,) there"],
        ),
    ],
)
def test_ranks_that_disagree_on_a_tensor_cannot_open(other: dict[str, torch.Tensor], said: list[str]) -> None:
    """C25, C26: a scale on one rank only, another dtype, size or name: both sides name layer, tensor and values."""
    first = [{"w": torch.zeros(4, 6)}, {"w": torch.zeros(4, 6), "scale": torch.zeros(4)}]
    here, there = run(open_ranks(OLD, [first, [{"w": torch.zeros(4, 6)}, other]]))
    for error in (here, there):
        assert isinstance(error, HandshakeError)
        assert "layer 1" in str(error)
    for part in said:
        assert part in str(here)


def test_ranks_whose_rows_lie_apart_differently_agree() -> None:
    """Strides between rows and addresses are each rank's own; those within a row are not."""
    apart = torch.zeros(4, 12)[:, :6]
    weights = [[[torch.ones(4, 6)]], [[apart]]]
    old, new = Placement([[0, 1, 2, 3, 4, 5, 6, 7]], ep_size=2), Placement([[4, 5, 6, 7, 0, 1, 2, 3]], ep_size=2)

    async def main() -> None:
        async with opened(old, weights) as comms:
            await migrate(comms, new)
        assert apart.eq(1).all()
        assert weights[0][0][0].eq(0).all()

    run(main())
    turned = torch.zeros(4, 2, 3).transpose(1, 2)
    (error, _) = run(open_ranks(old, [[[torch.zeros(4, 3, 2)]], [[turned]]]))
    assert isinstance(error, HandshakeError)
    assert "element_strides is (2, 1) here, (1, 3) there" in str(error)


def test_tied_tensors_and_empty_ones_move_without_native_misuse() -> None:
    """C15, C17: registered and deregistered once; an empty leaf and a layer that stays make no READ."""
    fabric = MemoryFabric()
    new = OLD.with_layers(NEW, 1)
    weights = []
    for rank in range(2):
        layers = []
        for _ in range(2):
            w = fill(torch.zeros(4, 8), OLD.local(rank)[0].tolist(), lambda e: torch.full((8,), float(e)))
            layers.append({"w": w, "again": w, "g_idx": torch.zeros(4, 0, dtype=torch.int32)})
        weights.append(layers)

    async def main() -> None:
        async with opened(OLD, weights, fabric=fabric) as comms:
            assert [report.reads for report in await migrate(comms, OLD)] == [0, 0]
            assert fabric.posts == 0
            await migrate(comms, new)
            for rank, layers in enumerate(weights):
                for layer in range(2):
                    held = torch.tensor(new.local(rank)[layer].tolist(), dtype=torch.float32)
                    assert torch.equal(layers[layer]["w"], held[:, None].expand(4, 8))

    run(main())
    assert not fabric.violations
    assert fabric.open_handles == 0


def test_partly_overlapping_tensors_never_reach_nixl() -> None:
    """C15: ``open`` raises, before any agent is made."""
    fabric = MemoryFabric()
    x = torch.zeros(8, 8)
    results = run(open_ranks(OLD, [[[x[:4]], [x[2:6]]]] * 2, fabric=fabric))
    assert all(isinstance(error, WeightsError) for error in results)
    assert not any(isinstance(result, AsyncEplbCommunicator) for result in results)
    assert not fabric.agents


@pytest.mark.parametrize("transport", [{}, {"UCX_TLS": "tcp,self"}], ids=["auto", "tcp"])
def test_real_ranks_move_every_dtype_tied_and_empty_tensors(tmp_path: Path, transport: dict[str, str]) -> None:
    """C15, C17, C26 over real NIXL, in two processes that must end by themselves with 0."""
    run_both(tmp_path, "cpu", transport)
