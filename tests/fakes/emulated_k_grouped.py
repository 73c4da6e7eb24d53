"""What `k_grouped.cu` does with its maps and arguments, on the CPU, and whether they are right.

A part of the stand-in for libcuda: see `emulator.py`.
"""

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import fields
from itertools import pairwise
from typing import NamedTuple

import torch

from moefp8 import kernels
from moefp8.kernels import jit
from moefp8.kernels.gemm.sm90.k_grouped.config import KGroupedConfig, Output
from tests.fakes.emulated_gemm import Map, memory

BLOCK, STEP = 128, 32


class Maps(NamedTuple):
    """The tensor maps, in the order of `Maps` in the kernel."""

    a: Map
    b: Map
    a_scales: Map
    b_scales: Map
    d: Map


def config_of(kernel: jit.Kernel) -> KGroupedConfig:
    """The configuration that a kernel's template arguments state."""
    told = dict(re.findall(r"\.(\w+) = ([\w:]+)", kernel.name))
    told["output"] = json.dumps(told["output"].removeprefix("Output::"))
    config = KGroupedConfig(**{x.name: json.loads(told[x.name]) for x in fields(KGroupedConfig)})
    assert int(told["shared_bytes"]) == config.shared_bytes
    return config


def k_grouped(made, maps: list[Map]) -> None:
    made.config, made.maps = config_of(made.kernel), Maps(*maps)
    check_launch(made)
    check_maps(made)
    check_tiles(made)
    x = made.arguments
    whole = output_of(made)
    for expert, (begin, end) in enumerate(tokens_of_experts(x)):
        d = whole[expert]
        if begin >= end:  # it is written by threads, not through its map
            if made.config.output != Output.ACCUMULATE:
                d.zero_()
            continue
        result = sums_of(made, begin // BLOCK + expert, end - begin)
        target = made.maps.d.tensor()[expert] if made.config.stages_output else d
        target.copy_(target + result if made.config.output == Output.ACCUMULATE else result)


def tokens_of_experts(x) -> list[tuple[int, int]]:
    if x.expert_offsets is None:
        assert x.num_experts == 1
        return [(0, x.num_tokens)]
    offsets = memory(x.expert_offsets, torch.int32, [x.num_experts + 1], [1]).tolist()
    most = x.num_tokens
    return [(min(max(begin, 0), most), min(end, most)) for begin, end in pairwise(offsets)]


def sums_of(made, first_block: int, num_tokens: int) -> torch.Tensor:
    """fp32 [M, N]: the last block comes first, then the others in turn; each is rounded once.

    All codes up to a multiple of 32 are multiplied, and what lies behind all blocks is zero.
    """
    a, b, a_scales, b_scales, _ = (x.tensor() for x in made.maps)
    if made.config.blocks_b:
        b_scales = b_scales.repeat_interleave(BLOCK, 1)[:, : b.shape[1]]
    total = torch.zeros(a.shape[1], b.shape[1])
    last = kernels.ceil_div(num_tokens, BLOCK) - 1
    for i in (last, *range(last)):
        block = first_block + i
        if block >= len(a):
            continue
        count = min(kernels.round_up(num_tokens - i * BLOCK, STEP), BLOCK)
        products = a[block, :, :count].float() @ b[block, :, :count].float().T
        scales = a_scales[block, :, None] * b_scales[block]
        total = (products.double() * scales.double() + total.double()).float()
    return total


def output_of(made) -> torch.Tensor:
    """d [E, M, N] by the address and pitches that threads use."""
    x = made.arguments
    dtype = torch.bfloat16 if made.config.output == Output.BFLOAT16 else torch.float32
    matrix, row = x.d_matrix_bytes // dtype.itemsize, x.d_row_bytes // dtype.itemsize
    # The stride of a single matrix, or row, says nothing.
    strides = [matrix if x.num_experts > 1 else 0, row if x.m > 1 else 0, 1]
    assert (x.d_matrix_bytes | x.d_row_bytes) % dtype.itemsize == 0
    return memory(x.d, dtype, [x.num_experts, x.m, x.n], strides)


def check_launch(made) -> None:
    config, x = made.config, made.arguments
    shared = made.block, made.cluster, made.shared_bytes
    assert shared == (config.threads, config.multicast, config.shared_bytes)
    assert made.programmatic
    unit = 16 if config.output == Output.BFLOAT16 else 8  # bytes that threads write at once
    steps = x.d, x.d_matrix_bytes, x.d_row_bytes, x.n * config.element_bytes
    assert bool(x.aligned) == (not any(step % unit for step in steps))


def check_maps(made) -> None:
    """They are of the matrices that arguments tell of, and boxes are what the kernel waits for."""
    config, x, maps = made.config, made.arguments, made.maps
    a, b, a_scales, b_scales, d = maps
    num_blocks = a.shape[2]
    assert (a.dtype, b.dtype) == (torch.float8_e4m3fn, torch.float8_e4m3fn)
    assert (a_scales.dtype, b_scales.dtype) == (torch.float32, torch.float32)
    assert (a.shape, b.shape) == ([BLOCK, x.m, num_blocks], [BLOCK, x.n, num_blocks])
    assert a_scales.shape == [x.m, num_blocks]
    of_b = kernels.num_blocks(x.n) if config.blocks_b else x.n
    assert b_scales.shape == [of_b, num_blocks]
    most = BLOCK * num_blocks
    assert most - BLOCK < x.num_tokens <= most if x.expert_offsets is None else x.num_tokens == most
    assert a.box == [BLOCK, config.tile_m // config.multicast, 1]
    assert b.box == [BLOCK, config.tile_n, 1]
    assert a_scales.box == [config.tile_m, 1]
    assert b_scales.box == [4 if config.blocks_b else config.tile_n, 1]
    assert [y.swizzle for y in maps[:4]] == [BLOCK, BLOCK, 0, 0]
    if config.stages_output:
        whole = output_of(made)
        assert (d.dtype, d.address) == (whole.dtype, x.d)
        assert d.shape == [x.n, x.m, x.num_experts]
        assert (d.box, d.swizzle) == ([128 // config.element_bytes, 64, 1], 128)
        assert x.m == 1 or d.strides[0] == whole.stride(1)
        assert x.num_experts == 1 or d.strides[1] == whole.stride(0)
        assert x.n * config.element_bytes % 16 == 0  # else a row's last unit would hold more


def check_tiles(made) -> None:
    """Every tile of every expert is walked once, also where CTAs of a cluster have none."""
    config, x = made.config, made.arguments
    counts = x.num_row_tiles, x.num_col_tiles
    sides = config.tile_m, config.tile_n * config.multicast
    assert counts == tuple(
        kernels.ceil_div(size, side) for size, side in zip((x.m, x.n), sides, strict=True)
    )
    clusters, rest = divmod(made.grid, config.multicast)
    assert rest == 0
    num_tiles = x.num_experts * counts[0] * counts[1]
    assert 1 <= clusters <= num_tiles
    assert 1 <= x.band <= counts[0]
    walked = sorted(itertools.chain.from_iterable(walk(x, i, clusters) for i in range(clusters)))
    assert walked == list(itertools.product(range(x.num_experts), *map(range, counts)))


def walk(x, first: int, clusters: int) -> Iterator[tuple[int, int, int]]:
    """(expert, row, column) of the tiles of a cluster, in the order of `Schedule`."""
    of_expert = x.num_row_tiles * x.num_col_tiles
    for index in range(first, x.num_experts * of_expert, clusters):
        expert, i = divmod(index, of_expert)
        first_row = i // (x.band * x.num_col_tiles) * x.band
        in_band = i - first_row * x.num_col_tiles
        height = min(x.band, x.num_row_tiles - first_row)
        yield expert, first_row + in_band % height, in_band // height
