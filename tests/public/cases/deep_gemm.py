"""`moefp8.deep_gemm`: DeepGEMM's calls, by position and by keyword."""

from typing import Any

import torch

import moefp8.deep_gemm as deep_gemm
from moefp8.quant import quantize_1x128, quantize_128x128

from . import attempt, case, layout_of, nan, randn

N, K = 200, 304
COUNTS = 100, 0, 130, 1
NOT_OFFERED = "fp8_mqa_logits", "bf16_gemm_nt", "m_grouped_fp8_fp4_mega_moe", "no_such_name"


def _operands(m: int, device: str) -> Any:
    a = deep_gemm.per_token_cast_to_fp8(randn(m, K, device=device))
    return a, quantize_128x128(randn(N, K, device=device))


def _transposed(pair: Any) -> Any:
    return pair[0].mT, pair[1].mT


@case
def dense(device: str) -> Any:
    (a, b), outputs = _operands(40, device), {}
    for form, gemm, x, w in (
        ("nt", deep_gemm.fp8_gemm_nt, a, b),
        ("nn", deep_gemm.fp8_gemm_nn, a, _transposed(b)),
        ("tn", deep_gemm.fp8_gemm_tn, _transposed(a), _transposed(b)),
        ("tt", deep_gemm.fp8_gemm_tt, _transposed(a), b),
    ):
        d, again = (nan(40, N, device=device) for _ in range(2))
        gemm(x, w, d)
        gemm(
            a=x,
            b=w,
            d=again,
            c=randn(40, N, device=device),
            recipe=None,
            recipe_a=(1, 128),
            recipe_b=(128, 128),
            compiled_dims="nk",
            disable_ue8m0_cast=True,
        )
        outputs[form] = d, again
    d = nan(40, N, device=device)
    deep_gemm.gemm_fp8_fp8_bf16_nt(lhs=a, rhs=b, out=d)
    return outputs, d


@case
def contiguous(device: str) -> Any:
    alignment = deep_gemm.get_mk_alignment_for_contiguous_layout()
    layout = layout_of(COUNTS, alignment, device)
    ends = torch.tensor([100, 128, 258, 385], dtype=torch.int32, device=device)
    m = len(layout)
    a = deep_gemm.per_token_cast_to_fp8(randn(m, K, device=device))
    b = quantize_128x128(randn(4, N, K, device=device))
    outputs = []
    for gemm, w in (
        (deep_gemm.m_grouped_fp8_gemm_nt_contiguous, b),
        (deep_gemm.m_grouped_fp8_gemm_nn_contiguous, _transposed(b)),
    ):
        several = [nan(m, N, device=device) for _ in range(4)]
        gemm(a, w, several[0], layout)
        gemm(
            a=a,
            b=w,
            d=several[1],
            grouped_layout=ends,
            recipe=(1, 128, 128),
            recipe_a=None,
            recipe_b=None,
            compiled_dims="nk",
            disable_ue8m0_cast=True,
            use_psum_layout=True,
            ensure_zero_padding=True,
            expected_m_for_psum_layout=128,
        )
        gemm(a, w, several[2], m_indices=layout)
        gemm(a, w, several[3], layout, ensure_zero_padding=False)
        outputs.append(several)
    d = nan(m, N, device=device)
    deep_gemm.m_grouped_gemm_fp8_fp8_bf16_nt_contiguous(lhs=a, rhs=b, out=d, m_indices=layout)
    return outputs, d


