"""`shard`: the parts of all ranks are the whole, bit for bit, and compute what it computes."""

import copy
import pickle
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import moefp8
import moefp8.hf
from moefp8 import FP8Linear, GroupedExperts, MoE
from moefp8.layers.moe import SharedExperts
from moefp8.layers.parts import Part, boxes, local_shape, overlaps, parts_of
from moefp8.precompile import layers as ahead
from moefp8.quant import BlockScaled, dequantize
from moefp8.testing import reference_model, relative_error
from tests.distributed.shard_cases import BF16, E, H, K, assert_sums_up, choices, make, parts


def dequantized(module: nn.Module) -> dict[str, torch.Tensor]:
    """Weights by name; gate and up are apart."""
    found = {}
    for name, data in module.named_parameters():
        if name not in ("weight", "gate_up_proj", "down_proj"):
            continue
        num_halves, axis = 2 if name == "gate_up_proj" else 1, data.ndim - 2
        pieces = data.chunk(num_halves, axis)
        if hasattr(module, f"{name}_scale_inv"):
            scales = getattr(module, f"{name}_scale_inv").chunk(num_halves, axis)
            pieces = [
                dequantize(BlockScaled(*(x.contiguous() for x in pair)))
                for pair in zip(pieces, scales, strict=True)
            ]
        found |= {f"{name}.{half}": piece for half, piece in enumerate(pieces)}
    return found


AXES = {"rows": 0, "columns": 1, "experts": 0, "intermediate": 2}
CASES = [
    *((what, kind) for what in ("linear", "fp8") for kind in ("rows", "columns")),
    *((what, kind) for what in ("grouped", "eager") for kind in ("experts", "intermediate")),
]


