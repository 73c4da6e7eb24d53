"""`TopKRouter`: a linear gate in FP32 and one of the two choice formulas."""

import math
from typing import Literal

import torch
from torch import nn

from ..kernels.common.checks import FLOATS, check_same_device, check_tensor
from ..routing import TopK
from ..routing.route import route
from ..routing.top_k import check_choice
from .module import FixedDtypeModule, attributes_repr, draw_as_linear

# These are the names of k in configs of models and in other routers.
TOP_K_NAMES = "num_experts_per_tok", "top_k", "num_experts_per_token", "moe_topk", "moe_k"


class TopKRouter(FixedDtypeModule):
    """Score E experts for every token and choose k; weight and bias stay FP32.

    The choice does not depend on `torch.set_float32_matmul_precision` and similar switches, and on
    a Hopper GPU, for tokens in BF16 and up to 512 experts, not on the other tokens.

    Args:
        hidden_size, num_experts, top_k: H, E, and k experts per token.
        scoring: "softmax" (Qwen3-MoE, Mixtral) or "sigmoid" (DeepSeek-V3, GLM, Kimi, MiniMax).
        renormalize: `norm_topk_prob`.
        num_groups, topk_groups, scaling_factor: for "sigmoid", `n_group`, `topk_group` and
            `routed_scaling_factor`.
        correction_bias: for "sigmoid", whether there is an `e_score_correction_bias`.

    Attributes:
        weight: fp32 [E, H].
        e_score_correction_bias: fp32 [E] buffer, or None; it counts in the choice alone.
    """

    fp32_names = ("weight", "e_score_correction_bias")

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        scoring: Literal["softmax", "sigmoid"] = "softmax",
        renormalize: bool = True,
        num_groups: int = 1,
        topk_groups: int = 1,
        scaling_factor: float = 1.0,
        correction_bias: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if scoring not in ("softmax", "sigmoid"):
            raise ValueError(f"TopKRouter: scoring must be 'softmax' or 'sigmoid', got {scoring!r}")
        sigmoid_options = num_groups, topk_groups, scaling_factor, correction_bias
        if scoring == "softmax" and sigmoid_options != (1, 1, 1.0, False):
            raise ValueError(
                "TopKRouter: num_groups, topk_groups, scaling_factor and correction_bias are for "
                "scoring='sigmoid'"
            )
        if not 0 < scaling_factor < math.inf:  # this refuses NaN, too
            raise ValueError(
                f"TopKRouter: scaling_factor must be finite and above 0, got {scaling_factor}"
            )
        check_choice("TopKRouter", num_experts, top_k, num_groups, topk_groups)
        self.hidden_size, self.num_experts, self.top_k = hidden_size, num_experts, top_k
        self.scoring, self.renormalize = scoring, renormalize
        self.num_groups, self.topk_groups = num_groups, topk_groups
        self.scaling_factor = scaling_factor
        empty = torch.empty(num_experts, hidden_size, dtype=torch.float32, device=device)
        self.weight = nn.Parameter(empty)
        bias = torch.zeros(num_experts, dtype=torch.float32, device=device)
        self.e_score_correction_bias: torch.Tensor | None
        self.register_buffer("e_score_correction_bias", bias if correction_bias else None)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        draw_as_linear(self.weight, self.hidden_size)
        if self.e_score_correction_bias is not None:
            self.e_score_correction_bias.zero_()

    def forward(self, hidden_states: torch.Tensor) -> TopK:
        """hidden_states: [T, H], any float dtype -> (top_k_index int64, top_k_weights fp32) [T, k].

        Raises ValueError for another shape.
        """
        check_tensor("TopKRouter", "hidden_states", hidden_states, FLOATS, 2)
        if hidden_states.shape[1] != self.hidden_size:
            came = list(hidden_states.shape)
            raise ValueError(
                f"TopKRouter: hidden_states must be [T, {self.hidden_size}], got {came}"
            )
        check_same_device("TopKRouter", hidden_states=hidden_states, weight=self.weight)
        x, weight, k = hidden_states, self.weight, self.top_k
        if self.scoring == "softmax":
            return route(x, weight, None, k, False, 1, 1, self.renormalize, 1.0)
        bias, groups = self.e_score_correction_bias, (self.num_groups, self.topk_groups)
        return route(x, weight, bias, k, True, *groups, self.renormalize, self.scaling_factor)

    def extra_repr(self) -> str:
        return attributes_repr(self, "hidden_size", "num_experts", "top_k", "scoring")
