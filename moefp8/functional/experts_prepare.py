"""What the kernels of an expert layer are given: see `experts_launch.py`.

T tokens, k choices each, E experts, H hidden, I intermediate, R rows.
"""

from typing import NamedTuple

import torch

from ..kernels.common.blocks import E4M3, ceil_div, num_blocks, round_up, round_up_to_tma
from ..kernels.common.tma_operands import fitting, lying_as
from ..kernels.gemm import launch as gemm_plan
from ..kernels.gemm.config import GemmConfig, GroupLayout
from ..kernels.gemm.experts_sizes import Sizes, mean_load
from ..kernels.gemm.grouped_launch import plan_of_groups
from ..kernels.gemm.launch import GateUp, Operands, Plan, device_sms
from ..kernels.jit import Launch
from ..routing.combine_launch import prepare_combine
from ..routing.dispatch_launch import most_count_bytes, prepare_dispatch

_ALIGNMENT = 256


Tokens = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # hidden states, choices, their weights
Projections = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # as in `experts`


class Workspace(NamedTuple):
    """Where in the workspace everything lies, in bytes. The tokens' rows give way to results."""

    tokens: int
    token_scales: int
    activated: int
    activated_scales: int
    results: int
    offsets: int
    counts: int
    token_to_row: int
    tile_counter: int
    size: int

    @classmethod
    def of(cls, sizes: Sizes) -> "Workspace":
        matrices, rows = sizes.matrix
        pitch, h, i = scale_pitch(rows), sizes.hidden_size, sizes.intermediate_size
        token_bytes = round_up(matrices * rows * round_up(h, 16), _ALIGNMENT)
        token_scale_bytes = matrices * num_blocks(h) * pitch * 4
        result_bytes = matrices * rows * round_up(h, 8) * 2
        lengths = (
            max(token_bytes + token_scale_bytes, result_bytes),
            max(matrices * rows * round_up(i, 16), most_count_bytes(*sizes[:3])),
            matrices * num_blocks(i) * pitch * 4,
            (sizes.num_experts + 1) * 4,
            sizes.num_experts * 4,
            sizes.num_tokens * sizes.top_k * 4,
            2 * 4,
        )
        starts = [0]
        for length in lengths:
            starts.append(round_up(starts[-1] + length, _ALIGNMENT))
        tokens, activated, scales, offsets, counts, token_to_row, tile_counter, size = starts
        return cls(
            *(tokens, tokens + token_bytes, activated, scales),
            *(tokens, offsets, counts, token_to_row, tile_counter, size),
        )


def scale_pitch(rows: int) -> int:
    """From one k-block's scales to the next's, in elements."""
    return round_up_to_tma(rows, 4)


class Weights(NamedTuple):
    """Of all experts, as TMA can address them: e4m3 and fp32 scales."""

    gate: torch.Tensor  # [E, I, H]
    gate_scale_inv: torch.Tensor
    up: torch.Tensor
    up_scale_inv: torch.Tensor
    down: torch.Tensor  # [E, H, I]
    down_scale_inv: torch.Tensor


def split_weights(projections: Projections) -> Weights:
    """Views of gate and up apart from each other."""
    gate_up, gate_up_scale_inv, down, down_scale_inv = projections
    i = down.shape[2]
    blocks = num_blocks(i)
    return Weights(
        *(gate_up[:, :i], gate_up_scale_inv[:, :blocks]),
        *(gate_up[:, i:], gate_up_scale_inv[:, blocks:]),
        *(down, down_scale_inv),
    )


def fitting_weights(weights: Weights) -> Weights:
    """Each itself, or a copy that TMA can address."""
    gate = fitting(weights.gate)
    return weights._replace(gate=gate, up=lying_as(gate, weights.up), down=fitting(weights.down))


class Steps(NamedTuple):
    """The plans of both GEMMs, and whether their clusters take tiles from a counter."""

    gate_up: Plan
    down: Plan
    take: tuple[bool, bool]


def takes_tiles(config: GemmConfig, plan: Plan, sizes: Sizes, n: int) -> bool:
    """Whether there are more tiles than clusters, and unequal ones; else a counter costs time."""
    active, load = mean_load(sizes)
    num_tiles = active * config.token_tiles(load) * config.weight_tiles(n)
    return load > 1 and num_tiles * plan.cluster > plan.grid_and_block[0]


