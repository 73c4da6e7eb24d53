"""`bias_grad.cu` and `bias_score_grad.cu` on the CPU, with checks of their arguments.

A part of the stand-in for libcuda: see `emulator.py`.
"""

from itertools import pairwise

import torch

from moefp8.kernels import num_blocks, round_up
from tests.fakes.emulated_gemm import dtype_of, memory


def rows_of(x, num_rows: int, num_blocks: int, size: int) -> torch.Tensor:
    """fp32 [R, size]: codes times their scales."""
    assert (x.rows | x.row_bytes) % 4 == 0
    codes = memory(x.rows, torch.float8_e4m3fn, [num_rows, size], [x.row_bytes, 1])
    scales = memory(x.scales, torch.float32, [num_rows, num_blocks], [1, x.scale_pitch])
    return codes.float() * scales.repeat_interleave(128, -1)[:, :size]


def bias_grad(made) -> None:
    x = made.arguments
    assert x.padded_size == round_up(x.size, 128)
    num_experts, rest = divmod(made.grid, x.num_blocks)
    parts, more = divmod(x.num_blocks * 128, x.padded_size)
    assert (rest, more, made.block, made.programmatic) == (0, 0, 256, True)
    offsets = memory(x.expert_offsets, torch.int32, [num_experts + 1], [1]).tolist()
    num_rows, shape = offsets[-1], [num_experts, parts, x.size]
    if num_rows == 0:
        return
    width = x.size if parts == 1 else parts * x.padded_size
    rows = rows_of(x, num_rows, x.num_blocks, width)
    rows = rows.unflatten(1, (parts, -1))[..., : x.size]
    if x.weight_of_row is not None:
        rows = rows * memory(x.weight_of_row, torch.float32, [num_rows], [1])[:, None, None]
    grad = memory(x.grad_bias, torch.float32, shape, [parts * x.size, x.size, 1])
    for expert, (begin, end) in enumerate(pairwise(offsets)):
        grad[expert] += rows[begin:end].sum(0)


def bias_score_grad(made) -> None:
    x = made.arguments
    assert (made.block, made.programmatic) == (128, True)
    token_to_row = memory(x.token_to_row, torch.int32, [made.grid], [1]).long()
    offsets = memory(x.expert_offsets, torch.int32, [x.num_experts + 1], [1])
    has_row = token_to_row >= 0
    if not has_row.any():
        return
    rows = rows_of(x, int(token_to_row.max()) + 1, num_blocks(x.size), x.size)
    dtype = dtype_of(made.kernel)
    bias = memory(x.bias, dtype, [x.num_experts, x.size], [x.size, 1]).float()
    experts = torch.searchsorted(offsets, token_to_row.int(), right=True) - 1
    products = (rows[token_to_row] * bias[experts.clamp(min=0)]).sum(-1)
    grad = memory(x.grad_scores, torch.float32, [made.grid], [1])
    grad += torch.where(has_row, products, 0)
