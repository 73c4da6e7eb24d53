"""What Hopper cannot compute, bad values, and names of DeepGEMM that are not offered."""

import pytest
import torch

import moefp8
import moefp8.deep_gemm as deep_gemm
from tests.deep_gemm.cases import called, contiguous, dense, forms
from tests.gpu import on_gpu

REFUSED = {
    "deep_gemm.fp8_gemm_nt((a[0].view(torch.int8), a[1]), b, d)": "FP4 is for Blackwell",
    "deep_gemm.fp8_fp4_gemm_nt(a, (b[0].view(torch.uint8), b[1]), d)": "b must be float8_e4m3fn",
    "deep_gemm.fp8_gemm_nt((a[0], a[1].int()), b, d)": "scales of a must be float32.*Blackwell",
    "deep_gemm.fp8_gemm_nt(a, (b[0], b[1].to(torch.float8_e8m0fnu)), d)": "scales of b.*Blackwell",
    "deep_gemm.fp8_gemm_nt(a, (b[0], b[1].double()), d)": "must be float32, got float64",
    "deep_gemm.fp8_gemm_nt(a[0], b, d)": "a must be a pair",
    "deep_gemm.fp8_gemm_nt(a, b, d, recipe=(1, 1, 128))": r"scales of b must be \[N.*\[200, 3\]",
    "deep_gemm.fp8_gemm_nt(a, b, d, recipe_a=(1, 32), recipe_b=(128, 128))": "for Blackwell",
    "deep_gemm.fp8_gemm_nt(a, b, d, recipe_a=(1, 128))": "recipe must be",
    "deep_gemm.fp8_gemm_nt(a, b, d, None, (1, 1, 128), 'nk', True)": "scales of b must be",
    "deep_gemm.fp8_gemm_nt(a, b, d, recipe=(1, 1, 32))": r"\(1, 1, 128\), for 1x128 scales of both",
    "deep_gemm.fp8_gemm_nt(a, b, d.float())": "d must be bfloat16",
    "deep_gemm.fp8_gemm_nt(a, b, d, c=c.float())": "c must have the shape and dtype of d",
    "deep_gemm.fp8_gemm_nt(a, b, d, c=c[:1])": "c must have the shape and dtype of d",
    "deep_gemm.fp8_gemm_nt(a, b, d[:1].expand(m, -1))": "d must not be expanded.*torch.empty",
    "deep_gemm.fp8_gemm_nt(a, b, d[:1].expand(m, -1), c)": "d must not be expanded",
    "deep_gemm.fp8_gemm_nt(a, b, d, c=c.to('meta'))": "must be on one device.*c on meta",
    "deep_gemm.fp8_gemm_tn((a_t[0], a_t[1][0]), b_t, d)": "a_scale_inv must have 2 dimensions",
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


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float8_e8m0fnu])
def test_the_way_out_for_scales_of_blackwell(dtype):
    data, sf = deep_gemm.per_token_cast_to_fp8(torch.randn(5, 512), use_ue8m0=True)
    b = deep_gemm.per_block_cast_to_fp8(torch.randn(8, 512))
    d, expected = torch.full((5, 8), float("nan")).bfloat16(), torch.empty(5, 8).bfloat16()
    deep_gemm.fp8_gemm_nt((data, sf), b, expected)
    sf = sf.to(torch.float8_e8m0fnu).view(dtype).T.contiguous().T  # M is contiguous, as for TMA
    with pytest.raises(TypeError, match="for Blackwell") as refused:
        deep_gemm.fp8_gemm_nt((data, sf), b, d)
    assert d.isnan().all()
    way_out = str(refused.value).rsplit(" by ", 1)[1]
    deep_gemm.fp8_gemm_nt((data, called(way_out, {"sf": sf})), b, d)
    assert torch.equal(d, expected)


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
        ("(a, b, d, m_indices, recipe=(1, 1, 128))", "which fp8_gemm_nt and k_grouped_fp8_gemm_nt"),
        ("(a, b, d[:, :1], m_indices)", "d must be"),
        ("(a, b, d[:1].expand(d.shape), m_indices)", r"d must not be expanded.*strides \[0, 1\]"),
        ("(a, b, d, psum_m - 101, use_psum_layout=True)", "in M = 788 rows, got -1 for group 0"),
        ("(a, b, d, psum_m * 2, use_psum_layout=True)", "in M = 788 rows, got 1024 for group 3"),
        ("(a, b, d, psum_m.flip(0), use_psum_layout=True)", "got 512 for group 1 after 513"),
        ("(a, b, d, psum_m.clamp(max=120), use_psum_layout=True)", "got 120 for group 1 after 100"),
    ],
)
def test_refusals_of_groups(form, message):
    case = contiguous()
    with pytest.raises((TypeError, ValueError), match=message):
        called(f"deep_gemm.m_grouped_fp8_gemm_nt_contiguous{form}", case)
    assert case["d"].isnan().all()


