"""Describe `k_grouped.cu`. M and N features, E experts, B blocks of 128 tokens."""

from pathlib import Path

from ....common.blocks import BLOCK, TMA_BYTES, ceil_div
from ....jit import Kernel
from ....program import Codes, Place, Record, Tensor, TensorMap
from ...sms import Sms
from .config import KGroupedConfig, Output, choose_config

SOURCE = Path(__file__).with_name("k_grouped.cu")
_BAND_ROWS = 1536  # rows of d over which the CTAs that run at once are spread


def kernel_of(config: KGroupedConfig) -> Kernel:
    return Kernel(SOURCE, config.kernel_name(), "")


def _config_of(b: Codes, d: Tensor, *, accumulates: bool) -> KGroupedConfig:
    (_, m, n), blocks_b = d.shape, b.scale_inv.shape[-1] != b.data.shape[1]
    d_fits = d.fits and n * d.element_size() % TMA_BYTES == 0
    output = Output.of(d.dtype, accumulates)
    return choose_config(m, n, output, blocks_b=blocks_b, d_fits=d_fits)


def describe_k_grouped(
    r: Record,
    sms: Sms,
    a: Codes,
    b: Codes,
    d: Tensor,
    num_tokens: int,
    *,
    accumulates: bool = False,
    expert_offsets: Place | None = None,
    programmatic: bool = True,
) -> None:
    """One step that writes d, or adds to it.

    TMA must be able to address all but d.

    Args:
        a, b: codes [B, M, 128] and [B, N, 128], scales [B, M] and [B, N] or [B, ceil(N/128)].
        d: [E, M, N].
        accumulates: whether the product is added to what d holds, which is fp32 then.
        num_tokens: of the only expert; with offsets, no expert's rows end after it.
        expert_offsets: int32 [E + 1]; None: there is one expert.
    """
    num_experts, m, n = d.shape
    config = _config_of(b, d, accumulates=accumulates)
    row_tiles, col_tiles = ceil_div(m, config.tile_m), ceil_div(n, config.tile_n * config.multicast)
    num_tiles = num_experts * row_tiles * col_tiles
    # The stride of a single matrix, or of a single row, has no meaning.
    matrix_bytes, row_bytes = (
        d.bytes_of_stride(axis) if d.shape[axis] > 1 else 0 for axis in (0, 1)
    )
    unit = 16 if config.output == Output.BFLOAT16 else 8  # bytes that are written at once
    steps = d.alignment, matrix_bytes, row_bytes, n * d.element_size()
    arguments = {
        "expert_offsets": expert_offsets,
        "d": d.place,
        "d_matrix_bytes": matrix_bytes,
        "d_row_bytes": row_bytes,
        "num_experts": num_experts,
        "num_tokens": num_tokens,
        "m": m,
        "n": n,
        "num_row_tiles": row_tiles,
        "num_col_tiles": col_tiles,
        "band": min(row_tiles, max(1, _BAND_ROWS // config.tile_m)),
        "aligned": not any(x % unit for x in steps),
    }
    box_m = config.tile_m // config.multicast
    # Where TMA does not store d, any map will do.
    last = TensorMap(a.data, (BLOCK, 8), BLOCK)
    if config.stages_output:
        last = TensorMap(d, (BLOCK // config.element_bytes, 64), BLOCK, is_written=True)
    maps = (
        TensorMap(a.data, (BLOCK, box_m), BLOCK),
        TensorMap(b.data, (BLOCK, config.tile_n), BLOCK),
        TensorMap(a.scale_inv, (config.tile_m, 1)),
        TensorMap(b.scale_inv, (config.scales_b, 1)),
        last,
    )
    r.step(
        kernel_of(config),
        min(num_tiles, max(1, sms.busy // config.multicast)) * config.multicast,
        config.threads,
        arguments,
        maps=(maps,),
        programmatic=programmatic,
        shared_bytes=config.shared_bytes,
        cluster=config.multicast,
    )
