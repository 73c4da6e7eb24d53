"""Sum the rows of each token, each times its weight. T tokens, k choices, R rows, H hidden size.

A Hopper GPU runs the kernel of `combine.cu`; elsewhere `combine_rows` runs, made of PyTorch's ops.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import _C
from torch.autograd import forward_ad

from ..kernels.common.blocks import ceil_div, divisor_of
from ..kernels.common.checks import FLOATS, INPUTS, check_same_device, check_shape, check_tensor
from ..kernels.common.prepared import layout_of, prepared
from ..kernels.jit import Kernel, Launch
from ..kernels.program import Place, Record, Target, Tensor, layouts, prepare_launch
from ..kernels.registry import register_inputs
from ..kernels.targets import target_of
from .plan import RoutingPlan

_OP = "combine"


def combine(y: torch.Tensor, plan: RoutingPlan, top_k_weights: torch.Tensor) -> torch.Tensor:
    """Sum the rows of every token, each times its weight, in FP32 and in the order of the choices.

    It is deterministic, without atomics, and differentiable. Padding rows are never read into a
    result, whatever they hold. A choice without a row counts as zero, whatever its weight.

    Args:
        y: [R, H] or [E, max_m, H], as `dispatch` returns; bf16, fp16 or fp32.
        top_k_weights: [T, k] bf16, fp16 or fp32.

    Returns:
        [T, H] in the dtype of `y`.

    Raises:
        TypeError, ValueError: `y` or `top_k_weights` does not fit the plan.
    """
    check_tensor(_OP, "y", y, FLOATS, len(plan.row_shape) + 1)
    check_shape(_OP, "y", y, [*plan.row_shape, y.shape[-1]], "[rows of the plan, H]")
    return sum_rows(y.flatten(0, -2), plan.token_to_row, top_k_weights)


def sum_rows(
    rows: torch.Tensor, token_to_row: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """`combine` of rows [R, H] by the map of a plan."""
    inputs = rows, token_to_row, top_k_weights
    if is_transformed():
        return _body(CombineInputs(*inputs))  # made of operations that transforms know
    if torch.is_grad_enabled() and (rows.requires_grad or top_k_weights.requires_grad):
        return _Combine.apply(*inputs)
    return _combine(*inputs)


def is_transformed() -> bool:
    """Whether forward-mode AD or a transform of functorch is under way."""
    return forward_ad._current_level >= 0 or _C._functorch.peek_interpreter_stack() is not None


def first_choices(token_to_row: torch.Tensor) -> torch.Tensor:
    """fp32 [T, k]: 1 for the first choice of each row, 0 for later ones and those without a row."""
    same = token_to_row[:, :, None] == token_to_row[:, None, :]
    position = torch.arange(token_to_row.shape[1], device=token_to_row.device)
    return ((same.int().argmax(-1) == position) & (token_to_row >= 0)).float()


def combine_rows(
    rows: torch.Tensor,
    token_to_row: torch.Tensor,
    top_k_weights: torch.Tensor,
    addend: torch.Tensor | None = None,
) -> torch.Tensor:
    """The numerics in PyTorch, of rows [R, H] by int32 token_to_row [T, k], where -1 is no row.

    addend: [T, H], added to the rounded sum, as an addition of the two tensors would.
    """
    num_tokens, top_k = token_to_row.shape
    result = torch.zeros(num_tokens, rows.shape[-1], dtype=torch.float32, device=rows.device)
    for choice in range(top_k if len(rows) else 0):
        row = token_to_row[:, choice]
        weight = top_k_weights[:, choice, None].float()
        term = weight * rows.index_select(0, row.clamp(min=0)).float()
        result = result + term.masked_fill(row[:, None] < 0, 0.0)
    result = result.to(rows.dtype)
    return result if addend is None else result + addend


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*inputs)
        return _combine(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradient of rows[r] sums weights[t, j] * grad[t] where token_to_row[t, j] == r.

        That of weights[t, j] is rows[r] . grad[t].
        """
        rows, token_to_row, weights = ctx.saved_tensors
        grad = grads[0].float()
        grad_rows = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
        grad_weights = torch.zeros_like(weights)
        for choice in range(token_to_row.shape[1]):
            row, is_here = token_to_row[:, choice], token_to_row[:, choice, None] >= 0
            at = row.clamp(min=0)
            term = weights[:, choice, None].float() * grad
            grad_rows.index_add_(0, at, term.masked_fill(~is_here, 0.0))
            product = (rows.index_select(0, at).float() * grad).masked_fill(~is_here, 0.0)
            grad_weights[:, choice] = product.sum(dim=-1)
        return grad_rows.to(rows.dtype), None, grad_weights


