"""A linear of each expert and its gradient, on the CPU and through launches without a GPU."""

from itertools import pairwise

import pytest
import torch

from moefp8.functional.grouped_linear import grouped_linear
from moefp8.quant import quantize_128x128
from moefp8.testing import assert_matches_reference
from tests import naive
from tests.fakes.emulator import emulated
from tests.functional.cases import tokens_of

SIZES = [(128, 128), (136, 272), (100, 36), (129, 257), (3, 5)]
LOADS = [(4, 0, 9), (0, 0, 0), (130, 1, 2)]


def offsets_of(loads: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *loads]).cumsum(0).int()


def differentiated(rows, weight, offsets, grad, keeps=None):
    """The result, and the gradient in rows."""
    rows = rows.clone().requires_grad_()
    y = grouped_linear("a layer", rows, *weight, offsets, keeps)
    return y.detach(), torch.autograd.grad(y, rows, grad)[0]


def assert_right(rows, weight, offsets, grad) -> None:
    y, dx = differentiated(rows, weight, offsets, grad)
    assert (y.dtype, dx.dtype) == (torch.bfloat16, rows.dtype)
    for expert, (begin, end) in enumerate(pairwise(offsets.tolist())):
        of_weight = naive.values(weight.data[expert], weight.scale_inv[expert], 128)
        # The scales of a gradient have no floor that counts, so it may be scaled by powers of two.
        quantized = naive.rounded_to_fp8(grad[begin:end].float() * 2.0**24) * 2.0**-24
        assert_matches_reference(y[begin:end], naive.rounded_to_fp8(rows[begin:end]) @ of_weight.T)
        assert_matches_reference(dx[begin:end], quantized @ of_weight)
    assert not y[offsets[-1] :].any()
    assert not dx[offsets[-1] :].any()


@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("is_launched", [False, True])
def test_it_is_right(n, k, is_launched):
    weight = quantize_128x128(torch.randn(3, n, k))
    for loads in LOADS:
        num_rows = sum(loads) + 3
        rows, grad = tokens_of(num_rows, k), tokens_of(num_rows, n) * 2.0**-24
        rows[sum(loads) :] = torch.nan  # rows of no expert may hold anything
        grad[sum(loads) :] = torch.inf
        if is_launched:
            with emulated():
                assert_right(rows, weight, offsets_of(loads), grad)
        else:
            assert_right(rows, weight, offsets_of(loads), grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_any_dtype(dtype):
    weight, offsets = quantize_128x128(torch.randn(3, 40, 136)), offsets_of((4, 0, 9))
    rows, grad = tokens_of(13, 136).to(dtype), tokens_of(13, 40)
    assert_right(rows, weight, offsets, grad)
    with emulated():
        assert_right(rows, weight, offsets, grad)


def test_a_gradient_may_lie_anywhere(gpu):
    weight, offsets = quantize_128x128(torch.randn(3, 40, 136)), offsets_of((4, 0, 9))
    rows, grad = tokens_of(13, 136), tokens_of(13, 40)
    expected = differentiated(rows, weight, offsets, grad)
    strided = differentiated(rows.T.contiguous().T, weight, offsets, grad.T.contiguous().T)
    assert all(map(torch.equal, strided, expected))
    _, of_sum = differentiated(rows, weight, offsets, torch.ones(()).bfloat16().expand(13, 40))
    _, of_ones = differentiated(rows, weight, offsets, torch.ones(13, 40).bfloat16())
    assert torch.equal(of_sum, of_ones)


def test_a_backward_transposes_and_multiplies(gpu):
    weight, offsets = quantize_128x128(torch.randn(3, 40, 136)), offsets_of((4, 0, 9))
    rows, grad = tokens_of(13, 136).requires_grad_(), tokens_of(13, 40)
    for _ in range(3):
        y = grouped_linear("a layer", rows, *weight, offsets)
        gpu.launched.clear()
        torch.autograd.grad(y, rows, grad)
        names = [made.kernel.name.split("_")[0] for made in gpu.launched]
        assert names == ["transpose", "quantize", "gemm"]


def test_a_weight_has_no_gradient():
    weight, offsets = quantize_128x128(torch.randn(3, 40, 136)), offsets_of((4, 0, 9))
    scales = weight.scale_inv.requires_grad_()
    y = grouped_linear("a layer", tokens_of(13, 136), weight.data, scales, offsets)
    with pytest.raises(NotImplementedError, match=r"^a layer: FP8 weights"):
        y.sum().backward()


def test_its_backward_is_well_formed():
    checks = ("test_faketensor", "test_aot_dispatch_static", "test_aot_dispatch_dynamic")
    weight, offsets = quantize_128x128(torch.randn(3, 40, 136)), offsets_of((4, 0, 9))
    op = torch.ops.moefp8.grouped_linear_backward.default
    torch.library.opcheck(op, (tokens_of(13, 40), *weight, offsets, None), test_utils=checks)
