"""DeepGEMM's casts, scales in memory, numbers and settings, in every form of their calls."""

import pytest
import torch

import moefp8.deep_gemm as deep_gemm
from moefp8.deep_gemm.testing import calc_diff
from tests.deep_gemm.cases import called, forms
from tests.gpu import on_cpu_and_gpu

# ---- Casts ----

# What is cast, and how many rows and columns a scale stands for.
CASTS = {
    "deep_gemm.per_token_cast_to_fp8(x)": (1, 128),
    "deep_gemm.per_token_cast_to_fp8(x, False)": (1, 128),
    "deep_gemm.per_token_cast_to_fp8(x, use_ue8m0=True)": (1, 128),
    "deep_gemm.per_token_cast_to_fp8(x, use_ue8m0=False, gran_k=128)": (1, 128),
    "deep_gemm.per_token_cast_to_fp8(x, True, 128, use_packed_ue8m0=False)": (1, 128),
    "deep_gemm.utils.per_token_cast_to_fp8(x, use_ue8m0=True, gran_k=32)": (1, 32),
    "deep_gemm.utils.math.per_token_cast_to_fp8(x, False, 64)": (1, 64),
    "deep_gemm.per_block_cast_to_fp8(x)": (128, 128),
    "deep_gemm.per_block_cast_to_fp8(x, False)": (128, 128),
    "deep_gemm.per_block_cast_to_fp8(x, use_ue8m0=True)": (128, 128),
    "deep_gemm.utils.per_block_cast_to_fp8(x, use_ue8m0=False, gran_k=32)": (32, 32),
    "deep_gemm.per_channel_cast_to_fp8(x, use_ue8m0=False)": (128, 1),
    "deep_gemm.per_channel_cast_to_fp8(x, use_ue8m0=True, gran_k=32)": (32, 1),
    "deep_gemm.per_custom_dims_cast_to_fp8(x, (0,), False)": (1, 300),
    "deep_gemm.per_custom_dims_cast_to_fp8(x, dims=(1,), use_ue8m0=True)": (256, 1),
}