# ---- The op ----


class CombineInputs(NamedTuple):
    """The arguments of the op: rows [R, H], token_to_row int32 [T, k], top_k_weights [T, k]."""

    rows: torch.Tensor
    token_to_row: torch.Tensor
    top_k_weights: torch.Tensor


def _allocate(inputs: CombineInputs) -> torch.Tensor:
    """Check, then allocate the result. Also the fake body."""
    rows, token_to_row, top_k_weights = inputs
    check_tensor(_OP, "top_k_weights", top_k_weights, FLOATS, 2)
    check_same_device(_OP, y=rows, top_k_weights=top_k_weights, plan=token_to_row)
    check_shape(_OP, "top_k_weights", top_k_weights, token_to_row.shape, "[T, k]")
    return rows.new_empty(token_to_row.shape[0], rows.shape[1])


def _body(inputs: CombineInputs) -> torch.Tensor:
    _allocate(inputs)
    return combine_rows(*inputs)


def _has_kernel(rows: torch.Tensor, token_to_row: torch.Tensor, *_: object) -> bool:
    """Whether `combine.cu` takes them: aligned rows of BF16, each a multiple of 16 bytes long."""
    aligned = (rows.data_ptr() | rows.stride(0) * 2) % 16 == 0 and rows.stride(1) == 1
    whole = rows.numel() > 0 and rows.shape[1] % 8 == 0 and rows.stride(0) >= rows.shape[1]
    in_order = token_to_row.dtype == torch.int32 and token_to_row.is_contiguous()
    return rows.dtype == torch.bfloat16 and aligned and whole and in_order


def _launch(inputs: CombineInputs) -> torch.Tensor:
    """Launch one kernel on the current stream; nothing waits for it."""
    out = _allocate(inputs)
    if out.numel():
        launch = prepared((_OP, *map(layout_of, inputs)), lambda: _prepare(inputs, out))
        addresses = tuple([x.data_ptr() for x in (*inputs, out)])
        launch.on(inputs.rows.get_device(), addresses)
    return out


def _prepare(inputs: CombineInputs, out: torch.Tensor) -> Launch:
    device_index = inputs.rows.get_device()
    r = Record(target_of(device_index), (*CombineInputs._fields, "out"))
    rows, token_to_row, weights, result = layouts(**inputs._asdict(), out=out).values()
    at_once = at_once_of(inputs.top_k_weights.shape[1])
    describe_combine(r, rows, token_to_row.place, weights, result, at_once=at_once)
    return prepare_launch(r, device_index)


_combine = register_inputs(
    _OP,
    CombineInputs,
    "Tensor",
    reference=_body,
    fake=_allocate,
    kernels=_launch,
    cuda=_body,
    kernels_take=_has_kernel,
)


# ---- The kernel ----

_SOURCE = Path(__file__).with_name("combine.cu")
MOST_AT_ONCE, _FEW_AT_ONCE = 8, 2  # choices of a token whose rows are loaded together
_COLUMNS = 8  # that a thread owns: 16 B of BF16
_MAX_UNITS = 2**31 - 2**10  # `Divisor` takes n < 2**31; idle threads count past the last unit


def threads_of(num_units: int, num_sms: int) -> int:
    """Threads of a CTA: few if there are few units, so that many SMs work."""
    return next((n for n in (256, 128, 64) if num_units >= n * num_sms), 32)


