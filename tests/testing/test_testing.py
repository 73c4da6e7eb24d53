"""Tests of the tests: what a measure must reject, and what the strategies must draw."""

import sys

import pytest
import torch
from hypothesis import find
from torch import nn

from moefp8 import FP8Linear, GroupedExperts, MoE
from moefp8.kernels import fp8_gemm_nt
from moefp8.quant import BlockScaled, quantize_1x128, quantize_128x128
from moefp8.testing import (
    ReferenceLinear,
    Spread,
    assert_matches_reference,
    gemm_shapes,
    gradients,
    module_errors,
    reference_model,
    relative_error,
    routings,
    row_errors,
    sizes,
    spread,
    teacher_forced,
)


def gemm(a, b):
    d = torch.empty(a.data.shape[0], b.data.shape[0], dtype=torch.bfloat16)
    fp8_gemm_nt(a, b, d)
    return d


A, B = quantize_1x128(torch.randn(512, 1024)), quantize_128x128(torch.randn(256, 1024))
RIGHT = gemm(A, B)
NAN = torch.nan


def first_blocks(x: BlockScaled) -> BlockScaled:
    """x without the last 128 of K = 1024."""
    return BlockScaled(x.data[:, :896], x.scale_inv[:, :7])


def with_scale(x: BlockScaled, row: int, block: int, factor: float) -> BlockScaled:
    scale_inv = x.scale_inv.clone()
    scale_inv[row, block] *= factor
    return x._replace(scale_inv=scale_inv)


WRONG = {
    "all zero": lambda: torch.zeros_like(RIGHT),
    "one row lost": lambda: RIGHT.index_fill(0, torch.tensor([300]), 0),
    "one row of another": lambda: RIGHT[torch.arange(512).index_fill(0, torch.tensor([4]), 5)],
    "one NaN": lambda: torch.where(torch.arange(512 * 256).view(512, 256) == 4355, NAN, RIGHT),
    "one activation scale wrong": lambda: gemm(with_scale(A, 100, 3, 2), B),
    "one weight scale wrong": lambda: gemm(A, with_scale(B, 1, 7, 1.25)),
    "one block of K lost": lambda: gemm(first_blocks(A), first_blocks(B)),
    "off by a percent": lambda: (RIGHT.float() * 1.01).bfloat16(),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_results_are_rejected(wrong):
    expected = (A.data.float() * A.scale_inv.repeat_interleave(128, 1)) @ (
        B.data.float() * B.scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)
    ).T
    assert_matches_reference(RIGHT, expected)
    with pytest.raises(AssertionError, match="rows are off by more than"):
        assert_matches_reference(WRONG[wrong](), expected)


def test_the_worst_row_is_named():
    expected = torch.ones(3, 4, 5)
    actual = expected.clone()
    actual[1, 2] = 1.5
    with pytest.raises(AssertionError, match=r"1 of 12 rows .* row \(1, 2\) .* 5\.000e-01"):
        assert_matches_reference(actual, expected)


def test_zero_rows_want_zeros():
    zeros = torch.zeros(2, 3)
    assert relative_error(zeros, zeros) == 0
    assert relative_error(zeros + 1e-30, zeros) == float("inf")
    assert relative_error(zeros[:0], zeros[:0]) == 0


def test_nan_is_never_close():
    nan = torch.full((2, 3), NAN)
    assert relative_error(nan, nan) == relative_error(nan, torch.ones(2, 3)) == float("inf")


@pytest.mark.parametrize("other", [(2, 1), (1, 3), (3,), (0, 3), (2, 3, 1)])
def test_shapes_must_match(other):
    for measure in (row_errors, relative_error, assert_matches_reference):
        with pytest.raises(ValueError, match=r"one shape, got \[2, 3\] and \["):
            measure(torch.ones(2, 3), torch.ones(other))


@pytest.mark.parametrize("bound", [NAN, float("inf"), -1e-3, -float("inf"), 1, 1.0, 4.0])
def test_a_bound_that_zeros_pass_or_nothing_passes_is_refused(bound):
    for actual in (torch.zeros(2, 3), torch.ones(2, 3)):
        with pytest.raises(ValueError, match=r"max_relative_error must be in \[0, 1\), got"):
            assert_matches_reference(actual, torch.ones(2, 3), bound)


