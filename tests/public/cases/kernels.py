"""`moefp8.kernels`: GEMMs of tensors, and helpers of their layouts."""

from typing import Any

import torch

from moefp8 import kernels
from moefp8.quant import quantize_1x128, quantize_128x128

from . import attempt, case, layout_of, nan, randn


def _pair(rows: int, n: int, k: int, device: str) -> Any:
    a = quantize_1x128(randn(rows, k, device=device))
    return a, quantize_128x128(randn(n, k, device=device))


@case
def dense(device: str) -> Any:
    outputs = {}
    for m, n, k in ((1, 8, 128), (40, 300, 512), (130, 200, 304), (0, 8, 16), (3, 5, 7)):
        a, b = _pair(m, n, k, device)
        d, again = nan(m, n, device=device), nan(m, n, device=device)
        kernels.fp8_gemm_nt(a, b, d)
        bias = randn(n, device=device)
        kernels.fp8_gemm_nt(
            a=a,
            b=b,
            d=again,
            c=None,
            recipe=(1, 128, 128),
            compiled_dims="nk",
            disable_ue8m0_cast=True,
            bias=bias,
            batch_invariant=True,
        )
        outputs[m, n, k] = d, again
    return outputs


@case
def contiguous(device: str) -> Any:
    counts, alignment = (100, 0, 130, 1), kernels.get_mk_alignment_for_contiguous_layout()
    a, (n, k) = quantize_1x128(randn(512, 304, device=device)), (200, 304)
    b, layout = (
        quantize_128x128(randn(4, n, k, device=device)),
        layout_of(counts, alignment, device),
    )
    outputs = [nan(512, n, device=device) for _ in range(2)]
    kernels.m_grouped_fp8_gemm_nt_contiguous(a, b, outputs[0], layout)
    kernels.m_grouped_fp8_gemm_nt_contiguous(
        a=a,
        b=b,
        d=outputs[1],
        grouped_layout=layout,
        recipe=(1, 128, 128),
        compiled_dims="nk",
        disable_ue8m0_cast=True,
    )
    offsets = torch.tensor([0, 100, 100, 230, 231], dtype=torch.int32, device=device)
    packed = quantize_1x128(randn(231, k, device=device))
    outputs.append(nan(231, n, device=device))
    kernels.m_grouped_fp8_gemm_nt_contiguous(packed, b, outputs[2], expert_offsets=offsets)
    return outputs


@case
def group_bias(device: str) -> Any:
    a, b = randn(158, 200, device=device), randn(2, 136, 200, device=device)
    a, b = quantize_1x128(a), quantize_128x128(b)
    d, bias = nan(158, 136, device=device), randn(2, 136, device=device)
    offsets = torch.tensor([0, 5, 158], dtype=torch.int32, device=device)
    kernels.m_grouped_fp8_gemm_nt_contiguous(a, b, d, expert_offsets=offsets, bias=bias)
    return d


@case
def padding(device: str) -> Any:
    x = quantize_1x128(randn(158, 200, device=device))
    b = quantize_128x128(randn(2, 136, 200, device=device))
    groups = torch.tensor([0] * 5 + [-1] * 123 + [1] * 30, dtype=torch.int32, device=device)
    d = nan(158, 136, device=device)
    kernels.m_grouped_fp8_gemm_nt_contiguous(x, b, d, groups, zero_padding=True)
    return d


@case
def masked(device: str) -> Any:
    b = quantize_128x128(randn(3, 136, 200, device=device))
    x = quantize_1x128(randn(3, 40, 200, device=device))
    masked_m = torch.tensor([7, 0, 40], dtype=torch.int32, device=device)
    outputs = [nan(3, 40, 136, device=device) for _ in range(2)]
    kernels.m_grouped_fp8_gemm_nt_masked(x, b, outputs[0], masked_m, 16)
    kernels.m_grouped_fp8_gemm_nt_masked(
        a=x,
        b=b,
        d=outputs[1],
        masked_m=masked_m,
        expected_m=16,
        recipe=(1, 128, 128),
        compiled_dims="nk",
        disable_ue8m0_cast=True,
    )
    return outputs


@case
def layouts(device: str) -> Any:
    scales = randn(9, 5, device=device, dtype=torch.float32)
    aligned = kernels.tma_aligned(scale_inv=scales)
    empty = kernels.empty_tma_aligned(shape=[2, 9, 5], device=torch.device(device))
    codes = torch.arange(256, device=device).to(torch.uint8).view(kernels.E4M3)
    return [
        (aligned, aligned.stride(), empty.shape, empty.stride()),
        kernels.e4m3_to_float(x=codes),
        (kernels.BLOCK, kernels.E4M3, kernels.num_blocks(size=129)),
        (kernels.ceil_div(x=9, y=4), kernels.round_up(x=9, multiple=4)),
    ]


@case
def sm_limit(device: str) -> Any:
    a, b = _pair(40, 300, 512, device)
    limits, d = [attempt(lambda: kernels.get_num_sms())], nan(40, 300, device=device)
    kernels.set_num_sms(num_sms=8)
    try:
        limits.append(kernels.get_num_sms())
        kernels.fp8_gemm_nt(a, b, d)
    finally:
        kernels.set_num_sms(None)
    return limits, attempt(lambda: kernels.get_num_sms()), d


@case
def errors(device: str) -> Any:
    a, b = _pair(4, 8, 128, device)
    d = nan(4, 8, device=device)
    layout = torch.zeros(4, dtype=torch.int32, device=device)
    return [
        attempt(lambda: kernels.fp8_gemm_nt(a, b, d[:3])),
        attempt(lambda: kernels.fp8_gemm_nt(a, b, d.float())),
        attempt(lambda: kernels.fp8_gemm_nt(a, b, d, c=d)),
        attempt(lambda: kernels.fp8_gemm_nt(a, b, d, recipe=(1, 1, 128))),
        attempt(lambda: kernels.fp8_gemm_nt((a[0], a[1][:2]), b, d)),
        attempt(lambda: kernels.m_grouped_fp8_gemm_nt_contiguous(a, b, d, layout)),
        attempt(lambda: kernels.m_grouped_fp8_gemm_nt_masked(a, b, d, layout, 4)),
        attempt(lambda: kernels.set_num_sms(0)),
    ]