@case
def masked(device: str) -> Any:
    x = quantize_1x128(randn(3, 40, K, device=device))
    b = quantize_128x128(randn(3, N, K, device=device))
    masked_m = torch.tensor([7, 0, 40], dtype=torch.int32, device=device)
    outputs = [nan(3, 40, N, device=device) for _ in range(3)]
    deep_gemm.m_grouped_fp8_gemm_nt_masked(x, b, outputs[0], masked_m, 16)
    deep_gemm.fp8_m_grouped_gemm_nt_masked(
        a=x,
        b=b,
        d=outputs[1],
        masked_m=masked_m,
        expected_m=16,
        recipe=None,
        recipe_a=(1, 128),
        recipe_b=(128, 128),
        compiled_dims="nk",
        disable_ue8m0_cast=True,
    )
    deep_gemm.m_grouped_gemm_fp8_fp8_bf16_nt_masked(
        lhs=x, rhs=b, out=outputs[2], masked_m=masked_m, expected_m=16
    )
    return outputs


@case
def weight_gradients(device: str) -> Any:
    """Dense: K are tokens."""
    x, y = (randn(f, 200, device=device, dtype=torch.float32) for f in (136, 72))
    a, b = deep_gemm.per_token_cast_to_fp8(x), deep_gemm.per_token_cast_to_fp8(y)
    outputs = [torch.ones(136, 72, device=device) for _ in range(4)]
    deep_gemm.fp8_gemm_nt(a, b, outputs[0], recipe=(1, 1, 128))
    deep_gemm.fp8_gemm_nt(a, b, outputs[1], c=outputs[1], recipe=(1, 1, 128))
    deep_gemm.fp8_gemm_nt(a, b, outputs[2], recipe_a=(1, 128), recipe_b=(1, 128))
    deep_gemm.wgrad_gemm_fp8_fp8_fp32_nt(lhs=a, rhs=b, out=outputs[3])
    return outputs


@case
def expert_weight_gradients(device: str) -> Any:
    outputs: list[Any] = []
    for ks in ([256, 0, 128], [128] * 10):
        on_device = torch.tensor(ks, dtype=torch.int32, device=device)
        tokens = [randn(sum(ks), f, device=device, dtype=torch.float32) for f in (136, 72)]
        tall = [deep_gemm.per_channel_cast_to_fp8(x) for x in tokens]
        flat = [_flat(x, ks) for x in tall]
        each = [torch.ones(len(ks), 136, 72, device=device) for _ in range(5)]
        for i, gemm, (a, b) in (
            (0, deep_gemm.k_grouped_fp8_gemm_tn_contiguous, tall),
            (1, deep_gemm.k_grouped_fp8_gemm_nt_contiguous, flat),
        ):
            gemm(
                a=a,
                b=b,
                d=each[i],
                ks=ks,
                ks_tensor=on_device,
                c=each[4],
                recipe=(1, 1, 128),
                compiled_dims="mn",
                use_psum_layout=False,
            )
            gemm(a, b, each[2 + i], ks_cpu=ks, grouped_layout=on_device)
        outputs.append(each)
        lhs, rhs = ((codes, scales.T.contiguous()) for codes, scales in flat)
        d = torch.ones(len(ks), 136, 72, device=device)
        deep_gemm.k_grouped_wgrad_gemm_fp8_fp8_fp32_nt(lhs=lhs, rhs=rhs, out=d, batch_sizes=ks)
        outputs.append(d)
    return outputs


def _flat(pair: Any, ks: list[int]) -> Any:
    """The groups' [F, k] one after the other, and scales [F, S]."""
    codes, scales = pair
    groups = [x.T.reshape(-1) for x in codes.view(torch.uint8).split(ks)]
    return torch.cat(groups).view(codes.dtype), scales.T.contiguous()


@case
def casts(device: str) -> Any:
    x = randn(256, 384, device=device)
    x[:9], x[9] = 1e-5 * x[:9], 0
    odd = randn(37, 200, device=device, dtype=torch.float32)
    odd[:3], odd[:, 5] = 1e-6 * odd[:3], 0
    return [
        deep_gemm.per_token_cast_to_fp8(x=x, use_ue8m0=True, gran_k=64, use_packed_ue8m0=False),
        deep_gemm.per_token_cast_to_fp8(odd),
        deep_gemm.per_block_cast_to_fp8(x=x, use_ue8m0=True, gran_k=64),
        deep_gemm.per_block_cast_to_fp8(odd),
        deep_gemm.per_channel_cast_to_fp8(x=x, use_ue8m0=True, gran_k=128),
        deep_gemm.per_custom_dims_cast_to_fp8(x=odd, dims=(0,), use_ue8m0=True),
        deep_gemm.ceil_to_ue8m0(x=odd),
        deep_gemm.calc_diff(x=odd, y=odd.bfloat16()),
        deep_gemm.calc_diff(torch.zeros(3), torch.zeros(3)),
    ]


