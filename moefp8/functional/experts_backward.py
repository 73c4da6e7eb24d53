"""The gradients of the routed SwiGLU experts, in hidden states and in the weights of choices.

T tokens, k choices each, E experts, H hidden, I intermediate, R = T k rows. With dO the gradient of
the result, row r of token t and choice j, and w its weight:

1. dO is quantized to 1x128 and dispatched.
2. dA_r = dO_t W_down, rounded to BF16: the gradient of the activated values, times no weight.
3. a_r is recomputed from the saved gate and up; the weight's gradient is dw_r = <dA_r, a_r>, and
   d[gate | up]_r = w dA_r da/d[gate | up], quantized to 1x128, gate and up apart.
4. dX_r = d[gate | up]_r W_gate_up, rounded to BF16; dX_t is the sum over its rows, in FP32 and in
   the order of the choices.
"""

from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch

from ..kernels.common.blocks import E4M3, MIN_GRADIENT_AMAX, num_blocks
from ..kernels.common.checks import (
    check_quantized_or_not,
    check_same_device,
    check_shape,
    check_tensor,
)
from ..kernels.common.registry import register_inputs
from ..kernels.gemm.dense import block_scaled_matmul
from ..quant.block_scaled import BlockScaled, dequantize
from ..quant.numerics import quantize_1x128
from ..quant.quantize import quantize_1x128 as quantize_op
from ..routing.combine import combine_rows
from ..routing.dispatch import dispatch_rows
from ..routing.plan import build_maps
from .autograd import first_order, no_gradients, records
from .expert_parts import Combine
from .experts import ExpertsInputs, experts, experts_saving
from .experts_backward_launch import launch_experts_backward, sizes_of
from .experts_launch import num_parts_of
from .feed_forward_backward import through_swiglu
from .swiglu_rows import weights_of_rows

_OP = "experts_backward"
Gradients = tuple[torch.Tensor, torch.Tensor]  # of hidden states, of top_k_weights


class ExpertsBackwardInputs(NamedTuple):
    """What `experts_backward` takes.

    grad: [T, H] bf16, fp16 or fp32, that of the result; it is quantized to 1x128. Or e4m3, codes as
        `quantize_gradient_1x128` gives them, with the same bits as of what was quantized.
    gate_up: what `experts_saving` gave, bf16 [T k, 2, I], or its codes e4m3 [2 T k, I].
    gate_up_scale_inv: fp32 [2 T k, ceil(I/128)], those of the codes; None for bf16.
    keeps: whether transposed weights are kept on a GPU, see `transposed`.
    grad_scale_inv: fp32 [T, ceil(H/128)], the scales of an e4m3 `grad`, in any strides; None for
        others.
    The others: as in `ExpertsInputs`.
    """

    grad: torch.Tensor
    top_k_index: torch.Tensor
    top_k_weights: torch.Tensor
    gate_up: torch.Tensor
    gate_up_scale_inv: torch.Tensor | None
    gate_up_proj: torch.Tensor
    gate_up_proj_scale_inv: torch.Tensor
    down_proj: torch.Tensor
    down_proj_scale_inv: torch.Tensor
    swiglu_limit: float | None
    keeps: bool | None
    expert_offset: int = 0
    num_global_experts: int | None = None
    grad_scale_inv: torch.Tensor | None = None


def _check(inputs: ExpertsBackwardInputs) -> None:
    grad, ids, weights, gate_up, *_ = inputs
    (num_tokens, top_k), (_, h, i) = ids.shape, inputs.down_proj.shape
    scale_inv = inputs.grad_scale_inv
    named = {"grad": grad, "top_k_index": ids, "gate_up": gate_up, "down_proj": inputs.down_proj}
    check_same_device(_OP, **named, grad_scale_inv=scale_inv)
    check_quantized_or_not(_OP, "grad", grad, scale_inv)
    check_shape(_OP, "grad", grad, [num_tokens, h], "[T, H]")
    check_shape(_OP, "top_k_weights", weights, [num_tokens, top_k], "[T, k] as top_k_index")
    num_rows, saved = num_tokens * top_k, [num_tokens * top_k, 2, i]
    if inputs.gate_up_scale_inv is None:
        check_tensor(_OP, "gate_up", gate_up, (torch.bfloat16,), 3)
    else:
        check_tensor(_OP, "gate_up", gate_up, (E4M3,), 2)
        saved = [2 * num_rows, i]
    check_shape(_OP, "gate_up", gate_up, saved, "two rows of I for each choice")