@on_cpu_and_gpu
@pytest.mark.parametrize("form", CASTS)
def test_casts(device, form):
    x = torch.randn(256, 300, device=device) * torch.logspace(-3, 3, 300, device=device)
    x[0, :128] = 0
    data, scales = called(form, {"x": x})
    rows, columns = CASTS[form]
    blocks = [-(-size // step) for size, step in zip(x.shape, (rows, columns), strict=True)]
    assert data.dtype == torch.float8_e4m3fn
    assert scales.dtype == torch.float32
    assert data.is_contiguous()
    assert scales.is_contiguous()
    assert list(scales.shape) == ([n for n in blocks if n > 1] if "custom" in form else blocks)
    of_element = scales.view(blocks).repeat_interleave(rows, 0)[:256]
    of_element = of_element.repeat_interleave(columns, 1)[:, :300].double()
    # The largest number of a block is 448 scales, or more than 224 if scales are powers of two.
    largest = torch.nn.functional.pad(x.double().abs(), (0, -300 % columns, 0, -256 % rows))
    largest = largest.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).amax((1, 3))
    exact = largest.clamp(min=1e-4) / 448
    if "True" in form:
        assert (scales.frexp().mantissa == 0.5).all()
        assert (scales.view(blocks) >= exact * (1 - 1e-6)).all()
        assert (scales.view(blocks) < exact * 2).all()
    else:
        assert torch.allclose(scales.view(blocks).double(), exact, rtol=1e-6, atol=0)
    # E4M3 has 3 bits of mantissa, and steps of 2^-9 below 2^-6.
    bound = (x.double().abs() / 16).maximum(of_element * 2**-10) * (1 + 1e-5)
    assert ((data.double() * of_element - x).abs() <= bound).all()


def test_ceil_to_ue8m0_rounds_up_to_powers_of_two():
    x = torch.tensor([1.0, 1.1, -3.0, 4.0, 0.0, 1e-45, 2.0**-126, 3e38, 0.75])
    expected = [1.0, 2.0, 4.0, 4.0, 2.0**-126, 2.0**-126, 2.0**-126, 2.0**127, 1.0]
    assert deep_gemm.ceil_to_ue8m0(x).tolist() == expected


# ---- Scales in memory ----

# s is [5, 3], of M = 5 and K = 384, or [2, 5, 3] of 2 groups; t is [3, 3] or [2, 3, 3], of N = 384.
ALIGNED = forms("""
deep_gemm.get_col_major_tma_aligned_tensor(s)
deep_gemm.get_mn_major_tma_aligned_tensor(s)
deep_gemm.utils.get_mn_major_tma_aligned_tensor(s)
deep_gemm.utils.layout.get_mn_major_tma_aligned_tensor(s)
deep_gemm.transform_sf_into_required_layout(s, 5, 384, (1, 128), num_groups)
deep_gemm.transform_sf_into_required_layout(s, 5, 384, (1, 128, 128), num_groups, True)
deep_gemm.transform_sf_into_required_layout(s, 5, 384, (1, 128, 128), num_groups, True, True)
deep_gemm.transform_sf_into_required_layout(s, 5, 384, (1, 128, 128), num_groups, True, True, None)
deep_gemm.transform_sf_into_required_layout(sf=s, mn=5, k=384, recipe=(1, 128, 128),
    num_groups=num_groups, is_sfa=True)
deep_gemm.transform_sf_into_required_layout(s, mn=5, k=300, recipe=(1, 128),
    num_groups=num_groups, disable_ue8m0_cast=False)
deep_gemm.transform_sf_into_required_layout(s, 5, 384, recipe_ab=(1, 128), num_groups=num_groups,
    is_sfa=True)
deep_gemm.transform_sf_into_required_layout(s, 5, 384, recipe=(1, 1, 128), num_groups=num_groups,
    is_sfa=False)
""")

UNCHANGED = forms("""
deep_gemm.transform_sf_into_required_layout(t, 300, 384, (128, 128), num_groups)
deep_gemm.transform_sf_into_required_layout(t, 384, 384, (1, 128, 128), num_groups, False)
deep_gemm.transform_sf_into_required_layout(t, 384, 384, (1, 128, 128), num_groups)
deep_gemm.transform_sf_into_required_layout(sf=t, mn=384, k=384, recipe=[1, 128, 128],
    num_groups=num_groups, is_sfa=False)
deep_gemm.transform_sf_into_required_layout(t, 384, 384, recipe_ab=(128, 128),
    num_groups=num_groups)
""")


@pytest.mark.parametrize(("num_groups", "strides"), [(None, (1, 8)), (2, (24, 1, 8))])
@pytest.mark.parametrize("form", ALIGNED)
def test_scales_are_aligned_for_tma(form, num_groups, strides):
    s = torch.randn(2, 5, 3)[slice(None) if num_groups else 0]
    aligned = called(form, {"s": s, "num_groups": num_groups})
    assert torch.equal(aligned, s)
    assert aligned.stride() == strides
    assert called(form, {"s": aligned, "num_groups": num_groups}) is aligned


@pytest.mark.parametrize(("num_groups", "shape"), [(None, (3, 3)), (2, (2, 3, 3))])
@pytest.mark.parametrize("form", UNCHANGED)
def test_scales_of_weights_stay(form, num_groups, shape):
    t = torch.randn(shape)
    assert called(form, {"t": t, "num_groups": num_groups}) is t


# ---- Numbers and settings ----

VALUES = {
    "deep_gemm.ceil_div(257, 128)": 3,
    "deep_gemm.utils.align(257, 128)": 384,
    "deep_gemm.get_tma_aligned_size(5, 4)": 8,
    "deep_gemm.utils.get_tma_aligned_size(17, 1)": 32,
    "deep_gemm.get_m_alignment_for_contiguous_layout()": 128,
    "deep_gemm.get_mk_alignment_for_contiguous_layout()": 128,
    "deep_gemm.utils.get_k_alignment_for_contiguous_layout()": 128,
    "deep_gemm.utils.layout.get_mk_alignment_for_contiguous_layout()": 128,
    "deep_gemm.get_theoretical_mk_alignment_for_contiguous_layout()": 128,
    "deep_gemm.get_theoretical_mk_alignment_for_contiguous_layout(24)": 128,
    "deep_gemm.get_theoretical_mk_alignment_for_contiguous_layout(expected_m=24)": 128,
    "deep_gemm.get_tc_util()": 100,
    "[deep_gemm.set_tc_util(50), deep_gemm.get_tc_util()]": [None, 50],
    "[deep_gemm.set_tc_util(0), deep_gemm.get_tc_util()]": [None, 100],
    "deep_gemm.get_pdl()": False,
    "[deep_gemm.set_pdl(True), deep_gemm.get_pdl()]": [None, True],
    "[deep_gemm.set_compile_mode(1), deep_gemm.get_compile_mode()]": [None, 1],
    "deep_gemm.set_ignore_compile_dims(True)": None,
    "deep_gemm.set_block_size_multiple_of(16)": None,
    "deep_gemm.set_block_size_multiple_of((16, 32))": None,
    "[deep_gemm.set_num_sms(8), deep_gemm.get_num_sms()]": [None, 8],
    "[deep_gemm.set_num_sms(num_sms=8), deep_gemm.get_num_sms()]": [None, 8],
    "deep_gemm.calc_diff(torch.zeros(2), torch.zeros(2))": 0.0,
    "float(deep_gemm.calc_diff(torch.ones(2), torch.zeros(2)))": 1.0,
    "float(deep_gemm.testing.calc_diff(torch.ones(2), 3 * torch.ones(2)))": pytest.approx(0.4),
}


@pytest.mark.parametrize("form", VALUES)
def test_values(form):
    assert called(form, {}) == VALUES[form]


def test_a_limit_on_sms_is_put_back():
    everything = deep_gemm.get_num_sms()
    for limit in (everything, 0):
        deep_gemm.set_num_sms(4)
        deep_gemm.set_num_sms(limit)
        assert deep_gemm.get_num_sms() == everything


def test_an_alignment_is_remembered():
    deep_gemm.set_mk_alignment_for_contiguous_layout(256)
    assert deep_gemm.get_m_alignment_for_contiguous_layout() == 256
    assert deep_gemm.utils.get_mk_alignment_for_contiguous_layout() == 256
    assert deep_gemm.get_theoretical_mk_alignment_for_contiguous_layout() == 128


def test_calc_diff_is_a_distance():
    x, y = torch.randn(3, 5), torch.randn(3, 5)
    expected = (x - y).norm() ** 2 / (x.norm() ** 2 + y.norm() ** 2)
    assert float(calc_diff(x, y)) == pytest.approx(float(expected), rel=1e-5)