@case
def layouts(device: str) -> Any:
    sf = randn(9, 5, device=device, dtype=torch.float32)
    aligned = deep_gemm.get_mn_major_tma_aligned_tensor(sf=sf)
    transformed = deep_gemm.transform_sf_into_required_layout(
        sf=sf,
        mn=9,
        k=600,
        recipe=(1, 128, 128),
        num_groups=None,
        is_sfa=True,
        disable_ue8m0_cast=True,
        psum_layout=None,
    )
    by_pair = deep_gemm.transform_sf_into_required_layout(sf, 1100, 600, recipe_ab=(128, 128))
    return [
        (x, x.stride())
        for x in (
            aligned,
            deep_gemm.get_col_major_tma_aligned_tensor(x=sf),
            transformed,
            by_pair,
        )
    ], [
        deep_gemm.get_tma_aligned_size(x=9, element_size=4),
        deep_gemm.get_m_alignment_for_contiguous_layout(),
        deep_gemm.get_theoretical_mk_alignment_for_contiguous_layout(expected_m=8),
        deep_gemm.ceil_div(9, 4),
        deep_gemm.align(9, 4),
    ]


@case
def settings(device: str) -> Any:
    def current() -> list[Any]:
        return [
            attempt(lambda: deep_gemm.get_num_sms()),
            deep_gemm.get_tc_util(),
            deep_gemm.get_pdl(),
            deep_gemm.get_compile_mode(),
            deep_gemm.get_mk_alignment_for_contiguous_layout(),
        ]

    seen = [current()]
    try:
        deep_gemm.set_num_sms(num_sms=16)
        deep_gemm.set_tc_util(new_tc_util=80)
        deep_gemm.set_pdl(new_enable_pdl=True)
        deep_gemm.set_compile_mode(new_compile_mode=1)
        deep_gemm.set_ignore_compile_dims(new_value=True)
        deep_gemm.set_block_size_multiple_of(new_value=(64, 64))
        deep_gemm.set_mk_alignment_for_contiguous_layout(new_value=256)
        seen.append(current())
    finally:
        deep_gemm.set_num_sms(0)
        deep_gemm.set_tc_util(100)
        deep_gemm.set_pdl(False)
        deep_gemm.set_compile_mode(0)
        deep_gemm.set_mk_alignment_for_contiguous_layout(128)
    return [*seen, current()]


@case
def errors(device: str) -> Any:
    (a, b), d = _operands(40, device), nan(40, N, device=device)
    layout = torch.zeros(40, dtype=torch.int32, device=device)
    return [
        attempt(lambda: deep_gemm.fp8_gemm_nt(a, b, d, recipe=(1, 2, 3))),
        attempt(lambda: deep_gemm.fp8_gemm_nn(a, b, d)),
        attempt(lambda: deep_gemm.fp8_gemm_nt((a[0].view(torch.uint8), a[1]), b, d)),
        attempt(lambda: deep_gemm.fp8_gemm_nt((a[0], a[1].int()), b, d)),
        attempt(lambda: deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, layout, m_indices=d)),
        attempt(lambda: deep_gemm.per_token_cast_to_fp8(d, use_packed_ue8m0=True)),
        attempt(lambda: deep_gemm.set_tc_util(200)),
        attempt(lambda: deep_gemm.set_mk_alignment_for_contiguous_layout(100)),
        *(attempt(lambda name=x: getattr(deep_gemm, name)) for x in NOT_OFFERED),
    ]
