"""Experts with LoRA beside their weights, forward and backward.

T tokens, k choices each, E experts, H hidden, I intermediate, r rank, R = T k rows. The rows
after the last expert's belong to no expert: they are computed and never used.
"""

from typing import Any, NamedTuple

import torch

from ..functional.activation import empty_gate_up
from ..functional.activation_rows import (
    ActivationGradients,
    activation_rows,
    activation_rows_backward,
)
from ..functional.autograd import first_order, no_gradients, records
from ..functional.expert_biases import BIASES, bias_gradients_of_rows, bias_products
from ..functional.grouped_bf16 import add_low_rank, grouped_outer
from ..functional.grouped_linear import grouped_dgrad
from ..kernels.common.activation import Activation
from ..kernels.common.blocks import BLOCK
from ..kernels.gemm.grouped import m_grouped_fp8_gemm_nt_contiguous
from ..quant.quantize import quantize_1x128, quantize_gradient_1x128
from ..quant.weight_format import tile_scales
from ..routing import RoutingPlan, build_plan
from ..routing.combine import sum_rows


class LowRank(NamedTuple):
    """An adapter adds `scaling * b @ a` to a weight. This product is never stored.

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
    """The arguments of experts with adapters.

    hidden_states: [T, H] bf16, fp16 or fp32. The next eight: as in `functional.experts`.
    a_of_gate_up to b_of_down: as in `LowRank`; None where there is no adapter.
    scaling_of_*: each adapter's scaling. The others are attributes of `GroupedExperts`.
    """

    hidden_states: torch.Tensor
    top_k_index: torch.Tensor
    top_k_weights: torch.Tensor
    gate_up_proj: torch.Tensor
    gate_up_proj_scale_inv: torch.Tensor
    down_proj: torch.Tensor
    down_proj_scale_inv: torch.Tensor
    gate_up_proj_bias: torch.Tensor | None
    down_proj_bias: torch.Tensor | None
    a_of_gate_up: torch.Tensor | None
    b_of_gate_up: torch.Tensor | None
    a_of_down: torch.Tensor | None
    b_of_down: torch.Tensor | None
    scaling_of_gate_up: float
    scaling_of_down: float
    activation: Activation
    keep_transposed: bool | None
    expert_offset: int
    num_global_experts: int | None


def _low_ranks(inputs: Inputs) -> tuple[LowRank | None, LowRank | None]:
    """The adapters of gate and up, and of down; None where there is no adapter."""
    gate_up = down = None
    if inputs.a_of_gate_up is not None and inputs.b_of_gate_up is not None:
        gate_up = LowRank(inputs.a_of_gate_up, inputs.b_of_gate_up, inputs.scaling_of_gate_up)
    if inputs.a_of_down is not None and inputs.b_of_down is not None:
        down = LowRank(inputs.a_of_down, inputs.b_of_down, inputs.scaling_of_down)
    return gate_up, down


class Saved(NamedTuple):
    """The tensors that the forward saves for the backward: u of both adapters, and each row's gate
    and up.
    """

    u_of_gate_up: torch.Tensor | None
    u_of_down: torch.Tensor | None
    gate_up: torch.Tensor


def adapted_experts(layer: str, inputs: Inputs) -> torch.Tensor:
    """bf16 [T, H], with gradients in hidden states, top_k_weights and the adapters' a and b.

    layer: the name in the error that is raised if an FP8 weight asks for a gradient.
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
    2. Compute gate and up of each row, and add their adapter's product.
    3. Apply SwiGLU.
    4. Compute down, and add its adapter's product.
    5. Sum the rows of every token, each times its weight.
    """
    x, (num_experts, h, i) = inputs.hidden_states, inputs.down_proj.shape
    plan = build_plan(
        inputs.top_k_index,
        num_experts,
        expert_offset=inputs.expert_offset,
        num_global_experts=inputs.num_global_experts,
    )
    gate_up_adapter, down_adapter = _low_ranks(inputs)
    offsets, multiply = plan.expert_offsets, m_grouped_fp8_gemm_nt_contiguous
    rows, u_of_gate_up, u_of_down = _rows(x, plan), None, None
    gate_up, quantized = empty_gate_up(x, len(rows), i), quantize_1x128(rows, False)
    for half, d, bias in _halves(inputs, gate_up):
        multiply(quantized, half, d, expert_offsets=offsets, bias=bias)
    if gate_up_adapter is not None:
        u_of_gate_up = gate_up_adapter.add_to(gate_up, rows.bfloat16(), offsets)
    activated = activation_rows(gate_up, inputs.activation)
    y = x.new_empty((len(rows), h), dtype=torch.bfloat16)
    down = inputs.down_proj, tile_scales(inputs.down_proj, inputs.down_proj_scale_inv)
    quantized, bias = quantize_1x128(activated, False), inputs.down_proj_bias
    multiply(quantized, down, y, expert_offsets=offsets, bias=bias)
    if down_adapter is not None:
        u_of_down = down_adapter.add_to(y, activated, offsets)
    result = sum_rows(y, plan.token_to_row, inputs.top_k_weights)
    return result, Saved(u_of_gate_up, u_of_down, gate_up), plan


def _rows(x: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
    """[R, ...]: each row's token; token 0 for a row without one."""
    return x.index_select(0, plan.row_to_token.clamp(min=0))


Half = tuple[torch.Tensor, torch.Tensor]  # codes, scales