def _empty(inputs: ExpertsBackwardInputs) -> Gradients:
    grad, weights = inputs.grad, inputs.top_k_weights
    dx = torch.empty_like(grad, dtype=torch.bfloat16, memory_format=torch.contiguous_format)
    return dx, weights.new_empty(weights.shape, dtype=torch.float32)


def _allocate(inputs: ExpertsBackwardInputs) -> Gradients:
    """Check, then allocate the gradients; this is also the fake body."""
    _check(inputs)
    return _empty(inputs)


def _body(inputs: ExpertsBackwardInputs) -> Gradients:
    dx, _ = _allocate(inputs)
    grad, ids, top_k_weights, gate_up, gate_up_scales, *weights = inputs[:9]
    gate_up_proj, gate_up_proj_scales, down_proj, down_scales = weights
    num_experts, h, i = down_proj.shape
    maps = build_maps(ids, num_experts, 1, None, inputs.expert_offset)
    _, expert_offsets, row_to_token, _, token_to_row = maps
    num_rows = len(row_to_token)
    if num_rows == 0 or i == 0:
        return dx.zero_(), top_k_weights.new_zeros(ids.shape, dtype=torch.float32)
    if gate_up_scales is not None:
        gate_up = dequantize(BlockScaled(gate_up, gate_up_scales)).view(num_rows, 2, i)
    weight_of_row, is_first = weights_of_rows(token_to_row, top_k_weights, num_rows)
    data, scale_inv = grad, inputs.grad_scale_inv
    if scale_inv is None:
        data, scale_inv = quantize_1x128(grad, min_amax=MIN_GRADIENT_AMAX)
    data, scale_inv = (dispatch_rows(x, row_to_token) for x in (data, scale_inv))
    rows, of_rows = grad.new_zeros(num_rows, h, dtype=torch.bfloat16), weight_of_row * 0
    for expert, (begin, end) in enumerate(pairwise(expert_offsets.tolist())):
        if begin == end:
            continue
        of_down = down_proj[expert].mT, down_scales[expert].mT
        of_activated = block_scaled_matmul(data[begin:end], scale_inv[begin:end], *of_down)
        halves = gate_up_proj[expert].split(i), gate_up_proj_scales[expert].split(num_blocks(i))
        rows[begin:end], of_rows[begin:end] = through_swiglu(
            of_activated.bfloat16(),
            gate_up[begin:end],
            weight_of_row[begin:end, None],
            list(zip(*halves, strict=True)),
            inputs.swiglu_limit,
        )
    of_weights = of_rows[token_to_row.clamp(min=0)].masked_fill(token_to_row < 0, 0.0)
    return combine_rows(rows, token_to_row, is_first), of_weights


def _launch(inputs: ExpertsBackwardInputs) -> Gradients:
    gradients = _empty(inputs)
    num_parts = num_parts_of(sizes_of(inputs), saves=True)
    launch_experts_backward(partial(_check, inputs), inputs, *gradients, num_parts)
    return gradients


experts_backward = register_inputs(
    _OP,
    ExpertsBackwardInputs,
    "(Tensor, Tensor)",
    cpu=_body,
    fake=_allocate,
    hopper=_launch,
)
"""`ExpertsBackwardInputs` -> bf16 [T, H] and fp32 [T, k], as the head of this file says.

A choice that is held elsewhere has a gradient of exactly 0, and choices that share a row have the
same one. On a Hopper GPU, what a token gets does not depend on the other tokens, bit for bit."""


def gradients_run_as_a_whole(inputs: ExpertsBackwardInputs) -> bool:
    """Whether a Hopper GPU has all tokens in one part, as `launch_combining_gradients` needs."""
    return num_parts_of(sizes_of(inputs), saves=True) == 1


