"""The gradients of routed SwiGLU experts in hidden states and in the weights of choices.

T tokens, k choices each, E experts, H hidden, I intermediate, R = T k rows. With dO the gradient of
the result, row r of token t and choice j, and w its weight:

1. dO is quantized to 1x128 and dispatched.
2. dA_r = dO_t W_down, rounded to BF16: the gradient of activated values, not yet times w.
3. a_r is recomputed from the saved gate and up. The gradient of w is dw_r = <dA_r, a_r>, and
   d[gate | up]_r = w dA_r da/d[gate | up], quantized to 1x128, gate and up separately.
4. dX_r = d[gate | up]_r W_gate_up, rounded to BF16. dX_t is the sum over the rows of t, in FP32
   and in the order of the choices.
"""

from itertools import pairwise
from math import gcd
from typing import NamedTuple

import torch

from ..kernels.common.activation import Activation
from ..kernels.common.blocks import E4M3, MIN_GRADIENT_AMAX, TMA_BYTES
from ..kernels.common.checks import (
    check_quantized_or_not,
    check_same_device,
    check_shape,
    check_tensor,
)
from ..kernels.common.prepared import Launches, layout_of
from ..kernels.gemm.dense import block_scaled_matmul
from ..kernels.gemm.sizes import Sizes
from ..kernels.jit import current_driver
from ..kernels.program import Codes, Record, Tensor, layouts, prepare_launches
from ..kernels.registry import Written, register_inputs
from ..kernels.targets import target_of
from ..quant.block_scaled import BlockScaled, dequantize
from ..quant.numerics import quantize_1x128
from ..quant.weight_format import tile_scales
from ..routing.combine import combine_rows
from ..routing.dispatch import dispatch_rows
from ..routing.plan import build_maps
from .activation import is_readable, readable_saved
from .activation_rows import weights_of_rows
from .expert_biases import (
    BiasGradients,
    add_bias_gradients,
    biases_of,
    check_bias_gradients,
)
from .expert_parts import Choices, Combine, TransposedWeights, results_layout
from .experts_records import BACKWARD_INPUTS, describe_experts_backward, num_parts_of
from .feed_forward_backward import through_activation
from .parts import split
from .transposed import transposed

_OP = "experts_backward"
Gradients = tuple[torch.Tensor, torch.Tensor]  # of hidden states, of top_k_weights


