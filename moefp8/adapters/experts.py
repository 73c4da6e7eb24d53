"""Experts with LoRA beside their weights, forward and backward.

T tokens, k choices each, E experts, H hidden, I intermediate, r rank, R = T k rows. Rows of no
expert, which are behind the last one's, are computed along and never used.
"""

from typing import Any, NamedTuple

import torch

from ..functional.autograd import first_order, no_gradients, records
from ..functional.grouped_bf16 import add_low_rank, grouped_outer
from ..functional.grouped_linear import grouped_dgrad
from ..functional.swiglu import empty_gate_up
from ..functional.swiglu_rows import SwigluGradients, swiglu_rows, swiglu_rows_backward
from ..kernels.common.blocks import BLOCK, num_blocks
from ..kernels.gemm.grouped import m_grouped_fp8_gemm_nt_contiguous
from ..quant.quantize import quantize_1x128, quantize_gradient_1x128
from ..routing import RoutingPlan, build_plan, combine


class LowRank(NamedTuple):
    """What an adapter adds to a weight: `scaling * b @ a`, which is never made.

    a: bf16 [E, r, K]. b: bf16 [E, N, r]. x and dx are bf16 [R, K], y and dy are [R, N].
    """

    a: torch.Tensor
    b: torch.Tensor
    scaling: float

    def add_to(self, y: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """y += b u; returns u = scaling * a x, bf16 [R, r]."""
        u: torch.Tensor = add_low_rank(y, x, self.a, self.b, self.scaling, offsets)
        return u

    def add_gradient_to(
        self, dx: torch.Tensor, dy: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        """dx += a^T v; returns v = scaling * b^T dy, bf16 [R, r]."""
        v: torch.Tensor = add_low_rank(dx, dy, self.b.mT, self.a.mT, self.scaling, offsets)
        return v


class Inputs(NamedTuple):
    """What experts with adapters take.

    hidden_states: [T, H] bf16, fp16 or fp32. The next six: as in `functional.experts`.
    a_of_gate_up to b_of_down: as in `LowRank`; None where there is no adapter.
    The scalings are those of both adapters, and the others attributes of `GroupedExperts`.
    """

    hidden_states: torch.Tensor
    top_k_index: torch.Tensor
    top_k_weights: torch.Tensor
    gate_up_proj: torch.Tensor
    gate_up_proj_scale_inv: torch.Tensor
    down_proj: torch.Tensor
    down_proj_scale_inv: torch.Tensor
    a_of_gate_up: torch.Tensor | None
    b_of_gate_up: torch.Tensor | None
    a_of_down: torch.Tensor | None
    b_of_down: torch.Tensor | None
    scaling_of_gate_up: float
    scaling_of_down: float
    swiglu_limit: float | None
    keep_transposed: bool | None
    expert_offset: int
    num_global_experts: int | None


def _low_ranks(inputs: Inputs) -> tuple[LowRank | None, LowRank | None]:
    """What is added to gate and up, and to down; None where there is no adapter."""
    of_gate_up = of_down = None
    if inputs.a_of_gate_up is not None and inputs.b_of_gate_up is not None:
        of_gate_up = LowRank(inputs.a_of_gate_up, inputs.b_of_gate_up, inputs.scaling_of_gate_up)
    if inputs.a_of_down is not None and inputs.b_of_down is not None:
        of_down = LowRank(inputs.a_of_down, inputs.b_of_down, inputs.scaling_of_down)
    return of_gate_up, of_down


class Saved(NamedTuple):
    """What a backward takes besides the inputs and the plan: u of both adapters, and gate and up of
    each row.
    """

    u_of_gate_up: torch.Tensor | None
    u_of_down: torch.Tensor | None
    gate_up: torch.Tensor


def adapted_experts(layer: str, inputs: Inputs) -> torch.Tensor:
    """bf16 [T, H], with gradients in hidden states, top_k_weights and the adapters' a and b.

    layer: who is named if a gradient of an FP8 weight is wanted, which is an error.
    """
    y: torch.Tensor
    if records(layer, *inputs):
        y = _AdaptedExperts.apply(layer, *inputs)
    else:
        y, _, _ = _forward(inputs)
    return y


def _forward(inputs: Inputs) -> tuple[torch.Tensor, Saved, RoutingPlan]:
    """Run the experts step by step.

    1. Copy every token to the rows of its experts, and quantize.
    2. Gate and up of each row, and what their adapter adds.
    3. SwiGLU.
    4. Down, and what its adapter adds.
    5. Sum the rows of every token, each times its weight.
    """
    x, (num_experts, h, i) = inputs.hidden_states, inputs.down_proj.shape
    rank = {name: getattr(inputs, name) for name in ("expert_offset", "num_global_experts")}
    plan = build_plan(inputs.top_k_index, num_experts, **rank)
    of_gate_up, of_down = _low_ranks(inputs)
    offsets, multiply = plan.expert_offsets, m_grouped_fp8_gemm_nt_contiguous
    rows, u_of_gate_up, u_of_down = _rows(x, plan), None, None
    gate_up, quantized = empty_gate_up(x, len(rows), i), quantize_1x128(rows, False)
    for half, d in _halves(inputs, gate_up):
        multiply(quantized, half, d, expert_offsets=offsets)
    if of_gate_up is not None:
        u_of_gate_up = of_gate_up.add_to(gate_up, rows.bfloat16(), offsets)
    activated = swiglu_rows(gate_up, inputs.swiglu_limit)
    y = x.new_empty((len(rows), h), dtype=torch.bfloat16)
    down = inputs.down_proj, inputs.down_proj_scale_inv
    multiply(quantize_1x128(activated, False), down, y, expert_offsets=offsets)
    if of_down is not None:
        u_of_down = of_down.add_to(y, activated, offsets)
    return combine(y, plan, inputs.top_k_weights), Saved(u_of_gate_up, u_of_down, gate_up), plan


def _rows(x: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
    """[R, ...]: the token of each row; the first one where a row has none."""
    return x.index_select(0, plan.row_to_token.clamp(min=0))


Half = tuple[torch.Tensor, torch.Tensor]  # codes, scales


def _halves(inputs: Inputs, gate_up: torch.Tensor) -> list[tuple[Half, torch.Tensor]]:
    """Weights and their part of gate_up [R, 2, I]; gate and up have blocks of their own."""
    weight, scale_inv = inputs.gate_up_proj, inputs.gate_up_proj_scale_inv
    i = gate_up.shape[2]
    if i % BLOCK == 0:
        return [((weight, scale_inv), gate_up.flatten(1))]
    weights = zip(weight.split(i, 1), scale_inv.split(num_blocks(i), 1), strict=True)
    return list(zip(weights, gate_up.unbind(1), strict=True))


# ---- The gradient ----


def _backward(
    grad: torch.Tensor, inputs: Inputs, saved: Saved, plan: RoutingPlan, needs_x: bool
) -> dict[str, torch.Tensor]:
    """The gradients of what `_forward` gives, by name, in the order of its steps from behind.

    Rows have no weight of a choice before SwiGLU's gradient, which multiplies by it: dw_r is the
    dot product of what is activated and of its gradient.
    """
    x, weights, keeps = inputs.hidden_states, inputs.top_k_weights, inputs.keep_transposed
    gate_up_proj = inputs.gate_up_proj, inputs.gate_up_proj_scale_inv
    down_proj = inputs.down_proj, inputs.down_proj_scale_inv
    of_gate_up, of_down = _low_ranks(inputs)
    offsets, rows, found = plan.expert_offsets, _rows(grad, plan), {}
    dy = rows.bfloat16()
    quantized = quantize_gradient_1x128(rows)
    of_activated = grouped_dgrad(*quantized, *down_proj, offsets, 1, keeps)
    if of_down is not None:
        v_of_down = of_down.add_gradient_to(of_activated, dy, offsets)
    through = SwigluGradients(
        *swiglu_rows_backward(
            of_activated, saved.gate_up, plan.token_to_row, weights, inputs.swiglu_limit
        )
    )
    found["top_k_weights"] = through.grad_weights.to(weights.dtype)
    if of_down is not None and saved.u_of_down is not None:
        activated = swiglu_rows(saved.gate_up, inputs.swiglu_limit)
        v, u = (
            (through.weight_of_row[:, None] * z).bfloat16() for z in (v_of_down, saved.u_of_down)
        )
        found["a_of_down"] = grouped_outer(v, activated, offsets)
        found["b_of_down"] = grouped_outer(dy, u, offsets)
    if needs_x:
        quantized = through.codes, through.scale_inv
        of_rows = grouped_dgrad(*quantized, *gate_up_proj, offsets, 2, keeps)
    else:
        of_rows = x.new_empty((len(rows), x.shape[1]), dtype=torch.bfloat16)  # for what is added
    if of_gate_up is not None and saved.u_of_gate_up is not None:
        dy = through.grad_gate_up.flatten(1)
        v = of_gate_up.add_gradient_to(of_rows, dy, offsets)
        found["a_of_gate_up"] = grouped_outer(v, _rows(x, plan).bfloat16(), offsets)
        found["b_of_gate_up"] = grouped_outer(dy, saved.u_of_gate_up, offsets)
    if needs_x:
        found["hidden_states"] = combine(of_rows, plan, through.is_first).to(x.dtype)
    return found


_TENSORS = Inputs._fields.index("scaling_of_gate_up")
_DIFFERENTIABLE = "hidden_states", "top_k_weights", *Inputs._fields[7:_TENSORS]


class _AdaptedExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: str, *given: Any) -> torch.Tensor:
        y, saved, plan = _forward(Inputs(*given))
        maps = (
            plan.tokens_per_expert,
            plan.expert_offsets,
            plan.row_to_token,
            plan.row_to_expert,
            plan.token_to_row,
        )
        ctx.save_for_backward(*given[:_TENSORS], *saved, *maps)
        ctx.layer, ctx.options = layer, given[_TENSORS:]
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tensors = ctx.saved_tensors  # once: checkpointing gives them no second time
        inputs, others = Inputs(*tensors[:_TENSORS], *ctx.options), tensors[_TENSORS:]
        num_saved = len(Saved._fields)
        saved, plan = Saved(*others[:num_saved]), RoutingPlan(*others[num_saved:])
        needs = dict(zip(Inputs._fields, ctx.needs_input_grad[1:], strict=True))
        names = Inputs._fields[3:7]
        of_weights = no_gradients(grad, ctx.layer, [needs[x] for x in names], tensors[3:7])
        found = dict(zip(names, of_weights, strict=True))
        if any(needs[name] for name in _DIFFERENTIABLE):
            found |= _backward(grad, inputs, saved, plan, needs["hidden_states"])
        return None, *(found.get(x) if needs[x] else None for x in Inputs._fields)
