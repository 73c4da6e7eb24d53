"""The linear layer's op: its launches without a GPU, its checks, its fake body."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moefp8.functional.linear import fp8_linear
from moefp8.kernels import fp8_gemm_nt
from moefp8.kernels.jit import current_driver, using
from moefp8.quant import quantize_1x128, quantize_128x128
from moefp8.testing import gemm_shapes
from tests.fakes.emulator import FakeDriver, emulated
from tests.kernels.gemm.cases import BIASES


@given(
    shape=gemm_shapes(),
    dtype=st.sampled_from((torch.bfloat16, torch.float16, torch.float32)),
    bias=st.sampled_from(BIASES),
)
def test_linear_is_two_launches(shape, dtype, bias):
    m, n, k = shape
    x, weight = torch.randn(m, k).to(dtype), quantize_128x128(torch.randn(n, k))
    bias = None if bias is None else torch.randn(n).to(bias)
    expected = fp8_linear(x, *weight, bias)
    with emulated() as made:
        assert torch.equal(fp8_linear(x, *weight, bias), expected)
    copied = (k % 16 and max(m, n) > 1) or n % 8  # a copy may come in between
    if 0 not in shape:
        assert [x.programmatic for x in made.launched] == [False, not copied]


def test_whatever_decides_a_launch_is_prepared_for_once():
    x, weight, bias = torch.randn(5, 256), quantize_128x128(torch.randn(136, 256)), torch.randn(136)
    wide = torch.randn(5, 260)
    calls = [(y, *weight, bias) for y in (x, x[:4], x.half(), wide[:, 1:257], wide[:, 4:])]
    calls += [(x, *weight, None), (x, *weight, bias.half())]
    expected = [fp8_linear(*arguments) for arguments in calls]
    with emulated() as gpu:
        for arguments, y in zip(2 * calls, 2 * expected, strict=True):
            assert torch.equal(fp8_linear(*arguments), y)
        assert len(gpu.prepared()) == len(calls)


def test_linear_equals_its_parts():
    x, weight, bias = torch.randn(5, 300), quantize_128x128(torch.randn(130, 300)), torch.randn(130)
    d = torch.empty(5, 130, dtype=torch.bfloat16)
    for b in (None, bias):
        fp8_gemm_nt(quantize_1x128(x), weight, d, bias=b)
        assert torch.equal(fp8_linear(x, *weight, b), d)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(5, 300, dtype=torch.int64)}, "x must be bfloat16 or .* got int64"),
        ({"x": torch.zeros(2, 5, 300)}, r"x must have 2 dimensions, got shape \[2, 5, 300\]"),
        ({"x": torch.zeros(5, 299)}, "K must be equal in x and weight, got 299 and 300"),
        ({"weight": torch.zeros(130, 300)}, "weight must be float8_e4m3fn, got float32"),
        ({"weight_scale_inv": torch.ones(2, 2)}, r"\[ceil\(N/128\), .* = \[2, 3\], got \[2, 2\]"),
        ({"bias": torch.zeros(5)}, r"bias must be \[N\] = \[130\], got \[5\]"),
        ({"x": torch.zeros(5, 300, device="meta")}, "x on meta, weight on cpu"),
    ],
)
def test_linear_names_what_is_wrong(change, message):
    weight = quantize_128x128(torch.randn(130, 300))
    good = {"x": torch.zeros(5, 300), "weight": weight.data, "weight_scale_inv": weight.scale_inv}
    arguments = {**good, "bias": None, **change}
    for driver in (current_driver(), FakeDriver()):
        with (
            using(driver),
            pytest.raises((TypeError, ValueError), match=f"^fp8_linear: .*{message}"),
        ):
            fp8_linear(*arguments.values())


def test_linear_agrees_with_its_fake_body():
    weight = quantize_128x128(torch.randn(130, 300))
    checks = ("test_faketensor", "test_aot_dispatch_static", "test_aot_dispatch_dynamic")
    op = torch.ops.moefp8.fp8_linear
    for bias in (None, torch.randn(130)):
        torch.library.opcheck(op, (torch.randn(5, 300), *weight, bias), test_utils=checks)
