"""Small launches of every family of kernels, for NVIDIA's compute-sanitizer: `make sanitize`.

It uses no pytest, and no torch operation that it can do without: under the sanitizer each one costs
seconds.
"""

import itertools
import math
from collections.abc import Sequence
from functools import partial
from itertools import product
from unittest import mock

import torch

from moefp8.functional.experts import experts, experts_saving
from moefp8.functional.experts_backward import experts_backward
from moefp8.functional.feed_forward import feed_forward_saving
from moefp8.functional.feed_forward_backward import feed_forward_backward
from moefp8.functional.linear import fp8_linear, fp8_linear_backward
from moefp8.functional.swiglu import empty_gate_up
from moefp8.functional.swiglu_rows import swiglu_rows, swiglu_rows_backward
from moefp8.kernels import empty_tma_aligned, jit, num_blocks, set_num_sms
from moefp8.kernels.gemm import segments
from moefp8.kernels.gemm.config import GemmConfig, GroupLayout
from moefp8.kernels.gemm.k_grouped import k_grouped_gemm
from moefp8.kernels.gemm.operands import Operands
from moefp8.quant.both import quantize_128x128_both
from moefp8.quant.columns import first_block, quantize_1x128_and_128x1, quantize_128x1
from moefp8.quant.quantize import launch_quantize_1x128, launch_quantize_128x128
from moefp8.quant.transpose import transpose_codes
from moefp8.routing import build_plan, sigmoid_group_topk, softmax_topk
from moefp8.routing.route import route
from tests.functional import swiglu_cases
from tests.functional.cases import EXPERTS_FAMILIES
from tests.functional.training import swiglu_columns_cases
from tests.kernels.gemm.cases import choosing, filled
from tests.kernels.gemm.grouped_cases import (
    UNTOUCHED,
    Routing,
    dense,
    launch,
    routing_of,
    taking_tiles,
)
from tests.quant.columns_cases import blocks_of, offsets_of
from tests.routing.cases import check_dispatch, ids_of, plan_of, run_combine, run_dispatch

FAMILIES = {
    "tokens are rows": filled(128, 128),
    "three math groups": filled(192, 112),
    "uneven columns": filled(128, 176),
    "two parts": filled(128, 256, parts=2),
    "two parts, halves": filled(128, 256, parts=2, halves_tiles=True),
    "two parts, three pieces, halves": filled(128, 224, parts=2, halves_tiles=True),
    "split": filled(128, 192, split_k=3),
    "two CTAs on an SM": filled(64, 64, ctas_per_sm=2),
    "one math group, deep": filled(64, 24, k_blocks_per_stage=2),
    "one math group, deep and split": filled(64, 32, k_blocks_per_stage=4, split_k=2),
    "two buffers": filled(128, 128, num_product_buffers=2),
    "two buffers, parts of a stage": filled(128, 192, parts=2, num_product_buffers=2),
    "two buffers, parts of a stage, halves": filled(
        128, 192, parts=2, num_product_buffers=2, halves_tiles=True
    ),
    "two buffers, deep": filled(64, 48, k_blocks_per_stage=2, num_product_buffers=2),
    "two buffers, split": filled(128, 64, split_k=2, num_product_buffers=2),
    "two buffers, narrow": filled(128, 32, k_blocks_per_stage=2, num_product_buffers=2),
    "two buffers, two stages": GemmConfig(64, 64, 2, ctas_per_sm=2, num_product_buffers=2),
    "four pieces": filled(128, 120),
    "three pieces, two buffers": filled(128, 112, num_product_buffers=2),
    "weights are rows": filled(64, 8, ctas_per_sm=2, swap_ab=True),
    "weights are rows, split": filled(64, 16, split_k=4, ctas_per_sm=2, swap_ab=True),
    "weights are rows, two math groups": filled(128, 64, split_k=2, swap_ab=True),
    "weights are rows, two pieces": filled(192, 24, swap_ab=True),
    "weights are rows, deep": filled(
        64, 16, k_blocks_per_stage=4, split_k=4, ctas_per_sm=2, swap_ab=True
    ),
}
_grouped = partial(filled, grouped=True)
GROUPED_FAMILIES = {
    "two buffers": _grouped(128, 128, num_product_buffers=2),
    "three math groups": _grouped(192, 112),
    "two parts": _grouped(128, 256, parts=2),
    "two CTAs on an SM": _grouped(64, 64, ctas_per_sm=2),
    "two buffers, parts of a stage": _grouped(128, 192, parts=2, num_product_buffers=2),
    "multicast": _grouped(128, 128, multicast=2),
    "two buffers, multicast": _grouped(128, 128, multicast=2, num_product_buffers=2),
    "three math groups, multicast": _grouped(192, 128, multicast=2),
    "weights are rows": _grouped(64, 8, swap_ab=True),
    "weights are rows, two math groups": _grouped(128, 64, swap_ab=True),
    "weights are rows, deep": _grouped(64, 16, k_blocks_per_stage=2, swap_ab=True),
    "weights are rows, two pieces": _grouped(192, 24, swap_ab=True),
}
# The tokens of each group, of few groups and of more than a warp has lanes.
COUNTS = (0, 77, 1, 0, 130, 5), (*[0] * 33, 9, 0, 260, 1)