@pytest.mark.parametrize(("what", "kind"), CASES)
@settings(max_examples=15)
@given(size=st.integers(8, 600), num_ranks=st.integers(1, 8))
def test_parts_put_together_are_the_whole(what, kind, size, num_ranks):
    num_ranks = min(num_ranks, E) if kind == "experts" else num_ranks
    whole = make(what, size, 40)
    ranks = [dequantized(part) for part in parts(whole, kind, num_ranks)]
    for name, wanted in dequantized(whole).items():
        is_gate_up = kind == "intermediate" and name.startswith("gate_up")
        axis, own = 1 if is_gate_up else AXES[kind], []
        ends = [rank * wanted.shape[axis] // num_ranks for rank in range(num_ranks + 1)]
        for part, (begin, end) in zip(ranks, pairwise(ends), strict=True):
            padding, piece = part[name].tensor_split([begin - end], axis)
            assert padding.shape[axis] < 128
            assert not padding.any()
            own.append(piece)
        assert torch.equal(torch.cat(own, axis), wanted)


@pytest.mark.parametrize("what", ["linear", "fp8"])
@pytest.mark.parametrize(("size", "num_ranks"), [(576, 4), (576, 8), (320, 4), (768, 4), (130, 3)])
def test_outputs_of_rows_are_those_of_the_whole(what, size, num_ranks):
    whole = make(what, size)
    x = torch.randn(2, 5, size, dtype=BF16)
    ranks = parts(whole, "rows", num_ranks)
    outputs = [part(x) for part in ranks]
    assert outputs[0].shape == (2, 5, size // num_ranks)
    tolerance = {"rtol": 0, "atol": 0} if what == "fp8" else {}  # BLAS may sum in another order
    torch.testing.assert_close(torch.cat(outputs, -1), whole(x), **tolerance)
    width = outputs[-1].shape[-1]
    assert ranks[-1](x[0, 0]).shape == (width,)
    assert ranks[-1](x[:, :0]).shape == (2, 0, width)


@pytest.mark.parametrize(("what", "bound"), [("linear", 1e-2), ("fp8", 4e-2)])
@pytest.mark.parametrize(("size", "num_ranks"), [(576, 4), (320, 4), (768, 4), (200, 3)])
def test_outputs_of_columns_sum_up(what, bound, size, num_ranks):
    whole = make(what, size)
    x = torch.randn(9, size, dtype=BF16)
    ranks = parts(whole, "columns", num_ranks)
    pieces = x.tensor_split([rank * size // num_ranks for rank in range(1, num_ranks)], -1)
    assert_sums_up([part(y) for part, y in zip(ranks, pieces, strict=True)], whole(x), bound)
    assert [part.bias is not None for part in ranks] == [True] + [False] * (num_ranks - 1)


def test_a_moe_layer_sums_up():
    whole = MoE(H, 192, E, K, shared_intermediate_size=320)
    x = torch.randn(3, 5, H, dtype=BF16)
    plan = {"experts": "experts", "shared_experts": "intermediate"}
    ranks = [moefp8.shard(copy.deepcopy(whole), plan, rank, 3) for rank in range(3)]
    assert isinstance(ranks[0].shared_experts, SharedExperts)
    assert all(rank.shared_experts.is_one_op for rank in ranks)
    assert_sums_up([rank(x) for rank in ranks], whole(x), 4e-2)
    for rank in ranks:  # the same, projection by projection
        rank.shared_experts.gate_proj.register_forward_hook(lambda *_: None)
        assert not rank.shared_experts.is_one_op
    assert_sums_up([rank(x) for rank in ranks], whole(x), 4e-2)


def test_a_part_survives_copies_and_pickle():
    whole = make("grouped", 192, H)
    x, (index, weights) = torch.randn(9, H, dtype=BF16), choices(9)
    part = parts(whole, "experts", 2)[1]
    for twin in (copy.deepcopy(part), pickle.loads(pickle.dumps(part))):
        assert parts_of(twin) == parts_of(part) != {}
        assert torch.equal(twin(x, index, weights), part(x, index, weights))


def test_kernels_are_compiled_for_what_is_held():
    """Rank 1 holds rows 600 to 1200 behind 88 zeros: 688 rows take other kernels than 600."""

    def kernels(module: nn.Module) -> set:
        return set(ahead.kernels_of(module, 4096))

    whole = nn.Sequential(FP8Linear(7168, 3000, bias=False, device="meta"))
    part = moefp8.shard(whole, {"0": "rows"}, 1, 5)
    held, own = (FP8Linear(7168, n, bias=False, device="meta") for n in (688, 600))
    assert part[0].weight.shape == held.weight.shape
    assert kernels(part) == kernels(held) != kernels(own)


def test_one_rank_holds_all():
    whole = make("fp8", 200)
    assert moefp8.shard(whole, {"": "rows"}, 0, 1) is whole
    assert parts_of(whole) == {}


def test_a_module_under_two_names_is_cut_once():
    linear = nn.Linear(8, 8)
    model = nn.ModuleDict({"a": linear, "b": linear})
    moefp8.shard(model, {"[ab]": "rows"}, 1, 2)
    assert model["b"].weight.shape == (4, 8)


def test_what_is_cut_twice():
    """Two patterns may cut a module in the same way; later, another axis can be cut."""
    model = MoE(H, 64, 2, 1, shared_intermediate_size=64)
    down = model.shared_experts.down_proj
    moefp8.shard(model, {"shared_experts": "intermediate", "*.down_proj": "columns"}, 1, 2)
    assert (down.weight.shape, down.in_features) == ((H, 64), 32)
    with pytest.raises(ValueError, match=r"down_proj\.weight is cut along axis 1 already"):
        moefp8.shard(model, {"*.down_proj": "columns"}, 0, 2)
    moefp8.shard(model, {"*.down_proj": "rows"}, 0, 2)
    assert down.weight.shape == (H // 2, 64)


TIED = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
TIED["a"].weight = TIED["b"].weight


@pytest.mark.parametrize(
    ("model", "plan", "rank", "num_ranks", "told"),
    [
        (nn.Linear(8, 8), {"": "rows"}, 2, 2, r"rank must be in \[0, num_ranks = 2\), got 2"),
        (nn.Linear(8, 8), {"": "halves"}, 0, 2, "kind must be one of"),
        (nn.Linear(8, 8), {"x": "rows"}, 0, 2, "every pattern must match a module, but 'x'"),
        (nn.Linear(8, 8), {"": "experts"}, 0, 2, "the model is a Linear"),
        (nn.LayerNorm(8), {"": "rows"}, 0, 2, "the model is a LayerNorm"),
        (nn.Linear(8, 3), {"": "rows"}, 0, 4, "rank 0 of 4 would hold nothing .* at most 3 ranks"),
        (TIED, {"a": "rows"}, 0, 2, r"a\.weight is tied to a parameter of another module"),
        # A linear of transformers may have scales of its own, for instance.
        (type("Scaled", (nn.Linear,), {})(8, 8), {"": "rows"}, 0, 2, "the model is a Scaled"),
    ],
)
def test_refusals_leave_the_model_whole(model, plan, rank, num_ranks, told):
    shapes = [x.shape for x in model.parameters()]
    with pytest.raises(ValueError, match=told):
        moefp8.shard(model, plan, rank, num_ranks)
    assert [x.shape for x in model.parameters()] == shapes


@pytest.mark.parametrize("name", ["gate_up_proj_bias", "gate_up_proj_scale_inv"])
def test_experts_with_other_parameters_are_refused(name):
    experts = make("eager", 64)
    experts.register_parameter(name, nn.Parameter(torch.zeros(E, 128)))
    with pytest.raises(
        ValueError, match="'experts' cuts experts of a GroupedExperts, PlainExperts"
    ):
        moefp8.shard(experts, {"": "experts"}, 0, 2)


def test_a_part_has_no_reference_and_is_not_converted():
    with pytest.raises(ValueError, match="compare it before shard"):
        reference_model(parts(FP8Linear(128, 128), "rows", 2)[0])
    part = nn.Sequential(*parts(nn.Linear(256, 256), "rows", 2)[:1])
    told = r"0 \(Linear\) is one rank's part of a layer; convert before shard"
    with pytest.raises(ValueError, match=told):
        moefp8.convert(part)


@settings(max_examples=300)
@given(
    total=st.integers(1, 20), cut=st.tuples(st.integers(0, 20), st.integers(0, 20)), data=st.data()
)
def test_overlaps_are_those_of_the_whole(total, cut, data):
    """Whatever index of the whole is asked for, what a part holds of it lies where it says."""
    begin, end = sorted(min(x, total) for x in cut)
    part = Part(begin, end, total, data.draw(st.integers(0, 3)), data.draw(st.integers(1, 2)))
    held = {1: part}
    whole = torch.arange(3 * part.whole_size * 2).view(3, part.whole_size, 2)
    here = torch.full(local_shape(whole.shape, held), -1)
    for box in boxes(whole.shape, held):
        there, place = zip(*box, strict=True)
        here[place] = whole[there]
    first = data.draw(st.integers(0, part.whole_size - 1))
    rows = slice(first, data.draw(st.integers(first, part.whole_size)))
    asked = [(), (1,), (1, rows), (slice(None), rows), (1, slice(first, first))]
    index = data.draw(st.sampled_from(asked))
    found = torch.full_like(whole[index], -1)
    for there, place in overlaps(here.shape, held, index):
        found[there] = here[place]
    wanted = torch.where(torch.isin(whole[index], here), whole[index], -1)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("kind", ["rows", "columns", "experts", "intermediate"])
@pytest.mark.parametrize(("size", "num_ranks"), [(320, 2), (576, 3)])
def test_master_weights_are_cut_and_train(kind, size, num_ranks):
    """Nothing is in front of a part, and the parts have the gradients of the whole."""
    torch.manual_seed(0)
    is_linear = kind in ("rows", "columns")
    whole: nn.Module
    if is_linear:
        whole = FP8Linear(size, size, bias=False, trainable=True)
        x, of_tokens = torch.randn(64, size, dtype=BF16), ()
    else:
        whole = GroupedExperts(E, H, size, trainable=True)
        x, of_tokens = torch.randn(64, H, dtype=BF16), choices(64)
    ranks = parts(whole, kind, num_ranks)
    y = whole(x, *of_tokens)
    grad = torch.randn_like(y)
    y.backward(grad)
    cuts = [rank * size // num_ranks for rank in range(1, num_ranks)]
    outputs = []
    for rank, part in enumerate(ranks):
        own = x.tensor_split(cuts, -1)[rank] if kind == "columns" else x
        outputs.append(part(own, *of_tokens))
        outputs[-1].backward(grad.tensor_split(cuts, -1)[rank] if kind == "rows" else grad)
    if kind == "rows":
        assert relative_error(torch.cat(outputs, -1), y) < 0.05
    else:
        assert_sums_up([x.detach() for x in outputs], y.detach(), 6e-2)
    for rank, part in enumerate(ranks):
        wanted = moefp8.shard(with_gradient(whole), {"": kind}, rank, num_ranks)
        for name, x in part.named_parameters():
            assert x.grad.shape == wanted.get_parameter(name).shape
            assert relative_error(x.grad, wanted.get_parameter(name)) < 0.06, name


def with_gradient(module: nn.Module) -> nn.Module:
    """A copy that holds gradients in the place of its weights."""
    twin = copy.deepcopy(module)
    for name, x in module.named_parameters():
        twin.get_parameter(name).data = x.grad
    return twin


def test_parts_of_master_weights_stay_what_they_are():
    part = parts(FP8Linear(320, 320, trainable=True), "rows", 2)[1]
    assert (part.rows_before, part.weight.shape[0]) == (0, 160)
    with pytest.raises(ValueError, match=r"freeze: .* one rank's part .* freeze the whole model"):
        moefp8.freeze(part)
    with pytest.raises(ValueError, match=r"FP8Linear.freeze: the module is one rank's part"):
        part.freeze()
    moefp8.unfreeze(part)  # it is trainable already
