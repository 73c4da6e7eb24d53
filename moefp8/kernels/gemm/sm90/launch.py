"""Describe a launch of `gemm.cu`. M tokens, N weights, K; G groups."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ...common.activation import SWIGLU, Activation
from ...common.blocks import BLOCK, ceil_div, num_blocks, round_up
from ...jit import Kernel
from ...program import Codes, Record, Tensor, TensorMap
from ..interface import GateUp, GroupLayout, GroupsOfTokens
from ..sms import Sms
from .config import GemmConfig, num_whole_tiles, usable_ctas

SOURCE = Path(__file__).with_name("gemm.cu")
BIASES = {
    None: "kNone",
    torch.float32: "kFloat",
    torch.bfloat16: "kBFloat16",
    torch.float16: "kHalf",
}
_L2_BYTES = 24 << 20  # of tokens that the L2 cache holds while weights stream past


@lru_cache(4096)
def kernel_of(
    config: GemmConfig,
    bias: torch.dtype | None,
    group_layout: GroupLayout | None = None,
    activation: Activation = SWIGLU,
) -> Kernel:
    """activation: of `config.gate_up`; its kind alone counts."""
    name = config.kernel_name(BIASES[bias], group_layout, activation.enumerator)
    return Kernel(SOURCE, name, config.interleaving)


def describe_gemm(
    r: Record,
    sms: Sms,
    config: GemmConfig,
    a: Codes,
    b: Codes,
    d: Tensor,
    tokens: int,
    *,
    bias: Tensor | None = None,
    groups: GroupsOfTokens | None = None,
    gate_up: GateUp | None = None,
    programmatic: bool = True,
) -> None:
    """One step that writes d.

    TMA must be able to address a, the scales of a, b and d, which have three dimensions in a
    grouped GEMM. If `config.gate_up`, b is gate's and d is E4M3. It reads weights, the bias, and
    bounds that are ready early.

    tokens: about how many tokens a group has.
    bias: contiguous: [N]; of groups [G, N], and with gate_up [G, 2N], gate first.
    """
    (m, k), n = a.data.shape[-2:], b.data.shape[-2]
    token_tiles = most_token_tiles(config, groups, m)
    weight_tiles = config.weight_tiles(n)
    rows, columns = token_tiles, weight_tiles
    if config.swap_ab:
        rows, columns = columns, rows
    clusters = num_clusters(config, token_tiles, n, sms)
    num_band = min(band(config, tokens, k), token_tiles)
    boxes = config.token_boxes(m)
    weights = [b.data] * len(config.weight_pieces)
    if gate_up is not None:
        weights = [b.data, gate_up.up.data]
    # A box has 128 bytes of each row. Where memory limits the speed, the L2 cache fetches no more.
    l2_bytes = 128 if tokens <= 64 else 256
    scale_box = config.token_scales, config.k_blocks_per_stage
    pieces = zip(weights, config.weight_pieces, strict=True)
    maps = (
        tuple(TensorMap(a.data, (128, x), 128, l2_bytes) for x in boxes),
        (TensorMap(a.scale_inv.mT, scale_box),),
        tuple(TensorMap(x, (128, rows), 128, l2_bytes) for x, rows in pieces),
        (TensorMap(d, config.store_box, _swizzle_of(config, d), is_written=True),),
    )
    arguments: dict[str, Any] = {
        "weight_scales": b.scale_inv.place,
        "weight_scale_stride": b.scale_inv.strides[-2],
        "weight_scale_stride_k": b.scale_inv.strides[-1],
        "bias": None if bias is None else bias.place,
        "num_weights": n,
        "num_k_blocks": num_blocks(k),
        "last_token": config.last_token(m),
        "stage_bytes": [config.stage_bytes(box) for box in boxes],
        "num_row_tiles": rows,
        "num_col_tiles": columns,
        "num_whole_tiles": num_whole_tiles(config, token_tiles * weight_tiles, clusters),
        "band": num_band,
        "inverse": ceil_div(1 << 33, num_band),
        "programmatic": programmatic,
    }
    early = [b.data.place, b.scale_inv.place, arguments["bias"]]
    if groups is not None:
        arguments["groups"] = {
            "bounds": groups.bounds,
            "num_groups": groups.num_groups,
            "num_segments": groups.num_segments,
            "num_tokens": m,
            "expected_tiles": config.token_tiles(groups.expected_tokens),
            "weight_scale_stride": b.scale_inv.strides[0],
            "d": d.place,
            "d_row_stride": d.strides[-2],
            "d_matrix_stride": d.strides[0],
            "bounds_ready": groups.bounds_ready,
            "tile_counter": groups.tile_counter,
        }
        early += [groups.bounds] if groups.bounds_ready else []
    if gate_up is not None:
        arguments["gate_up"] = {
            "up_scales": gate_up.up.scale_inv.place,
            "activation": gate_up.activation.arguments,
            "scales": gate_up.d_scale_inv.place,
            "pitch": gate_up.d_scale_inv.strides[-1],
            "saved": gate_up.saved,
            "saved_row_bytes": 2 * round_up(n, 8),
        }
        early += [gate_up.up.data.place, gate_up.up.scale_inv.place]
    r.step(
        kernel_of(
            config,
            None if bias is None else bias.dtype,
            None if groups is None else groups.layout,
            SWIGLU if gate_up is None else gate_up.activation,
        ),
        clusters * config.cluster,
        config.threads,
        arguments,
        maps=maps,
        early=early,
        programmatic=programmatic,
        shared_bytes=config.shared_bytes,
        cluster=config.cluster,
    )


def _swizzle_of(config: GemmConfig, d: Tensor) -> int:
    """The bytes of d that a swizzle spans; 0 where a box is one unit of it, 16 bytes, wide."""
    columns = config.store_box[0]
    return columns * d.element_size() if columns > 8 else 0


def most_token_tiles(config: GemmConfig, groups: GroupsOfTokens | None, m: int) -> int:
    """How many tiles of tokens any routing of m tokens can need."""
    tokens = config.tile[0]
    if groups is None:
        return ceil_div(m, tokens)
    if groups.layout == GroupLayout.MASKED:
        return groups.num_groups * ceil_div(m, tokens)
    if groups.layout in (GroupLayout.ROWS, GroupLayout.SEGMENTS):
        return ceil_div(m, BLOCK) * ceil_div(BLOCK, tokens)
    # Each group that has a token takes up to two tiles more than its share: one that begins before
    # it, at a multiple of 16 bytes in each row of scales, and one that ends after it.
    return m // tokens + 2 * min(groups.num_groups, m)


def num_clusters(config: GemmConfig, token_tiles: int, n: int, sms: Sms) -> int:
    """One cluster for each tile if CTAs divide K; else as many as run at a time, for all tiles."""
    num_tiles = token_tiles * config.weight_tiles(n)
    if config.split_k > 1:
        return num_tiles
    num_ctas = usable_ctas(config, sms.busy, sms.busy == sms.all)
    return min(num_tiles, max(1, num_ctas // config.cluster))


def has_more_tiles_than_clusters(
    config: GemmConfig,
    num_active: int,
    tokens: int,
    shape: tuple[int, int],
    groups: GroupsOfTokens,
    sms: Sms,
) -> bool:
    """Whether clusters walk over several tiles, if `num_active` groups have about `tokens` tokens.

    shape: [M, N] of d.
    """
    m, n = shape
    num_tiles = num_active * config.token_tiles(tokens) * config.weight_tiles(n)
    return num_tiles > num_clusters(config, most_token_tiles(config, groups, m), n, sms)


def band(config: GemmConfig, m: int, k: int) -> int:
    """How many tiles of tokens are walked together, before the next tiles of weights.

    In a dense GEMM they are all, if the L2 cache can hold the tokens while the weights stream past;
    else about 512 tokens, so that the CTAs that run at once read few tokens and few weights, or
    2048 where tiles have 256 weights. They are 128 at most: the kernel divides by multiplying,
    which is exact while band^2 * num_col_tiles <= 2^33.

    In a grouped GEMM they are 2 to 16 tiles of one group, which read the same weights at about the
    same time.
    """
    tokens, weights = config.tile
    if config.grouped:
        return max(2, min(16, _L2_BYTES // (tokens * k)))
    if config.swap_ab:
        return 1
    if m * k <= _L2_BYTES:
        return min(ceil_div(m, tokens), 128)
    return max(1, (512 if weights < 256 else 2048) // tokens)
