"""Tests of the tests: what a measure must reject, and what the strategies must draw."""

import pytest
import torch
from hypothesis import find
from torch import nn

from moefp8 import FP8Linear, GroupedExperts, MoE
from moefp8.kernels import fp8_gemm_nt
from moefp8.quant import BlockScaled, quantize_1x128, quantize_128x128
from moefp8.testing import (
    ReferenceLinear,
    assert_matches_reference,
    gemm_shapes,
    reference_model,
    relative_error,
    routings,
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


def test_shapes_must_match():
    with pytest.raises(ValueError, match=r"one shape, got \[2, 3\] and \[2, 1\]"):
        relative_error(torch.ones(2, 3), torch.ones(2, 1))


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


def test_unquantized_activations_are_another_reference():
    linear, x = FP8Linear(512, 64), torch.randn(8, 512)
    exact = reference_model(linear, quantize_activations=False)(x)
    assert 5e-3 < relative_error(reference_model(linear)(x), exact) < 0.06


def test_strategies_reach_the_hard_cases():
    routing = routings(6, 2)
    find(routing, lambda r: r.top_k_index.shape[0] == 0)
    find(routing, lambda r: (r.top_k_index == 6).all() and len(r.top_k_index))
    find(routing, lambda r: r.top_k_index.unique().numel() == 2 and len(r.top_k_index) > 9)
    find(routing, lambda r: r.top_k_index.unique().numel() == 7)
    find(gemm_shapes(), lambda s: 0 in s)
    find(gemm_shapes(), lambda s: s[2] > 128 and s[2] % 128 == 1)
    find(spread(), lambda s: s.octaves > 20 and s.zero_fraction > 0)
    with pytest.raises(ValueError, match="got 7"):
        routings(6, 7)