def shapes_of(config: GemmConfig) -> list[tuple[int, int, int]]:
    """(M, N, K) that this configuration may be chosen for, odd in every way.

    In the first a pipeline is not even full; in the second each of its stages is filled again.
    """
    k = 128 * max(3, config.split_k * config.k_blocks_per_stage) + 40
    rounds = 128 * config.k_blocks_per_stage * config.split_k * (config.stages + 2) + 40
    return [(77, 200, k), (130, 331, rounds)]


def main() -> None:
    torch.manual_seed(0)
    run_families()
    run_segments()
    run_weight_gradients()
    run_experts_families()
    run_swiglu_backward()
    run_swiglu_columns()
    run_swiglu()
    run_feed_forward()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = torch.ones(9, 296, dtype=dtype, device="cuda")
        launch_quantize_1x128(x, False)
        launch_quantize_1x128(x[:, 1:], True)
        launch_quantize_128x128(x, False)
        weight = launch_quantize_128x128(torch.ones(136, 296, device="cuda"), False)
        fp8_linear(x, *weight, None)
        fp8_linear_backward(x[:, :136], *weight, False)
        print(f"quantize and linear, {dtype}", flush=True)
        run_top_k(dtype)
    run_transpose()
    run_both()
    run_columns()
    run_route()
    for num_tokens, top_k, hidden_size, num_sms in (
        (3, 2, 200, 132), (200, 3, 1160, 5),
        (2731, 3, 136, 50),  # a kernel before counts the choices
    ):  # fmt: skip
        # As if the GPU had no more SMs: then the chunks of tokens are long.
        few = mock.patch.object(jit.Driver, "num_sms", lambda driver, device_index, n=num_sms: n)
        with jit.using(jit.Driver()), few:
            for kind in ("out of range", "one expert", "nowhere"):
                run_routing(kind, num_tokens, top_k, hidden_size)
    torch.cuda.synchronize()


def tell(what: str, wrong: int) -> None:
    print(f"{what}: {wrong} wrong", flush=True)
    if wrong:
        raise SystemExit(1)


def ones(*shape: int) -> torch.Tensor:
    codes = torch.full(shape, 0x38, dtype=torch.uint8, device="cuda")
    return codes.view(torch.float8_e4m3fn)


def run_top_k(dtype: torch.dtype) -> None:
    """All logits are 0, so the first experts are chosen, in groups of several sizes too."""
    for num_experts, k, num_groups in ((7, 3, 7), (160, 6, 8), (256, 8, 1), (512, 40, 64)):
        logits = torch.zeros(9, num_experts + 1, dtype=dtype, device="cuda")[:, 1:]
        bias = torch.zeros(num_experts, device="cuda")
        groups = num_groups, (num_groups + 1) // 2
        index = sigmoid_group_topk(logits, bias, k, *groups, True, 2.5)[0].cpu()
        wrong = int((index != torch.arange(k)).sum())
        index = softmax_topk(logits, k, True)[0].cpu()
        wrong += int((index != torch.arange(k)).sum())
        tell(f"top-k of {num_experts}, {dtype}", wrong)


