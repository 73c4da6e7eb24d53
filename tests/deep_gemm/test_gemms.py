"""Every form in which DeepGEMM's releases, its tests and serving engines call its GEMMs.

Results are judged against the dequantized operands in FP64, row by row.
"""

import pytest
import torch

import moefp8.deep_gemm as deep_gemm
from moefp8.kernels import jit
from moefp8.quant import dequantize, quantize_1x128
from moefp8.testing import assert_matches_reference
from tests.deep_gemm.cases import (
    COUNTS,
    NAN,
    K,
    N,
    called,
    contiguous,
    dense,
    experts,
    forms,
    product,
    row_major,
)
from tests.gpu import no_synchronisation, on_cpu_and_gpu, on_gpu

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


@on_cpu_and_gpu
@pytest.mark.parametrize("form", PRODUCTS + SUMS)
def test_dense(device, form):
    names = dense(device)
    expected, bound = product(names["a"], names["b"]), 4e-3
    if form in SUMS:  # the product and then the sum are rounded to BF16
        expected, bound = expected + names["c"], 8e-3
    assert called(form, names) is None
    assert_matches_reference(names["d"], expected, bound)


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


def check_groups(case: dict[str, object]) -> None:
    x, w = dequantize(case["a"]).double(), dequantize(case["b"]).double()
    for group in range(len(COUNTS)):
        of_group = case["m_indices"] == group
        assert_matches_reference(case["d"][of_group], x[of_group] @ w[group].T)


@on_cpu_and_gpu
@pytest.mark.parametrize("form", BY_ROWS + BY_ENDS + WITHOUT_ZEROS)
def test_padding_of_contiguous_groups_becomes_zeros_or_stays(device, form):
    case = contiguous(device)
    assert called(form, case) is None
    check_groups(case)
    padding = case["d"][case["m_indices"] < 0]
    assert padding.isnan().all() if form in WITHOUT_ZEROS else not padding.any()


ROUTINGS = {
    "no token": [],
    "tokens of the last group": [[4] * 90],
    "blocks of padding before, between and after groups": [[], [], [0] * 128, [], [2] * 3, []],
    "a group that two runs share": [[1] * 128, [], [1] * 7, [3] * 128],
}


@pytest.mark.parametrize("routing", ROUTINGS)
def test_padding_becomes_zeros_whatever_the_routing(gpu, routing):
    """A CPU and the launcher for a GPU give the same bits."""
    case = contiguous(spare=1000)
    rows = case["m_indices"].fill_(-1)
    for block, groups in enumerate(ROUTINGS[routing]):
        rows[128 * block :][: len(groups)] = torch.tensor(groups, dtype=torch.int32)
    x = torch.randn(len(rows), K).masked_fill(rows[:, None] < 0, NAN)
    case["a"], results = row_major(quantize_1x128(x)), []
    for driver in (jit.Driver(), gpu):
        with jit.using(driver):
            called(BY_ROWS[2], case | {"d": case["d"].fill_(NAN)})
        check_groups(case)
        assert not case["d"][rows < 0].any()
        results.append(case["d"].clone())
    assert torch.equal(*results)
    assert len(gpu.gemms) == 1


@on_gpu
@pytest.mark.parametrize("form", [BY_ROWS[2], BY_ENDS[0]])
def test_nothing_waits_for_the_gpu(form):
    case = contiguous("cuda")
    called(form, case)
    with no_synchronisation():
        called(form, case)
    check_groups(case)


@pytest.mark.parametrize("spare", [0, 1, 300])
@pytest.mark.parametrize("alignment", [128, 256, 384])
def test_groups_are_aligned_as_set(alignment, spare):
    deep_gemm.set_mk_alignment_for_contiguous_layout(alignment)
    for form in (BY_ROWS[2], BY_ENDS[0]):
        case = contiguous(alignment=alignment, spare=spare)
        called(form, case)
        check_groups(case)
        assert not case["d"][case["m_indices"] < 0].any()


def test_fewer_rows_than_the_alignment():
    case = contiguous(spare=0)
    a = tuple(x[:100] for x in case["a"])
    for layout_, options in (
        (case["m_indices"][:100], {}),
        (torch.tensor([100] * 5, dtype=torch.int32), {"use_psum_layout": True}),
    ):
        d = torch.full((100, N), NAN, dtype=torch.bfloat16)
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, case["b"], d, layout_, **options)
        case["d"][:100] = d
        assert_matches_reference(d, product(a, tuple(x[0] for x in case["b"])))


@pytest.mark.parametrize("options", [{}, {"use_psum_layout": True}])
def test_without_groups_all_rows_are_padding(options):
    case = contiguous()
    b = tuple(x[:0] for x in case["b"])
    rows = case["psum_m"][:0] if options else case["m_indices"].fill_(-1)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(case["a"], b, case["d"], rows, **options)
    assert not case["d"].any()


def test_groups_compile_whole():
    case = contiguous()
    multiply = torch.compile(
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous, fullgraph=True, backend="eager"
    )
    multiply(*(case[name] for name in ("a", "b", "d", "psum_m")), use_psum_layout=True)
    check_groups(case)
    assert not case["d"][case["m_indices"] < 0].any()


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
