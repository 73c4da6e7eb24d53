"""The kernels of a backward of trained experts on a Hopper GPU, in order.

T tokens, k choices each, E experts, H hidden, I intermediate, R = T k rows.

1. `routing/dispatch.cu` plans the routing as the forward did, quantizes the gradient of every token
   once, and copies it to its rows.
2. `gemm.cu` with W_down^T.
3. `activation_columns.cu`: the gradients of scores, d[gate | up] in row codes and in column codes,
   and the activated values times their scores in column codes.
4. `gemm.cu` with W_gate_up^T, and `routing/combine.cu`: the gradient of each token.
5. `columns.cu` with the gradients of tokens, and `k_grouped.cu`: the gradient of W_down.
6. `columns.cu` with the tokens, and `k_grouped.cu`: the gradient of W_gate_up.

None waits for the host. Intermediate results are in one workspace.
"""

from collections.abc import Iterator
from typing import Any

import torch

from ...kernels.common.activation import SWIGLU, Activation
from ...kernels.common.blocks import BLOCK, MIN_GRADIENT_AMAX, num_blocks, round_up
from ...kernels.gemm.sizes import Sizes
from ...kernels.jit import Kernel
from ...kernels.program import Codes, Place, Record, Span, Target, Tensor, kernels_of
from ...kernels.targets import ANY_TARGET
from ...quant.columns import column_codes, describe_columns, num_column_blocks
from ...routing.combine import describe_combine
from ..expert_biases import BIAS_INPUTS, NO_BIASES, BiasGradients, describe_bias_gradients
from ..expert_parts import BF16_CALL, CallTensors, Choices, TransposedWeights, describe_rows_gemm
from ..experts_records import describe_grad_activated
from .activation_columns import describe_activation_columns

# The addresses of a call, in order; those of optional tensors are 0 where there are none.
INPUTS = (
    *("grad", "x", "ids", "scores", "saved", "saved_scales"),
    *("down", "down_scales", "gate_up", "gate_up_scales"),
    *("grad_down", "grad_gate_up", "dx", "grad_weights"),
    *BIAS_INPUTS,
)


def describe_trained_backward(
    r: Record,
    sizes: Sizes,
    *,
    grad: Tensor,
    x: Tensor,
    choices: Choices,
    saved: Tensor,
    saved_scales: Tensor | None,
    weights: TransposedWeights,
    grad_down: Tensor | None,
    grad_gate_up: Tensor | None,
    dx: Tensor,
    activation: Activation = SWIGLU,
    expert_offset: int = 0,
    blocks: bool = False,
    accumulate: tuple[bool, bool] = (False, False),
    biases: BiasGradients = NO_BIASES,
) -> None:
    """Add the steps of a backward to r; the head of this file lists them.

    The gradients of scores go to the input "grad_weights", fp32 [T, k].

    Args:
        grad, x: [T, H], as `columns.readable` gives them.
        saved, saved_scales: as in `describe_activation_backward`.
        grad_down, grad_gate_up: bf16 or fp32 [E, H, I] and [E, 2I, H], or None.
        dx: bf16 [T, H], contiguous.
        blocks: whether x and activated values have one scale for 128 tokens of 128 features.
        accumulate: whether the step adds to grad_down, and to grad_gate_up, in fp32.
        biases: what `describe_bias_gradients` takes and gives.
    """
    num_rows, h, i = sizes.num_tokens * sizes.top_k, sizes.hidden_size, sizes.intermediate_size
    num_columns = num_column_blocks(num_rows, sizes.num_experts)
    first, second = r.target.gemms.experts_backward(r, sizes)
    grad_rows, dispatched, grad_activated = describe_grad_activated(
        r, sizes, first, grad, None, choices.ids, weights.down, expert_offset
    )
    _, offsets, token_to_row = dispatched.maps
    rows = r.codes("grad_gate_up_rows", (1, num_rows, 2 * round_up(i, BLOCK)))
    gate_up_columns = column_codes(r, "gate_up_columns", num_columns, 2 * i)
    activated_columns = column_codes(r, "activated_columns", num_columns, i, blocks=blocks)
    is_first = r.matrices(
        "is_first", (1, sizes.num_tokens, sizes.top_k), torch.float32, sizes.top_k
    ).first()
    row_to_token = r.buffer("row_to_token", 4 * num_rows)
    weight_of_row = r.buffer("weight_of_row", 4 * num_rows)
    describe_activation_columns(
        r,
        grad_activated,
        saved,
        saved_scales,
        choices.scores,
        offsets,
        token_to_row,
        sizes.num_experts,
        activation,
        rows=rows,
        gate_up_columns=gate_up_columns,
        activated_columns=activated_columns,
        grad_weights=Place("grad_weights"),
        is_first=is_first.place,
        weight_of_row=weight_of_row,
        partial_sums=r.buffer("partial_sums", num_blocks(i) * num_rows * 4),
        row_to_token=row_to_token,
        blocks=blocks,
    )
    describe_bias_gradients(
        r,
        biases,
        grad_rows,
        rows,
        dispatched,
        Place("grad_weights"),
        sizes.num_tokens * sizes.top_k,
        weight_of_row,
    )
    results = r.matrices("results", (1, num_rows, h), torch.bfloat16)
    describe_rows_gemm(
        r, second, rows, weights.gate_up, results, sizes, dispatched, follows_dispatch=False
    )
    describe_combine(r, results, token_to_row, is_first, dx, programmatic=True)

    def gathered(name: str, tokens: Tensor, *, blocks: bool) -> Codes:
        """Add a step that makes column codes of tokens, with one row for each choice."""
        columns = column_codes(r, name, num_columns, tokens.shape[1], blocks=blocks)
        describe_columns(
            r,
            tokens,
            columns,
            num_rows,
            num_experts=sizes.num_experts,
            expert_offsets=offsets,
            row_to_token=row_to_token,
            min_amax=MIN_GRADIENT_AMAX,
            blocks=blocks,
            programmatic=True,
        )
        return columns

    k_grouped = r.target.gemms.k_grouped
    options: dict[str, Any] = {"num_tokens": BLOCK * num_columns, "expert_offsets": offsets}
    to_down, to_gate_up = accumulate
    if grad_down is not None:
        columns = gathered("grad_columns", grad, blocks=False)
        k_grouped(r, columns, activated_columns, grad_down, accumulates=to_down, **options)
    if grad_gate_up is not None:
        columns = gathered("x_columns", x, blocks=blocks)
        k_grouped(r, gate_up_columns, columns, grad_gate_up, accumulates=to_gate_up, **options)


