"""The kernels of routed experts on a Hopper GPU, forward and backward, in order.

T tokens, k choices each, E experts, H hidden, I intermediate, R rows. A forward:

1. `routing/dispatch.cu` plans the routing, quantizes every token once, unless tokens are codes, and
   copies each to its rows: one kernel, or two for many choices.
2. `gemm.cu`: gate and up, the activation, quantization (`config.gate_up`).
3. `gemm.cu`: down.
4. `routing/combine.cu`: the weighted sum of every token's rows, to which `addend` is added.

A backward, which first transposes each weight if no transpose of it is kept:

1. `routing/dispatch.cu` plans the routing as the forward did, and quantizes the gradient of
   every token.
2. `gemm.cu` with W_down^T.
3. `activation_backward.cu`: the activation again, the gradients of scores, of gate and of up.
4. `gemm.cu` with W_gate_up^T.
5. `routing/combine.cu`: the sum of every token's rows, in a fixed order.

Each kernel starts before the previous one ends, and waits where it needs its results: so its code
and its first weights load in the meantime. None waits for the host. Intermediate results are in one
workspace, whose size grows with T; a large T is split.
"""

from collections.abc import Iterator

import torch

from ..kernels.common.activation import SWIGLU, Activation
from ..kernels.common.blocks import BLOCK, MIN_GRADIENT_AMAX, round_up
from ..kernels.gemm.interface import Config, GateUp
from ..kernels.gemm.sizes import Sizes, matrix_of
from ..kernels.jit import Kernel
from ..kernels.program import (
    Codes,
    Place,
    Record,
    Span,
    Target,
    Tensor,
    Word,
    kernels_of,
)
from ..kernels.targets import ANY_TARGET
from ..routing.combine import describe_combine
from ..routing.dispatch import Dispatched, describe_dispatch
from .activation import describe_activation_backward
from .expert_biases import BIAS_INPUTS, NO_BIASES, BiasGradients, describe_bias_gradients
from .expert_parts import (
    BF16_CALL,
    CallTensors,
    Choices,
    Combine,
    ExpertWeights,
    TransposedWeights,
    describe_rows_gemm,
)
from .parts import parts_of

# The addresses of a call, in order; those of optional tensors are 0 where there are none.
INPUTS = (
    *("x", "ids", "scores"),
    *("gate", "gate_scales", "up", "up_scales", "down", "down_scales"),
    *("y", "addend", "saved", "x_scales", "word"),
    *("gate_up_bias", "down_bias"),
)
BACKWARD_INPUTS = (
    *("grad", "ids", "scores", "saved", "saved_scales"),
    *("down", "down_scales", "gate_up", "gate_up_scales"),
    *("dx", "grad_weights", "grad_scales", "word"),
    *BIAS_INPUTS,
)


def describe_experts(
    r: Record,
    sizes: Sizes,
    x: Tensor,
    choices: Choices,
    weights: ExpertWeights,
    y: Tensor,
    *,
    activation: Activation = SWIGLU,
    expert_offset: int = 0,
    addend: Tensor | None = None,
    x_scales: Tensor | None = None,
    saved: Place | None = None,
    combine: Combine | None = None,
) -> None:
    """Add the steps of a forward to r; the head of this file lists them.

    Args:
        x: [T, H], columns contiguous; e4m3 with x_scales, fp32 [T, ceil(H/128)].
        y, addend: bf16 [T, H], contiguous.
        saved: memory for gate and up [T k, 2, I], which a backward needs, or None.
        combine: replaces `describe_combine`.
    """
    matrices, num_rows = matrix_of(sizes)
    h, i = sizes.hidden_size, sizes.intermediate_size
    gate_up_config, down_config = r.target.gemms.experts(r, sizes, saves=saved is not None)
    rows = r.codes("rows", (matrices, num_rows, h))
    dispatched = describe_dispatch(
        r,
        x,
        choices.ids,
        rows,
        sizes.num_experts,
        x_scale_inv=x_scales,
        expert_offset=expert_offset,
        is_masked=sizes.masked,
    )
    activated = r.codes("activated", (matrices, num_rows, i))
    describe_rows_gemm(
        r,
        gate_up_config,
        rows,
        weights.gate,
        activated.data,
        sizes,
        dispatched,
        follows_dispatch=True,
        bias=weights.gate_up_bias,
        gate_up=GateUp(weights.up, activation, activated.scale_inv, saved),
    )
    results = r.matrices("results", (matrices, num_rows, h), torch.bfloat16)
    describe_rows_gemm(
        r,
        down_config,
        activated,
        weights.down,
        results,
        sizes,
        dispatched,
        follows_dispatch=False,
        bias=weights.down_bias,
    )
    token_to_row = dispatched.maps.token_to_row
    if combine is None:
        describe_combine(r, results, token_to_row, choices.scores, y, addend, programmatic=True)
    else:
        combine.describe(
            r, results, token_to_row, choices.scores, y, grad_weights=None, word=Word("word")
        )