def make_steps(
    sizes: Sizes,
    weights: Weights,
    memory: torch.Tensor,
    configs: tuple[GemmConfig, GemmConfig],
    sms: tuple[int, int],
) -> Steps:
    """memory: a workspace; of what is in it, only where it lies counts. sms: as `busy_sms`."""
    at, (matrices, rows) = Workspace.of(sizes), sizes.matrix
    h, i, pitch = sizes.hidden_size, sizes.intermediate_size, scale_pitch(rows)

    def rows_at(offset: int, columns: int, row_pitch: int, dtype: torch.dtype) -> torch.Tensor:
        shape = matrices, rows, columns
        strides = rows * row_pitch, row_pitch, 1
        return memory[offset:].view(dtype).as_strided(shape, strides)

    def scales_at(offset: int, columns: int) -> torch.Tensor:
        shape, strides = (matrices, rows, columns), (columns * pitch, 1, pitch)
        return memory[offset:].view(torch.float32).as_strided(shape, strides)

    tokens = rows_at(at.tokens, h, round_up(h, 16), E4M3)
    activated = rows_at(at.activated, i, round_up(i, 16), E4M3)
    results = rows_at(at.results, h, round_up(h, 8), torch.bfloat16)
    token_scales = scales_at(at.token_scales, num_blocks(h))
    activated_scales = scales_at(at.activated_scales, num_blocks(i))

    gate = Operands(tokens, token_scales, weights.gate, weights.gate_scale_inv, activated)
    down = Operands(activated, activated_scales, weights.down, weights.down_scale_inv, results)
    load = ceil_div(sizes.num_tokens * sizes.top_k, sizes.num_experts)
    all_have_some = load >= 4  # else nobody can guess which experts have none
    of_experts = (
        GroupLayout.MASKED if sizes.masked else GroupLayout.OFFSETS,
        sizes.num_experts,
        load,
        sms,
    )
    plans = (
        plan_of_groups(configs[0], gate, *of_experts, guesses=all_have_some),
        plan_of_groups(configs[1], down, *of_experts, guesses=False, bounds_ready=True),
    )
    first, second = map(takes_tiles, configs, plans, (sizes, sizes), (i, h))
    return Steps(*plans, (first, second))


def prepare_gemms(
    steps: Steps,
    sizes: Sizes,
    weights: Weights,
    memory: torch.Tensor,
    limit: float,
    stream: int,
) -> tuple[Launch, Launch]:
    at, start = Workspace.of(sizes), memory.data_ptr()
    bounds = start + (at.counts if sizes.masked else at.offsets)
    gate, gate_scale_inv, up, up_scale_inv, down, down_scale_inv = (x.data_ptr() for x in weights)
    scales = start + at.activated_scales
    operands = (start + at.tokens, start + at.token_scales, gate, gate_scale_inv)
    gate_up = GateUp(up, up_scale_inv, limit, scales, scale_pitch(sizes.matrix[1]))
    tile_counter = [
        start + at.tile_counter + 4 * i if take else None for i, take in enumerate(steps.take)
    ]
    first = gemm_plan.prepare(
        steps.gate_up,
        (*operands, start + at.activated, bounds),
        stream,
        True,
        gate_up,
        tile_counter[0],
    )
    operands = (start + at.activated, scales, down, down_scale_inv)
    second = gemm_plan.prepare(
        steps.down,
        (*operands, start + at.results, bounds),
        stream,
        True,
        tile_counter=tile_counter[1],
    )
    return first, second


def prepare_dispatch_and_combine(
    sizes: Sizes,
    tokens: Tokens,
    memory: torch.Tensor,
    y: torch.Tensor,
    stream: int,
) -> tuple[tuple[Launch, ...], Launch]:
    """tokens: hidden states, the router's choices and weights."""
    at, start, (_, rows) = Workspace.of(sizes), memory.data_ptr(), sizes.matrix
    x, ids, weights = tokens
    device_index, hidden_size = x.get_device(), sizes.hidden_size
    token_to_row, num_sms = start + at.token_to_row, device_sms(device_index)
    dispatch = prepare_dispatch(
        device_index,
        x=x.data_ptr(),
        x_dtype=x.dtype,
        x_row_stride_bytes=x.stride(0) * x.element_size(),
        ids=ids.data_ptr(),
        id_bytes=ids.element_size(),
        id_strides=(ids.stride(0), ids.stride(1)),
        num_tokens=sizes.num_tokens,
        top_k=sizes.top_k,
        num_experts=sizes.num_experts,
        hidden_size=hidden_size,
        max_m=sizes.num_tokens if sizes.masked else None,
        rows=start + at.tokens,
        row_pitch=round_up(hidden_size, 16),
        row_scales=start + at.token_scales,
        scale_pitch=scale_pitch(rows),
        expert_offsets=start + at.offsets,
        tokens_per_expert=start + at.counts,
        token_to_row=token_to_row,
        zeros=start + at.tile_counter,
        stream=stream,
        num_sms=num_sms,
        counts=start + at.activated,  # not yet in use
    )
    combine = prepare_combine(
        device_index,
        y=start + at.results,
        y_row_pitch=round_up(hidden_size, 8),
        token_to_row=token_to_row,
        weights=weights.data_ptr(),
        weights_dtype=weights.dtype,
        weight_strides=(weights.stride(0), weights.stride(1)),
        num_tokens=sizes.num_tokens,
        top_k=sizes.top_k,
        hidden_size=hidden_size,
        out=y.data_ptr(),
        stream=stream,
        num_sms=num_sms,
        programmatic=True,
    )
    return dispatch, combine
