"""The dense GEMM against FP64 on the same codes and scales."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moefp8.kernels import fp8_gemm_nt
from moefp8.quant import BlockScaled, quantize_1x128, quantize_128x128
from moefp8.testing import assert_matches_reference, gemm_shapes, spread
from tests import naive
from tests.gpu import on_cpu_and_gpu
from tests.kernels.gemm import grouped_cases
from tests.kernels.gemm.cases import run_gemm
from tests.kernels.gemm.grouped_cases import dense


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


@on_cpu_and_gpu
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("m", [6, 200])
def test_bad_activations_stay_in_their_row(device, bad, m):
    x = torch.randn(m, 1000, device=device)
    b = quantize_128x128(torch.randn(400, 1000, device=device))
    clean, d = (torch.empty(m, 400, dtype=torch.bfloat16, device=device) for _ in range(2))
    fp8_gemm_nt(quantize_1x128(x), b, clean)
    x[2, 7] = bad
    fp8_gemm_nt(quantize_1x128(x), b, d)
    assert bool(d[2].isnan().all())
    others = torch.arange(m) != 2
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


BAD = [
    ("a", torch.Tensor.float, "a must be float8_e4m3fn, got float32"),
    ("a", lambda x: x.view(torch.uint8), "a must be float8_e4m3fn, got uint8"),
    ("a", lambda x: x.as_strided((6, 300), (1, 6)), "last dimension of a must be contiguous"),
    ("a_scale_inv", torch.Tensor.half, "a_scale_inv must be float32, got float16"),
    ("a_scale_inv", lambda x: x.view(torch.int32), "a_scale_inv must be float32, got int32"),
    (
        "a_scale_inv",
        lambda x: x[:, :2],
        r"a_scale_inv must be \[M, ceil\(K/128\)\] = \[6, 3\], got \[6, 2\]",
    ),
    ("b", lambda x: x.view(torch.float8_e5m2), "b must be float8_e4m3fn, got float8_e5m2"),
    ("b", lambda x: x[None], r"b must have 2 dimensions, got shape \[1, 200, 300\]"),
    ("b", lambda x: x[:, :200], "K must be equal in a and b, got 300 and 200"),
    ("b", lambda x: x.to("meta"), "a on cpu, .*b on meta"),
    ("b_scale_inv", lambda x: x.view(torch.int32), "b_scale_inv must be float32, got int32"),
    (
        "b_scale_inv",
        lambda x: x.T.contiguous(),
        r"b_scale_inv must be \[ceil\(N/128\), ceil\(K/128\)\] = \[2, 3\], got \[3, 2\]",
    ),
    ("d", lambda x: x.view(torch.float16), "d must be bfloat16, got float16"),
    ("d", lambda x: x.view(200, 6), r"d must be \[M, N\] = \[6, 200\], got \[200, 6\]"),
    ("d", lambda x: x.view(200, 6).T, r"last dimension of d must be contiguous, got .*\[1, 6\]"),
    ("bias", lambda x: x[:6], r"bias must be \[N\] = \[200\], got \[6\]"),
    ("bias", torch.Tensor.long, "bias must be bfloat16 or float16 or float32, got int64"),
]


@pytest.mark.parametrize(("name", "change", "message"), BAD)
@pytest.mark.parametrize("launched", [False, True])
def test_bad_input_is_named_and_loses_nothing(request, launched, name, change, message):
    """A kernel that has been prepared for what is right is no excuse."""
    gpu = request.getfixturevalue("gpu") if launched else None
    arguments = grouped_cases.operands(dense(6), 200, 300)._asdict() | {"bias": torch.ones(200)}
    run_gemm(**arguments)
    before = arguments["d"].clone()
    with pytest.raises((TypeError, ValueError), match=f"^fp8_gemm_nt: .*{message}"):
        run_gemm(**arguments | {name: change(arguments[name])})
    assert torch.equal(arguments["d"], before)
    assert gpu is None or len(gpu.launched) == 1


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
    a, b, d = operands(6, 200, 300)
    with pytest.raises(TypeError, match=r"fp8_gemm_nt: a must be a pair \(data, scale_inv\), got"):
        fp8_gemm_nt(a.data, b, d)


def test_ops_are_not_differentiable():
    _, b, d = operands(2, 200, 300)
    a = quantize_1x128(torch.randn(2, 300, requires_grad=True))
    fp8_gemm_nt(a, b, d)
    assert not any(y.requires_grad for y in (*a, d))


@given(seed=st.integers(0, 2**16))
def test_repeated_runs_are_identical(seed):
    torch.manual_seed(seed)
    a, b, d = operands(17, 130, 257)
    again = torch.empty_like(d)
    fp8_gemm_nt(a, b, d)
    fp8_gemm_nt(a, b, again)
    assert torch.equal(d, again)