def experts_record(
    sizes: Sizes,
    tensors: CallTensors = BF16_CALL,
    target: Target = ANY_TARGET,
    span: Span | None = None,
    activation: Activation = SWIGLU,
) -> Record:
    """The record of a forward of contiguous tensors."""
    r = Record(target, INPUTS, span=span)
    describe_experts(
        r,
        sizes,
        tensors.tokens("x", sizes),
        tensors.choices(sizes),
        tensors.weights(sizes),
        tensors.results("y", sizes),
        activation=activation,
        x_scales=tensors.scales("x_scales", sizes),
        saved=None if tensors.saved is None else Place("saved"),
    )
    return r


def experts_kernels(
    target: Target, sizes: Sizes, tensors: CallTensors, activation: Activation = SWIGLU
) -> Iterator[Kernel]:
    """The kernels of a forward for up to `sizes.num_tokens` tokens."""

    def describe(span: Span) -> Record:
        some = sizes._replace(num_tokens=span.first)
        return experts_record(some, tensors, target, span, activation)

    return kernels_of(describe, sizes.num_tokens)


# ---- The gradient ----


def describe_experts_backward(
    r: Record,
    sizes: Sizes,
    *,
    grad: Tensor,
    grad_scales: Tensor | None,
    choices: Choices,
    saved: Tensor,
    saved_scales: Tensor | None,
    weights: TransposedWeights,
    dx: Tensor,
    activation: Activation,
    expert_offset: int,
    combine: Combine | None,
    biases: BiasGradients = NO_BIASES,
) -> None:
    """Add the steps of a backward to r; the head of this file lists them.

    The gradients of scores go to the input "grad_weights", fp32 [T, k].

    Args:
        grad: [T, H], columns contiguous; e4m3 with grad_scales, fp32 [T, ceil(H/128)].
        saved, saved_scales: as in `describe_activation_backward`.
        dx: bf16 [T, H], contiguous.
        combine: replaces `describe_combine`.
        biases: what `describe_bias_gradients` takes and gives.
    """
    num_rows, h, i = sizes.num_tokens * sizes.top_k, sizes.hidden_size, sizes.intermediate_size
    first, second = r.target.gemms.experts_backward(r, sizes)
    grad_rows, dispatched, grad_activated = describe_grad_activated(
        r, sizes, first, grad, grad_scales, choices.ids, weights.down, expert_offset
    )
    token_to_row, grad_weights = dispatched.maps.token_to_row, Place("grad_weights")
    grad_gate_up = r.codes("grad_gate_up", (1, num_rows, 2 * round_up(i, BLOCK)))
    is_first = r.matrices(
        "is_first", (1, sizes.num_tokens, sizes.top_k), torch.float32, sizes.top_k
    )
    weight_of_row = None
    if biases.grad_down is not None:
        weight_of_row = r.buffer("weight_of_row", 4 * num_rows)
    describe_activation_backward(
        r,
        grad_activated,
        saved,
        saved_scales,
        grad_gate_up,
        activation,
        weights=choices.scores,
        token_to_row=token_to_row,
        grad_weights=grad_weights,
        is_first=is_first.place,
        weight_of_row=weight_of_row,
    )
    describe_bias_gradients(
        r,
        biases,
        grad_rows,
        grad_gate_up,
        dispatched,
        grad_weights,
        sizes.num_tokens * sizes.top_k,
        weight_of_row,
    )
    results = r.matrices("results", (1, num_rows, h), torch.bfloat16)
    describe_rows_gemm(
        r, second, grad_gate_up, weights.gate_up, results, sizes, dispatched, follows_dispatch=False
    )
    if combine is None:
        describe_combine(r, results, token_to_row, is_first.first(), dx, programmatic=True)
    else:
        combine.describe(
            r,
            results,
            token_to_row,
            is_first.first(),
            dx,
            grad_weights=grad_weights,
            word=Word("word"),
        )


