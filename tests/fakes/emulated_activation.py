"""`activation_rows.cu` and `activation_backward.cu` on the CPU, with checks of their arguments.

A part of the stand-in for libcuda: see `emulator.py`.
"""

from typing import NamedTuple

import torch
from torch.nn import functional as F

from moefp8.functional.activation import activate, activate_grad
from moefp8.kernels import num_blocks, round_up
from moefp8.quant import numerics
from tests.fakes.emulated_gemm import activation_of, memory


def activation_of_rows(made) -> None:
    """What `activation_rows.cu` does."""
    x, num_rows, pitch = made.arguments, made.grid, made.arguments.row_bytes // 2
    assert made.block == min(256, round_up(-(-x.size // 8), 32))
    assert made.programmatic
    # Eight elements are loaded and stored at once, also where a row ends between them.
    assert (x.gate_up | x.activated | x.row_bytes) % 16 == 0
    assert pitch >= round_up(x.size, 8)
    strides = [2 * pitch, pitch, 1]
    gate_up = memory(x.gate_up, torch.bfloat16, [num_rows, 2, x.size], strides)
    activated = memory(x.activated, torch.bfloat16, [num_rows, x.size], [pitch, 1])
    activated.copy_(activate(*gate_up.unbind(1), activation_of(made.kernel, x.activation)))


class Choices(NamedTuple):
    """The choices that have a row, each row once for each of them.

    weights: the sum of those of all choices of the row.
    """

    index: torch.Tensor
    rows: torch.Tensor
    weights: torch.Tensor


def activation_backward(made, weights_dtype: torch.dtype) -> None:
    x, is_fp8 = made.arguments, made.kernel.name.endswith("true>")
    check_launch(made, is_fp8)
    index, rows, weights = choices_of(x, weights_dtype)
    if len(rows) == 0:
        return
    num_rows = int(rows.max()) + 1
    grads = memory(x.grad, torch.bfloat16, [num_rows, x.size], [x.grad_row_bytes // 2, 1])
    grad, gate_up = grads[rows].float(), saved_rows(x, rows, is_fp8)
    activation = activation_of(made.kernel, x.activation)
    *of_halves, activated = activate_grad(grad * weights[:, None], *gate_up.unbind(1), activation)
    padded = F.pad(torch.stack(of_halves, 1), (0, x.padded_size - x.size)).flatten(1)
    if x.rows is not None:
        data, scale_inv = numerics.quantize_1x128(padded, False, x.min_amax)
        codes = memory(x.rows, torch.uint8, [num_rows, data.shape[1]], [x.row_pitch, 1])
        codes[rows] = data.view(torch.uint8)
        shape = num_rows, scale_inv.shape[1]
        memory(x.row_scales, torch.float32, [*shape], [1, x.scale_pitch])[rows] = scale_inv
    if x.bf16_rows is not None:
        shape, pitch = [num_rows, 2, x.size], x.bf16_row_bytes // 2
        exact = memory(x.bf16_rows, torch.bfloat16, shape, [2 * pitch, pitch, 1])
        exact[rows] = torch.stack(of_halves, 1).bfloat16()
    if x.weight_of_row is not None:
        memory(x.weight_of_row, torch.float32, [num_rows], [1])[rows] = weights
    if x.of_weights is not None:
        of_weights = memory(x.of_weights, torch.float32, [x.num_choices], [1])
        of_weights[index] = (grad * activated).sum(-1)


def check_launch(made, is_fp8: bool) -> None:
    x = made.arguments
    assert (made.grid, made.shared_bytes) == (x.num_choices, 0)
    assert x.padded_size == round_up(x.size, 128)
    assert made.block == min(128, round_up(x.padded_size, 256) // 8)
    assert made.programmatic
    # Eight elements are loaded at once, also where a row ends between them, and stored.
    assert (x.grad | x.grad_row_bytes) % 16 == 0
    assert x.grad_row_bytes >= round_up(x.size, 8) * 2
    assert x.rows or x.bf16_rows
    if x.rows is not None:
        assert (x.rows | x.row_pitch) % 8 == 0
        assert x.row_pitch >= 2 * x.padded_size
    assert (x.saved_scales is not None) == is_fp8
    if is_fp8:  # codes are loaded one by one unless each row has whole eights
        assert (x.saved | x.saved_row_bytes) % (1 if x.size % 8 else 8) == 0
        assert x.saved_row_bytes >= x.size
    else:
        assert (x.saved | x.saved_row_bytes) % 16 == 0
        assert x.saved_row_bytes >= round_up(x.size, 8) * 2


def saved_rows(x, rows: torch.Tensor, is_fp8: bool) -> torch.Tensor:
    """fp32 [rows, 2, I]: gate and up."""
    dtype = torch.float8_e4m3fn if is_fp8 else torch.bfloat16
    rows = torch.stack([2 * rows, 2 * rows + 1], 1)
    num_rows, pitch = int(rows.max()) + 1, x.saved_row_bytes // dtype.itemsize
    values = memory(x.saved, dtype, [num_rows, x.size], [pitch, 1])
    if not is_fp8:
        return values[rows].float()
    shape, strides = [num_rows, num_blocks(x.size)], [1, x.saved_scale_pitch]
    scales = memory(x.saved_scales, torch.float32, shape, strides)[rows]
    codes = values.view(torch.uint8)[rows].view(dtype)
    return codes.float() * scales.repeat_interleave(128, -1)[..., : x.size]


def choices_of(x, dtype: torch.dtype) -> Choices:
    """What is told of each choice, but its gradient where it has a row, is written on the way."""
    if x.token_to_row is None:
        assert (x.weights, x.of_weights, x.is_first, x.top_k) == (None, None, None, 1)
        index = torch.arange(x.num_choices)
        return Choices(index, index, torch.ones(x.num_choices))
    num_tokens, rest = divmod(x.num_choices, x.top_k)
    assert rest == 0
    shape, contiguous = [num_tokens, x.top_k], [x.top_k, 1]
    strides = [y // dtype.itemsize for y in (x.weight_token_bytes, x.weight_choice_bytes)]
    weights = memory(x.weights, dtype, shape, strides).float()
    token_to_row = memory(x.token_to_row, torch.int32, shape, contiguous)
    has_row, is_same = token_to_row >= 0, token_to_row[:, :, None] == token_to_row[:, None, :]
    is_first = (is_same.int().argmax(-1) == torch.arange(x.top_k)) & has_row
    memory(x.is_first, torch.float32, shape, contiguous).copy_(is_first)
    memory(x.of_weights, torch.float32, shape, contiguous)[~has_row] = 0
    of_rows = torch.where(is_same, weights[:, None, :], 0).sum(-1)
    (index,) = torch.nonzero(has_row.flatten(), as_tuple=True)
    return Choices(index, token_to_row.flatten()[index].long(), of_rows.flatten()[index])