class ExpertsBackwardInputs(NamedTuple):
    """The inputs of `experts_backward`.

    grad: [T, H], the gradient of the result: bf16, fp16 or fp32, quantized to 1x128. Or e4m3 codes
        from `quantize_gradient_1x128`, with the same result, bit for bit.
    gate_up: saved by `experts_saving`, bf16 [T k, 2, I], or its codes, e4m3 [2 T k, I].
    gate_up_scale_inv: fp32 [2 T k, ceil(I/128)], the scales of the codes; None for bf16.
    grad_gate_up_proj_bias, grad_down_proj_bias: fp32 [E, 2I] and [E, H], contiguous, to which the
        gradients of the biases are added; None: they are not wanted.
    keep_transposed: whether transposed weights are kept on a GPU, see `transposed`.
    grad_scale_inv: fp32 [T, ceil(H/128)], any strides: the scales of an e4m3 `grad`; else None.
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
    down_proj_bias: torch.Tensor | None
    grad_gate_up_proj_bias: Written | None
    grad_down_proj_bias: Written | None
    activation: Activation
    keep_transposed: bool | None
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
    check_bias_gradients(_OP, grad, inputs.down_proj.shape, biases_of(inputs))


def _empty(inputs: ExpertsBackwardInputs) -> Gradients:
    grad, weights = inputs.grad, inputs.top_k_weights
    dx = torch.empty_like(grad, dtype=torch.bfloat16, memory_format=torch.contiguous_format)
    return dx, weights.new_empty(weights.shape, dtype=torch.float32)


def _allocate(inputs: ExpertsBackwardInputs) -> Gradients:
    """Check, then allocate the gradients; this is also the fake body."""
    _check(inputs)
    return _empty(inputs)


def _body(inputs: ExpertsBackwardInputs) -> Gradients:
    """Expert by expert, in PyTorch: the formulas at the head of this file."""
    dx, _ = _allocate(inputs)
    grad, ids, scores = inputs.grad, inputs.top_k_index, inputs.top_k_weights
    gate_up_proj, down_proj = inputs.gate_up_proj, inputs.down_proj
    gate_up_proj_scales = tile_scales(gate_up_proj, inputs.gate_up_proj_scale_inv, parts=2)
    down_scales = tile_scales(down_proj, inputs.down_proj_scale_inv)
    biases = biases_of(inputs)
    has_biases = any(x is not None for x in biases)
    num_experts, h, i = down_proj.shape
    maps = build_maps(ids, num_experts, 1, None, inputs.expert_offset)
    _, expert_offsets, row_to_token, _, token_to_row = maps
    num_rows = len(row_to_token)
    if num_rows == 0 or (i == 0 and not has_biases):
        return dx.zero_(), scores.new_zeros(ids.shape, dtype=torch.float32)
    gate_up = inputs.gate_up
    if inputs.gate_up_scale_inv is not None:
        codes = BlockScaled(gate_up, inputs.gate_up_scale_inv)
        gate_up = dequantize(codes).view(num_rows, 2, i)
    score_of_row, is_first = weights_of_rows(token_to_row, scores, num_rows)
    data, scale_inv = grad, inputs.grad_scale_inv
    if scale_inv is None:
        data, scale_inv = quantize_1x128(grad, min_amax=MIN_GRADIENT_AMAX)
    data, scale_inv = (dispatch_rows(x, row_to_token) for x in (data, scale_inv))
    dx_rows = grad.new_zeros(num_rows, h, dtype=torch.bfloat16)
    grad_score_of_row = torch.zeros_like(score_of_row)
    grad_gate_up = grad.new_zeros(num_rows, 2 * i, dtype=torch.float32)
    for expert, (begin, end) in enumerate(pairwise(expert_offsets.tolist())):
        if begin == end:
            continue
        here = slice(begin, end)
        down_transposed = down_proj[expert].mT, down_scales[expert].mT
        grad_activated = block_scaled_matmul(data[here], scale_inv[here], *down_transposed)
        gate, up = gate_up_proj[expert].unflatten(0, (2, i))
        gate_scales, up_scales = gate_up_proj_scales[expert].unflatten(0, (2, -1))
        dx_rows[here], grad_score_of_row[here], grad_gate_up[here] = through_activation(
            grad_activated.bfloat16(),
            gate_up[here],
            score_of_row[here, None],
            [(gate, gate_scales), (up, up_scales)],
            inputs.activation,
        )
    if has_biases:
        grad_rows = dequantize(BlockScaled(data, scale_inv), torch.float32)
        rows = grad_rows, grad_gate_up, score_of_row, expert_offsets
        grad_score_of_row += add_bias_gradients(*biases, *rows)
    grad_scores = grad_score_of_row[token_to_row.clamp(min=0)]
    grad_scores = grad_scores.masked_fill(token_to_row < 0, 0.0)
    return combine_rows(dx_rows, token_to_row, is_first), grad_scores


def _launch(inputs: ExpertsBackwardInputs) -> Gradients:
    gradients = _empty(inputs)
    _launch_into(inputs, *gradients, num_parts_of(sizes_of(inputs), saves=True))
    return gradients


def _launch_into(
    inputs: ExpertsBackwardInputs,
    dx: torch.Tensor,
    grad_weights: torch.Tensor,
    num_parts: int,
    combine: Combine | None = None,
    word: int = 0,
) -> None:
    """`experts_backward` on the current stream; nothing waits for it.

    num_parts: the number of parts in which tokens are computed, as in the forward.
    combine: replaces `describe_combine`, and takes `dx`; there is one part.
    word: a number for the kernel of `combine`, which may differ from call to call.
    """
    if 0 in (*inputs.top_k_index.shape, *inputs.down_proj.shape):
        if any(x is not None for x in biases_of(inputs)):
            for target, x in zip((dx, grad_weights), _body(inputs), strict=True):
                target.copy_(x)
            return
        _check(inputs)
        dx.zero_()
        grad_weights.zero_()
        return
    weights = (
        transposed(inputs.down_proj, inputs.keep_transposed),
        tile_scales(inputs.down_proj, inputs.down_proj_scale_inv).mT,
        transposed(inputs.gate_up_proj, inputs.keep_transposed, parts=2),
        tile_scales(inputs.gate_up_proj, inputs.gate_up_proj_scale_inv, 2).mT,
    )
    grad = inputs.grad
    if grad.stride(1) != 1:
        grad = grad.contiguous()
    gate_up, scales = inputs.gate_up, inputs.gate_up_scale_inv
    if not is_readable(gate_up, scales):
        _check(inputs)
        gate_up, scales = readable_saved(gate_up, scales)
    inputs = inputs._replace(grad=grad, gate_up=gate_up, gate_up_scale_inv=scales)
    if num_parts == 1:
        _launch_part(inputs, weights, dx, grad_weights, combine, word)
        return
    cut = inputs.grad, inputs.top_k_index, inputs.top_k_weights, dx, grad_weights
    saved = inputs.gate_up, inputs.gate_up_scale_inv, inputs.grad_scale_inv
    for *tokens, part_dx, part_grad_weights, rows, row_scales, grad_scales in split(
        num_parts, len(inputs.grad), *cut, *saved
    ):
        part = inputs._replace(
            grad=tokens[0],
            top_k_index=tokens[1],
            top_k_weights=tokens[2],
            gate_up=rows,
            gate_up_scale_inv=row_scales,
            grad_scale_inv=grad_scales,
        )
        _launch_part(part, weights, part_dx, part_grad_weights)


def sizes_of(inputs: ExpertsBackwardInputs) -> Sizes:
    """The sizes of a layer, and of all its tokens."""
    (num_tokens, top_k), (e, h, i) = inputs.top_k_index.shape, inputs.down_proj.shape
    return Sizes(num_tokens, top_k, e, h, i, False, inputs.num_global_experts)


def _launch_part(
    inputs: ExpertsBackwardInputs,
    weights: tuple[torch.Tensor, ...],
    dx: torch.Tensor,
    grad_weights: torch.Tensor,
    combine: Combine | None = None,
    word: int = 0,
) -> None:
    grad, ids, top_k_weights, gate_up, scales = inputs[:5]
    grad_scales, biases = inputs.grad_scale_inv, biases_of(inputs)
    driver = current_driver()
    tensors = grad, ids, top_k_weights, gate_up, *weights
    key = (
        _OP,
        tuple([layout_of(x) for x in tensors]),
        None if scales is None else layout_of(scales),
        None if grad_scales is None else layout_of(grad_scales),
        grad.data_ptr() % 16,
        dx.data_ptr() % 16,
        tuple([None if x is None else layout_of(x) for x in biases]),
        inputs.activation,
        inputs.expert_offset,
        inputs.num_global_experts,
        combine,
        driver.max_sms,
    )
    prepared = driver.prepared().get(key)
    if prepared is None:
        _check(inputs)
        prepared = driver.keep(key, _prepare(inputs, weights, dx.data_ptr(), combine))
    saved_scales = 0 if scales is None else scales.data_ptr()
    grad_scales_address = 0 if grad_scales is None else grad_scales.data_ptr()
    addresses = [x.data_ptr() for x in (*weights, dx, grad_weights)]
    saved = gate_up.data_ptr(), saved_scales
    tokens = grad.data_ptr(), ids.data_ptr(), top_k_weights.data_ptr()
    others = grad_scales_address, word, *[0 if x is None else x.data_ptr() for x in biases]
    prepared(grad.get_device(), (*tokens, *saved, *addresses, *others))


def _prepare(
    inputs: ExpertsBackwardInputs,
    weights: tuple[torch.Tensor, ...],
    dx_alignment: int,
    combine: Combine | None,
) -> Launches:
    sizes = sizes_of(inputs)
    device_index = inputs.grad.get_device()
    down, down_scales, gate_up, gate_up_scales = weights
    shape = sizes.num_tokens, sizes.hidden_size
    r = Record(target_of(device_index), BACKWARD_INPUTS)
    describe_experts_backward(
        r,
        sizes,
        choices=Choices(
            Tensor.of(inputs.top_k_index, "ids"), Tensor.of(inputs.top_k_weights, "scores")
        ),
        weights=TransposedWeights(
            Codes.of(down, down_scales, "down"), Codes.of(gate_up, gate_up_scales, "gate_up")
        ),
        dx=results_layout("dx", shape, gcd(dx_alignment, TMA_BYTES)),
        activation=inputs.activation,
        expert_offset=inputs.expert_offset,
        combine=combine,
        biases=BiasGradients.of(*biases_of(inputs)),
        **layouts(
            grad=inputs.grad,
            grad_scales=inputs.grad_scale_inv,
            saved=inputs.gate_up,
            saved_scales=inputs.gate_up_scale_inv,
        ),
    )
    return prepare_launches(r, device_index)


experts_backward = register_inputs(
    _OP,
    ExpertsBackwardInputs,
    "(Tensor, Tensor)",
    reference=_body,
    fake=_allocate,
    kernels=_launch,
)
"""`ExpertsBackwardInputs` -> bf16 dX [T, H] and fp32 dw [T, k]; the head of this file has formulas.

A choice of an expert held elsewhere has a gradient of exactly 0; choices that share a row have the
same gradient. On a Hopper GPU, those of a token do not depend on other tokens, bit for bit."""


def gradients_run_as_a_whole(inputs: ExpertsBackwardInputs) -> bool:
    """Whether a Hopper GPU has one part, as `launch_combining_gradients` needs."""
    return num_parts_of(sizes_of(inputs), saves=True) == 1


def launch_combining_gradients(
    inputs: ExpertsBackwardInputs, combine: Combine, word: int, out: torch.Tensor
) -> None:
    """`experts_backward` on a Hopper GPU, where `combine` sums the rows of tokens, and sends sums
    and gradients of weights elsewhere; see `gradients_run_as_a_whole`.

    word: a number for the kernel of `combine`, which may differ from call to call.
    out: the output argument of `combine`.
    """
    weights = inputs.top_k_weights
    grad_weights = weights.new_empty(weights.shape, dtype=torch.float32)
    _launch_into(inputs, out, grad_weights, 1, combine, word)
