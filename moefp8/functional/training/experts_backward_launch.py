"""Launch the gradients of trained experts on a Hopper GPU: kernels in a row.

T tokens, k choices each, E experts, H hidden, I intermediate, R = T k rows.

1. `routing/dispatch.cu` plans the routing as the forward did, quantizes the gradient of every token
   once, and copies it to its rows.
2. `gemm.cu` with W_down^T.
3. `swiglu_columns.cu`: the weights of choices, d[gate | up] in codes of rows and of columns, w a in
   codes of columns.
4. `gemm.cu` with W_gate_up^T, and `routing/combine.cu`: the gradient of each token.
5. `columns.cu` with the gradients of tokens, and `k_grouped.cu`: the gradient of W_down.
6. `columns.cu` with the tokens, and `k_grouped.cu`: the gradient of W_gate_up.

None waits for the host, and all that lies between them is in one workspace.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ...kernels.common.blocks import BLOCK, MIN_GRADIENT_AMAX, num_blocks, round_up
from ...kernels.common.prepared import Launches, layout_of
from ...kernels.gemm.k_grouped.k_grouped import describe_k_grouped
from ...kernels.gemm.tuned import ANY_TARGET, target_of
from ...kernels.jit import Kernel, current_driver
from ...kernels.program import (
    Codes,
    Place,
    Record,
    Span,
    Target,
    Tensor,
    kernels_of,
    layouts,
    prepare_launches,
)
from ...quant.columns import column_codes, describe_columns, num_column_blocks, readable
from ...routing.combine import describe_combine
from ...routing.dispatch import describe_dispatch
from ..expert_configs import Sizes, describe_backward_configs
from ..expert_parts import GIVEN, Given, describe_rows_gemm
from ..swiglu import saved_as_read
from .swiglu_columns import describe_swiglu_columns

_OP = "trained_experts_backward"


class Tensors(NamedTuple):
    """The tensors of a call, in the order of its addresses.

    grad: [T, H]. hidden_states: [T, H]. ids, weights: [T, k].
    gate_up: bf16 [R, 2, I], or codes e4m3 [2R, I] with gate_up_scale_inv.
    down, gate_up_proj: codes of W^T, e4m3 [E, I, H] and [E, H, 2 (I rounded up to 128)], and their
        scales.
    of_down, of_gate_up: bf16 or fp32 [E, H, I] and [E, 2I, H], which gradients of weights go to.
    dx: bf16 [T, H]. of_weights: fp32 [T, k].
    """

    grad: torch.Tensor
    hidden_states: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    gate_up: torch.Tensor
    gate_up_scale_inv: torch.Tensor | None
    down: torch.Tensor
    down_scale_inv: torch.Tensor
    gate_up_proj: torch.Tensor
    gate_up_proj_scale_inv: torch.Tensor
    of_down: torch.Tensor | None
    of_gate_up: torch.Tensor | None
    dx: torch.Tensor
    of_weights: torch.Tensor


class Options(NamedTuple):
    """accumulate: whether of_down, and of_gate_up, are added to."""

    limit: float | None
    expert_offset: int
    num_global_experts: int | None
    blocks: bool
    accumulate: tuple[bool, bool]


def launch_backward(
    check: Callable[[], object], tensors: Tensors, num_experts: int, options: Options
) -> None:
    """All gradients on the current stream; nothing waits for them.

    check: raises if the tensors are wrong; called for layouts that are new. There is at least one
    choice, and no size is 0.
    """
    tensors = _as_kernels_read(tensors)
    driver = current_driver()
    key = (
        _OP,
        tuple([None if x is None else (layout_of(x), x.data_ptr() % 16) for x in tensors]),
        num_experts,
        options,
        driver.max_sms,
    )
    found = driver.prepared().get(key)
    if found is None:
        check()
        found = driver.keep(key, _prepare(tensors, num_experts, options))
    addresses = tuple([0 if x is None else x.data_ptr() for x in tensors])
    found(tensors.grad.get_device(), addresses)


def _as_kernels_read(tensors: Tensors) -> Tensors:
    """The tensors themselves, or copies of those that lie otherwise."""
    gate_up, scales = saved_as_read(tensors.gate_up, tensors.gate_up_scale_inv)
    grad = tensors.grad if tensors.grad.stride(1) == 1 else tensors.grad.contiguous()
    return tensors._replace(
        grad=readable(grad),
        hidden_states=readable(tensors.hidden_states),
        gate_up=gate_up,
        gate_up_scale_inv=scales,
    )


def _prepare(tensors: Tensors, num_experts: int, options: Options) -> Launches:
    (num_tokens, h), top_k = tensors.hidden_states.shape, tensors.ids.shape[1]
    rank, i = options.num_global_experts, tensors.gate_up.shape[-1]
    sizes = Sizes(num_tokens, top_k, num_experts, h, i, False, rank)
    device_index = tensors.grad.get_device()
    r = Record(target_of(device_index), Tensors._fields)
    _Backward(r, sizes, options, layouts(**tensors._asdict())).describe()
    return prepare_launches(r, device_index)


def trained_backward_record(
    sizes: Sizes,
    given: Given = GIVEN,
    target: Target = ANY_TARGET,
    span: Span | None = None,
    *,
    blocks: bool = False,
    dtypes: tuple[torch.dtype | None, torch.dtype | None] = (torch.float32, torch.float32),
    accumulate: bool = False,
) -> Record:
    """The record of a backward of contiguous tensors, whose gradients are BF16.

    given: of the tokens. blocks, accumulate: as in `Options`.
    dtypes: those of the gradients of down, and of gate and up, if they are wanted.
    """
    e, h, i = sizes[2:5]
    saved, saved_scales = given.saved_tensors(sizes)
    ids, weights = given.choices(sizes)
    down = Codes.contiguous("down", e, i, h)
    gate_up = Codes.contiguous("gate_up_proj", e, h, 2 * round_up(i, BLOCK))
    shapes = {"of_down": (e, h, i), "of_gate_up": (e, 2 * i, h)}
    tensors = {
        "grad": given._replace(dtype=torch.bfloat16).tokens("grad", sizes),
        "hidden_states": given.tokens("hidden_states", sizes),
        "ids": ids,
        "weights": replace(weights, place=Place("weights")),
        "gate_up": replace(saved, place=Place("gate_up")),
        "gate_up_scale_inv": saved_scales
        and replace(saved_scales, place=Place("gate_up_scale_inv")),
        "down": down.data,
        "down_scale_inv": replace(down.scale_inv, place=Place("down_scale_inv")),
        "gate_up_proj": gate_up.data,
        "gate_up_proj_scale_inv": replace(gate_up.scale_inv, place=Place("gate_up_proj_scale_inv")),
        **{
            name: None if dtype is None else Tensor.contiguous(name, *shape, dtype=dtype)
            for (name, shape), dtype in zip(shapes.items(), dtypes, strict=True)
        },
        "dx": given.results("dx", sizes),
    }
    r = Record(target, Tensors._fields, span=span)
    options = Options(None, 0, None, blocks, (accumulate, accumulate))
    _Backward(r, sizes, options, tensors).describe()
    return r


def trained_backward_kernels(
    target: Target, sizes: Sizes, given: Given, **options: Any
) -> Iterator[Kernel]:
    """The kernels of a backward for up to as many tokens as `sizes` says, W^T apart.

    options: those of `trained_backward_record`.
    """

    def describe(span: Span) -> Record:
        some = sizes._replace(num_tokens=span.first)
        return trained_backward_record(some, given, target, span, **options)

    return kernels_of(describe, sizes.num_tokens)


class _Backward:
    """The description of one layout of the tensors, by their names."""

    def __init__(self, r: Record, sizes: Sizes, options: Options, of: Mapping[str, Any]) -> None:
        self.r, self.sizes, self.options, self.of = r, sizes, options, of
        self.num_rows = sizes.num_tokens * sizes.top_k
        self.num_columns = num_column_blocks(self.num_rows, sizes.num_experts)

    def describe(self) -> None:
        r, of, sizes, rows = self.r, self.of, self.sizes, self.num_rows
        h, i, options = sizes.hidden_size, sizes.intermediate_size, self.options
        first, second = describe_backward_configs(r, sizes)
        grad_rows = r.codes("grad_rows", (1, rows, h))
        dispatched = describe_dispatch(
            r,
            of["grad"],
            of["ids"],
            grad_rows,
            sizes.num_experts,
            expert_offset=options.expert_offset,
            min_amax=MIN_GRADIENT_AMAX,
        )
        _, offsets, token_to_row = dispatched.maps
        grad_activated = r.matrices("grad_activated", (1, rows, i), torch.bfloat16)
        down = Codes(of["down"], of["down_scale_inv"])
        describe_rows_gemm(
            r, first, grad_rows, down, grad_activated, sizes, dispatched, follows_dispatch=True
        )
        grad_gate_up = r.codes("grad_gate_up", (1, rows, 2 * round_up(i, BLOCK)))
        gate_up_columns = column_codes(r, "gate_up_columns", self.num_columns, 2 * i)
        activated_columns = column_codes(
            r, "activated_columns", self.num_columns, i, blocks=options.blocks
        )
        is_first = r.matrices("is_first", (1, *of["ids"].shape), torch.float32, sizes.top_k).first()
        row_to_token = r.buffer("row_to_token", 4 * rows)
        describe_swiglu_columns(
            r,
            grad_activated,
            of["gate_up"],
            of["gate_up_scale_inv"],
            of["weights"],
            offsets,
            token_to_row,
            sizes.num_experts,
            math.inf if options.limit is None else options.limit,
            rows=grad_gate_up,
            gate_up_columns=gate_up_columns,
            activated_columns=activated_columns,
            grad_weights=Place("of_weights"),
            is_first=is_first.place,
            weight_of_row=r.buffer("weight_of_row", 4 * rows),
            partial_sums=r.buffer("partial_sums", num_blocks(i) * rows * 4),
            row_to_token=row_to_token,
            blocks=options.blocks,
        )
        results = r.matrices("results", (1, rows, h), torch.bfloat16)
        gate_up = Codes(of["gate_up_proj"], of["gate_up_proj_scale_inv"])
        describe_rows_gemm(
            r, second, grad_gate_up, gate_up, results, sizes, dispatched, follows_dispatch=False
        )
        describe_combine(r, results, token_to_row, is_first, of["dx"], programmatic=True)
        to_down, to_gate_up = options.accumulate
        if of["of_down"] is not None:
            grad_columns = self._gather("grad", offsets, row_to_token, blocks=False)
            self._sum(grad_columns, activated_columns, of["of_down"], offsets, accumulates=to_down)
        if of["of_gate_up"] is not None:
            x_columns = self._gather("hidden_states", offsets, row_to_token, blocks=options.blocks)
            self._sum(gate_up_columns, x_columns, of["of_gate_up"], offsets, accumulates=to_gate_up)

    def _gather(self, name: str, offsets: Place, row_to_token: Place, *, blocks: bool) -> Codes:
        """Column codes of the tokens of an input, in the rows of their experts."""
        x = self.of[name]
        columns = column_codes(
            self.r, f"{name}_columns", self.num_columns, x.shape[1], blocks=blocks
        )
        describe_columns(
            self.r,
            x,
            columns,
            self.num_rows,
            num_experts=self.sizes.num_experts,
            expert_offsets=offsets,
            row_to_token=row_to_token,
            min_amax=MIN_GRADIENT_AMAX,
            blocks=blocks,
            programmatic=True,
        )
        return columns

    def _sum(self, a: Codes, b: Codes, d: Tensor, offsets: Place, *, accumulates: bool) -> None:
        """The gradient of a weight: the sum over each expert's rows."""
        num_tokens = BLOCK * self.num_columns
        describe_k_grouped(
            self.r, a, b, d, num_tokens, accumulates=accumulates, expert_offsets=offsets
        )
