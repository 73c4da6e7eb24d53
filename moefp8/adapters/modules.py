"""The modules that adapters turn others into: the same tensors under the same names, and LoRA.

T tokens, k choices each, E experts, H hidden, I intermediate, R rows.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..kernels.common.checks import FLOATS, check_tensor
from ..layers import FP8Linear, GroupedExperts
from ..layers.experts import BIASES, WEIGHTS
from .experts import Inputs, adapted_experts
from .lora import LoRA

STACKS = "gate_up_proj", "down_proj"
Factors = tuple[torch.Tensor, torch.Tensor, float]  # A [E, r, K], B [E, N, r], scaling


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
        adapters = {name: self._adapter(name) for name in STACKS}
        return compute_adapted(
            self, adapters, hidden_states, top_k_index, top_k_weights, addend=addend
        )

    def _adapter(self, parameter: str) -> Factors | None:
        lora = self._modules.get(f"lora_{parameter}")
        return (lora.A, lora.B, lora.scaling) if isinstance(lora, LoRA) else None


def compute_adapted(
    experts: GroupedExperts,
    adapters: Mapping[str, Factors | None],
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    addend: torch.Tensor | None = None,
) -> torch.Tensor:
    """`GroupedExperts.compute`, with adapters beside the weights that are their keys."""
    check_tensor("GroupedExperts", "hidden_states", hidden_states, FLOATS)
    weights: dict[str, Any] = {name: experts._look_up(name) for name in (*WEIGHTS, *BIASES)}
    inputs = Inputs(
        hidden_states,
        top_k_index,
        top_k_weights,
        **weights,
        **_fields("gate_up", adapters.get("gate_up_proj")),
        **_fields("down", adapters.get("down_proj")),
        activation=experts.activation,
        keep_transposed=experts.keep_transposed,
        expert_offset=experts.expert_offset,
        num_global_experts=experts.num_global_experts,
    )
    y = adapted_experts("GroupedExperts", inputs)
    y = y if addend is None else y + addend
    return y.to(hidden_states.dtype)


def _fields(name: str, adapter: Factors | None) -> dict[str, Any]:
    """What `Inputs` has of the adapter of that projection."""
    a, b, scaling = adapter or (None, None, 0.0)
    a, b = [x if x is None else x.bfloat16() for x in (a, b)]
    return {f"a_of_{name}": a, f"b_of_{name}": b, f"scaling_of_{name}": scaling}
