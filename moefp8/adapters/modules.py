"""The modules that adapters turn others into: the same tensors under the same names, and LoRA.

T tokens, k choices each, E experts, H hidden, I intermediate, R rows.
"""

from typing import Any

import torch
from torch import nn

from ..kernels.common.checks import FLOATS, check_tensor
from ..layers import FP8Linear, GroupedExperts
from ..layers.experts import WEIGHTS
from .experts import Inputs, adapted_experts
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

    def compute(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        addend: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As in `GroupedExperts`."""
        check_tensor("GroupedExperts", "hidden_states", hidden_states, FLOATS)
        weights: dict[str, Any] = {name: self._look_up(name) for name in WEIGHTS}
        inputs = Inputs(
            hidden_states,
            top_k_index,
            top_k_weights,
            **weights,
            **self._adapter("gate_up"),
            **self._adapter("down"),
            swiglu_limit=self.swiglu_limit,
            keep_transposed=self.keep_transposed,
            expert_offset=self.expert_offset,
            num_global_experts=self.num_global_experts,
        )
        y = adapted_experts("GroupedExperts", inputs)
        y = y if addend is None else y + addend
        return y.to(hidden_states.dtype)

    def _adapter(self, name: str) -> dict[str, Any]:
        """What `Inputs` has of the adapter of that projection."""
        lora = self._modules.get(f"lora_{name}_proj")
        if not isinstance(lora, LoRA):
            return {f"a_of_{name}": None, f"b_of_{name}": None, f"scaling_of_{name}": 0.0}
        a, b = lora.A.bfloat16(), lora.B.bfloat16()
        return {f"a_of_{name}": a, f"b_of_{name}": b, f"scaling_of_{name}": lora.scaling}