def run_transpose() -> None:
    """All codes are 1.0, so that what lies behind a row or a part is seen at once."""
    for n, k, parts in ((100, 144, 2), (264, 72, 1), (6, 16, 2), (331, 400, 1)):
        found = transpose_codes(ones(2, n, k), parts).view(torch.uint8).cpu()
        width, rows = found.shape[-1] // parts, n // parts
        is_row = torch.arange(parts * width) % width < rows
        expected = torch.where(is_row, 0x38, 0).expand(2, k, -1)
        tell(f"transpose, {n}x{k} in {parts}", int((found != expected).sum()))


def run_both() -> None:
    """All weights are 448, of which scales are 1 and codes 0x7e."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for n, k, parts in ((100, 144, 2), (264, 72, 1), (6, 16, 2), (331, 400, 1), (10, 9, 2)):
            w = torch.full((2, n, k), 448, dtype=dtype, device="cuda")
            found = quantize_128x128_both(w, parts)
            width, rows = found.transposed.shape[-1] // parts, n // parts
            is_row = torch.arange(parts * width) % width < rows
            expected = torch.where(is_row, 0x7E, 0).expand(2, k, -1)
            wrong = int((found.transposed.view(torch.uint8).cpu() != expected).sum())
            wrong += int((found.data.view(torch.uint8).cpu() != 0x7E).sum())
            wrong += int((found.scale_inv.cpu() != 1).sum())
            tell(f"both, {dtype}, {n}x{k} in {parts}", wrong)


def run_columns() -> None:
    """All numbers are 448, of which scales are 1 and codes 0x7e; experts have 0, 131 and 9 rows."""
    edges = [0, 0, 131, 140]
    offsets = torch.tensor(edges, dtype=torch.int32, device="cuda")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for k, blocks in itertools.product((136, 9), (False, True)):
            x = torch.full((140, k), 448, dtype=dtype, device="cuda")
            tokens = torch.arange(139, -1, -1, dtype=torch.int32, device="cuda")
            row_data, row_scales, *found = quantize_1x128_and_128x1(x, offsets, False, 1e-4, blocks)
            wrong = int((row_data.view(torch.uint8).cpu() != 0x7E).sum())
            wrong += int((row_scales.cpu() != 1).sum())
            for data, scales in (found, quantize_128x1(x, offsets, tokens, False, 1e-4, blocks)):
                codes, scale_inv = data.view(torch.uint8).cpu(), scales.cpu()
                first = first_block(0, 1)
                counts = {first: 128, first + 1: 3, first_block(131, 2): 9}
                for block, count in counts.items():
                    whole = torch.where(torch.arange(-(-count // 32) * 32) < count, 0x7E, 0)
                    wrong += int((codes[block, :, : len(whole)] != whole).sum())
                    wrong += int((scale_inv[block] != 1).sum())
            tell(f"columns, {dtype}, {k}, blocks {blocks}", wrong)


def run_route() -> None:
    """Tokens are the same, so all choose what a single one chooses; sizes divide no tile."""
    for num_experts, h, counts in ((130, 1160, (1, 70, 300)), (72, 520, (9, 2000))):
        x = torch.randn(1, h, device="cuda").bfloat16()
        weight = torch.randn(num_experts, h, device="cuda") / h**0.5
        expected = (x.double() @ weight.double().T).topk(5).indices.cpu()
        for num_tokens in counts:
            rows = x.repeat(num_tokens, 1)
            index = route(rows, weight, None, 5, False, 1, 1, True, 1.0).top_k_index.cpu()
            tell(f"route, {num_tokens} tokens, {num_experts}", int((index != expected).sum()))


def run_routing(kind: str, num_tokens: int, top_k: int, hidden_size: int) -> None:
    """Check plan, dispatch and combine."""
    x = torch.ones(num_tokens, hidden_size, dtype=torch.bfloat16, device="cuda")
    ids = ids_of(kind, num_tokens, top_k, 9).cuda()
    weights = torch.ones(num_tokens, top_k, device="cuda")
    for max_m in (None, num_tokens):
        if max_m:
            build_plan(ids, 9, "masked")
        else:
            build_plan(ids, 9, alignment=4)
        check_dispatch(run_dispatch(x, ids, 9, max_m), x, ids, 9, max_m)
        plan = plan_of(ids, 9, max_m)
        y = torch.ones(len(plan.row_to_token), hidden_size, dtype=torch.bfloat16, device="cuda")
        expected, wrong = (plan.token_to_row >= 0).sum(1, keepdim=True), 0
        unaligned = torch.ones(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view_as(x)
        for addend in (None, x, unaligned):
            out = run_combine(y, hidden_size, plan, weights, addend=addend).cpu()
            wrong += int((out != expected + (addend is not None)).sum())
        tell(f"routing, {kind}, {num_tokens} tokens", wrong)


def run_families() -> None:
    """Dense and grouped GEMMs. On one SM, one cluster walks over all tiles."""
    for name, config in FAMILIES.items():
        with choosing(config):
            shapes = shapes_of(config)
            for m, n, k in shapes:
                run_gemm(name, dense(m), n, k)
            if config.split_k == 1:
                run_gemm(name, dense(m), n, k, 1)
            if config.halves_tiles:  # one tile is left for three SMs
                run_gemm(f"{name}, halved", dense(m), n, k, 3)
    for name, config in GROUPED_FAMILIES.items():
        with choosing(config):
            for (_, n, k), counts, limit in zip(shapes_of(config), COUNTS, (None, 1), strict=True):
                for layout in GroupLayout:
                    run_gemm(name, routing_of(layout, counts), n, k, limit)
            with taking_tiles(True):  # several clusters take many tiles
                for layout in (GroupLayout.MASKED, GroupLayout.SEGMENTS):
                    run_gemm(f"{name}, in turn", routing_of(layout, COUNTS[1]), 712, k, 6)
    for layout in GroupLayout:
        run_broken_bounds(layout)


def run_segments() -> None:
    """Two blocks of rows for each group, and more blocks than the CTA takes at once."""
    num_rows = 128 * 2100 - 50
    rows = torch.arange(num_rows, dtype=torch.int32).div(256, rounding_mode="floor").int()
    found = torch.full((segments.list_bytes(num_rows) // 16, 4), -1, dtype=torch.int32).cuda()
    sources, group_of_row = (jit.Source(0), jit.Source(1)), rows.cuda()
    launch = segments.prepare_segments(num_rows, 2000, 0, *sources, programmatic=False)
    launch.on(0, (group_of_row.data_ptr(), found.data_ptr()))
    begin = 256 * torch.arange(1050, dtype=torch.int32)
    zero, end = torch.zeros_like(begin), (begin + 256).clamp(max=num_rows)
    of_each = torch.stack([begin, end, torch.arange(1050, dtype=torch.int32), zero], 1)
    expected = torch.zeros_like(found, device="cpu")
    expected[0, 0], expected[1:1051] = 1050, of_each
    tell("segments", int((found.cpu() != expected).sum()))


def run_weight_gradients() -> None:
    """Tiles leave through shared memory and from registers; offsets may be anything."""
    for dtype, accumulates in (
        (torch.bfloat16, False),
        (torch.float32, False),
        (torch.float32, True),
    ):
        for blocks_b in (False, True):
            for n, limit in ((264, None), (264, 1), (331, None), (130, 1)):
                set_num_sms(limit)
                for counts in COUNTS:
                    run_weight_gradient(counts, 300, n, dtype, accumulates, blocks_b)
                set_num_sms(None)
            run_weight_gradient((600,) * 3, 600, 520, dtype, accumulates, blocks_b, broken=True)


def run_weight_gradient(
    counts: Sequence[int],
    m: int,
    n: int,
    dtype: torch.dtype,
    accumulates: bool,
    blocks_b: bool,
    broken: bool = False,
) -> None:
    """All codes of tokens are 1, and products of scales, too. What no token has is NaN.

    It begins where an expert's zeros end, at a multiple of 32.
    """
    expert_offsets, num_experts = offsets_of(counts), len(counts)
    num_of_blocks = sum(counts) // 128 + num_experts
    a = torch.full((num_of_blocks, 1, 128), 0x7F, dtype=torch.uint8)
    a_scale_inv = torch.full((num_of_blocks, 1), math.nan)
    for index, _, count in blocks_of(expert_offsets, sum(counts)):
        a[index, :, : -(-count // 32) * 32] = 0
        a[index, :, :count], a_scale_inv[index] = 0x38, 0.5
    codes = a.cuda().view(torch.float8_e4m3fn)
    sides = codes.expand(-1, m, -1).contiguous(), codes.expand(-1, n, -1).contiguous()
    a_scale_inv = a_scale_inv.expand(-1, m).contiguous().cuda()
    b_scale_inv = torch.full((num_of_blocks, num_blocks(n) if blocks_b else n), 2.0, device="cuda")
    d = torch.full((num_experts, m, n), UNTOUCHED, dtype=dtype, device="cuda")
    if broken:
        expert_offsets[1], expert_offsets[2] = 2**31 - 1, -(2**31)
    given = expert_offsets.cuda()
    k_grouped_gemm(sides[0], a_scale_inv, sides[1], b_scale_inv, d, given, 0, accumulates)
    told = f"weight gradients of {num_experts}, {m}x{n}, {dtype}{', added' * accumulates}"
    told += ", blocks" * blocks_b
    if broken:
        print(f"{told}, broken offsets", flush=True)
        return
    expected = torch.tensor(counts)[:, None, None] + (UNTOUCHED if accumulates else 0.0)
    tell(told, int((d.cpu() != expected.to(dtype)).sum()))


def run_gemm(name: str, routing: Routing, n: int, k: int, limit: int | None = None) -> None:
    """All operands are 1, so that zeros, or what lies beyond a box, are seen at once.

    Tokens of no group are NaN, and stay unwritten. limit: how many SMs may be used.
    """
    k_blocks, rows, groups = num_blocks(k), routing.rows_of_a(), routing.matrices_of_b()
    is_of_group, bias = routing.is_of_group()[..., None], None if routing.layout else 8.0
    a = torch.where(is_of_group.cuda(), ones(*rows, k).view(torch.uint8), 0x7F)
    a_scale_inv = empty_tma_aligned([*rows, k_blocks], a.device).fill_(0.5)
    b_scale_inv = torch.full((*groups, num_blocks(n), k_blocks), 2.0, device="cuda")
    d = torch.full((*rows, n), UNTOUCHED, dtype=torch.bfloat16, device="cuda")
    made = Operands(a.view(torch.float8_e4m3fn), a_scale_inv, ones(*groups, n, k), b_scale_inv, d)
    set_num_sms(limit)
    added = None if bias is None else torch.full((n,), bias, device="cuda")
    launch(routing, made, expected_m=64, bias=added)
    set_num_sms(None)
    expected = torch.where(is_of_group, k + (bias or 0.0), UNTOUCHED).bfloat16()
    layout = routing.layout.name if routing.layout else "dense"
    what = (
        f"{layout}, {name}, {routing.num_tokens}x{n}x{k}{f', {limit} SMs at most' if limit else ''}"
    )
    tell(what, int((d.cpu() != expected).sum()))


def run_experts_families() -> None:
    for name, (gate_up, down) in EXPERTS_FAMILIES.items():
        # On one SM one cluster takes all tiles; it asks for the next one on its way along K.
        long = (77, 1664, 144, 1) if gate_up else (77, 200, 1152, 1)
        shapes = [(5, 200, 144, None), (77, 264, 400, 1), long]
        if (gate_up or down).tail:
            shapes.append((230, 264, 400, None))  # 138 of each expert
        with choosing(down, gate_up):
            for num_tokens, h, i, limit in shapes:
                set_num_sms(limit)
                told = f"experts, {name}, {num_tokens} tokens", num_tokens, h, i
                for masked in (False, True):
                    run_experts(*told, masked)
                if gate_up:
                    run_experts_backward(*told)
                set_num_sms(None)
    run_experts("experts, few choices", 3, 264, 400, False)
    run_experts("experts, counted", 2731, 136, 144, False)
    for num_tokens in (77, 2731):
        for masked in (False, True):
            name = f"experts of a rank, {num_tokens} tokens"
            run_experts(name, num_tokens, 136, 144, masked, first=2, num_global=9)
    for num_tokens, h, i, limit in (
        (3, 264, 400, None),
        (2731, 100, 36, None),
        (300, 1664, 144, 1),
    ):
        set_num_sms(limit)
        run_experts_backward(f"experts, {num_tokens} tokens", num_tokens, h, i, fp8=True)
        set_num_sms(None)
    run_experts_backward("experts of a rank", 77, 136, 144, first=2, num_global=9)


def run_experts(
    name: str, num_tokens: int, h: int, i: int, masked: bool, first: int = 0, num_global: int = 4
) -> None:
    """Gate and up are 1, so every choice that is held here gives its top_k_weight times silu(1).

    The addend is 1 where H is 264; else there is none.
    """
    x, ids, is_here = tokens_of_ones(num_tokens, h, first, num_global)
    adds = h == 264
    options = 100.0, masked, first, num_global, x if adds else None
    top_k_weights = torch.ones(num_tokens, 3, device="cuda")
    y = experts(x, ids, top_k_weights, *weights_of_ones(h, i), *options)
    expected = SILU * is_here.sum(1, keepdim=True) + adds
    tell(f"{name}{', masked' if masked else ''}", num_far(y, expected))


def run_experts_backward(
    name: str,
    num_tokens: int,
    h: int,
    i: int,
    fp8: bool = False,
    first: int = 0,
    num_global: int = 4,
) -> None:
    """The gradient of the result is 1 as well; so that of `a` is H / I, and weights are 1 / H."""
    x, ids, is_here = tokens_of_ones(num_tokens, h, first, num_global)
    weights, scales = weights_of_ones(h, i), None
    top_k_weights = torch.ones(num_tokens, 3, device="cuda")
    rank = first, num_global
    y, gate_up = experts_saving(x, ids, top_k_weights, *weights, 100.0, False, *rank, None)
    num_rows = int(is_here.sum())
    num_choices, row = is_here.sum(1, keepdim=True), gate_up[:num_rows].flatten(0, 1)
    wrong = num_far(y, SILU * num_choices) + num_far(row, torch.ones(()))
    if fp8:
        gate_up, scales = launch_quantize_1x128(gate_up.flatten(0, 1), False)
    saved = gate_up, scales
    found = experts_backward(x, ids, top_k_weights, *saved, *weights, 100.0, False, *rank)
    slope = SILU + SILU * (1 - SILU)
    wrong += num_far(found[0], (slope + SILU) * num_choices)
    wrong += num_far(found[1] / h, SILU * is_here)
    tell(f"{name}, backward{', FP8' if fp8 else ''}", wrong)


def run_swiglu() -> None:
    """Rows end anywhere; gate and up are 1."""
    for num_rows, size in ((3, 8), (5, 100), (2, 2176), (1, 1)):
        gate_up = empty_gate_up(torch.empty(0, device="cuda"), num_rows, size).fill_(1)
        wrong = num_far(swiglu_rows(gate_up, None), torch.tensor(SILU))
        ids = torch.arange(num_rows, device="cuda")[:, None] % 4
        plan, weights = build_plan(ids, 4), torch.ones(num_rows, 1, device="cuda")
        grad = swiglu_rows(gate_up, None)  # it lies as kernels want it
        found = swiglu_rows_backward(grad.fill_(1), gate_up, plan.token_to_row, weights, None)
        slope = torch.tensor([SILU + SILU * (1 - SILU), SILU])[:, None]
        wrong += num_far(found[2], slope) + num_far(found[4] / size, torch.tensor(SILU))
        tell(f"SwiGLU of {num_rows} rows of {size}", wrong)


def run_feed_forward() -> None:
    """As `run_experts_backward`, of an expert that all tokens take."""
    for num_tokens, h, i in ((3, 264, 400), (140, 100, 36), (300, 136, 144)):
        gate_up, gate_up_scales, down, down_scales = (x[0] for x in weights_of_ones(h, i))
        halves = gate_up.view(2, i, h), gate_up_scales.view(2, -1, gate_up_scales.shape[1])
        weights = *(x[half] for half in (0, 1) for x in halves), down, down_scales
        x = torch.ones(num_tokens, h, dtype=torch.bfloat16, device="cuda")
        y, saved = feed_forward_saving(x, *weights, 100.0)
        dx = feed_forward_backward(x, saved, *weights, 100.0, False)
        slope = SILU + SILU * (1 - SILU)
        wrong = num_far(y, torch.tensor(SILU)) + num_far(dx, torch.tensor(slope + SILU))
        tell(f"feed-forward, {num_tokens} tokens", wrong)


def run_swiglu_backward() -> None:
    for name in swiglu_cases.CASES:
        for fp8 in (False, True):
            made = swiglu_cases.make(name, torch.float32, fp8, math.inf, "cuda")
            swiglu_cases.check(made, swiglu_cases.run(made))
            print(f"gradient of SwiGLU, {name}{', FP8' if fp8 else ''}", flush=True)


def run_swiglu_columns() -> None:
    for name, case in swiglu_columns_cases.CASES.items():
        for fp8, blocks in product((False, True), repeat=2):
            made = swiglu_columns_cases.make(case, torch.float32, fp8, None, "cuda", blocks=blocks)
            swiglu_columns_cases.check(made, swiglu_columns_cases.run(made))
            told = f"{', FP8' if fp8 else ''}{', blocks' if blocks else ''}"
            print(f"gradient of SwiGLU in columns, {name}{told}", flush=True)


SILU = 0.7310586  # of 1


def tokens_of_ones(
    num_tokens: int, h: int, first: int, num_global: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, three choices each, and which are held by the rank of four experts (on the CPU)."""
    x = torch.ones(num_tokens, h, dtype=torch.bfloat16, device="cuda")
    ids = torch.arange(num_tokens * 3).view(num_tokens, 3) % (num_global + 1)
    return x, ids.cuda(), (ids >= first) & (ids < first + 4)


