"""Every form in which DeepGEMM's releases, its tests and serving engines call it, literally.

Results are judged against the dequantized operands in FP64, row by row.
"""

import re
from types import SimpleNamespace

import pytest
import torch

import moefp8.deep_gemm as deep_gemm
from moefp8.deep_gemm.testing import calc_diff
from moefp8.deep_gemm.utils import layout, math
from moefp8.deep_gemm.utils.layout import get_mn_major_tma_aligned_tensor
from moefp8.quant import dequantize, quantize_1x128, quantize_128x128
from moefp8.testing import assert_matches_reference
from tests.gpu import on_cpu_and_gpu

NAN = float("nan")
N, K = 200, 300
COUNTS = 100, 0, 130, 128, 1  # rows of each group


@pytest.fixture(autouse=True)
def _settings():
    yield
    deep_gemm.set_num_sms(0)
    deep_gemm.set_tc_util(100)
    deep_gemm.set_pdl(False)
    deep_gemm.set_compile_mode(0)
    deep_gemm.set_mk_alignment_for_contiguous_layout(128)


def forms(text: str) -> list[str]:
    """One call for each line; what is indented goes on."""
    return [" ".join(form.split()) for form in re.split(r"\n(?=\S)", text.strip())]


# ---- Dense ----

PRODUCTS = forms("""
deep_gemm.gemm_fp8_fp8_bf16_nt(a, b, d)
deep_gemm.gemm_fp8_fp8_bf16_nt([a[0], a[1]], [b[0], b[1]], d)
deep_gemm.gemm_fp8_fp8_bf16_nt(lhs=a, rhs=b, out=d)
deep_gemm.gemm_fp8_fp8_bf16_nt((a[0], deep_gemm.get_col_major_tma_aligned_tensor(a[1])), b, d)
deep_gemm.gemm_fp8_fp8_bf16_nt((a[0], a[1].T.contiguous().T), b, d)
deep_gemm.fp8_gemm_nt(a, b, d)
deep_gemm.fp8_gemm_nt(a=a, b=b, d=d)
deep_gemm.fp8_gemm_nt(a, b, d, c=None)
deep_gemm.fp8_gemm_nt(a, b, d, disable_ue8m0_cast=True)
deep_gemm.fp8_gemm_nt(a, b, d, disable_ue8m0_cast=False)
deep_gemm.fp8_gemm_nt(a, b, d, compiled_dims="nk")
deep_gemm.fp8_gemm_nt(a, b, d, compiled_dims="mn")
deep_gemm.fp8_gemm_nt(a, b, d, recipe=(1, 128, 128), disable_ue8m0_cast=True)
deep_gemm.fp8_gemm_nt(a, b, d, recipe=[1, 128, 128])
deep_gemm.fp8_gemm_nt(a, b, d, recipe_a=(1, 128), recipe_b=(128, 128))
deep_gemm.fp8_gemm_nt(a, b, d, c=None, disable_ue8m0_cast=True, recipe=None)
deep_gemm.fp8_gemm_nt(a, b, d, c=None, disable_ue8m0_cast=True, recipe=None, recipe_a=None,
    recipe_b=None)
deep_gemm.fp8_gemm_nt(a, b, d, None, (1, 128, 128))
deep_gemm.fp8_gemm_nt(a, b, d, None, None, "nk", True)
deep_gemm.fp8_gemm_nt(a, b, d, None, (1, 128, 128), "nk", False)
deep_gemm.fp8_gemm_nt(a, b, d, None, None, None, None, "nk", True)
deep_gemm.fp8_gemm_nt(a, b, d, None, None, (1, 128), (128, 128), "mn", False)
deep_gemm.fp8_gemm_nt((a[0], get_mn_major_tma_aligned_tensor(a[1])), b, d)
deep_gemm.fp8_gemm_nt((a[0], layout.get_mn_major_tma_aligned_tensor(a[1])), b, d)
deep_gemm.fp8_gemm_nt((a[0], deep_gemm.transform_sf_into_required_layout(a[1], m, k, (1, 128,
    128), None, True)), b, d)
deep_gemm.fp8_gemm_nt(deep_gemm.per_token_cast_to_fp8(x), deep_gemm.per_block_cast_to_fp8(w), d)
deep_gemm.fp8_gemm_nt(deep_gemm.utils.per_token_cast_to_fp8(x, False),
    deep_gemm.utils.per_block_cast_to_fp8(w, False), d)
deep_gemm.fp8_gemm_nt(math.per_token_cast_to_fp8(x, use_ue8m0=False, gran_k=128),
    math.per_block_cast_to_fp8(w, use_ue8m0=False, gran_k=128), d)
deep_gemm.fp8_gemm_nn(a, b_t, d)
deep_gemm.fp8_gemm_nn(a, b_t, d, c=None, recipe=None)
deep_gemm.fp8_gemm_nn(a, b_t, d, c=None, disable_ue8m0_cast=True, recipe=(1, 128, 128))
deep_gemm.fp8_gemm_nn(a, b_t, d, None, None, "nk", True)
deep_gemm.fp8_gemm_tn(a_t, b_t, d)
deep_gemm.fp8_gemm_tn(a_t, b_t, d, c=None, recipe=None, compiled_dims="mn")
deep_gemm.fp8_gemm_tt(a_t, b, d)
deep_gemm.fp8_gemm_tt(a_t, b, d, disable_ue8m0_cast=True)
deep_gemm.fp8_fp4_gemm_nt(a, b, d)
deep_gemm.fp8_fp4_gemm_nt(a, b, d, recipe=None)
deep_gemm.fp8_fp4_gemm_nt(a, b, d, c=None, disable_ue8m0_cast=True, recipe=None, recipe_a=None,
    recipe_b=None)
deep_gemm.fp8_fp4_gemm_nt(a, b, d, recipe_a=(1, 128), recipe_b=(128, 128))
deep_gemm.fp8_fp4_gemm_nn(a, b_t, d)
deep_gemm.fp8_fp4_gemm_tn(a_t, b_t, d)
deep_gemm.fp8_fp4_gemm_tt(a_t, b, d)
""")

