"""The gradient of the activation of trained experts, in row codes and in column codes.

T tokens, k choices each, E experts, R rows, I intermediate, B blocks of column codes. Let a_r =
f(gate_r) up_r, w_r the sum of the weights of the row's choices, and dA_r the gradient of a_r
before it is multiplied by w_r. Then d[gate | up]_r = w_r dA_r da/d[gate | up]. The gradient of x
sums it over features, and needs row codes. The gradient of W_gate_up sums it over tokens, that of
W_down sums w_r a_r over tokens: both need column codes, see `quantize_128x1`. Column codes of w_r
a_r may share a scale for 128 features, those of a gradient never do. All codes are made from FP32
values that were not rounded before.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...kernels.common.activation import Activation
from ...kernels.common.blocks import (
    BLOCK,
    E4M3,
    MIN_GRADIENT_AMAX,
    ceil_div,
    divisor_of,
    empty_tma_aligned,
    num_blocks,
    round_up,
    zero_padded,
)
from ...kernels.common.checks import FLOATS, INPUTS, check_same_device, check_shape, check_tensor
from ...kernels.common.prepared import layout_of, prepared
from ...kernels.jit import Kernel, Launch
from ...kernels.program import Codes, Place, Record, Tensor, layouts, prepare_launches
from ...kernels.registry import register_inputs
from ...kernels.targets import target_of
from ...quant.block_scaled import BlockScaled, dequantize
from ...quant.columns import empty_columns, num_column_blocks, quantize_128x1
from ...quant.numerics import quantize_1x128
from ..activation import activate_grad, readable_saved
from ..activation_rows import weights_of_rows

_OP = "activation_columns_backward"
_CODES = 8  # loaded at once by a thread


class ActivationColumnsGradients(NamedTuple):
    """The results of `activation_columns_backward`. Rows and blocks of no expert are undefined.

    codes, scale_inv: d[gate | up], e4m3 [R, 2 * (I rounded up to 128)], halves padded with zeros,
        and its fp32 1x128 scales: as in `activation_rows_backward`, bit for bit.
    gate_up_columns, gate_up_scale_inv: d[gate | up], gate's features first: column codes e4m3
        [B, 2 I, 128] with fp32 scales [B, 2 I].
    activated_columns, activated_scale_inv: w a, e4m3 [B, I, 128] with fp32 scales [B, I], or
        [B, ceil(I/128)] with `blocks`; the pitch of rows is a multiple of 16 bytes.
    grad_weights: fp32 [T, k], <dA, a> of the choice's row; 0 where there is no row.
    is_first: fp32 [T, k], 1 for the first choice of each row and 0 for others.
    """

    codes: torch.Tensor
    scale_inv: torch.Tensor
    gate_up_columns: torch.Tensor
    gate_up_scale_inv: torch.Tensor
    activated_columns: torch.Tensor
    activated_scale_inv: torch.Tensor
    grad_weights: torch.Tensor
    is_first: torch.Tensor


class ActivationColumnsInputs(NamedTuple):
    """The inputs of `activation_columns_backward`.

    grad: bf16 [R, I], the gradient of activated values, not yet times the weight of a choice.
    gate_up: bf16 [R, 2, I], best in the layout of `empty_gate_up`, or codes e4m3 [2 R, I].
    gate_up_scale_inv: fp32 [2 R, ceil(I/128)], the scales of the codes; None for bf16.
    expert_offsets: int32 [E + 1]; expert e has the rows from expert_offsets[e] to the next one.
    token_to_row: int32 [T, k], as in `RoutingPlan`; anything but [0, R) is no row. A row of an
        expert that no choice has counts as zeros.
    top_k_weights: [T, k] bf16, fp16 or fp32.
    blocks: column codes of w a have one scale for 128 tokens of 128 features; otherwise for 128
        tokens of one feature. All else is the same, bit for bit.
    """

    grad: torch.Tensor
    gate_up: torch.Tensor
    gate_up_scale_inv: torch.Tensor | None
    expert_offsets: torch.Tensor
    token_to_row: torch.Tensor
    top_k_weights: torch.Tensor
    activation: Activation
    blocks: bool = False


def _check(inputs: ActivationColumnsInputs) -> None:
    grad, gate_up, scale_inv, expert_offsets, token_to_row, weights, *_ = inputs
    check_same_device(
        _OP,
        grad=grad,
        gate_up=gate_up,
        gate_up_scale_inv=scale_inv,
        expert_offsets=expert_offsets,
        token_to_row=token_to_row,
        top_k_weights=weights,
    )
    check_tensor(_OP, "grad", grad, (torch.bfloat16,), 2)
    num_rows, size = grad.shape
    if scale_inv is None:
        check_tensor(_OP, "gate_up", gate_up, (torch.bfloat16,), 3)
        check_shape(_OP, "gate_up", gate_up, [num_rows, 2, size], "[R, 2, I] for grad [R, I]")
    else:
        check_tensor(_OP, "gate_up", gate_up, (E4M3,), 2)
        check_shape(_OP, "gate_up", gate_up, [2 * num_rows, size], "[2 R, I] for grad [R, I]")
        check_tensor(_OP, "gate_up_scale_inv", scale_inv, (torch.float32,), 2)
        shape = [2 * num_rows, num_blocks(size)]
        check_shape(_OP, "gate_up_scale_inv", scale_inv, shape, "[2 R, ceil(I/128)]")
    check_tensor(_OP, "expert_offsets", expert_offsets, (torch.int32,), 1)
    if len(expert_offsets) < 2:
        came = list(expert_offsets.shape)
        raise ValueError(f"{_OP}: expert_offsets must be [E + 1] for E >= 1 experts, got {came}")
    check_tensor(_OP, "token_to_row", token_to_row, (torch.int32,), 2)
    check_tensor(_OP, "top_k_weights", weights, FLOATS, 2)
    check_shape(_OP, "top_k_weights", weights, token_to_row.shape, "[T, k] as token_to_row")


def _allocate(inputs: ActivationColumnsInputs) -> ActivationColumnsGradients:
    """Check, then allocate the gradients; this is also the fake body."""
    _check(inputs)
    grad, weights, device = inputs.grad, inputs.top_k_weights, inputs.grad.device
    num_rows, size = grad.shape
    num_columns = num_column_blocks(num_rows, len(inputs.expert_offsets) - 1)
    padded = 2 * round_up(size, BLOCK)
    per_choice = (weights.new_empty(weights.shape, dtype=torch.float32) for _ in range(2))
    return ActivationColumnsGradients(
        grad.new_empty((num_rows, padded), dtype=E4M3),
        empty_tma_aligned((num_rows, padded // BLOCK), device),
        *empty_columns(num_columns, 2 * size, device),
        *empty_columns(num_columns, size, device, blocks=inputs.blocks),
        *per_choice,
    )


def _body(inputs: ActivationColumnsInputs) -> ActivationColumnsGradients:
    gradients = _allocate(inputs)
    grad, gate_up, scale_inv, expert_offsets, token_to_row, top_k_weights = inputs[:6]
    activation, blocks = inputs.activation, inputs.blocks
    num_rows, size = grad.shape
    if grad.numel() == 0:
        return _without_elements(gradients)
    if scale_inv is not None:
        gate_up = dequantize(BlockScaled(gate_up, scale_inv)).view(num_rows, 2, size)
    has_row = (token_to_row >= 0) & (token_to_row < num_rows)
    token_to_row = token_to_row.masked_fill(~has_row, -1)
    has_choice = torch.zeros(num_rows + 1, dtype=torch.bool, device=grad.device)
    has_choice[token_to_row.flatten().long()] = True  # the extra last one for -1
    has_choice = has_choice[:num_rows]
    grad = grad.float().masked_fill(~has_choice[:, None], 0.0)
    gate, up = gate_up.float().masked_fill(~has_choice[:, None, None], 0.0).unbind(1)
    weight_of_row, is_first = weights_of_rows(token_to_row, top_k_weights, num_rows)
    *grad_halves, activated = activate_grad(grad, gate, up, activation)
    grad_gate_up = torch.stack(grad_halves, 1) * weight_of_row[:, None, None]
    padded = zero_padded(grad_gate_up, 2).flatten(1)
    weighted = weight_of_row[:, None] * activated
    products = (grad * activated).sum(-1)
    values = (
        *quantize_1x128(padded, min_amax=MIN_GRADIENT_AMAX),
        *_columns(grad_gate_up.flatten(1), expert_offsets),
        *_columns(weighted, expert_offsets, blocks),
        products[token_to_row.clamp(min=0)].masked_fill(~has_row, 0.0),
        is_first,
    )
    for x, value in zip(gradients, values, strict=True):
        x.copy_(value)
    return gradients


def _columns(
    x: torch.Tensor, expert_offsets: torch.Tensor, blocks: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    data, scale_inv = quantize_128x1(x, expert_offsets, None, False, MIN_GRADIENT_AMAX, blocks)
    return data, scale_inv


def _without_elements(gradients: ActivationColumnsGradients) -> ActivationColumnsGradients:
    gradients.grad_weights.zero_()
    gradients.is_first.zero_()
    return gradients


# The addresses of a call: input tensors, gradients, memory of the kernels.
_ADDRESSES = (
    *("grad", "saved", "saved_scales", "expert_offsets", "token_to_row", "weights"),
    *("rows", "rows_scales", "gate_up", "gate_up_scales", "activated", "activated_scales"),
    *("grad_weights", "is_first", "weight_of_row", "partial_sums"),
)


def _launch(inputs: ActivationColumnsInputs) -> ActivationColumnsGradients:
    gradients = _allocate(inputs)
    if inputs.grad.numel() == 0:
        return _without_elements(gradients)
    inputs = _as_kernels_read(inputs)
    grad, gate_up, scales, expert_offsets, token_to_row, weights = inputs[:6]
    num_rows, size = grad.shape
    memory = (
        grad.new_zeros(num_rows, dtype=torch.float32),  # the weight of each row
        grad.new_empty((num_blocks(size), num_rows), dtype=torch.float32),  # partial sums
    )
    launches = prepared(
        (
            _OP,
            *map(layout_of, (grad, gate_up, weights)),
            None if scales is None else layout_of(scales),
            len(expert_offsets),
            *inputs[6:],
        ),
        lambda: _prepare(inputs, gradients),
    )
    tensors = grad, gate_up, scales, expert_offsets, token_to_row, weights, *gradients, *memory
    addresses = tuple([0 if x is None else x.data_ptr() for x in tensors])
    for launch in launches:
        launch.on(grad.get_device(), addresses)
    return gradients


def _prepare(
    inputs: ActivationColumnsInputs, gradients: ActivationColumnsGradients
) -> Sequence[Launch]:
    grad, gate_up, scales, expert_offsets, _, weights, activation, blocks = inputs
    device_index = grad.get_device()
    r = Record(target_of(device_index), _ADDRESSES)
    describe_activation_columns(
        r,
        **layouts(grad=grad, saved=gate_up, saved_scales=scales, weights=weights),
        expert_offsets=Place("expert_offsets"),
        token_to_row=Place("token_to_row"),
        num_experts=len(expert_offsets) - 1,
        activation=activation,
        rows=Codes.of(gradients.codes, gradients.scale_inv, "rows"),
        gate_up_columns=Codes.of(gradients.gate_up_columns, gradients.gate_up_scale_inv, "gate_up"),
        activated_columns=Codes.of(
            gradients.activated_columns, gradients.activated_scale_inv, "activated"
        ),
        grad_weights=Place("grad_weights"),
        is_first=Place("is_first"),
        weight_of_row=Place("weight_of_row"),
        partial_sums=Place("partial_sums"),
        blocks=blocks,
    )
    return prepare_launches(r, device_index).launches


def _as_kernels_read(inputs: ActivationColumnsInputs) -> ActivationColumnsInputs:
    """Each input itself, or a copy if kernels cannot read its layout."""
    grad, gate_up, scales = inputs[:3]
    num_rows, size = grad.shape
    if (grad.data_ptr() | 2 * grad.stride(0)) % 16 or grad.stride(0) < size or grad.stride(1) != 1:
        pitch = round_up(size, _CODES)
        grad = grad.new_empty((num_rows, pitch))[:, :size].copy_(grad)
    gate_up, scales = readable_saved(gate_up, scales)
    return inputs._replace(
        grad=grad,
        gate_up=gate_up,
        gate_up_scale_inv=scales,
        expert_offsets=inputs.expert_offsets.contiguous(),
        token_to_row=inputs.token_to_row.contiguous(),
    )


activation_columns_backward = register_inputs(
    _OP,
    ActivationColumnsInputs,
    "(Tensor codes, Tensor scale_inv, Tensor gate_up_columns, Tensor gate_up_scale_inv, "
    "Tensor activated_columns, Tensor activated_scale_inv, Tensor grad_weights, Tensor is_first)",
    reference=_body,
    fake=_allocate,
    kernels=_launch,
)
"""The gradient of `activation_rows` times the weights of choices, and the column codes for the
gradients of W: `ActivationColumnsInputs` -> `ActivationColumnsGradients`. In column codes, rows
after an expert's last one are zeros up to a multiple of 32. Raises TypeError, ValueError."""


