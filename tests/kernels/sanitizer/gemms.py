"""GEMMs, what runs before them, and weight gradients."""

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from moefp8.kernels import empty_tma_aligned, num_blocks, set_num_sms
from moefp8.kernels.gemm import segments
from moefp8.kernels.gemm.interface import GroupLayout
from moefp8.kernels.gemm.k_grouped import k_grouped_gemm
from moefp8.kernels.gemm.operands import Operands
from moefp8.kernels.program import Place, Record, prepare_launch
from moefp8.kernels.targets import target_of
from tests.kernels.gemm.cases import choosing
from tests.kernels.gemm.grouped_cases import (
    UNTOUCHED,
    Routing,
    dense,
    launch,
    routing_of,
    taking_tiles,
)
from tests.kernels.gemm.sm90.families import COUNTS, FAMILIES, GROUPED_FAMILIES, shapes_of
from tests.kernels.sanitizer.judge import Launch, ones, tell
from tests.quant.columns_cases import blocks_of, offsets_of


def launches() -> Iterator[Launch]:
    yield from dense_families()
    yield from grouped_families()
    yield run_segments
    yield from weight_gradients()


def dense_families() -> Iterator[Launch]:
    """On one SM, one cluster walks over all tiles."""
    for name, config in FAMILIES.items():
        with choosing(config):
            shapes = shapes_of(config)
            for m, n, k in shapes:
                yield partial(run_gemm, name, dense(m), n, k)
            if config.split_k == 1:
                yield partial(run_gemm, name, dense(m), n, k, 1)
            if config.halves_tiles:  # one tile is left for three SMs
                yield partial(run_gemm, f"{name}, halved", dense(m), n, k, 3)


def grouped_families() -> Iterator[Launch]:
    for name, config in GROUPED_FAMILIES.items():
        with choosing(config):
            for (_, n, k), counts, limit in zip(shapes_of(config), COUNTS, (None, 1), strict=True):
                for layout in GroupLayout:
                    yield partial(run_gemm, name, routing_of(layout, counts), n, k, limit)
            with taking_tiles(True):  # several clusters take many tiles
                for layout in (GroupLayout.MASKED, GroupLayout.SEGMENTS):
                    routing = routing_of(layout, COUNTS[1])
                    yield partial(run_gemm, f"{name}, in turn", routing, 712, k, 6)
    for layout in GroupLayout:
        yield partial(run_broken_bounds, layout)


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


def run_segments() -> None:
    """Two blocks of rows for each group, and more blocks than the CTA takes at once."""
    num_rows = 128 * 2100 - 50
    rows = torch.arange(num_rows, dtype=torch.int32).div(256, rounding_mode="floor").int()
    found = torch.full((segments.list_bytes(num_rows) // 16, 4), -1, dtype=torch.int32).cuda()
    group_of_row, r = rows.cuda(), Record(target_of(0), ("rows", "list"))
    places = Place("rows"), Place("list")
    segments.describe_segments(r, *places, num_rows, 2000, programmatic=False)
    prepare_launch(r, 0).on(0, (group_of_row.data_ptr(), found.data_ptr()))
    begin = 256 * torch.arange(1050, dtype=torch.int32)
    zero, end = torch.zeros_like(begin), (begin + 256).clamp(max=num_rows)
    of_each = torch.stack([begin, end, torch.arange(1050, dtype=torch.int32), zero], 1)
    expected = torch.zeros_like(found, device="cpu")
    expected[0, 0], expected[1:1051] = 1050, of_each
    tell("segments", int((found.cpu() != expected).sum()))


def weight_gradients() -> Iterator[Launch]:
    """Tiles leave through shared memory and from registers; offsets may be anything."""
    for dtype, accumulates in (
        (torch.bfloat16, False),
        (torch.float32, False),
        (torch.float32, True),
    ):
        for blocks_b in (False, True):
            last = dtype, accumulates, blocks_b
            for n, limit in ((264, None), (264, 1), (331, None), (130, 1)):
                for counts in COUNTS:
                    yield partial(run_weight_gradient, counts, 300, n, *last, limit=limit)
            yield partial(run_weight_gradient, (600,) * 3, 600, 520, *last, broken=True)


def run_weight_gradient(
    counts: Sequence[int],
    m: int,
    n: int,
    dtype: torch.dtype,
    accumulates: bool,
    blocks_b: bool,
    limit: int | None = None,
    broken: bool = False,
) -> None:
    """All codes of tokens are 1, and products of scales, too. What no token has is NaN.

    It begins where an expert's zeros end, at a multiple of 32. limit: how many SMs may be used.
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
    set_num_sms(limit)
    k_grouped_gemm(sides[0], a_scale_inv, sides[1], b_scale_inv, d, given, 0, accumulates)
    set_num_sms(None)
    told = f"weight gradients of {num_experts}, {m}x{n}, {dtype}{', added' * accumulates}"
    told += ", blocks" * blocks_b
    if broken:
        print(f"{told}, broken offsets", flush=True)
        return
    expected = torch.tensor(counts)[:, None, None] + (UNTOUCHED if accumulates else 0.0)
    tell(told, int((d.cpu() != expected.to(dtype)).sum()))