SUMS = forms("""
deep_gemm.fp8_gemm_nt(a, b, d, c)
deep_gemm.fp8_gemm_nt(a, b, d, c=c)
deep_gemm.fp8_gemm_nt(a, b, d.copy_(c), c=d, disable_ue8m0_cast=True, recipe=None)
deep_gemm.fp8_gemm_nn(a, b_t, d, c=c)
deep_gemm.fp8_gemm_tn(a_t, b_t, d, c=c)
deep_gemm.fp8_gemm_tt(a_t, b, d, c=c)
deep_gemm.fp8_fp4_gemm_nt(a, b, d, c=c)
""")


def called(form: str, names: dict[str, object]) -> object:
    tools = {"deep_gemm": deep_gemm, "layout": layout, "math": math, "torch": torch}
    tools |= {"get_mn_major_tma_aligned_tensor": get_mn_major_tma_aligned_tensor}
    return eval(form, tools | names)


def row_major(quantized) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales as DeepGEMM's casts give them."""
    data, scales = quantized
    return data, scales.contiguous()


def dense(device: str = "cpu", m: int = 130) -> dict[str, object]:
    x, w = torch.randn(m, K, device=device), torch.randn(N, K, device=device)
    a, b = row_major(quantize_1x128(x)), quantize_128x128(w)
    d = torch.full((m, N), NAN, dtype=torch.bfloat16, device=device)
    c = torch.randn(m, N, device=device).bfloat16()
    names = {"x": x, "w": w, "a": a, "b": tuple(b), "c": c, "d": d, "m": m, "k": K}
    return names | {"a_t": (a[0].T, a[1].T), "b_t": (b[0].T, b[1].T)}


def product(a, b) -> torch.Tensor:
    return dequantize(a).double() @ dequantize(b).double().mT


@on_cpu_and_gpu
@pytest.mark.parametrize("form", PRODUCTS)
def test_products(device, form):
    names = dense(device)
    assert called(form, names) is None
    assert_matches_reference(names["d"], product(names["a"], names["b"]))