# ---- The kernels ----

_SOURCE = Path(__file__).with_name("activation_columns.cu")
_THREADS = 256
_LOADS_AT_ONCE = 8  # of partial sums
_MAX_TILES = 2**31 - 1  # of a grid, and the largest number that `Divisor` takes


def _kernel(name: str) -> Kernel:
    return Kernel(_SOURCE, f"activation_columns_{name}")


def weights_kernel_of(weights_dtype: torch.dtype) -> Kernel:
    return _kernel(f"weights_kernel<{INPUTS[weights_dtype]}>")


def kernel_of(activation: Activation, *, is_fp8: bool, blocks: bool = False) -> Kernel:
    """blocks: column codes of activated values have one scale for 128 features."""
    flags = str(is_fp8).lower(), str(blocks).lower()
    return _kernel(f"kernel<{', '.join((activation.enumerator, *flags))}>")


def sums_kernel_of() -> Kernel:
    return _kernel(f"sums_kernel<{_LOADS_AT_ONCE}>")


def shared_bytes_of(*, is_fp8: bool) -> int:
    """The size of `Memory` in activation_columns_tile.cuh."""
    units, unit_rows, results, warps = 8, 16, 3, _THREADS // 32
    codes = sum(units * (unit_rows * BLOCK * n + 16) for n in (2, *[1 if is_fp8 else 2] * 2))
    amax, dividers, weights = warps * results * BLOCK * 4, results * BLOCK * 8, BLOCK * 4
    return codes + amax + dividers + weights + (2 * BLOCK * 4 if is_fp8 else 16)