@pytest.mark.parametrize(
    "bound", [True, False, None, "0.1", 0.1j, torch.tensor(0.1), torch.tensor([NAN, 0.1])]
)
def test_a_bound_that_is_no_number_is_refused(bound):
    with pytest.raises(TypeError, match=r"max_relative_error must be a number, got .*\.item\(\)"):
        assert_matches_reference(torch.ones(2, 3), torch.ones(2, 3), bound)


def test_a_bound_is_the_largest_error_that_passes():
    expected = torch.ones(2, 3)
    assert_matches_reference(expected, expected, 0)
    assert_matches_reference(expected * 1.5, expected, 0.5)
    with pytest.raises(AssertionError, match="2 of 2 rows"):
        assert_matches_reference(torch.zeros(2, 3), expected, 0.999)


@pytest.mark.parametrize("output", [torch.ones(2, dtype=torch.complex64), (torch.ones(2),), None])
def test_what_is_not_a_tensor_of_real_numbers_is_refused(output):
    for pair in ((output, torch.ones(2)), (torch.ones(2), output)):
        with pytest.raises(TypeError, match=r"must be a tensor of real numbers, got (\w|\.)+; "):
            relative_error(*pair)


def test_numbers_whose_squares_vanish_are_compared():
    tiny = torch.full((2, 3), 1e-200, dtype=torch.float64)
    assert relative_error(tiny, tiny) == 0
    assert relative_error(torch.zeros_like(tiny), tiny) == float("inf")


def test_references_notice_a_wrong_scale():
    linear, experts, x = FP8Linear(256, 256), GroupedExperts(3, 256, 200), torch.randn(8, 256)
    routing = torch.arange(8)[:, None] % 3, torch.ones(8, 1)
    for module, arguments in ((linear, (x,)), (experts, (x, *routing))):
        right = module(*arguments)
        for name, parameter in module.named_parameters():
            if name.endswith("scale_inv"):
                parameter.data.view(-1)[-1].mul_(1.5)
                with pytest.raises(AssertionError):
                    assert_matches_reference(right, reference_model(module)(*arguments))
                parameter.data.view(-1)[-1].div_(1.5)
        assert_matches_reference(right, reference_model(module)(*arguments), 6e-3)


def test_a_reference_shares_weights_and_leaves_the_model():
    model = nn.Sequential(FP8Linear(8, 8), nn.LayerNorm(8), GroupedExperts(2, 8, 8))
    reference = reference_model(model)
    assert isinstance(model[0], FP8Linear)
    assert isinstance(model[2], GroupedExperts)
    assert reference[0].linear.weight is model[0].weight
    assert reference[1].weight is model[1].weight
    assert reference[2].experts.down_proj is model[2].down_proj


def test_a_shared_module_is_replaced_in_both_places():
    model = nn.Sequential(FP8Linear(8, 8), nn.ReLU())
    model.append(model[0])
    reference = reference_model(model)
    assert isinstance(reference[0], ReferenceLinear)
    assert reference[0] is reference[2]


def test_the_reference_ignores_the_weight_of_a_choice_held_elsewhere():
    experts, x = GroupedExperts(2, 8, 8), torch.randn(1, 8)
    routing = torch.tensor([[0, 2]]), torch.tensor([[1.0, torch.nan]])
    assert_matches_reference(experts(x, *routing), reference_model(experts)(x, *routing), 2e-2)


def test_a_whole_moe_has_a_reference():
    moe, x = MoE(64, 48, 4, 2, shared_intermediate_size=40), torch.randn(5, 64)
    assert_matches_reference(moe(x), reference_model(moe)(x), 8e-2)
    assert_matches_reference(*teacher_forced(moe, x), 2e-2)


class ByKeyword(nn.Sequential):
    def forward(self, x):
        return self[1](x=self[0](x))


# ---- Teacher forcing ----


def test_teacher_forcing_reaches_calls_by_keyword():
    model, x = ByKeyword(nn.Linear(8, 256), FP8Linear(256, 8)), torch.randn(4, 8)
    seen = []

    def shift(module, arguments, y):
        """Add another amount in the model than in its reference."""
        seen.append(module)
        return y + 100 * len(seen)

    model[0].register_forward_hook(shift)
    output, expected = teacher_forced(model, x)
    assert len(seen) == 2
    assert_matches_reference(output, expected)


