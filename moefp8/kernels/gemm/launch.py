"""Prepare a launch of `gemm.cu`: what the kernel is given. M tokens, N weights, K; G groups."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from ..common.blocks import BLOCK, ceil_div, num_blocks, round_up
from ..common.tma_operands import box_of
from ..jit import (
    MAP_BYTES,
    Kernel,
    Launch,
    Pointer,
    Source,
    current_driver,
    join_maps,
    offset_of,
    pointers,
    struct_of,
    tensor_map,
)
from .config import GemmConfig, GroupLayout, num_whole_tiles, usable_ctas
from .operands import Operands

SOURCE = Path(__file__).with_name("gemm.cu")
Arguments = struct_of(SOURCE)
Groups, Activation = struct_of(SOURCE, "Groups"), struct_of(SOURCE, "Activation")
BIASES = {
    None: "kNone",
    torch.float32: "kFloat",
    torch.bfloat16: "kBFloat16",
    torch.float16: "kHalf",
}
_L2_BYTES = 24 << 20  # of tokens that the L2 cache holds while weights stream past


class GemmSources(NamedTuple):
    """Which addresses of a launch are those of its operands.

    bounds: what tells the groups apart. up, up_scale_inv, d_scale_inv: only if `config.gate_up`.
    saved: bf16 [M, 2, N], gate and up of each token, only if `config.saves_gate_up`; rows of N lie
        round_up(N, 8) apart.
    tile_counter: an int, zero at first, that clusters take tiles from; None: each has its own.
    """

    a: Source
    a_scale_inv: Source
    b: Source
    b_scale_inv: Source
    d: Source
    bias: Source | None = None
    bounds: Source | None = None
    up: Source | None = None
    up_scale_inv: Source | None = None
    d_scale_inv: Source | None = None
    saved: Source | None = None
    tile_counter: Source | None = None


@dataclass(frozen=True)
class GroupsOfTokens:
    """What a grouped GEMM knows of its groups beforehand.

    layout: what tells which tokens are of which group.
    num_segments: how many runs of tokens have one group each, at most.
    expected_tiles: how many tiles of tokens a group has, if the first tiles may be guessed from
        that, see `prefetch_expected` in producer.cuh; else 0.
    bounds_ready: whether the bounds are older than the stream's previous kernel.
    """

    layout: GroupLayout
    num_segments: int
    expected_tiles: int = 0
    bounds_ready: bool = False


class GateUp(NamedTuple):
    """What SwiGLU and quantization take: the limit, and the pitch of the scales of d."""

    limit: float
    d_scale_pitch: int


class Sms(NamedTuple):
    """How many SMs of a GPU may be busy, and how many it has."""

    busy: int
    all: int


@lru_cache(4096)
def kernel_of(
    config: GemmConfig, bias: torch.dtype | None, group_layout: GroupLayout | None = None
) -> Kernel:
    return Kernel(SOURCE, config.kernel_name(BIASES[bias], group_layout), config.interleaving)


def prepare_gemm(
    config: GemmConfig,
    operands: Operands,
    sources: GemmSources,
    sms: Sms,
    tokens: int,
    *,
    bias: torch.dtype | None = None,
    groups: GroupsOfTokens | None = None,
    gate_up: GateUp | None = None,
    programmatic: bool = True,
) -> Launch:
    """A launch for operands that lie as these do, wherever `sources` say.

    operands: they fit (`fitting_operands`), and only their layouts count; those of a grouped GEMM
        have three dimensions. If `config.gate_up`, b and its scales are gate's, up's lie alike, and
        d is E4M3.
    tokens: about how many tokens a group has.
    bias: its dtype; it is contiguous.
    """
    a, a_scale_inv, b, b_scale_inv, d = operands
    (m, k), n = a.shape[-2:], b.shape[-2]
    driver, device_index = current_driver(), b.get_device()
    token_tiles = most_token_tiles(config, groups, operands)
    weight_tiles = config.weight_tiles(n)
    rows, columns = token_tiles, weight_tiles
    if config.swap_ab:
        rows, columns = columns, rows
    clusters = num_clusters(config, token_tiles, n, sms)
    num_band = min(band(config, tokens, k), token_tiles)
    boxes = config.token_boxes(m)
    stage_bytes = tuple([config.stage_bytes(box) for box in boxes])
    stride, stride_k = b_scale_inv.stride()[-2:]
    arguments = Arguments(
        weight_scale_stride=stride,
        weight_scale_stride_k=stride_k,
        num_weights=n,
        num_k_blocks=num_blocks(k),
        last_token=config.last_token(m),
        stage_bytes=stage_bytes,
        num_row_tiles=rows,
        num_col_tiles=columns,
        num_whole_tiles=num_whole_tiles(config, token_tiles * weight_tiles, clusters),
        band=num_band,
        inverse=ceil_div(1 << 33, num_band),
        programmatic=programmatic,
    )
    if groups is not None:
        arguments.groups = Groups(
            num_groups=b.shape[0],
            num_segments=groups.num_segments,
            num_tokens=m,
            expected_tiles=groups.expected_tiles,
            weight_scale_stride=b_scale_inv.stride(0),
            d_row_stride=d.stride(-2),
            d_matrix_stride=d.stride(0),
            bounds_ready=groups.bounds_ready,
        )
    if gate_up is not None:
        arguments.activation = Activation(
            limit=gate_up.limit, pitch=gate_up.d_scale_pitch, saved_row_bytes=2 * round_up(n, 8)
        )
    # A box has 128 bytes of each row. Where memory is what counts, the L2 cache fetches no more.
    l2_bytes = 128 if tokens <= 64 else 256
    scale_box = config.token_scales, config.k_blocks_per_stage
    maps = (
        join_maps(tensor_map(box_of(a, (128, x), 128, l2_bytes)) for x in boxes),
        tensor_map(box_of(a_scale_inv.mT, scale_box, 0)),
        join_maps(tensor_map(box_of(b, (128, x), 128, l2_bytes)) for x in config.weight_pieces),
        tensor_map(box_of(d, config.store_box, _swizzle_of(config, d))),
    )
    return Launch(
        driver.load(
            kernel_of(config, bias, None if groups is None else groups.layout), device_index
        ),
        clusters * config.cluster,
        config.threads,
        (*maps, arguments),
        _pointers(config, sources, len(boxes)),
        shared_bytes=config.shared_bytes,
        cluster=config.cluster,
        programmatic=programmatic,
    )


def _swizzle_of(config: GemmConfig, d: torch.Tensor) -> int:
    """The bytes of d that a swizzle spans; 0 where a box is one unit of it, 16 bytes, wide."""
    columns = config.store_box[0]
    return columns * d.element_size() if columns > 8 else 0


def _pointers(config: GemmConfig, sources: GemmSources, num_token_boxes: int) -> list[Pointer]:
    """Where addresses go: into maps of tokens, of their scales, of weights, of d; then the rest."""
    weights = [sources.b] * len(config.weight_pieces)
    if sources.up is not None:
        weights = [sources.b, sources.up]
    return [
        *(Pointer(0, i * MAP_BYTES, sources.a) for i in range(num_token_boxes)),
        Pointer(1, 0, sources.a_scale_inv),
        *(Pointer(2, i * MAP_BYTES, x) for i, x in enumerate(weights)),
        Pointer(3, 0, sources.d),
        *pointers(Arguments, 4, weight_scales=sources.b_scale_inv, bias=sources.bias),
        *pointers(
            Groups,
            4,
            offset_of(Arguments, "groups"),
            bounds=sources.bounds,
            d=sources.d if config.grouped else None,
            tile_counter=sources.tile_counter,
        ),
        *pointers(
            Activation,
            4,
            offset_of(Arguments, "activation"),
            up_scales=sources.up_scale_inv,
            scales=sources.d_scale_inv,
            saved=sources.saved,
        ),
    ]


def most_token_tiles(config: GemmConfig, groups: GroupsOfTokens | None, operands: Operands) -> int:
    """How many tiles of tokens any routing can need."""
    m, tokens = operands.a.shape[-2], config.tile[0]
    if groups is None:
        return ceil_div(m, tokens)
    num_groups = len(operands.b)
    if groups.layout == GroupLayout.MASKED:
        return num_groups * ceil_div(m, tokens)
    if groups.layout in (GroupLayout.ROWS, GroupLayout.SEGMENTS):
        return ceil_div(m, BLOCK) * ceil_div(BLOCK, tokens)
    # Each group that has a token takes up to two tiles more than its share: one that begins before
    # it, at a multiple of 16 bytes in each row of scales, and one that ends after it.
    return m // tokens + 2 * min(num_groups, m)


def num_clusters(config: GemmConfig, token_tiles: int, n: int, sms: Sms) -> int:
    """One cluster for each tile if CTAs divide K; else as many as run at a time, which walk."""
    num_tiles = token_tiles * config.weight_tiles(n)
    if config.split_k > 1:
        return num_tiles
    num_ctas = usable_ctas(config, sms.busy, sms.busy == sms.all)
    return min(num_tiles, max(1, num_ctas // config.cluster))


def has_more_tiles_than_clusters(
    config: GemmConfig,
    num_groups: int,
    tokens: int,
    operands: Operands,
    groups: GroupsOfTokens,
    sms: Sms,
) -> bool:
    """Whether clusters walk over several tiles, if `num_groups` have about `tokens` tokens each."""
    n = operands.b.shape[-2]
    num_tiles = num_groups * config.token_tiles(tokens) * config.weight_tiles(n)
    return num_tiles > num_clusters(config, most_token_tiles(config, groups, operands), n, sms)


def band(config: GemmConfig, m: int, k: int) -> int:
    """How many tiles of tokens are walked together, before the next tiles of weights.

    In a dense GEMM they are all, if the L2 cache can hold the tokens while the weights stream past;
    else about 512 tokens, so that the CTAs that run at once read few tokens and few weights, or
    2048 where tiles have 256 weights. They are 128 at most: the kernel divides by multiplying,
    which is exact while band^2 * num_col_tiles <= 2^33.

    In a grouped GEMM they are of one group, 16 at most, and two or more: those read the same
    weights at about the same time.
    """
    tokens, weights = config.tile
    if config.grouped:
        return max(2, min(16, _L2_BYTES // (tokens * k)))
    if config.swap_ab:
        return 1
    if m * k <= _L2_BYTES:
        return min(ceil_div(m, tokens), 128)
    return max(1, (512 if weights < 256 else 2048) // tokens)


# ---- How many SMs may be busy ----


def set_num_sms(num_sms: int | None) -> None:
    """Let GEMMs run on at most `num_sms` SMs of a GPU, in this process; None: on all.

    The others are for what runs beside them, e.g. communication. More than a GPU has means all.

    Raises:
        TypeError: `num_sms` is neither an int nor None.
        ValueError: `num_sms` is below 1.
    """
    if num_sms is not None and (isinstance(num_sms, bool) or not isinstance(num_sms, int)):
        raise TypeError(f"set_num_sms: num_sms must be an int, or None for all, got {num_sms!r}")
    if num_sms is not None and num_sms < 1:
        raise ValueError(f"set_num_sms: num_sms must be at least 1, or None for all, got {num_sms}")
    current_driver().max_sms = num_sms


def get_num_sms() -> int:
    """The limit of `set_num_sms`; without one, as many SMs as the current GPU has.

    Raises:
        RuntimeError: there is neither a limit nor a GPU.
    """
    driver = current_driver()
    if driver.max_sms is not None:
        return driver.max_sms
    if not torch.cuda.is_available():
        raise RuntimeError("get_num_sms: there is no GPU, and set_num_sms has set no limit")
    return driver.num_sms(torch.cuda.current_device())


def busy_sms(device_index: int) -> Sms:
    driver = current_driver()
    all_sms = driver.num_sms(device_index)
    return Sms(min(all_sms, driver.max_sms or all_sms), all_sms)
