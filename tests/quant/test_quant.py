"""Quantization against a bit-by-bit reference, and what it promises about memory and bad input."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moefp8 import kernels
from moefp8.quant import BlockScaled, dequantize, quantize_1x128, quantize_128x128
from moefp8.quant.quantize import quantize_1x128 as quantize_op
from moefp8.testing import sizes, spread
from tests import naive
from tests.gpu import on_cpu_and_gpu, same_bits

DTYPES = st.sampled_from((torch.bfloat16, torch.float16, torch.float32))


def codes(q: BlockScaled) -> torch.Tensor:
    return with_one_zero(q.data.view(torch.uint8).long())


def with_one_zero(values: torch.Tensor) -> torch.Tensor:
    """E4M3 codes, with -0 written as 0."""
    return values.masked_fill(values == 0x80, 0)


both = pytest.mark.parametrize(
    ("quantize", "block_rows"), [(quantize_1x128, 1), (quantize_128x128, 128)]
)


@both
@given(data=st.data(), values=spread(), dtype=DTYPES, ue8m0=st.booleans())
def test_equals_the_reference_bit_for_bit(quantize, block_rows, data, values, dtype, ue8m0):
    rows, k = data.draw(sizes(20 if block_rows == 1 else 300)), data.draw(sizes(300))
    x = values.tensor(rows, k, dtype=dtype)
    q = quantize(x, ue8m0=ue8m0)
    expected_codes, expected_scales = naive.quantize(x, block_rows, ue8m0)
    assert torch.equal(q.scale_inv, expected_scales)
    assert torch.equal(codes(q), with_one_zero(expected_codes))


@on_cpu_and_gpu
@pytest.mark.parametrize("min_amax", [1e-4, 2.0**-60])
def test_blocks_have_a_least_magnitude(min_amax, device):
    """That of gradients is so small that none of a model's is lost."""
    sizes = torch.exp2(torch.arange(-80.0, 40, 3))
    x = (torch.randn(len(sizes), 200) * sizes[:, None]).bfloat16()
    data, scale_inv = (y.cpu() for y in quantize_op(x.to(device), False, min_amax))
    expected_codes, expected_scales = naive.quantize(x, 1, False, min_amax)
    assert torch.equal(scale_inv, expected_scales)
    assert torch.equal(codes(BlockScaled(data, scale_inv)), with_one_zero(expected_codes))