@on_cpu_and_gpu
@pytest.mark.parametrize("form", SUMS)
def test_sums(device, form):
    """The product and then the sum are rounded to BF16."""
    names = dense(device)
    expected = product(names["a"], names["b"]) + names["c"].double()
    called(form, names)
    assert_matches_reference(names["d"], expected, 8e-3)


def test_a_product_of_no_rows_or_columns():
    empty = {**dense(m=0)}
    deep_gemm.fp8_gemm_nt(empty["a"], empty["b"], empty["d"], c=empty["c"])
    a = torch.empty(2, 0, dtype=torch.float8_e4m3fn), torch.empty(2, 0)
    b = torch.empty(3, 0, dtype=torch.float8_e4m3fn), torch.empty(1, 0)
    c, d = torch.randn(2, 3).bfloat16(), torch.full((2, 3), NAN, dtype=torch.bfloat16)
    deep_gemm.fp8_gemm_nt(a, b, d, c=c)
    assert torch.equal(d, c)
    deep_gemm.fp8_gemm_nt(a, b, d)
    assert not d.any()


# ---- Grouped, contiguous ----

BY_ROWS = forms("""
deep_gemm.m_grouped_gemm_fp8_fp8_bf16_nt_contiguous(a, b, d, m_indices)
deep_gemm.m_grouped_gemm_fp8_fp8_bf16_nt_contiguous(lhs=a, rhs=b, out=d, m_indices=m_indices)
deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, m_indices)
deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, m_indices=m_indices)
deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a=a, b=b, d=d, grouped_layout=m_indices)
deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, m_indices, disable_ue8m0_cast=True)
deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, m_indices, recipe=(1, 128, 128))
deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, m_indices, recipe_a=(1, 128), recipe_b=(128,
    128))
deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, m_indices, None, "nk", True)
deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, m_indices, None, None, None, "nk", True)
deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, m_indices, None, None, None, "nk", True, False)
deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, m_indices, use_psum_layout=False,
    ensure_zero_padding=True)
deep_gemm.m_grouped_fp8_gemm_nt_contiguous((a[0],
    deep_gemm.get_mn_major_tma_aligned_tensor(a[1])), b, d, m_indices)
deep_gemm.m_grouped_fp8_gemm_nn_contiguous(a, b_t, d, m_indices)
deep_gemm.m_grouped_fp8_gemm_nn_contiguous(a, b_t, d, m_indices, disable_ue8m0_cast=True)
deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous(a, b, d, m_indices)
deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous(a, b, d, m_indices, recipe=None,
    use_psum_layout=False)
deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous(a=a, b=b, d=d, grouped_layout=m_indices,
    recipe_a=(1, 128), recipe_b=(128, 128))
deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous(a, b, d, m_indices, disable_ue8m0_cast=True,
    use_psum_layout=False, ensure_zero_padding=True, recipe=None, recipe_a=None, recipe_b=None)
deep_gemm.m_grouped_fp8_fp4_gemm_nn_contiguous(a, b_t, d, m_indices, recipe=None,
    use_psum_layout=False)
""")

BY_ENDS = forms("""
deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, psum_m, use_psum_layout=True)
deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, psum_m, use_psum_layout=True,
    disable_ue8m0_cast=True)
deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, psum_m, None, None, None, "nk", True, True, 120)
deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, psum_m, None, None, None, "nk", True, True,
    None)
deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, psum_m, None, None, None, "nk", True, True,
    True, 120)
deep_gemm.m_grouped_fp8_gemm_nn_contiguous(a, b_t, d, psum_m, use_psum_layout=True)
deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous(a, b, d, psum_m, use_psum_layout=True)
deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous(a, b, d, psum_m, disable_ue8m0_cast=True,
    use_psum_layout=True, expected_m_for_psum_layout=120, recipe=None, recipe_a=None,
    recipe_b=None)
deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous(a, b, d, psum_m, use_psum_layout=True,
    ensure_zero_padding=True)
deep_gemm.m_grouped_fp8_fp4_gemm_nn_contiguous(a, b_t, d, psum_m, use_psum_layout=True,
    ensure_zero_padding=True)
""")

