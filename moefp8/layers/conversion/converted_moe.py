"""`ConvertedMoE`: what `convert` puts in place of a block that calls its experts one by one.

T tokens, E experts, H hidden, k choices.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from ...routing import sigmoid_group_topk, softmax_topk
from ..module import attributes_repr
from ..moe import project

Scoring = Literal["softmax", "sigmoid"]
SCORINGS: tuple[Scoring, ...] = ("softmax", "sigmoid")


class Formula(NamedTuple):
    """How a block chooses experts by its router's logits, and what it returns.

    scoring: "softmax" or "sigmoid". renormalize: whether the k weights are divided by their sum,
    which is what a softmax after the choice does. gives_logits: whether the block returns (output,
    logits [T, E]), or the output alone.
    """

    scoring: Scoring
    renormalize: bool
    top_k: int
    gives_logits: bool


class ConvertedMoE(nn.Module):
    """A block's own router and its experts, stacked: `experts(x, choice(router(x)))`.

    The router is the very module that the block had, and both keep their names, so that keys of a
    state dict differ for the experts alone.

    Attributes:
        num_experts, hidden_size, top_k, scoring, renormalize: as in `TopKRouter`.
        gives_logits: whether the forward also returns the logits.
    """

    def __init__(
        self, router: str, gate: nn.Module, name: str, experts: Any, formula: Formula
    ) -> None:
        super().__init__()
        self.add_module(router, gate)
        self.add_module(name, experts)
        self._router, self._experts = router, name
        self.num_experts, self.hidden_size = experts.num_experts, experts.hidden_size
        self.scoring, self.renormalize, self.top_k, self.gives_logits = formula

    def forward(self, hidden_states: torch.Tensor) -> Any:
        """hidden_states: [..., H] bf16, fp16 or fp32 -> the same shape and dtype.

        With `gives_logits`, a tuple of that and the logits [T, E], in the router's dtype.
        """
        tokens = hidden_states.reshape(-1, self.hidden_size)
        logits = project(getattr(self, self._router), tokens)
        if self.scoring == "softmax":
            chosen = softmax_topk(logits, self.top_k, self.renormalize)
        else:
            chosen = sigmoid_group_topk(logits, None, self.top_k, renormalize=self.renormalize)
        y = getattr(self, self._experts)(tokens, *chosen).view(hidden_states.shape)
        return (y, logits) if self.gives_logits else y

    def extra_repr(self) -> str:
        return attributes_repr(self, "top_k", "scoring", "renormalize", "gives_logits")