def weights_of_ones(h: int, i: int) -> tuple[torch.Tensor, ...]:
    """Four experts, which give ones where gate and up, or activated values, are of ones."""
    blocks_h, blocks_i = num_blocks(h), num_blocks(i)
    gate_up_scales = torch.full((4, 2 * blocks_i, blocks_h), 1 / h, device="cuda")
    down_scales = torch.full((4, blocks_h, blocks_i), 1 / i, device="cuda")
    return ones(4, 2 * i, h), gate_up_scales, ones(4, h, i), down_scales


def num_far(found: torch.Tensor, expected: torch.Tensor) -> int:
    found = found.float().cpu()
    return int(((found - expected).abs() > 0.02 * expected.abs().clamp(min=1)).sum()) + int(
        found.isnan().sum()
    )


def run_broken_bounds(layout: GroupLayout) -> None:
    """Numbers that break the rules: nothing outside of the tensors may be read or written."""
    routing = routing_of(layout, (50,) * 6)
    rows, bounds = routing.rows_of_a(), routing.bounds_on("cuda")
    bounds[1::3], bounds[2::5] = 2**31 - 1, -(2**31)
    a_scale_inv = empty_tma_aligned([*rows, 3], bounds.device)
    d = torch.zeros(*rows, 136, dtype=torch.bfloat16, device="cuda")
    b_scale_inv = torch.ones(6, 2, 3, device="cuda")
    made = Operands(ones(*rows, 272), a_scale_inv, ones(6, 136, 272), b_scale_inv, d)
    for expected_m in (4, 60, 1000):
        launch(routing, made, bounds, expected_m)
    print(f"{layout.name}, broken bounds", flush=True)


if __name__ == "__main__":
    main()
