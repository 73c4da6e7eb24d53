"""The dense GEMM against FP64 on the same codes and scales."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moefp8.kernels import fp8_gemm_nt
from moefp8.quant import BlockScaled, quantize_1x128, quantize_128x128
from moefp8.testing import assert_matches_reference, gemm_shapes, spread
from tests import naive


def operands(m: int, n: int, k: int) -> tuple[BlockScaled, BlockScaled, torch.Tensor]:
    """Random a and b, and an output poisoned with NaN."""
    d = torch.full((m, n), torch.nan, dtype=torch.bfloat16)
    return quantize_1x128(torch.randn(m, k)), quantize_128x128(torch.randn(n, k)), d


@given(shape=gemm_shapes(), left=spread(), right=spread())
def test_matches_the_reference(shape, left, right):
    m, n, k = shape
    a, b = quantize_1x128(left.tensor(m, k)), quantize_128x128(right.tensor(n, k))
    d = torch.full((m, n), torch.nan, dtype=torch.bfloat16)
    fp8_gemm_nt(a, b, d)
    # Where terms of opposite signs cancel, what is left is judged by the size of the terms.
    expected = naive.gemm(a, b)
    size = naive.values(*a, 1).abs() @ naive.values(*b, 128).abs().T
    assert bool(((d.double() - expected).abs() <= expected.abs() * 2**-8 + size * 2**-20).all())


def test_worst_row_is_at_bf16_rounding():
    a, b, d = operands(300, 576, 7168)
    fp8_gemm_nt(a, b, d)
    assert_matches_reference(d, naive.gemm(a, b), max_relative_error=2.5e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bias_is_added_before_rounding(dtype):
    a, b, d = operands(7, 200, 300)
    bias = torch.randn(200).to(dtype) * 100
    fp8_gemm_nt(a, b, d, bias=bias)
    assert_matches_reference(d, naive.gemm(a, b) + bias.double())


def test_no_k_gives_the_bias():
    a, b, d = operands(3, 5, 0)
    bias = torch.arange(5.0)
    fp8_gemm_nt(a, b, d, bias=bias)
    assert torch.equal(d, bias.bfloat16().expand(3, 5))


def test_views_and_any_scale_order():
    a, b, d = operands(9, 130, 260)
    fp8_gemm_nt(a, b, d)
    wide = torch.zeros(9, 400, dtype=torch.float8_e4m3fn)
    wide[:, 16:276] = a.data
    out = torch.full((9, 300), torch.nan, dtype=torch.bfloat16)
    fp8_gemm_nt((wide[:, 16:276], a.scale_inv.contiguous()), b, out[:, 3:133])
    assert torch.equal(out[:, 3:133], d)
    assert bool(out[:, :3].isnan().all())
    assert bool(out[:, 133:].isnan().all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_activations_stay_in_their_row(bad):
    x, b = torch.randn(6, 300), quantize_128x128(torch.randn(40, 300))
    clean, d = (torch.empty(6, 40, dtype=torch.bfloat16) for _ in range(2))
    fp8_gemm_nt(quantize_1x128(x), b, clean)
    x[2, 7] = bad
    fp8_gemm_nt(quantize_1x128(x), b, d)
    assert bool(d[2].isnan().all())
    others = torch.arange(6) != 2
    assert torch.equal(d[others], clean[others])


def test_deep_gemm_arguments():
    a, b, d = operands(3, 4, 128)
    fp8_gemm_nt(a, b, d, recipe=(1, 128, 128), compiled_dims="mnk", disable_ue8m0_cast=True)
    with pytest.raises(
        ValueError, match=r"recipe must be None or \(1, 128, 128\), got \(1, 1, 128\)"
    ):
        fp8_gemm_nt(a, b, d, recipe=(1, 1, 128))
    with pytest.raises(ValueError, match="c must be None"):
        fp8_gemm_nt(a, b, d, c=d)


A, B, D = operands(6, 200, 300)
BAD = {
    "dtype of a": (((A[0].float(), A[1]), B, D), "a must be float8_e4m3fn, got float32"),
    "dtype of scale": (((A[0], A[1].half()), B, D), "a_scale_inv must be float32, got float16"),
    "dtype of d": ((A, B, D.float()), "d must be bfloat16, got float32"),
    "rank of b": (
        (A, (B[0][None], B[1]), D),
        r"b must have 2 dimensions, got shape \[1, 200, 300\]",
    ),
    "K": ((A, (B[0][:, :200], B[1]), D), "K must be equal in a and b, got 300 and 200"),
    "scale of a": (
        ((A[0], A[1][:, :2]), B, D),
        r"a_scale_inv must be \[M, ceil\(K/128\)\] = \[6, 3\], got \[6, 2\]",
    ),
    "scale of b": (
        (A, (B[0], B[1].T.contiguous()), D),
        r"b_scale_inv must be \[ceil\(N/128\), ceil\(K/128\)\] = \[2, 3\], got \[3, 2\]",
    ),
    "shape of d": ((A, B, D.T.contiguous()), r"d must be \[M, N\] = \[6, 200\], got \[200, 6\]"),
    "strides of d": (
        (A, B, torch.empty(200, 6, dtype=torch.bfloat16).T),
        r"last dimension of d must be contiguous, got strides \[1, 6\]",
    ),
    "device": ((A, (B[0].to("meta"), B[1]), D), "a on cpu, .*b on meta"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named_and_loses_nothing(case):
    arguments, message = BAD[case]
    before = arguments[2].clone()
    with pytest.raises((TypeError, ValueError), match=f"fp8_gemm_nt: .*{message}"):
        fp8_gemm_nt(*arguments)
    torch.testing.assert_close(arguments[2], before, rtol=0, atol=0, equal_nan=True)


def test_bad_bias_is_named():
    with pytest.raises(ValueError, match=r"bias must be \[N\] = \[200\], got \[6\]"):
        fp8_gemm_nt(A, B, D, bias=torch.ones(6))
    with pytest.raises(TypeError, match="bias must be bfloat16 or float16 or float32, got int64"):
        fp8_gemm_nt(A, B, D, bias=torch.ones(200, dtype=torch.int64))


def test_ops_agree_with_their_fake_bodies():
    a, b, d = operands(6, 200, 300)
    checks = ("test_faketensor", "test_aot_dispatch_static", "test_aot_dispatch_dynamic")
    ops = torch.ops.moefp8
    for ue8m0 in (False, True):
        torch.library.opcheck(ops.quantize_1x128, (torch.randn(5, 300), ue8m0), test_utils=checks)
        torch.library.opcheck(
            ops.quantize_128x128, (torch.randn(2, 5, 9), ue8m0), test_utils=checks
        )
    torch.library.opcheck(ops.fp8_gemm_nt, (*a, *b, d, None), test_utils=checks)
    index = torch.tensor([[0, 2], [3, 1]])
    for max_m in (None, 4):
        torch.library.opcheck(ops.build_plan, (index, 3, 1, max_m), test_utils=checks)


def test_operands_must_be_pairs():
    with pytest.raises(TypeError, match=r"fp8_gemm_nt: a must be a pair \(data, scale_inv\), got"):
        fp8_gemm_nt(A.data, B, D)


def test_ops_are_not_differentiable():
    x, d = torch.randn(2, 300, requires_grad=True), torch.empty(2, 200, dtype=torch.bfloat16)
    a = quantize_1x128(x)
    fp8_gemm_nt(a, B, d)
    assert not any(y.requires_grad for y in (*a, d))


@given(seed=st.integers(0, 2**16))
def test_repeated_runs_are_identical(seed):
    torch.manual_seed(seed)
    a, b, d = operands(17, 130, 257)
    again = torch.empty_like(d)
    fp8_gemm_nt(a, b, d)
    fp8_gemm_nt(a, b, again)
    assert torch.equal(d, again)