def _halves(
    inputs: Inputs, gate_up: torch.Tensor
) -> list[tuple[Half, torch.Tensor, torch.Tensor | None]]:
    """Weights, their part of gate_up [R, 2, I] and their biases; no block spans gate and up."""
    weight, scale_inv = inputs.gate_up_proj, inputs.gate_up_proj_scale_inv
    i, bias = gate_up.shape[2], inputs.gate_up_proj_bias
    scale_inv = tile_scales(weight, scale_inv, 2)
    if i % BLOCK == 0:
        return [((weight, scale_inv), gate_up.flatten(1), bias)]
    weights = zip(weight.split(i, 1), scale_inv.chunk(2, 1), strict=True)
    biases: Any = (None, None)
    if bias is not None:  # one copy of both, since the kernel takes contiguous ones
        biases = bias.unflatten(1, (2, i)).transpose(0, 1).contiguous()
    return list(zip(weights, gate_up.unbind(1), biases, strict=True))


# ---- The gradient ----


def _backward(
    grad: torch.Tensor, inputs: Inputs, saved: Saved, plan: RoutingPlan, needs: dict[str, bool]
) -> dict[str, torch.Tensor | None]:
    """The gradients of `_forward`'s inputs, by name; its steps run in reverse.

    SwiGLU's gradient multiplies rows by the weights of their choices, and no earlier step does.
    dw_r is the dot product of a row's activations and their gradient.
    """
    x, weights, keep_transposed = inputs.hidden_states, inputs.top_k_weights, inputs.keep_transposed
    gate_up_proj = inputs.gate_up_proj, inputs.gate_up_proj_scale_inv
    down_proj = inputs.down_proj, inputs.down_proj_scale_inv
    gate_up_adapter, down_adapter = _low_ranks(inputs)
    offsets, rows = plan.expert_offsets, _rows(grad, plan)
    gradients: dict[str, torch.Tensor | None] = {}
    dy = rows.bfloat16()
    quantized = quantize_gradient_1x128(rows)
    grad_activated = grouped_dgrad(*quantized, *down_proj, offsets, 1, keep_transposed)
    if down_adapter is not None:
        v_of_down = down_adapter.add_gradient_to(grad_activated, dy, offsets)
    through = ActivationGradients(
        *activation_rows_backward(
            grad_activated, saved.gate_up, plan.token_to_row, weights, inputs.activation
        )
    )
    grad_scores = through.grad_weights
    if inputs.down_proj_bias is not None:
        here = inputs.top_k_index - inputs.expert_offset
        grad_scores = grad_scores + bias_products(grad, inputs.down_proj_bias, here)
    gradients["top_k_weights"] = grad_scores.to(weights.dtype)
    gradients |= bias_gradients_of_rows(
        needs, lambda: dy, through.weight_of_row, through.grad_gate_up, offsets
    )
    if down_adapter is not None and saved.u_of_down is not None:
        activated = activation_rows(saved.gate_up, inputs.activation)
        v, u = (
            (through.weight_of_row[:, None] * z).bfloat16() for z in (v_of_down, saved.u_of_down)
        )
        gradients["a_of_down"] = grouped_outer(v, activated, offsets)
        gradients["b_of_down"] = grouped_outer(dy, u, offsets)
    if needs["hidden_states"]:
        quantized = through.codes, through.scale_inv
        grad_rows = grouped_dgrad(*quantized, *gate_up_proj, offsets, 2, keep_transposed)
    else:
        grad_rows = x.new_empty((len(rows), x.shape[1]), dtype=torch.bfloat16)  # for the adapter's
    if gate_up_adapter is not None and saved.u_of_gate_up is not None:
        dy = through.grad_gate_up.flatten(1)
        v = gate_up_adapter.add_gradient_to(grad_rows, dy, offsets)
        gradients["a_of_gate_up"] = grouped_outer(v, _rows(x, plan).bfloat16(), offsets)
        gradients["b_of_gate_up"] = grouped_outer(dy, saved.u_of_gate_up, offsets)
    if needs["hidden_states"]:
        grad_x = sum_rows(grad_rows, plan.token_to_row, through.is_first)
        gradients["hidden_states"] = grad_x.to(x.dtype)
    return gradients


_TENSORS = Inputs._fields.index("scaling_of_gate_up")
_DIFFERENTIABLE = "hidden_states", "top_k_weights", *Inputs._fields[7:_TENSORS]


class _AdaptedExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: str, *args: Any) -> torch.Tensor:
        y, saved, plan = _forward(Inputs(*args))
        maps = (
            plan.tokens_per_expert,
            plan.expert_offsets,
            plan.row_to_token,
            plan.row_to_expert,
            plan.token_to_row,
        )
        ctx.save_for_backward(*args[:_TENSORS], *saved, *maps)
        ctx.layer, ctx.options = layer, args[_TENSORS:]
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tensors = ctx.saved_tensors  # read once: checkpointing returns them only once
        inputs, others = Inputs(*tensors[:_TENSORS], *ctx.options), tensors[_TENSORS:]
        num_saved = len(Saved._fields)
        saved, plan = Saved(*others[:num_saved]), RoutingPlan(*others[num_saved:])
        needs = dict(zip(Inputs._fields, ctx.needs_input_grad[1:], strict=True))
        names = Inputs._fields[3:7]
        weight_gradients = no_gradients(grad, ctx.layer, [needs[x] for x in names], tensors[3:7])
        gradients = dict(zip(names, weight_gradients, strict=True))
        if any(needs[name] for name in _DIFFERENTIABLE):
            gradients |= _backward(grad, inputs, saved, plan, needs)
            for name in BIASES:
                if (gradient := gradients.get(name)) is not None:
                    gradients[name] = gradient.to(getattr(inputs, name).dtype)
        return None, *(gradients.get(x) if needs[x] else None for x in Inputs._fields)