def trained_backward_record(
    sizes: Sizes,
    tensors: CallTensors = BF16_CALL,
    target: Target = ANY_TARGET,
    span: Span | None = None,
    *,
    activation: Activation = SWIGLU,
    blocks: bool = False,
    dtypes: tuple[torch.dtype | None, torch.dtype | None] = (torch.float32, torch.float32),
    accumulate: bool = False,
) -> Record:
    """The record of a backward of contiguous tensors, with BF16 gradients of the result.

    blocks, accumulate: as in `describe_trained_backward`.
    dtypes: of the gradients of down, and of gate and up; None: not wanted.
    """
    e, h, i = sizes[2:5]
    saved, saved_scales = tensors.saved_tensors(sizes)
    shapes = {"grad_down": (e, h, i), "grad_gate_up": (e, 2 * i, h)}
    grad_down, grad_gate_up = (
        None if dtype is None else Tensor.contiguous(name, *shape, dtype=dtype)
        for (name, shape), dtype in zip(shapes.items(), dtypes, strict=True)
    )
    r = Record(target, INPUTS, span=span)
    describe_trained_backward(
        r,
        sizes,
        grad=tensors._replace(dtype=torch.bfloat16).tokens("grad", sizes),
        x=tensors.tokens("x", sizes),
        choices=tensors.choices(sizes),
        saved=saved,
        saved_scales=saved_scales,
        weights=TransposedWeights(
            Codes.contiguous("down", e, i, h),
            Codes.contiguous("gate_up", e, h, 2 * round_up(i, BLOCK)),
        ),
        grad_down=grad_down,
        grad_gate_up=grad_gate_up,
        dx=tensors.results("dx", sizes),
        activation=activation,
        blocks=blocks,
        accumulate=(accumulate, accumulate),
        biases=tensors.bias_gradients(sizes),
    )
    return r


def trained_backward_kernels(
    target: Target, sizes: Sizes, tensors: CallTensors, **options: Any
) -> Iterator[Kernel]:
    """The kernels of a backward for up to `sizes.num_tokens` tokens, but those that make W^T.

    options: of `trained_backward_record`.
    """

    def describe(span: Span) -> Record:
        some = sizes._replace(num_tokens=span.first)
        return trained_backward_record(some, tensors, target, span, **options)

    return kernels_of(describe, sizes.num_tokens)