@given(shape=st.lists(st.integers(0, 3), max_size=3), k=sizes(300), data=spread())
def test_leading_axes_are_independent(shape, k, data):
    x = data.tensor(*shape, k)
    q = quantize_1x128(x)
    assert q.data.shape == x.shape
    assert q.scale_inv.shape == (*shape, -(-k // 128))
    rows = quantize_1x128(x.reshape(-1, k) if x.numel() else x.new_zeros(0, k))
    assert torch.equal(codes(q).flatten(), codes(rows).flatten())
    assert torch.equal(q.scale_inv.flatten(), rows.scale_inv.flatten())


@given(batch=st.integers(0, 3), n=sizes(200), k=sizes(200), data=spread())
def test_batched_weights_are_quantized_one_by_one(batch, n, k, data):
    w = data.tensor(batch, n, k)
    q = quantize_128x128(w)
    assert q.scale_inv.shape == (batch, -(-n // 128), -(-k // 128))
    for i in range(batch):
        one = quantize_128x128(w[i])
        assert torch.equal(codes(q)[i], codes(one))
        assert torch.equal(q.scale_inv[i], one.scale_inv)


@pytest.mark.parametrize("shape", [(300, 34 * 128 + 5), (33 * 128 + 1, 70), (2, 800, 900)])
@pytest.mark.parametrize("ue8m0", [False, True])
def test_large_weights_are_quantized_and_dequantized_as_their_blocks(shape, ue8m0):
    """On a CPU they are worked at in parts."""
    w = torch.randn(shape) * torch.exp2(torch.randint(-9, 9, shape).float())
    w[..., 7, 5], w[..., -1, -1] = torch.nan, torch.inf
    q = quantize_128x128(w, ue8m0=ue8m0)
    values = dequantize(q)
    for i, rows in enumerate(w.split(128, -2)):
        for j, block in enumerate(rows.split(128, -1)):
            one = quantize_128x128(block, ue8m0=ue8m0)
            part = ..., slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            assert same_bits(q.data[part].view(torch.uint8), one.data.view(torch.uint8))
            scale_inv = q.scale_inv[..., i : i + 1, j : j + 1]
            assert same_bits(scale_inv, one.scale_inv)
            assert same_bits(values[part], one.data.float() * scale_inv)


def test_the_default_device_changes_nothing():
    x = torch.randn(200, 300)
    with torch.device("meta"):
        for q in (quantize_1x128(x), quantize_128x128(x)):
            assert {q.data.device.type, q.scale_inv.device.type} == {"cpu"}
            assert torch.equal(dequantize(q).sign(), x.sign())


@both
def test_dequantize_multiplies_by_the_scale_of_the_block(quantize, block_rows):
    q = quantize(torch.randn(2, 200, 300))
    expected = torch.stack([naive.values(*matrix, block_rows) for matrix in zip(*q, strict=True)])
    torch.testing.assert_close(dequantize(q).double(), expected, rtol=1e-7, atol=0)
    assert dequantize(q, torch.bfloat16).dtype == torch.bfloat16


def test_every_code_decodes_to_its_value():
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    expected = naive.E4M3_VALUES.float()
    assert same_bits(kernels.e4m3_to_float(every), expected)
    assert same_bits(every.float(), expected)


def test_a_scale_that_is_a_power_of_two_stays():
    x = torch.full((1, 128), 448.0 * 2**-5)
    assert quantize_1x128(x, ue8m0=True).scale_inv.item() == 2**-5


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("ue8m0", [False, True])
def test_nan_and_inf_spoil_their_own_block_only(bad, ue8m0):
    x = torch.randn(4, 384)
    clean = dequantize(quantize_1x128(x, ue8m0=ue8m0))
    x[1, 130] = bad
    values = dequantize(quantize_1x128(x, ue8m0=ue8m0))
    assert bool(values[1, 130].isnan())
    touched = torch.zeros(4, 384, dtype=torch.bool)
    touched[1, 128:256] = True
    assert torch.equal(values[~touched], clean[~touched])


@given(batch=st.lists(st.integers(0, 3), max_size=1), m=sizes(20, min_size=1), k=sizes(300, 1))
def test_activation_scales_lie_as_tma_wants_them(batch, m, k):
    scale_inv = quantize_1x128(torch.ones(*batch, m, k)).scale_inv
    pitch = (m + 3) // 4 * 4
    assert scale_inv.stride()[-2:] == (1, pitch)
    if batch:
        assert scale_inv.stride(0) == pitch * scale_inv.shape[-1]


def test_tma_aligned_keeps_the_values():
    scale_inv = torch.rand(5, 3)
    copy = kernels.tma_aligned(scale_inv)
    assert copy.stride() == (1, 8)
    assert torch.equal(copy, scale_inv)


@both
def test_views_are_quantized_as_their_values(quantize, block_rows):
    x = torch.randn(300, 40).T
    assert torch.equal(codes(quantize(x)), codes(quantize(x.contiguous())))


@both
def test_bad_input_is_named(quantize, block_rows):
    with pytest.raises(TypeError, match=r"must be bfloat16 or float16 or float32, got float64"):
        quantize(torch.ones(4, 4, dtype=torch.float64))
    with pytest.raises(TypeError, match="got int64"):
        quantize(torch.ones(4, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"got shape \[\]"):
        quantize(torch.tensor(1.0))


def test_dequantize_has_a_gradient_in_scales():
    q = quantize_128x128(torch.randn(200, 300))
    scales = q.scale_inv.clone().requires_grad_()
    dequantize(BlockScaled(q.data, scales)).sum().backward()
    wanted = [[tile.double().sum() for tile in x.split(128, 1)] for x in q.data.float().split(128)]
    torch.testing.assert_close(scales.grad.double(), torch.tensor(wanted).double())


def test_dequantize_refuses_scales_that_fit_no_block():
    q = quantize_1x128(torch.randn(4, 300))
    with pytest.raises(ValueError, match=r"\[4, 300\], got \[4, 2\]"):
        dequantize(BlockScaled(q.data, q.scale_inv[:, :2]))
    with pytest.raises(TypeError, match="data must be float8_e4m3fn, got uint8"):
        dequantize(BlockScaled(q.data.view(torch.uint8), q.scale_inv))
    with pytest.raises(TypeError, match="scale_inv must be float32, got uint8"):
        dequantize(BlockScaled(q.data, torch.ones(4, 3, dtype=torch.uint8)))
    with pytest.raises(ValueError, match=r"data must be \[\.\.\., K\], got shape \[\]"):
        dequantize(BlockScaled(q.data[0, 0], q.scale_inv[0, 0]))
