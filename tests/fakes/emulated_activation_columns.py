"""The kernels of `activation_columns.cu` on the CPU, with checks of their arguments.

A part of the stand-in for libcuda: see `emulator.py`.
"""

from itertools import pairwise

import torch

from moefp8.functional.activation import activate
from moefp8.functional.activation_rows import weights_of_rows
from moefp8.functional.training.activation_columns import (
    ActivationColumnsGradients,
    activation_columns_backward,
    shared_bytes_of,
)
from moefp8.kernels import num_blocks, round_up
from moefp8.quant.columns import first_block, num_column_blocks
from tests.fakes.emulated_gemm import activation_of, dtype_of, memory

E4M3 = torch.float8_e4m3fn


def activation_columns(made) -> None:
    assert made.programmatic
    assert made.block == 256
    name = made.kernel.name.removeprefix("activation_columns_")
    if name.startswith("weights"):
        weights(made)
    elif name.startswith("sums"):
        sums(made)
    else:
        flags = name.removeprefix("kernel<").rstrip(">").split(", ")
        tiles(made, *(flag == "true" for flag in flags[1:]))


def choices_of(made) -> torch.Tensor:
    """int32 [T, k], -1 where there is no row."""
    x = made.arguments
    assert (made.grid, made.shared_bytes) == (-(-x.num_choices // 256), 0)
    shape = [x.num_choices // x.top_k.value, x.top_k.value]
    token_to_row = memory(x.token_to_row, torch.int32, shape, [shape[1], 1])
    return token_to_row.masked_fill((token_to_row < 0) | (token_to_row >= x.num_rows), -1)


def weights(made) -> None:
    x, dtype, token_to_row = made.arguments, dtype_of(made.kernel), choices_of(made)
    strides = [y // dtype.itemsize for y in (x.weight_token_bytes, x.weight_choice_bytes)]
    of_choices = memory(x.weights, dtype, [*token_to_row.shape], strides)
    found, is_first = weights_of_rows(token_to_row, of_choices, x.num_rows)
    rows = token_to_row[token_to_row >= 0].long()
    weight_of_row = memory(x.weight_of_row, torch.float32, [x.num_rows], [1])
    offsets = memory(x.expert_offsets, torch.int32, [x.num_experts + 1], [1])
    begin, end = offsets.clamp(0, x.num_rows)[[0, -1]].tolist()
    without_choice = torch.ones(x.num_rows, dtype=torch.bool).index_fill(0, rows, False)
    assert not weight_of_row.view(torch.int32)[begin:end][without_choice[begin:end]].any()
    weight_of_row[rows] = torch.where(found == 0, -0.0, found)[rows]
    memory(x.is_first, torch.float32, [x.num_choices], [1]).copy_(is_first.flatten())
    if x.row_to_token is not None:
        tokens = torch.arange(len(token_to_row), dtype=torch.int32)[:, None]
        row_to_token = memory(x.row_to_token, torch.int32, [x.num_rows], [1])
        row_to_token[rows] = tokens.expand_as(token_to_row)[token_to_row >= 0]


def sums(made) -> None:
    x, token_to_row = made.arguments, choices_of(made)
    shape = [x.num_tiles.value, x.num_rows]
    of_rows = memory(x.partial_sums, torch.float32, shape, [x.num_rows, 1]).sum(0)
    found = of_rows[token_to_row.clamp(min=0)].masked_fill(token_to_row < 0, 0.0)
    memory(x.of_weights, torch.float32, [x.num_choices], [1]).copy_(found.flatten())


def tiles(made, is_fp8: bool, has_blocks: bool) -> None:
    x, num_rows, size = made.arguments, made.arguments.num_rows, made.arguments.size
    blocks, tiles_of_row = num_column_blocks(num_rows, x.num_experts), num_blocks(size)
    assert x.num_tiles.value == tiles_of_row
    assert made.grid == blocks * tiles_of_row
    assert made.shared_bytes == shared_bytes_of(is_fp8=is_fp8)
    assert made.shared_bytes + 1024 <= 114 * 1024  # two CTAs of an SM
    # Eight elements are loaded at once, also where a row ends between them; sixteen are stored.
    assert (x.grad | x.grad_row_bytes) % 16 == 0
    assert x.grad_row_bytes >= round_up(size, 8) * 2
    assert (x.rows | x.row_pitch) % 8 == 0
    assert x.row_pitch >= 2 * tiles_of_row * 128
    assert (x.gate_up_columns | x.activated_columns) % 16 == 0
    assert x.gate_up_scale_pitch >= 2 * size
    assert x.activated_scale_pitch >= (tiles_of_row if has_blocks else size)
    assert (x.gate_up_scale_pitch | x.activated_scale_pitch) % 4 == 0
    assert (x.saved_scales is not None) == is_fp8
    grad = memory(x.grad, torch.bfloat16, [num_rows, size], [x.grad_row_bytes // 2, 1])
    gate_up, scales = saved_of(x, is_fp8)
    activation = activation_of(made.kernel, x.activation)
    offsets = memory(x.expert_offsets, torch.int32, [x.num_experts + 1], [1])
    weight_of_row = memory(x.weight_of_row, torch.float32, [num_rows], [1])
    has_choice = weight_of_row.view(torch.int32) != 0
    rows = torch.arange(num_rows, dtype=torch.int32).masked_fill(~has_choice, -1)
    found = ActivationColumnsGradients(
        *activation_columns_backward.overload(
            *(grad, gate_up, scales, offsets, rows[:, None], weight_of_row[:, None] + 0.0),
            *(*activation, has_blocks),
        )
    )
    values = gate_up.float()
    if is_fp8:
        values = values * scales.repeat_interleave(128, 1)[:, :size]
    activated = activate(*values.view(num_rows, 2, size).unbind(1), activation)
    products = torch.nn.functional.pad(grad.float() * activated, (0, -size % 128))
    partial = products.unflatten(1, (-1, 128)).sum(2).T.masked_fill(~has_choice, 0.0)
    strides = [x.num_rows, 1]
    of_tiles = memory(x.partial_sums, torch.float32, [tiles_of_row, num_rows], strides)
    shape = [num_rows, 2 * tiles_of_row * 128]
    codes = memory(x.rows, torch.uint8, shape, [x.row_pitch, 1])
    shape = [num_rows, 2 * tiles_of_row]
    row_scales = memory(x.row_scales, torch.float32, shape, [1, x.scale_pitch])
    for expert, (begin, end) in enumerate(pairwise(offsets.clamp(0, num_rows).tolist())):
        if begin >= end:
            continue
        of_tiles[:, begin:end] = partial[:, begin:end]
        codes[begin:end] = found.codes.view(torch.uint8)[begin:end]
        row_scales[begin:end] = found.scale_inv[begin:end]
        for first in range(begin, end, 128):
            block = first_block(begin, expert) + (first - begin) // 128
            write_columns(x, found, block, round_up(min(end - first, 128), 32))


def saved_of(x, is_fp8: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """gate_up and its scales, as the op takes them."""
    if not is_fp8:
        assert (x.saved | x.saved_row_bytes) % 16 == 0
        assert x.saved_row_bytes >= round_up(x.size, 8) * 2
        pitch = x.saved_row_bytes // 2
        strides = [2 * pitch, pitch, 1]
        return memory(x.saved, torch.bfloat16, [x.num_rows, 2, x.size], strides), None
    assert x.saved_row_bytes == x.size
    assert x.size % 8 or x.saved % 8 == 0
    shape, strides = [2 * x.num_rows, num_blocks(x.size)], [1, x.saved_scale_pitch]
    scales = memory(x.saved_scales, torch.float32, shape, strides)
    return memory(x.saved, E4M3, [2 * x.num_rows, x.size], [x.size, 1]), scales


def write_columns(x, found: ActivationColumnsGradients, block: int, end: int) -> None:
    for data, scales, codes, scale_inv, pitch in (
        (x.gate_up_columns, x.gate_up_scales, *found[2:4], x.gate_up_scale_pitch),
        (x.activated_columns, x.activated_scales, *found[4:6], x.activated_scale_pitch),
    ):
        strides = [codes.shape[1] * 128, 128, 1]
        target = memory(data, torch.uint8, [*codes.shape], strides)
        target[block, :, :end] = codes.view(torch.uint8)[block, :, :end]
        memory(scales, torch.float32, [*scale_inv.shape], [pitch, 1])[block] = scale_inv[block]