WITHOUT_ZEROS = forms("""
deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, m_indices, ensure_zero_padding=False)
deep_gemm.m_grouped_fp8_fp4_gemm_nn_contiguous(a, b_t, d, m_indices, ensure_zero_padding=False)
deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, psum_m, use_psum_layout=True,
    ensure_zero_padding=False)
deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous(a, b, d, psum_m, None, None, None, "nk", True,
    True, False, 120)
""")


def experts(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(quantize_128x128(torch.randn(len(COUNTS), N, K, device=device)))


def contiguous(device: str = "cpu", alignment: int = 128, spare: int = 148) -> SimpleNamespace:
    """Rows of padding hold NaN in a and d. `spare` rows behind the last group are padding too."""
    m_indices, ends, ending = [], [], []
    for group, count in enumerate(COUNTS):
        ends.append(len(m_indices) + count)
        padding = -count % alignment
        m_indices += [group] * count + [-1] * padding
        ending += [False] * count + [True] * padding
    m_indices += [-1] * spare
    ending += [False] * spare
    rows = torch.tensor(m_indices, dtype=torch.int32, device=device)
    x, b = torch.randn(len(rows), K, device=device), experts(device)
    a = row_major(quantize_1x128(x.masked_fill(rows[:, None] < 0, NAN)))
    d = torch.full((len(rows), N), NAN, dtype=torch.bfloat16, device=device)
    names = {"a": a, "b": b, "b_t": (b[0].mT, b[1].mT), "d": d, "m_indices": rows}
    names["psum_m"] = torch.tensor(ends, dtype=torch.int32, device=device)
    return SimpleNamespace(names=names, d=d, rows=rows, ending=torch.tensor(ending))


def check_groups(case: SimpleNamespace) -> None:
    x, w = dequantize(case.names["a"]).double(), dequantize(case.names["b"]).double()
    for group in range(len(COUNTS)):
        of_group = case.rows == group
        assert_matches_reference(case.d[of_group], x[of_group] @ w[group].T)


@on_cpu_and_gpu
@pytest.mark.parametrize("form", BY_ROWS + BY_ENDS)
def test_contiguous_groups_end_in_zeros(device, form):
    case = contiguous(device)
    assert called(form, case.names) is None
    check_groups(case)
    padding = case.d.cpu()[case.ending]
    assert len(padding)
    assert not padding.any()


@on_cpu_and_gpu
@pytest.mark.parametrize("form", WITHOUT_ZEROS)
def test_padding_is_left_alone_if_wanted(device, form):
    case = contiguous(device)
    called(form, case.names)
    check_groups(case)
    assert case.d[case.rows < 0].isnan().all()


@pytest.mark.parametrize("spare", [0, 1, 300])
@pytest.mark.parametrize("alignment", [128, 256, 384])
def test_groups_are_aligned_as_set(alignment, spare):
    deep_gemm.set_mk_alignment_for_contiguous_layout(alignment)
    for form in (BY_ROWS[2], BY_ENDS[0]):
        case = contiguous(alignment=alignment, spare=spare)
        called(form, case.names)
        check_groups(case)
        assert not case.d[case.ending].any()


def test_fewer_rows_than_the_alignment():
    case = contiguous(spare=0)
    a = tuple(x[:100] for x in case.names["a"])
    for layout_, options in (
        (case.rows[:100], {}),
        (torch.tensor([100] * 5, dtype=torch.int32), {"use_psum_layout": True}),
    ):
        d = torch.full((100, N), NAN, dtype=torch.bfloat16)
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, case.names["b"], d, layout_, **options)
        case.d[:100] = d
        assert_matches_reference(d, product(a, tuple(x[0] for x in case.names["b"])))


# ---- Grouped, masked ----

