"""Launch the gradients of experts on a Hopper GPU: kernels in a row, as in experts_launch.py.

T tokens, k choices each, E experts, H hidden, I intermediate, R rows.

1. `routing/dispatch.cu` plans the routing as the forward did, quantizes the gradient of every token
   once, unless it comes as codes, and copies it to its rows.
2. `gemm.cu` with W_down^T.
3. `swiglu_backward.cu`: the activation again, the gradients of weights, of gate and of up.
4. `gemm.cu` with W_gate_up^T.
5. `routing/combine.cu`: the sum of every token's rows, in a fixed order.

Before them, a weight whose transpose is not kept is transposed.
"""

import math
from collections.abc import Callable, Iterator
from math import gcd
from typing import TYPE_CHECKING

import torch

from ..kernels.common.blocks import BLOCK, MIN_GRADIENT_AMAX, TMA_BYTES, round_up
from ..kernels.common.prepared import Launches, layout_of
from ..kernels.gemm.tuned import ANY_TARGET, target_of
from ..kernels.jit import Kernel, current_driver
from ..kernels.program import (
    Codes,
    Place,
    Record,
    Span,
    Target,
    Tensor,
    Word,
    kernels_of,
    layouts,
    prepare_launches,
)
from ..routing.combine_launch import describe_combine
from ..routing.dispatch_launch import describe_dispatch
from .expert_configs import Sizes, describe_backward_configs
from .expert_parts import (
    GIVEN,
    Choices,
    Combine,
    Given,
    TransposedWeights,
    describe_rows_gemm,
    results_layout,
)
from .parts import split
from .swiglu import lies_as_read, saved_as_read
from .swiglu_backward_launch import describe_swiglu_backward
from .transposed import transposed

if TYPE_CHECKING:
    from .experts_backward import ExpertsBackwardInputs

_OP = "experts_backward"
# The addresses of a call, in order; those of optional tensors are 0 where there are none.
_INPUTS = (
    *("grad", "ids", "scores", "saved", "saved_scales"),
    *("down", "down_scales", "gate_up", "gate_up_scales"),
    *("dx", "grad_weights", "grad_scales", "word"),
)


def launch_experts_backward(
    check: Callable[[], object],
    inputs: "ExpertsBackwardInputs",
    dx: torch.Tensor,
    of_weights: torch.Tensor,
    num_parts: int,
    combine: Combine | None = None,
    word: int = 0,
) -> None:
    """`experts_backward` on the current stream; nothing waits for it.

    check: raises if the arguments are wrong; called for layouts that are new.
    num_parts: in how many parts tokens are computed, as in the forward.
    combine: stands for `describe_combine`; `dx` is then what it needs, and there is one part.
    word: a number for the kernel of `combine`, which may differ from call to call.
    """
    if 0 in (*inputs.top_k_index.shape, *inputs.down_proj.shape):
        check()
        dx.zero_()
        of_weights.zero_()
        return
    weights = (
        transposed(inputs.down_proj, inputs.keeps),
        inputs.down_proj_scale_inv.mT,
        transposed(inputs.gate_up_proj, inputs.keeps, parts=2),
        inputs.gate_up_proj_scale_inv.mT,
    )
    grad = inputs.grad
    if grad.stride(1) != 1:
        grad = grad.contiguous()
    gate_up, scales = inputs.gate_up, inputs.gate_up_scale_inv
    if not lies_as_read(gate_up, scales):
        check()
        gate_up, scales = saved_as_read(gate_up, scales)
    inputs = inputs._replace(grad=grad, gate_up=gate_up, gate_up_scale_inv=scales)
    if num_parts == 1:
        _launch(check, inputs, weights, dx, of_weights, combine, word)
        return
    cut = inputs.grad, inputs.top_k_index, inputs.top_k_weights, dx, of_weights
    saved = inputs.gate_up, inputs.gate_up_scale_inv, inputs.grad_scale_inv
    for *tokens, part_dx, part_of_weights, rows, row_scales, grad_scales in split(
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
        _launch(check, part, weights, part_dx, part_of_weights)


def sizes_of(inputs: "ExpertsBackwardInputs") -> Sizes:
    """The sizes of a layer, and of all its tokens."""
    (num_tokens, top_k), (e, h, i) = inputs.top_k_index.shape, inputs.down_proj.shape
    return Sizes(num_tokens, top_k, e, h, i, False, inputs.num_global_experts)


def _launch(
    check: Callable[[], object],
    inputs: "ExpertsBackwardInputs",
    weights: tuple[torch.Tensor, ...],
    dx: torch.Tensor,
    of_weights: torch.Tensor,
    combine: Combine | None = None,
    word: int = 0,
) -> None:
    grad, ids, top_k_weights, gate_up, scales = inputs[:5]
    grad_scales = inputs.grad_scale_inv
    driver = current_driver()
    tensors = grad, ids, top_k_weights, gate_up, *weights
    key = (
        _OP,
        tuple([layout_of(x) for x in tensors]),
        None if scales is None else layout_of(scales),
        None if grad_scales is None else layout_of(grad_scales),
        grad.data_ptr() % 16,
        dx.data_ptr() % 16,
        inputs.swiglu_limit,
        inputs.expert_offset,
        inputs.num_global_experts,
        combine,
        driver.max_sms,
    )
    found = driver.prepared().get(key)
    if found is None:
        check()
        found = driver.keep(key, _prepare(inputs, weights, dx.data_ptr(), combine))
    saved_scales = 0 if scales is None else scales.data_ptr()
    of_grad = 0 if grad_scales is None else grad_scales.data_ptr()
    addresses = [x.data_ptr() for x in (*weights, dx, of_weights)]
    saved = gate_up.data_ptr(), saved_scales
    tokens = grad.data_ptr(), ids.data_ptr(), top_k_weights.data_ptr()
    found(grad.get_device(), (*tokens, *saved, *addresses, of_grad, word))


def _prepare(
    inputs: "ExpertsBackwardInputs",
    weights: tuple[torch.Tensor, ...],
    dx_alignment: int,
    combine: Combine | None,
) -> Launches:
    sizes, limit = sizes_of(inputs), inputs.swiglu_limit
    device_index = inputs.grad.get_device()
    down, down_scales, gate_up, gate_up_scales = weights
    shape = sizes.num_tokens, sizes.hidden_size
    r = Record(target_of(device_index), _INPUTS)
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
        limit=math.inf if limit is None else limit,
        expert_offset=inputs.expert_offset,
        combine=combine,
        **layouts(
            grad=inputs.grad,
            grad_scales=inputs.grad_scale_inv,
            saved=inputs.gate_up,
            saved_scales=inputs.gate_up_scale_inv,
        ),
    )
    return prepare_launches(r, device_index)


