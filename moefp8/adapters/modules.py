"""The modules that adapters turn others into: the same tensors under the same names, and LoRA.

T tokens, k choices each, E experts, H hidden, I intermediate, R rows.
"""

from typing import Any

import torch
from torch import nn

from ..functional.autograd import first_order
from ..functional.grouped_linear import grouped_linear
from ..functional.swiglu import swiglu, swiglu_grad
from ..kernels import BLOCK, num_blocks
from ..kernels.common.checks import FLOATS, check_tensor
from ..layers import FP8Linear, GroupedExperts
from ..routing import RoutingPlan, build_plan, combine, dispatch
from .lora import LoRA


class LoRAFP8Linear(FP8Linear):
    """An `FP8Linear` with `lora_weight` beside its weight."""

    lora_weight: LoRA

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.lora_weight(super().forward(x), x)
        return y


class LoRALinear(nn.Linear):
    """An `nn.Linear` with `lora_weight` beside its weight."""

    lora_weight: LoRA

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.lora_weight(super().forward(input), input)
        return y


class LoRAGroupedExperts(GroupedExperts):
    """A `GroupedExperts` with `lora_gate_up_proj` and `lora_down_proj`, or one of them.

    An adapter of gate_up_proj adds to gate and up before they meet, so the experts run step by
    step, and gate and up are rounded to BF16 in between.
    """

    runs_in_steps = True

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        *,
        addend: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As in `GroupedExperts`.

        1. Copy every token to the rows of its experts.
        2. Gate and up of each row, and what their adapter adds.
        3. SwiGLU.
        4. Down, and what its adapter adds.
        5. Sum the rows of every token, each times its weight.
        """
        check_tensor("GroupedExperts", "hidden_states", hidden_states, FLOATS)
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        rank = {x: getattr(self, x) for x in ("expert_offset", "num_global_experts")}
        plan = build_plan(top_k_index, self.num_experts, **rank)
        gate_up = self._project("gate_up_proj", dispatch(tokens, plan), plan)
        activated = _SwiGLU.apply(gate_up, self.swiglu_limit)
        y = combine(self._project("down_proj", activated, plan), plan, top_k_weights)
        y = y.view(hidden_states.shape)
        y = y if addend is None else y + addend
        return y.to(hidden_states.dtype)

    def _project(self, name: str, rows: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
        """[R, K] of any float dtype -> bf16 [R, N]; rows of no expert give zeros."""
        weight, scale_inv = self._look_up(name), self._look_up(f"{name}_scale_inv")
        offsets, i = plan.expert_offsets, self.intermediate_size
        if name == "gate_up_proj" and i % BLOCK:  # gate and up are cut into blocks separately
            halves = zip(weight.split(i, 1), scale_inv.split(num_blocks(i), 1), strict=True)
            y = torch.cat([self._multiply(rows, *half, offsets) for half in halves], dim=1)
        else:
            y = self._multiply(rows, weight, scale_inv, offsets)
        lora = self._modules.get(f"lora_{name}")
        return y if lora is None else lora(y, rows, offsets)

    def _multiply(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor,
        scale_inv: torch.Tensor,
        expert_offsets: torch.Tensor,
    ) -> torch.Tensor:
        inputs = rows, weight, scale_inv, expert_offsets
        return grouped_linear("GroupedExperts", *inputs, self.keep_transposed)


class _SwiGLU(torch.autograd.Function):
    """bf16 [R, 2I], gate first -> bf16 [R, I]; no more than the input is saved."""

    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor, limit: float | None) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        ctx.limit = limit
        gate, up = gate_up.chunk(2, dim=-1)
        return swiglu(gate, up, limit).to(gate_up.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        of_gate, of_up, _ = swiglu_grad(grad.float(), gate, up, ctx.limit)
        return torch.cat([of_gate, of_up], dim=-1).to(grad.dtype), None