def describe_grad_activated(
    r: Record,
    sizes: Sizes,
    config: Config,
    grad: Tensor,
    grad_scales: Tensor | None,
    ids: Tensor,
    down: Codes,
    expert_offset: int,
) -> tuple[Codes, Dispatched, Tensor]:
    """The first two steps of a backward: dispatch, and the gradients of the activated values.

    Returns the plan, and bf16 [1, R, I]. The arguments are those of `describe_experts_backward`;
    down: W_down^T.
    """
    num_rows, h, i = sizes.num_tokens * sizes.top_k, sizes.hidden_size, sizes.intermediate_size
    rows = r.codes("grad_rows", (1, num_rows, h))
    dispatched = describe_dispatch(
        r,
        grad,
        ids,
        rows,
        sizes.num_experts,
        x_scale_inv=grad_scales,
        expert_offset=expert_offset,
        min_amax=MIN_GRADIENT_AMAX,
    )
    activated = r.matrices("grad_activated", (1, num_rows, i), torch.bfloat16)
    describe_rows_gemm(r, config, rows, down, activated, sizes, dispatched, follows_dispatch=True)
    return rows, dispatched, activated


def experts_backward_record(
    sizes: Sizes,
    tensors: CallTensors = BF16_CALL,
    target: Target = ANY_TARGET,
    span: Span | None = None,
    activation: Activation = SWIGLU,
) -> Record:
    """The record of a backward of contiguous tensors."""
    e, h, i = sizes[2:5]
    saved, saved_scales = tensors.saved_tensors(sizes)
    r = Record(target, BACKWARD_INPUTS, span=span)
    describe_experts_backward(
        r,
        sizes,
        grad=tensors.tokens("grad", sizes),
        grad_scales=tensors.scales("grad_scales", sizes),
        choices=tensors.choices(sizes),
        saved=saved,
        saved_scales=saved_scales,
        weights=TransposedWeights(
            Codes.contiguous("down", e, i, h),
            Codes.contiguous("gate_up", e, h, 2 * round_up(i, BLOCK)),
        ),
        dx=tensors.results("dx", sizes),
        activation=activation,
        expert_offset=0,
        combine=None,
        biases=tensors.bias_gradients(sizes),
    )
    return r


def experts_backward_kernels(
    target: Target, sizes: Sizes, tensors: CallTensors, activation: Activation = SWIGLU
) -> Iterator[Kernel]:
    """The kernels of a backward for up to `sizes.num_tokens` tokens, but those that make W^T."""

    def describe(span: Span) -> Record:
        some = sizes._replace(num_tokens=span.first)
        return experts_backward_record(some, tensors, target, span, activation)

    return kernels_of(describe, sizes.num_tokens)


# ---- Both ----


def num_parts_of(sizes: Sizes, *, saves: bool) -> int:
    """The number of parts of a forward; 0 if there is nothing to compute.

    saves: a backward follows, with the same parts.
    """
    return parts_of(sizes, experts_record, *([experts_backward_record] if saves else []))