def experts_backward_record(
    sizes: Sizes, given: Given = GIVEN, target: Target = ANY_TARGET, span: Span | None = None
) -> Record:
    """The record of a backward of contiguous tensors."""
    e, h, i = sizes[2:5]
    saved, saved_scales = given.saved_tensors(sizes)
    r = Record(target, _INPUTS, span=span)
    describe_experts_backward(
        r,
        sizes,
        grad=given.tokens("grad", sizes),
        grad_scales=given.scales("grad_scales", sizes),
        choices=given.choices(sizes),
        saved=saved,
        saved_scales=saved_scales,
        weights=TransposedWeights(
            Codes.contiguous("down", e, i, h),
            Codes.contiguous("gate_up", e, h, 2 * round_up(i, BLOCK)),
        ),
        dx=given.results("dx", sizes),
        limit=math.inf,
        expert_offset=0,
        combine=None,
    )
    return r


def experts_backward_kernels(target: Target, sizes: Sizes, given: Given) -> Iterator[Kernel]:
    """The kernels of a backward for up to as many tokens as `sizes` says, W^T apart."""

    def describe(span: Span) -> Record:
        some = sizes._replace(num_tokens=span.first)
        return experts_backward_record(some, given, target, span)

    return kernels_of(describe, sizes.num_tokens)


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
    limit: float,
    expert_offset: int,
    combine: Combine | None,
) -> None:
    """The steps of a backward, as the head of this file says.

    The gradients of scores go to the input "grad_weights", fp32 [T, k].

    Args:
        grad: [T, H], columns contiguous; e4m3 with grad_scales, fp32 [T, ceil(H/128)].
        saved, saved_scales: as in `describe_swiglu_backward`.
        dx: bf16 [T, H], contiguous.
        combine: stands for `describe_combine`.
    """
    num_rows, h, i = sizes.num_tokens * sizes.top_k, sizes.hidden_size, sizes.intermediate_size
    first, second = describe_backward_configs(r, sizes)
    rows = r.codes("rows", (1, num_rows, h))
    dispatched = describe_dispatch(
        r,
        grad,
        choices.ids,
        rows,
        sizes.num_experts,
        x_scale_inv=grad_scales,
        expert_offset=expert_offset,
        min_amax=MIN_GRADIENT_AMAX,
    )
    token_to_row, grad_weights = dispatched.maps.token_to_row, Place("grad_weights")
    grad_activated = r.matrices("grad_activated", (1, num_rows, i), torch.bfloat16)
    describe_rows_gemm(
        r, first, rows, weights.down, grad_activated, sizes, dispatched, follows_dispatch=True
    )
    grad_gate_up = r.codes("grad_gate_up", (1, num_rows, 2 * round_up(i, BLOCK)))
    is_first = r.matrices(
        "is_first", (1, sizes.num_tokens, sizes.top_k), torch.float32, sizes.top_k
    )

    describe_swiglu_backward(
        r,
        grad_activated,
        saved,
        saved_scales,
        grad_gate_up,
        limit,
        weights=choices.scores,
        token_to_row=token_to_row,
        grad_weights=grad_weights,
        is_first=is_first.place,
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