@pytest.mark.parametrize("name", ["nt", "nn"])
@pytest.mark.parametrize(
    ("row", "group", "message"),
    [
        (130, 5, "a group below 5, got 5 at row 130"),
        (600, -2, "a group below 5, got -2 at row 600"),
        (100, 1, "start at multiples of 128 rows, got group 1 from row 100"),
    ],
)
def test_wrong_values_of_groups_lose_nothing(name, row, group, message):
    case = contiguous()
    case["m_indices"][row] = group
    b = "b" if name == "nt" else "b_t"
    with pytest.raises(ValueError, match=message):
        called(f"deep_gemm.m_grouped_fp8_gemm_{name}_contiguous(a, {b}, d, m_indices)", case)
    assert case["d"].isnan().all()


WRITING = forms("""
deep_gemm.fp8_gemm_nt(a, b, d)
deep_gemm.fp8_gemm_nt(a, b, d, c)
deep_gemm.fp8_gemm_tt(a_t, b, d, c=c)
""")


@pytest.mark.parametrize("is_leaf", [True, False])
@pytest.mark.parametrize("form", WRITING)
def test_what_is_written_has_no_gradient(form, is_leaf):
    case = dense()
    d = case["d"].requires_grad_()
    case["d"] = d if is_leaf else d.clone()
    with pytest.raises(ValueError, match=r"fp8_gemm_\w\w: d must not require a gradient"):
        called(form, case)
    assert case["d"].isnan().all()


def test_groups_that_are_written_have_no_gradient():
    case = contiguous()
    case["d"] = case["d"].requires_grad_().clone()
    with pytest.raises(ValueError, match="d must not require a gradient"):
        called("deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, m_indices)", case)
    assert case["d"].isnan().all()


def test_an_addend_may_require_a_gradient():
    case = dense()
    called("deep_gemm.fp8_gemm_nt(a, b, d, c)", case)
    expected = case["d"].clone()
    called("deep_gemm.fp8_gemm_nt(a, b, d.zero_(), c.requires_grad_())", case)
    assert case["d"].equal(expected)


@on_gpu
def test_more_sms_than_there_are_are_refused():
    with pytest.raises(ValueError, match="SMs of the GPU, got 100000"):
        deep_gemm.set_num_sms(100_000)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("bf16_gemm_nt", "torch.matmul"),
        ("m_grouped_bf16_gemm_nt_contiguous", "torch.matmul"),
        ("k_grouped_bf16_gemm_tn_contiguous", "torch.matmul"),
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
        (
            "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor",
            "Hopper takes FP32 scales",
        ),
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
    assert moefp8.deep_gemm is deep_gemm
    kept = "fp8_gemm_nt m_grouped_fp8_gemm_nt_contiguous m_grouped_fp8_gemm_nt_masked "
    kept += "get_mk_alignment_for_contiguous_layout set_num_sms get_num_sms ceil_div"
    for name in deep_gemm.__all__:
        assert getattr(deep_gemm, name).__doc__ or name in ("align", "ceil_div"), name
        assert name in kept.split() or not hasattr(moefp8.kernels, name), name