class InPlace(nn.Module):
    """Layers that write into their hidden states, a buffer and a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = FP8Linear(256, 128), FP8Linear(128, 256)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x, cache=None):
        self.calls += 1
        h = x * self.calls
        for _ in range(2):
            up = self.up(h)
            h.add_(self.down(up))
            up.mul_(2)
            h += self.down(nn.functional.relu_(up))
            h.mul_(0.5)
        if cache is not None:
            h[:] += sum(cache.states, torch.zeros_like(h))
            cache.states.append(h.clone())
        return h


class Cache:
    """States of earlier calls, in an object that is no tuple, list or dict."""

    def __init__(self) -> None:
        self.states = [torch.ones(4, 256)]


def test_teacher_forcing_allows_for_hidden_states_that_are_written_in_place():
    model, cache = InPlace(), Cache()
    for _ in range(2):  # a cache and a buffer count, too
        assert_matches_reference(*teacher_forced(model, torch.randn(4, 256), cache=cache))
    assert model.calls == 2
    assert len(cache.states) == 3  # as after a call of the model


class IntoArgument(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = FP8Linear(256, 256)

    def forward(self, x):
        x.add_(self.linear(x)).mul_(2)
        return self.linear(x)


def test_models_may_write_into_their_arguments():
    model, x = IntoArgument(), torch.randn(4, 256)
    ours, expected = (gradients(z, x) for z in (model, reference_model(model)))
    assert_matches_reference(ours["0"], expected["0"], 1e-2)
    assert_matches_reference(*teacher_forced(model, x.clone()))
    before, after = x.clone(), x.clone()
    model(after)
    teacher_forced(model, x)
    assert torch.equal(x, after)  # as a call of the model does
    assert not torch.equal(x, before)


def test_gradients_flow_through_both_outputs_of_teacher_forcing():
    model, x = nn.Sequential(nn.Linear(8, 256), FP8Linear(256, 8)), torch.randn(4, 8)
    for output in teacher_forced(model, x.requires_grad_()):
        (grad,) = torch.autograd.grad(output.sum(), x, retain_graph=True)
        assert grad.any()


class Holder:
    """An object of a tensor that is no leaf; deepcopy refuses such a tensor."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x * 1


class WithExtra(nn.Module):
    """A linear with a buffer that is computed from a parameter; it takes any further arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = FP8Linear(256, 256)
        self.scale = nn.Parameter(torch.ones(256))
        self.register_buffer("computed", self.scale * 2)

    def forward(self, x, *args, **kwargs):
        return self.linear(x) * self.computed


@pytest.mark.parametrize("name", ["1", "extra"])
@pytest.mark.parametrize(
    ("kind", "value"),
    [("generator", (i for i in range(2))), ("Holder", Holder(torch.ones(2, requires_grad=True)))],
)
def test_arguments_that_cannot_be_copied_are_named(name, kind, value):
    args, kwargs = ([value], {}) if name == "1" else ([], {name: value})
    with pytest.raises(
        TypeError, match=rf"teacher_forced: argument {name} .* got a {kind}"
    ) as error:
        teacher_forced(WithExtra(), torch.randn(4, 256), *args, **kwargs)
    assert "detach()" in str(error.value)
    assert "a list" in str(error.value)


def test_computed_buffers_are_copied():
    model = WithExtra()
    ours, expected = teacher_forced(model, torch.randn(4, 256), torch.Generator())
    assert_matches_reference(ours, expected)
    for output in (ours, expected):
        assert torch.autograd.grad(output.sum(), model.scale, retain_graph=True)[0].any()


@pytest.mark.parametrize("call", [teacher_forced, module_errors])
def test_a_model_that_cannot_be_copied_is_named(call):
    model = WithExtra()
    model.extra = Holder(torch.ones(2, requires_grad=True))
    with pytest.raises(TypeError, match=r"reference_model: the model .* got a WithExtra .*detach"):
        call(model, torch.randn(4, 256))


# ---- Errors of modules ----


def test_the_module_that_is_wrong_is_named():
    """Teacher forcing does not see it where all that the module gives goes into another one."""
    model, x = nn.Sequential(*(FP8Linear(256, 256) for _ in range(3))), torch.randn(4, 256)
    assert all(errors.max() < 4e-3 for errors in module_errors(model, x).values())
    model[1].register_forward_hook(lambda *args: args[-1].index_fill(0, torch.tensor(2), 0))
    errors = module_errors(model, x)
    assert [*errors] == ["0", "1", "2"]
    assert errors["1"].argmax() == 2
    assert [bool(x.max() < 4e-3) for x in errors.values()] == [True, False, True]
    assert_matches_reference(*teacher_forced(model, x))


class Uneven(nn.Module):
    """It calls a linear twice, experts by keyword with what they add, and a linear with no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.idle, self.unused = (FP8Linear(256, 256) for _ in range(3))
        self.experts = GroupedExperts(3, 256, 200)

    def forward(self, x):
        h = self.linear(x=self.linear(x))
        scores, ids = torch.ones(6, 1), torch.arange(6)[:, None] % 4
        y = self.experts(top_k_weights=scores, top_k_index=ids, hidden_states=h, addend=h)
        h += self.idle(h[:0]).sum()
        return h + y


