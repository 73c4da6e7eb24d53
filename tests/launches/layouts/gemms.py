"""GEMMs alone: dense, grouped, those of weight gradients, and DeepGEMM's functions."""

import torch

from moefp8 import deep_gemm
from moefp8.kernels import E4M3, ceil_div, num_blocks
from tests.launches.layouts.draw import (
    ACTIVATION_SCALES,
    ALIGNED,
    BF16,
    DTYPES,
    FP32,
    INT32,
    LINEARS,
    MOSTLY,
    ROWS,
    Draw,
    layouts,
)

ops = torch.ops.moefp8
BIASES = None, None, *DTYPES
GROUPS = 1, 2, 4, 8, 32, 64, 128, 256


def sizes(draw: Draw) -> tuple[int, int, int]:
    """M, N, K."""
    n, k = draw.among(LINEARS, "N,K")
    return draw.tokens(), n, k


def activations(draw: Draw, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    *rows, k = shape
    a = draw.tensor("a", shape, E4M3, ROWS)
    return a, draw.scales("a_scale_inv", [*rows, num_blocks(k)], ACTIVATION_SCALES)


@layouts("gemm", 140)
def dense(draw: Draw):
    m, n, k = sizes(draw)
    a, b = activations(draw, m, k), draw.weight("b", n, k, places=ROWS)
    d, bias = draw.tensor("d", (m, n), BF16, ROWS), draw.among(BIASES, "bias")
    added = None if bias is None else draw.tensor("bias", (n,), bias)
    alone = draw.flag("batch_invariant", 5)
    return lambda: ops.fp8_gemm_nt(*a, *b, d, added, alone)


@layouts("grouped", 120)
def contiguous(draw: Draw):
    (m, n, k), groups = sizes(draw), draw.among(GROUPS, "G")
    a, b = activations(draw, m, k), draw.weight("b", groups, n, k, places=ROWS)
    d, zeroes = draw.tensor("d", (m, n), BF16, ROWS), draw.flag("zero_padding", 6)
    layout = offsets = None
    if draw.flag("by rows", 3):
        layout = draw.tensor("grouped_layout", (m,), INT32)
    else:
        offsets = draw.tensor("expert_offsets", (groups + 1,), INT32)
    return lambda: ops.m_grouped_fp8_gemm_nt_contiguous(*a, *b, d, layout, offsets, zeroes)


@layouts("masked", 60)
def masked(draw: Draw):
    (m, n, k), groups = sizes(draw), draw.among(GROUPS, "G")
    a, b = activations(draw, groups, m, k), draw.weight("b", groups, n, k, places=ROWS)
    d = draw.tensor("d", (groups, m, n), BF16, ROWS)
    counts = draw.tensor("masked_m", (groups,), INT32)
    expected = draw.among((1, 16, 100, 700, 5000), "expected_m")
    return lambda: ops.m_grouped_fp8_gemm_nt_masked(*a, *b, d, counts, expected)


@layouts("k_grouped", 110)
def weight_gradient(draw: Draw):
    tokens, m, n = sizes(draw)
    groups = draw.among((None, 1, 2, 4, 8, 64, 128, 256), "E")
    blocks = ceil_div(tokens, 128) if groups is None else tokens // 128 + groups
    by_blocks = draw.flag("blocks")
    columns = []
    for name, features in (("a", m), ("b", n)):
        data = draw.tensor(name, (blocks, features, 128), E4M3, ALIGNED)
        num_scales = num_blocks(features) if by_blocks and name == "b" else features
        places = *MOSTLY, "wide", "odd pitch"
        columns += [data, draw.scales(f"{name}_scale_inv", (blocks, num_scales), places)]
    accumulates = draw.flag("accumulates", 3)
    dtype = FP32 if accumulates else draw.among((BF16, FP32), "d")
    shape = (m, n) if groups is None else (groups, m, n)
    d = draw.tensor("d", shape, dtype, ROWS)
    offsets = None if groups is None else draw.tensor("expert_offsets", (groups + 1,), INT32)
    return lambda: ops.k_grouped_gemm(*columns, d, offsets, tokens, accumulates)


# ---- DeepGEMM's functions ----


def turned(pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return pair[0].mT, pair[1].mT


@layouts("deep_gemm.dense", 40)
def deep_gemm_dense(draw: Draw):
    m, n, k = sizes(draw)
    form = draw.among(("nt", "nn", "tn", "tt"), "form")
    a, b = activations(draw, m, k), draw.weight("b", n, k, places=ALIGNED)
    a = turned(a) if form[0] == "t" else a
    b = turned(b) if form[1] == "n" else b
    d = draw.tensor("d", (m, n), BF16)
    c = draw.tensor("c", (m, n), BF16) if draw.flag("c", 3) else None
    gemm = getattr(deep_gemm, f"fp8_gemm_{form}")
    return lambda: gemm(a, b, d, c)


@layouts("deep_gemm.grouped", 40)
def deep_gemm_grouped(draw: Draw):
    (m, n, k), groups = sizes(draw), draw.among(GROUPS, "G")
    form, psum = draw.among(("nt", "nn"), "form"), draw.flag("psum")
    a, b = activations(draw, m, k), draw.weight("b", groups, n, k, places=ALIGNED)
    layout = draw.tensor("grouped_layout", (groups if psum else m,), INT32)
    b = turned(b) if form == "nn" else b
    d, zeroes = draw.tensor("d", (m, n), BF16), draw.flag("zeroes")
    gemm = getattr(deep_gemm, f"m_grouped_fp8_gemm_{form}_contiguous")
    return lambda: gemm(a, b, d, layout, use_psum_layout=psum, ensure_zero_padding=zeroes)


@layouts("deep_gemm.masked", 10)
def deep_gemm_masked(draw: Draw):
    (m, n, k), groups = sizes(draw), draw.among(GROUPS, "G")
    a, b = activations(draw, groups, m, k), draw.weight("b", groups, n, k, places=ALIGNED)
    d = draw.tensor("d", (groups, m, n), BF16)
    counts = draw.tensor("masked_m", (groups,), INT32)
    return lambda: deep_gemm.m_grouped_fp8_gemm_nt_masked(a, b, d, counts, max(1, m // 2))


@layouts("deep_gemm.gradient", 20)
def deep_gemm_gradient(draw: Draw):
    k, m, n = sizes(draw)
    dtype = draw.among((FP32, BF16), "d")
    pairs = [
        (
            draw.tensor(name, (features, k), E4M3, ALIGNED),
            draw.scales(f"{name}_scale_inv", (features, num_blocks(k)), ACTIVATION_SCALES),
        )
        for name, features in (("a", m), ("b", n))
    ]
    d = draw.tensor("d", (m, n), dtype)
    c = draw.tensor("c", (m, n), FP32) if dtype == FP32 and draw.flag("c") else None
    return lambda: deep_gemm.fp8_gemm_nt(*pairs, d, c, recipe=(1, 1, 128))


@layouts("deep_gemm.k_grouped", 30)
def deep_gemm_k_grouped(draw: Draw):
    m, n = draw.among([x for x in LINEARS if max(x) < 20000], "M,N")
    groups, form = draw.among((1, 3, 8, 20, 64), "G"), draw.among(("nt", "tn"), "form")
    ks = [128 * draw.up_to(6) for _ in range(groups)]
    draw.note(f"ks={ks}")
    total, c, pairs = sum(ks), None, []
    for name, features in (("a", m), ("b", n)):
        if form == "nt":
            data = draw.tensor(name, (features * total,), E4M3)
            scales = draw.scales(f"{name}_scale_inv", (features, total // 128), ACTIVATION_SCALES)
        else:
            data = draw.tensor(name, (total, features), E4M3, ("own", "turned"))
            scales = draw.scales(f"{name}_scale_inv", (total // 128, features))
        pairs.append((data, scales))
    d, on_device = draw.tensor("d", (groups, m, n), FP32), draw.tensor("ks", (groups,), INT32)
    if draw.flag("c"):
        c = draw.tensor("c", (groups, m, n), FP32)
    gemm = getattr(deep_gemm, f"k_grouped_fp8_gemm_{form}_contiguous")
    return lambda: gemm(*pairs, d, ks, on_device, c)