def describe_activation_columns(
    r: Record,
    grad: Tensor,
    saved: Tensor,
    saved_scales: Tensor | None,
    weights: Tensor,
    expert_offsets: Place,
    token_to_row: Place,
    num_experts: int,
    activation: Activation,
    *,
    rows: Codes,
    gate_up_columns: Codes,
    activated_columns: Codes,
    grad_weights: Place,
    is_first: Place,
    weight_of_row: Place,
    partial_sums: Place,
    row_to_token: Place | None = None,
    blocks: bool = False,
) -> None:
    """Add three steps to r: weights of rows, gradients, gradients of weights; without choices, one.

    Each waits for the previous step.

    Args:
        grad: bf16 [..., R, I] in rows of whole 16 bytes.
        saved: bf16 [R, 2, I] in the layout of `empty_gate_up`, or e4m3 [2 R, I], contiguous, at a
            multiple of 8 bytes. Not empty.
        saved_scales: fp32 [2 R, ceil(I/128)], rows innermost; None for bf16.
        weights: [T, k].
        expert_offsets: int32 [E + 1]. token_to_row: int32 [T, k], contiguous.
        rows: e4m3 [..., R, 2 * (I rounded up to 128)], contiguous; the padding of each half is
            written as zeros. fp32 scales, rows innermost.
        gate_up_columns, activated_columns: e4m3 [B, 2 I, 128] and [B, I, 128]; fp32 [B, 2 I] and
            [B, I], or with `blocks` [B, ceil(I/128)], as `empty_columns` says.
        grad_weights, is_first: fp32 [T, k].
        weight_of_row: fp32 [R], zeros in rows of an expert that no choice has, anything elsewhere.
            partial_sums: fp32 [ceil(I/128), R]. Both are memory for the kernels.
        row_to_token: int32 [R], written by the first step for rows of choices; None: not written.
        blocks: as in `kernel_of`.

    Raises:
        ValueError: there are more tiles than a grid takes.
    """
    is_fp8, size = saved_scales is not None, saved.shape[-1]
    num_rows = saved.shape[0] // (2 if is_fp8 else 1)
    (num_tokens, top_k), tiles_of_row = weights.shape, num_blocks(size)
    num_choices = num_tokens * top_k
    num_tiles = num_column_blocks(num_rows, num_experts) * tiles_of_row
    if max(num_tiles, num_choices + _THREADS) > _MAX_TILES:
        raise ValueError(
            f"{_OP}: one call takes at most {_MAX_TILES} tiles of 128x128, and "
            f"choices, got {num_tiles} and {num_choices}; split the tokens"
        )
    arguments: dict[str, Any] = {
        "grad": grad.place,
        "grad_row_bytes": grad.bytes_of_stride(-2),
        "saved": saved.place,
        "saved_row_bytes": saved.bytes_of_stride(-2),
        "expert_offsets": expert_offsets,
        "token_to_row": token_to_row,
        "weights": weights.place,
        "weight_token_bytes": weights.bytes_of_stride(0),
        "weight_choice_bytes": weights.bytes_of_stride(1),
        "rows": rows.data.place,
        "row_pitch": 2 * tiles_of_row * BLOCK,
        "row_scales": rows.scale_inv.place,
        "scale_pitch": rows.scale_inv.strides[-1],
        "gate_up_columns": gate_up_columns.data.place,
        "gate_up_scales": gate_up_columns.scale_inv.place,
        "gate_up_scale_pitch": gate_up_columns.scale_inv.strides[0],
        "activated_columns": activated_columns.data.place,
        "activated_scales": activated_columns.scale_inv.place,
        "activated_scale_pitch": activated_columns.scale_inv.strides[0],
        "weight_of_row": weight_of_row,
        "row_to_token": row_to_token,
        "partial_sums": partial_sums,
        "of_weights": grad_weights,
        "is_first": is_first,
        "num_choices": num_choices,
        "num_rows": num_rows,
        "num_experts": num_experts,
        "size": size,
        "top_k": divisor_of(max(top_k, 1)),
        "num_tiles": divisor_of(tiles_of_row),
        "activation": activation.arguments,
        "min_amax": MIN_GRADIENT_AMAX,
    }
    if saved_scales is not None:
        arguments["saved_scales"] = saved_scales.place
        arguments["saved_scale_pitch"] = saved_scales.strides[-1]

    def step(kernel: Kernel, grid: int, shared_bytes: int = 0) -> None:
        r.step(kernel, grid, _THREADS, arguments, programmatic=True, shared_bytes=shared_bytes)

    if num_choices > 0:
        step(weights_kernel_of(weights.dtype), ceil_div(num_choices, _THREADS))
    step(
        kernel_of(activation, is_fp8=is_fp8, blocks=blocks),
        num_tiles,
        shared_bytes_of(is_fp8=is_fp8),
    )
    if num_choices > 0:
        step(sums_kernel_of(), ceil_div(num_choices, _THREADS))
