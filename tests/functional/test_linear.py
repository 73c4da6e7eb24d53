"""The linear layer's op and its gradient: launches without a GPU, checks, fake bodies."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moefp8.functional.linear import fp8_linear, fp8_linear_backward
from moefp8.kernels import fp8_gemm_nt
from moefp8.kernels.common.blocks import MIN_GRADIENT_AMAX
from moefp8.kernels.jit import current_driver, using
from moefp8.quant import quantize_1x128, quantize_128x128
from moefp8.testing import gemm_shapes
from tests.fakes.emulator import FakeDriver, emulated
from tests.functional.cases import run_body
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


# ---- The gradient ----


@given(shape=gemm_shapes(), dtype=st.sampled_from((torch.bfloat16, torch.float16, torch.float32)))
def test_a_gradient_is_a_transposition_and_two_launches(shape, dtype):
    m, n, k = shape
    grad, weight = (torch.randn(m, n) * 2.0**-10).to(dtype), quantize_128x128(torch.randn(n, k))
    expected = fp8_linear_backward(grad, *weight, None)
    with emulated() as made:
        assert torch.equal(fp8_linear_backward(grad, *weight, None), expected)
    if 0 not in shape:
        names = [x.kernel.name.split("_")[0] for x in made.launched]
        assert names == ["transpose", "quantize", "gemm"]
        copied = (n % 16 and m > 1) or k % 8  # a copy may come in between
        assert [x.programmatic for x in made.launched] == [False, False, not copied]


def test_small_gradients_are_no_zeros(gpu):
    """The floor of the amax of activations would make them zeros."""
    grad, weight = torch.randn(5, 136), quantize_128x128(torch.randn(136, 256))
    expected = fp8_linear_backward(grad, *weight, None)
    for scale in (2.0**-10, 2.0**-50):
        assert torch.equal(fp8_linear_backward(grad * scale, *weight, None), expected * scale)
    quantized = [x for x in gpu.launched if x.kernel.name.startswith("quantize_1x128")]
    assert [x.arguments.min_amax for x in quantized] == [MIN_GRADIENT_AMAX] * 3


def test_a_gradient_may_lie_anywhere(gpu):
    """Also as that of a sum does, whose rows are one, or all elements are."""
    weight = quantize_128x128(torch.randn(136, 256))
    for shape in ((5, 136), (1, 136)):
        grad = torch.randn(shape).bfloat16()
        expected = fp8_linear_backward(grad, *weight, None)
        wide = torch.empty(2 * shape[0], 140).bfloat16()[::2, 3:139]
        for place in (grad.T.contiguous().T, wide.copy_(grad)):
            assert torch.equal(fp8_linear_backward(place, *weight, None), expected)
        for expanded in (grad[:1].expand(shape), grad[:1, :1].expand(shape)):
            expected = fp8_linear_backward(expanded.contiguous(), *weight, None)
            assert torch.equal(fp8_linear_backward(expanded, *weight, None), expected)
    assert len(gpu.gemms) == 2 * 7


def test_other_layers_of_one_layout_prepare_nothing_for_gradients(gpu):
    """The forward of a layer that lies as the transposed one has a launch of its own."""
    x = torch.randn(5, 128) * 2.0**-24  # so that the floor counts, which is another
    for layer in range(4):
        weight = quantize_128x128(torch.randn(128, 128))
        found = fp8_linear_backward(x, *weight, None), fp8_linear(x, *weight, None)
        expected = run_body(fp8_linear_backward, x, *weight, None)
        assert torch.equal(found[0], expected)
        assert torch.equal(found[1], run_body(fp8_linear, x, *weight, None))
        if layer == 0:
            prepared = len(gpu.prepared())
    assert len(gpu.prepared()) == prepared


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grad": torch.zeros(5, 130, dtype=torch.int64)}, "grad must be bfloat16 or .* got int64"),
        ({"grad": torch.zeros(2, 5, 130)}, "grad must have 2 dimensions"),
        ({"grad": torch.zeros(5, 129)}, r"grad must be \[M, N\] for weight \[N, K\] = \[5, 130\]"),
        ({"weight": torch.zeros(130, 300)}, "weight must be float8_e4m3fn, got float32"),
        ({"grad": torch.zeros(5, 130, device="meta")}, "grad on meta, weight on cpu"),
    ],
)
def test_a_gradient_names_what_is_wrong(change, message):
    weight = quantize_128x128(torch.randn(130, 300))
    good = {"grad": torch.zeros(5, 130), "weight": weight.data, "scale_inv": weight.scale_inv}
    arguments = {**good, "keep_transposed": None, **change}
    for driver in (current_driver(), FakeDriver()):
        with (
            using(driver),
            pytest.raises((TypeError, ValueError), match=f"^fp8_linear_backward: .*{message}"),
        ):
            fp8_linear_backward(*arguments.values())


def test_a_gradient_agrees_with_its_fake_body():
    weight = quantize_128x128(torch.randn(130, 300))
    checks = ("test_faketensor", "test_aot_dispatch_static", "test_aot_dispatch_dynamic")
    op = torch.ops.moefp8.fp8_linear_backward
    for keeps in (None, True):
        torch.library.opcheck(op, (torch.randn(5, 130), *weight, keeps), test_utils=checks)