def launch_combining_gradients(
    inputs: ExpertsBackwardInputs, combine: Combine, word: int, out: torch.Tensor
) -> None:
    """`experts_backward` on a Hopper GPU, where `combine` sums the rows of tokens and brings them
    elsewhere, and the gradients of weights with them; see `gradients_run_as_a_whole`.

    word: a number for the kernel of `combine`, which may differ from call to call.
    out: what it takes for the result.
    """
    weights = inputs.top_k_weights
    of_weights = weights.new_empty(weights.shape, dtype=torch.float32)
    check = partial(_check, inputs)
    launch_experts_backward(check, inputs, out, of_weights, 1, combine, word)


# ---- Autograd ----


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, layer: str, saved_dtype: torch.dtype, keeps: bool | None, *inputs: Any
    ) -> torch.Tensor:
        told = ExpertsInputs(*inputs)
        ctx.saves = any(ctx.needs_input_grad[3:-2])
        if not ctx.saves:  # the addend alone asks
            return cast(torch.Tensor, experts(*inputs))
        y, gate_up = experts_saving(*inputs)
        scale_inv = None
        if saved_dtype == E4M3:
            gate_up, scale_inv = quantize_op(gate_up.flatten(0, 1), False)
        ctx.save_for_backward(*inputs[1:3], gate_up, scale_inv, *inputs[3:7])
        ctx.layer, ctx.dtypes = layer, (told[0].dtype, told[2].dtype)
        ctx.options = told.swiglu_limit, keeps, told.expert_offset, told.num_global_experts
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needs = dict(zip(ExpertsInputs._fields, ctx.needs_input_grad[3:], strict=True))
        found = _gradients(ctx, grad, needs) if ctx.saves else {}
        if needs["addend"]:
            found["addend"] = grad
        return None, None, None, *(found.get(name) for name in ExpertsInputs._fields)


def _gradients(
    ctx: Any, grad: torch.Tensor, needs: dict[str, bool]
) -> dict[str, torch.Tensor | None]:
    """Those that need what was saved, by the names of the inputs."""
    saved, of_dtype = ctx.saved_tensors, ctx.dtypes
    found: dict[str, torch.Tensor | None] = {}
    if needs["hidden_states"] or needs["top_k_weights"]:
        dx, of_weights = experts_backward(grad, *saved, *ctx.options)
        if needs["hidden_states"]:
            found["hidden_states"] = dx.to(of_dtype[0])
        if needs["top_k_weights"]:
            found["top_k_weights"] = of_weights.to(of_dtype[1])
    names = ExpertsInputs._fields[3:7]
    of_projections = no_gradients(grad, ctx.layer, [needs[x] for x in names], saved[4:])
    return found | dict(zip(names, of_projections, strict=True))


def check_saved_dtype(layer: str, saved_dtype: torch.dtype) -> None:
    if saved_dtype not in (torch.bfloat16, E4M3):
        raise ValueError(
            f"{layer}: saved_dtype must be torch.bfloat16 or torch.float8_e4m3fn, got "
            f"{saved_dtype!r}"
        )


def routed_experts(
    layer: str,
    inputs: ExpertsInputs,
    saved_dtype: torch.dtype = torch.bfloat16,
    keeps: bool | None = None,
) -> torch.Tensor:
    """`experts` -> bf16 [T, H], with gradients in hidden states, top_k_weights and addend.

    layer: who is named if a gradient of a weight is wanted, which is an error.
    saved_dtype: in which gate and up are saved for the backward: bf16, or e4m3 with 1x128 scales.
    keeps: see `transposed`.
    """
    y: torch.Tensor
    scale_inv = inputs.hidden_states_scale_inv
    if scale_inv is not None and records(layer, inputs.hidden_states, scale_inv):
        raise NotImplementedError(
            f"{layer}: codes of hidden states and their scales have no gradient; detach them"
        )
    if records(layer, *inputs):  # an autograd function costs as much as a launch
        check_saved_dtype(layer, saved_dtype)
        y = _Experts.apply(layer, saved_dtype, keeps, *inputs)
    else:
        y = experts(*inputs)
    return y
