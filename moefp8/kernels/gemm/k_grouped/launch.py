"""Launch `k_grouped.cu`, the GEMM of gradients in weights, on a Hopper GPU."""

from pathlib import Path
from typing import NamedTuple

import torch

from ...common.blocks import BLOCK, TMA_BYTES, ceil_div
from ...common.tma_operands import box_of
from ...jit import (
    MAP_BYTES,
    Kernel,
    Launch,
    Pointer,
    Source,
    current_driver,
    join_maps,
    pointers,
    struct_of,
    tensor_map,
)
from ..launch import Sms
from .config import KGroupedConfig, Output, choose_config

SOURCE = Path(__file__).with_name("k_grouped.cu")
Arguments = struct_of(SOURCE)
_BAND_ROWS = 1536  # of d, that CTAs which run at once are spread over


class KGroupedOperands(NamedTuple):
    """a [B, M, 128], b [B, N, 128], their scales [B, M] and [B, N], d [E, M, N]."""

    a: torch.Tensor
    a_scale_inv: torch.Tensor
    b: torch.Tensor
    b_scale_inv: torch.Tensor
    d: torch.Tensor


class KGroupedSources(NamedTuple):
    """Which addresses of a launch are those of its operands; no offsets: there is one expert."""

    a: Source
    a_scale_inv: Source
    b: Source
    b_scale_inv: Source
    d: Source
    expert_offsets: Source | None = None


def kernel_of(config: KGroupedConfig) -> Kernel:
    return Kernel(SOURCE, config.kernel_name(), "")


def needed_kernels(
    m: int, n: int, dtype: torch.dtype, *, accumulates: bool = False, blocks_b: bool = False
) -> list[Kernel]:
    """The kernels for d [E, M, N], which may lie anywhere: the gradient of weights [M, N].

    They depend on no number of tokens, experts or SMs.
    """
    output = Output.of(dtype, accumulates)
    ends_even = n * dtype.itemsize % TMA_BYTES == 0  # else TMA cannot address d
    configs = (
        choose_config(m, n, output, blocks_b=blocks_b, d_fits=d_fits)
        for d_fits in ((True, False) if ends_even else (False,))
    )
    return [kernel_of(config) for config in configs] if m and n else []


def prepare_k_grouped(
    config: KGroupedConfig,
    operands: KGroupedOperands,
    sources: KGroupedSources,
    sms: Sms,
    num_tokens: int,
    *,
    band: int | None = None,
) -> Launch:
    """A launch for operands that lie as these do, wherever `sources` say.

    operands: TMA can address all but d, and d too if `config.stages_output`; layouts and the
        alignment of d count.
    num_tokens: of the only expert; with offsets, no expert's rows end behind it.
    """
    a, a_scale_inv, b, b_scale_inv, d = operands
    num_experts, m, n = d.shape
    driver, device_index = current_driver(), d.get_device()
    row_tiles, col_tiles = ceil_div(m, config.tile_m), ceil_div(n, config.tile_n * config.multicast)
    num_tiles = num_experts * row_tiles * col_tiles
    # The stride of a single matrix, or row, says nothing.
    matrix_bytes, row_bytes = (
        stride * d.element_size() if count > 1 else 0
        for stride, count in zip(d.stride()[:2], d.shape[:2], strict=True)
    )
    unit = 16 if config.output == Output.BFLOAT16 else 8  # bytes that are written at once
    steps = d.data_ptr(), matrix_bytes, row_bytes, n * d.element_size()
    arguments = Arguments(
        d_matrix_bytes=matrix_bytes,
        d_row_bytes=row_bytes,
        num_experts=num_experts,
        num_tokens=num_tokens,
        m=m,
        n=n,
        num_row_tiles=row_tiles,
        num_col_tiles=col_tiles,
        band=min(row_tiles, band or max(1, _BAND_ROWS // config.tile_m)),
        aligned=not any(x % unit for x in steps),
    )
    box_m = config.tile_m // config.multicast
    of_d, box_d = (
        (d, (BLOCK // config.element_bytes, 64)) if config.stages_output else (a, (BLOCK, 8))
    )
    maps = (
        tensor_map(box_of(a, (BLOCK, box_m), BLOCK)),
        tensor_map(box_of(b, (BLOCK, config.tile_n), BLOCK)),
        tensor_map(box_of(a_scale_inv, (config.tile_m, 1), 0)),
        tensor_map(box_of(b_scale_inv, (config.scales_b, 1), 0)),
        tensor_map(box_of(of_d, box_d, BLOCK)),  # where d does not leave by TMA, any map will do
    )
    of_maps = (
        *(sources.a, sources.b, sources.a_scale_inv, sources.b_scale_inv),
        sources.d if config.stages_output else sources.a,
    )
    return Launch(
        driver.load(kernel_of(config), device_index),
        min(num_tiles, max(1, sms.busy // config.multicast)) * config.multicast,
        config.threads,
        (join_maps(maps), arguments),
        [
            *(Pointer(0, i * MAP_BYTES, x) for i, x in enumerate(of_maps)),
            *pointers(Arguments, 1, expert_offsets=sources.expert_offsets, d=sources.d),
        ],
        shared_bytes=config.shared_bytes,
        cluster=config.multicast,
        programmatic=True,
    )