MASKED = forms("""
deep_gemm.m_grouped_gemm_fp8_fp8_bf16_nt_masked(a, b, d, masked_m, 70)
deep_gemm.m_grouped_gemm_fp8_fp8_bf16_nt_masked(a, b, out=d, masked_m=masked_m, expected_m=70)
deep_gemm.m_grouped_gemm_fp8_fp8_bf16_nt_masked(lhs=a, rhs=b, out=d, masked_m=masked_m,
    expected_m=70)
deep_gemm.fp8_m_grouped_gemm_nt_masked(a, b, d, masked_m, 70)
deep_gemm.fp8_m_grouped_gemm_nt_masked(a, b, d, masked_m=masked_m, expected_m=70)
deep_gemm.fp8_m_grouped_gemm_nt_masked(a, b, d, masked_m, 70, disable_ue8m0_cast=True)
deep_gemm.fp8_m_grouped_gemm_nt_masked(a, b, d, masked_m, 70, recipe_a=(1, 128), recipe_b=(128,
    128))
deep_gemm.m_grouped_fp8_gemm_nt_masked(a, b, d, masked_m, 70)
deep_gemm.m_grouped_fp8_gemm_nt_masked(a=a, b=b, d=d, masked_m=masked_m, expected_m=70)
deep_gemm.m_grouped_fp8_gemm_nt_masked(a, b, d, masked_m, 70, (1, 128, 128))
deep_gemm.m_grouped_fp8_gemm_nt_masked(a, b, d, masked_m, 70, None, "nk", True)
deep_gemm.m_grouped_fp8_gemm_nt_masked(a, b, d, masked_m, 70, None, None, None, "nk", True)
deep_gemm.m_grouped_fp8_gemm_nt_masked((a[0], deep_gemm.get_col_major_tma_aligned_tensor(a[1])),
    b, d, masked_m, 70)
deep_gemm.m_grouped_fp8_gemm_nt_masked((a[0], deep_gemm.transform_sf_into_required_layout(a[1],
    mn=max_m, k=k, recipe=(1, 128, 128), num_groups=num_groups, is_sfa=True)), b, d, masked_m, 70)
deep_gemm.m_grouped_fp8_fp4_gemm_nt_masked(a, b, d, masked_m, 70)
deep_gemm.m_grouped_fp8_fp4_gemm_nt_masked(a, b, d, masked_m, 70, disable_ue8m0_cast=True,
    recipe=None, recipe_a=None, recipe_b=None)
""")


@on_cpu_and_gpu
@pytest.mark.parametrize("form", MASKED)
def test_masked(device, form):
    max_m, b = 140, experts(device)
    a = row_major(quantize_1x128(torch.randn(len(COUNTS), max_m, K, device=device)))
    d = torch.full((len(COUNTS), max_m, N), NAN, dtype=torch.bfloat16, device=device)
    masked_m = torch.tensor(COUNTS, dtype=torch.int32, device=device)
    names = {"a": a, "b": b, "d": d, "masked_m": masked_m}
    assert called(form, names | {"max_m": max_m, "k": K, "num_groups": len(COUNTS)}) is None
    expected = product(a, b)
    for group, count in enumerate(COUNTS):
        assert_matches_reference(d[group, :count], expected[group, :count])
        assert d[group, count:].isnan().all()


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

# s2 is [5, 3], of M = 5, K = 384, t2 is [3, 3], of N = 384; s3 and t3 are of 2 groups each.
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


@pytest.mark.parametrize("num_groups", [None, 2])
@pytest.mark.parametrize("form", ALIGNED)
def test_scales_are_aligned_for_tma(form, num_groups):
    s = torch.randn(*([] if num_groups is None else [2]), 5, 3)
    aligned = called(form, {"s": s, "num_groups": num_groups})
    assert torch.equal(aligned, s)
    assert aligned.stride() == ((1, 8) if num_groups is None else (24, 1, 8))
    assert called(form, {"s": aligned, "num_groups": num_groups}) is aligned


@pytest.mark.parametrize("num_groups", [None, 2])
@pytest.mark.parametrize("form", UNCHANGED)
def test_scales_of_weights_stay(form, num_groups):
    t = torch.randn(*([] if num_groups is None else [2]), 3, 3)
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
    deep_gemm.set_num_sms(4)
    deep_gemm.set_num_sms(everything)
    assert deep_gemm.get_num_sms() == everything
    deep_gemm.set_num_sms(4)
    deep_gemm.set_num_sms(0)
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


# ---- What is refused ----