def test_every_call_of_a_module_is_compared():
    model, x = Uneven(), torch.randn(2, 3, 256).bfloat16()
    errors = module_errors(model, x)
    assert {name: x.shape for name, x in errors.items()} == {"linear": (12,), "experts": (6,)}
    assert all(x.max() < 0.05 for x in errors.values())
    assert_matches_reference(*teacher_forced(model, x), 2e-2)


def test_unquantized_activations_are_another_reference():
    linear, x = FP8Linear(512, 64), torch.randn(8, 512)
    exact = reference_model(linear, quantize_activations=False)(x)
    assert 5e-3 < relative_error(reference_model(linear)(x), exact) < 0.06


def sizes_of_blocks(weight: torch.Tensor) -> torch.Tensor:
    """The largest number of each 128x128 block."""
    return quantize_128x128(weight).scale_inv * 448


def factor_of(weight: torch.Tensor) -> float:
    largest = sizes_of_blocks(weight)
    return float(largest.max() / largest.min()) if largest.all() else 0.0


def test_blocks_of_weights_differ_in_size_but_not_the_rows_of_a_block():
    weight = Spread(seed=1, octaves=12, zero_fraction=0.0).weight(2, 300, 520, dtype=torch.float32)
    assert factor_of(weight) > 2**6
    for rows in (slice(128), slice(128, 256), slice(256, 300)):
        for columns in (slice(128), slice(384, 512)):
            deviations = weight[1, rows, columns].std(dim=-1)
            assert deviations.max() < 2 * deviations.min()
    zeros = Spread(seed=1, octaves=12, zero_fraction=0.3).weight(2, 300, 520) == 0
    assert 0 < zeros[:, ::128, ::128].sum() < zeros[:, ::128, ::128].numel()


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (1, 1), (3, 128, 128)])
def test_weights_have_any_shape(shape):
    weight = Spread(seed=1, octaves=3, zero_fraction=0.0).weight(*shape)
    assert weight.shape == shape
    assert weight.dtype == torch.bfloat16


def test_strategies_reach_the_hard_cases():
    routing = routings(6, 2)
    find(routing, lambda r: r.top_k_index.shape[0] == 0)
    find(routing, lambda r: (r.top_k_index == 6).all() and len(r.top_k_index))
    find(routing, lambda r: r.top_k_index.unique().numel() == 2 and len(r.top_k_index) > 9)
    find(routing, lambda r: r.top_k_index.unique().numel() == 7)
    find(gemm_shapes(), lambda s: 0 in s)
    find(gemm_shapes(), lambda s: s[2] > 128 and s[2] % 128 == 1)
    find(spread(), lambda s: s.octaves > 20 and s.zero_fraction > 0)
    find(spread(), lambda s: factor_of(s.weight(129, 129)) > 2**10)
    with pytest.raises(ValueError, match="got 7"):
        routings(6, 7)


STRATEGIES = {
    "spread": spread,
    "sizes": lambda: sizes(9),
    "gemm_shapes": gemm_shapes,
    "routings": lambda: routings(4, 2),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategies_say_what_brings_hypothesis(monkeypatch, name):
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    with pytest.raises(ImportError, match=r"hypothesis.*: pip install '\.\[testing\]' in a clone"):
        STRATEGIES[name]()
