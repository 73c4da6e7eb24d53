"""`ConvertedMoE`: what `convert` puts in place of a block that calls its experts one by one.

T tokens, E experts, H hidden, k choices.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import nn

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

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """logits [T, E] -> ids int64 and weights fp32 [T, k].

        `torch.topk` chooses, as blocks written by hand let it, so that a block and its replacement
        choose the same of equal logits, which logits in 16 bits often are.
        """
        logits = logits.float()
        if self.scoring == "sigmoid":
            best, ids = logits.sigmoid().topk(self.top_k, dim=-1)
            return ids, best / best.sum(-1, keepdim=True) if self.renormalize else best
        best, ids = logits.topk(self.top_k, dim=-1)
        if self.renormalize:
            return ids, best.softmax(dim=-1)
        return ids, logits.softmax(dim=-1).gather(-1, ids)


class ConvertedMoE(nn.Module):
    """A block's own router and its experts, stacked: `experts(x, choice(router(x)))`.

    The router is the very module that the block had, and both keep their names, so that keys of a
    state dict differ for the experts alone.

    Attributes:
        hidden_size, top_k: H and k.
        formula: how it chooses, and whether its forward also returns the logits.
    """

    def __init__(
        self, router: str, gate: nn.Module, name: str, experts: Any, formula: Formula
    ) -> None:
        super().__init__()
        self.add_module(router, gate)
        self.add_module(name, experts)
        self._router_name, self._experts_name = router, name
        self.hidden_size, self.top_k, self.formula = experts.hidden_size, formula.top_k, formula

    def forward(self, hidden_states: torch.Tensor) -> Any:
        """hidden_states: [..., H] bf16, fp16 or fp32 -> the same shape and dtype.

        If `formula` says so, a tuple of that and the logits [T, E], in the router's dtype.
        """
        tokens = hidden_states.reshape(-1, self.hidden_size)
        logits = project(getattr(self, self._router_name), tokens)
        ids, weights = self.formula.choose(logits)
        y = getattr(self, self._experts_name)(tokens, ids, weights).view(hidden_states.shape)
        return (y, logits) if self.formula.gives_logits else y

    def extra_repr(self) -> str:
        return attributes_repr(self.formula, *self.formula._fields)