REFUSED = {
    "deep_gemm.fp8_gemm_nt((a[0].view(torch.int8), a[1]), b, d)": "FP4 is for Blackwell",
    "deep_gemm.fp8_fp4_gemm_nt(a, (b[0].view(torch.uint8), b[1]), d)": "b must be float8_e4m3fn",
    "deep_gemm.fp8_gemm_nt((a[0], a[1].int()), b, d)": "scales of a must be float32.*Blackwell",
    "deep_gemm.fp8_gemm_nt(a, (b[0], b[1].to(torch.float8_e8m0fnu)), d)": "scales of b.*Blackwell",
    "deep_gemm.fp8_gemm_nt(a, (b[0], b[1].double()), d)": "must be float32, got float64",
    "deep_gemm.fp8_gemm_nt(a[0], b, d)": "a must be a pair",
    "deep_gemm.fp8_gemm_nt(a, b, d, recipe=(1, 1, 128))": "weight gradients.*come with training",
    "deep_gemm.fp8_gemm_nt(a, b, d, recipe_a=(1, 32), recipe_b=(128, 128))": "for Blackwell",
    "deep_gemm.fp8_gemm_nt(a, b, d, recipe_a=(1, 128))": "recipe must be",
    "deep_gemm.fp8_gemm_nt(a, b, d, None, (1, 1, 128), 'nk', True)": "recipe must be",
    "deep_gemm.fp8_gemm_nt(a, b, d.float())": "d must be bfloat16",
    "deep_gemm.fp8_gemm_nt(a, b, d, c=c.float())": "c must have the shape and dtype of d",
    "deep_gemm.fp8_gemm_nt(a, b, d, c=c[:1])": "c must have the shape and dtype of d",
    "deep_gemm.fp8_gemm_nn(a, (b_t[0].contiguous(), b_t[1]), d)": "b must be K-major on Hopper",
    "deep_gemm.fp8_gemm_tn((a_t[0].contiguous(), a_t[1]), b_t, d)": r"copy it by .mT.contiguous",
    "deep_gemm.fp8_gemm_nt(a, (b_t[0].contiguous().T, b[1]), d)": r"copy it by .contiguous\(\)",
    "deep_gemm.per_token_cast_to_fp8(x, True, 128, True)": "packed UE8M0 scales are for Blackwell",
    "deep_gemm.per_token_cast_to_fp8(x[None])": "x must have 2 dimensions",
    "deep_gemm.per_block_cast_to_fp8(x, gran_k=0)": "gran_k be at least 1",
    "deep_gemm.per_channel_cast_to_fp8(x)": "gran_k must divide K = 130",
    "deep_gemm.transform_sf_into_required_layout(a[1].int(), m, k, (1, 128))": "Blackwell",
    "deep_gemm.transform_sf_into_required_layout(a[1], m, k, (1, 32))": "other blocks",
    "deep_gemm.transform_sf_into_required_layout(a[1], m, k)": "got recipe None",
    "deep_gemm.transform_sf_into_required_layout(a[1], m + 1, k, (1, 128))": r"\[131, 3\], got",
    "deep_gemm.transform_sf_into_required_layout(a[1], m, k, (1, 128), 2)": r"\[2, 130, 3\]",
    "deep_gemm.get_mn_major_tma_aligned_tensor(a[1].double())": "sf must be float32, got float64",
    "deep_gemm.get_mn_major_tma_aligned_tensor(a[1][None, None])": "2 or 3 dimensions",
    "deep_gemm.get_tma_aligned_size(5, 3)": "element_size must divide 16, got 3",
    "deep_gemm.set_mk_alignment_for_contiguous_layout(64)": "multiple of 128.*expert_offsets",
    "deep_gemm.set_mk_alignment_for_contiguous_layout(0)": "multiple of 128",
    "deep_gemm.set_mk_alignment_for_contiguous_layout(True)": "must be an int",
    "deep_gemm.set_num_sms(-1)": "got -1",
    "deep_gemm.set_num_sms(True)": "must be an int, got True",
    "deep_gemm.set_num_sms(False)": "must be an int, got False",
    "deep_gemm.set_num_sms(8.0)": "must be an int, got 8.0",
    "deep_gemm.set_num_sms('8')": "must be an int, got '8'",
    "deep_gemm.set_num_sms(None)": "must be an int, got None",
    "deep_gemm.set_tc_util(101)": r"in \[0, 100\], got 101",
    "deep_gemm.set_tc_util(0.5)": "must be an int",
}