def combine_kernel_of(
    weights_dtype: torch.dtype, vectorized: bool, at_once: int = MOST_AT_ONCE
) -> Kernel:
    """vectorized: eight elements of the result can be stored at once, and of the addend loaded.

    at_once: how many choices of a token have their rows loaded together.
    """
    more = "" if at_once == MOST_AT_ONCE else f", {at_once}"
    flag = str(vectorized).lower()
    return Kernel(_SOURCE, f"combine_kernel<{INPUTS[weights_dtype]}, {flag}{more}>")


def at_once_of(top_k: int) -> int:
    """`at_once` for top_k choices; if it exceeds them, the last choice's row is loaded again."""
    return _FEW_AT_ONCE if top_k <= _FEW_AT_ONCE else MOST_AT_ONCE


def combine_kernels(
    target: Target, dtype: torch.dtype, top_k: int, hidden_size: int
) -> Iterator[Kernel]:
    """The kernel of `combine` where the result is aligned; dtype: of the weights."""
    r = Record(target, ("y", "token_to_row", "weights", "out"))
    y, out = (Tensor.contiguous(name, 1, hidden_size) for name in ("y", "out"))
    weights = Tensor.contiguous("weights", 1, top_k, dtype=dtype)
    at_once = at_once_of(top_k)
    describe_combine(r, y, Place("token_to_row"), weights, out, at_once=at_once)
    yield from r.kernels


def describe_combine(
    r: Record,
    y: Tensor,
    token_to_row: Place,
    weights: Tensor,
    out: Tensor,
    addend: Tensor | None = None,
    *,
    programmatic: bool = False,
    at_once: int = MOST_AT_ONCE,
) -> None:
    """One step: `out[t] = sum over j of weights[t, j] * y[token_to_row[t, j]]`.

    It reads all but `y` early, so these must be older than the step before.

    Args:
        y: bf16 [..., R, H], at a multiple of 16 bytes, in rows of whole 16 bytes. The bytes after
            the end of a row, up to the next multiple of 16, are read too.
        token_to_row: int32 [T, k], contiguous; a negative row counts as zeros (row 0 is read).
        weights: [T, k].
        out: bf16 [T, H], contiguous; T and H at least 1.
        addend: bf16 [T, H], contiguous, which is added to the sum after its rounding to BF16.
        programmatic: it may start before the stream's previous kernel ends; all that it reads
            early must be older than that kernel.
        at_once: as in `combine_kernel_of`.

    Raises:
        ValueError: there are more elements than a kernel can count.
    """
    (num_tokens, top_k), hidden_size = weights.shape, out.shape[1]
    units = ceil_div(hidden_size, _COLUMNS)
    num_units = num_tokens * units
    if num_units > _MAX_UNITS:
        raise ValueError(
            f"{_OP}: one call takes at most {_MAX_UNITS} times {_COLUMNS} columns, got "
            f"T = {num_tokens} and H = {hidden_size}; split the tokens"
        )
    arguments: dict[str, Any] = {
        "y": y.place,
        "y_row_bytes": y.bytes_of_stride(-2),
        "token_to_row": token_to_row,
        "weights": weights.place,
        "weight_token_bytes": weights.bytes_of_stride(0),
        "weight_choice_bytes": weights.bytes_of_stride(1),
        "out": out.place,
        "addend": None if addend is None else addend.place,
        "num_tokens": num_tokens,
        "top_k": top_k,
        "hidden_size": hidden_size,
        "units": divisor_of(units),
    }
    is_aligned = out.is_aligned and (addend is None or addend.is_aligned)
    vectorized = hidden_size % _COLUMNS == 0 and is_aligned
    threads = threads_of(num_units, r.target.num_sms)
    r.step(
        combine_kernel_of(weights.dtype, vectorized, at_once),
        ceil_div(num_units, threads),
        threads,
        arguments,
        early=(token_to_row, weights.place, arguments["addend"]),
        programmatic=programmatic,
    )