@pytest.mark.parametrize("form", REFUSED)
def test_refusals(form):
    names = dense()
    with pytest.raises((TypeError, ValueError), match=REFUSED[form]):
        called(form, names)
    assert names["d"].isnan().all()
    assert deep_gemm.get_mk_alignment_for_contiguous_layout() == 128


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("(a, b, d)", "give either grouped_layout or"),
        ("(a, b, d, m_indices, m_indices=m_indices)", "give either grouped_layout or"),
        ("(a, b, d, m_indices[:-1])", r"grouped_layout must be \[M\]"),
        ("(a, b, d, m_indices.long())", "grouped_layout must be int32"),
        ("(a, b, d, psum_m[1:], use_psum_layout=True)", r"\[G\] with use_psum_layout = \[5\]"),
        ("(a, b, d, psum_m.long(), use_psum_layout=True)", "grouped_layout must be int32"),
        ("(a, b, d, m_indices, recipe=(1, 1, 32))", "recipe must be"),
        ("(a, b, d[:, :1], m_indices)", "d must be"),
    ],
)
def test_refusals_of_groups(form, message):
    case = contiguous()
    with pytest.raises((TypeError, ValueError), match=message):
        called(f"deep_gemm.m_grouped_fp8_gemm_nt_contiguous{form}", case.names)
    assert case.d.isnan().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_more_sms_than_there_are_are_refused():
    with pytest.raises(ValueError, match="SMs of the GPU, got 100000"):
        deep_gemm.set_num_sms(100_000)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("k_grouped_fp8_gemm_nt_contiguous", "come with training"),
        ("k_grouped_fp8_gemm_tn_contiguous", "come with training"),
        ("wgrad_gemm_fp8_fp8_fp32_nt", "come with training"),
        ("k_grouped_wgrad_gemm_fp8_fp8_fp32_nt", "come with training"),
        ("bf16_gemm_nt", "torch.matmul"),
        ("m_grouped_bf16_gemm_nt_contiguous", "torch.matmul"),
        ("fp8_mqa_logits", "attention"),
        ("fp8_fp4_paged_mqa_logits", "attention"),
        ("fp8_gemm_nt_skip_head_mid", "attention"),
        ("einsum", "torch.einsum"),
        ("fp8_einsum", "torch.einsum"),
        ("cublaslt_gemm_nt", "torch.matmul"),
        ("tf32_hc_prenorm_gemm", "hyper-connections"),
        ("fp8_fp4_mega_moe", "GroupedExperts"),
        ("get_symm_buffer_for_mega_moe", "GroupedExperts"),
        ("per_token_cast_to_fp4", "per_token_cast_to_fp8"),
        ("get_mn_major_tma_aligned_packed_ue8m0_tensor", "Hopper takes FP32 scales"),
        ("pack_ue8m0_to_int", "Hopper takes FP32 scales"),
        ("bench_kineto", "timing"),
    ],
)
def test_what_is_not_offered_says_why(name, why):
    assert not hasattr(deep_gemm, name)
    with pytest.raises(AttributeError, match=f"no attribute '{name}': .*{why}"):
        getattr(deep_gemm, name)


def test_unknown_names_are_no_attributes():
    with pytest.raises(AttributeError, match=r"no attribute 'fp8_gemm'$"):
        deep_gemm.fp8_gemm  # noqa: B018


def test_names_are_documented_and_known_to_nothing_else():
    import moefp8

    assert moefp8.deep_gemm is deep_gemm
    kept = "fp8_gemm_nt m_grouped_fp8_gemm_nt_contiguous m_grouped_fp8_gemm_nt_masked "
    kept += "get_mk_alignment_for_contiguous_layout set_num_sms get_num_sms ceil_div"
    for name in deep_gemm.__all__:
        assert getattr(deep_gemm, name).__doc__ or name in ("align", "ceil_div"), name
        assert name in kept.split() or not hasattr(moefp8.kernels, name), name
