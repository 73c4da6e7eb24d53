"""MoE layers of vLLM on moefp8.

T tokens, k choices each, E experts of this rank, H hidden, I intermediate.
"""

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8Dynamic128Sym,
    kFp8Static128BlockSym,
)

from ...functional.experts import ExpertsInputs, experts
from ...kernels.common.activation import Activation
from ..common import EXPERTS
from ..loaders import take_floats
from .model import ServedModel, why_not_here

_PARAMETERS = "w13_weight", "w13_weight_scale_inv", "w2_weight", "w2_weight_scale_inv"


class MoEFP8Experts(mk.FusedMoEExpertsModular):
    """`experts` for vLLM's modular kernel, which brings tokens to the ranks of their experts.

    scales: those of gate and up, and of down, as the layer has them now. vLLM gives a kernel those
    of the time when it is made, and makes another one when weights are reloaded.
    """

    scales: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return why_not_here() is None

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return (weight_key, activation_key) == (kFp8Static128BlockSym, kFp8Dynamic128Sym)

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation == MoEActivation.SILU

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return True

    @staticmethod
    def _supports_batch_invariance() -> bool:
        return True  # on a Hopper GPU a token's result does not depend on other tokens

    def supports_expert_map(self) -> bool:
        return True

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return TopKWeightAndReduceNoOP()  # rows are weighted and summed already

    def workspace_shapes(
        self, M: int, N: int, K: int, *args: Any, **kwargs: Any
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        return (0,), (0,), (M, K)

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        *args: Any,
        apply_router_weight_on_input: bool = False,
        **kwargs: Any,
    ) -> None:
        """Write the sum over each token's choices of this rank into output, [T, H]."""
        if apply_router_weight_on_input:
            topk_weights = torch.ones_like(topk_weights)
        if expert_map is not None:
            topk_ids = local_ids(topk_ids, expert_map, len(w1))
        y = experts(
            *ExpertsInputs(
                hidden_states=hidden_states,
                top_k_index=topk_ids,
                top_k_weights=topk_weights,
                gate_up_proj=w1,
                gate_up_proj_scale_inv=self.scales[0] if self.scales else self.w1_scale,
                down_proj=w2,
                down_proj_scale_inv=self.scales[1] if self.scales else self.w2_scale,
                activation=Activation(limit=self.quant_config.gemm1_clamp_limit),
                masked=False,
                num_global_experts=global_num_experts,
            )
        )
        output.copy_(y)


class MoEFP8ExpertsMethod(Fp8MoEMethod):
    """vLLM makes and loads weights and scales; they stay as they are, and `experts` takes them.

    layer.w13_weight: e4m3 [E, 2I, H], gate rows first; layer.w2_weight: e4m3 [E, H, I]; their
    scales, named ..._scale_inv, are fp32, one for each block of 128x128.
    """

    def __init__(self, quant_config: Any, layer: Any, served: ServedModel) -> None:
        super().__init__(quant_config, layer)
        # Whatever vLLM has chosen, weights are to stay as they are for Triton.
        self.fp8_backend, self.experts_cls = Fp8MoeBackend.TRITON, MoEFP8Experts
        self.served = served
        self.expert_offset: tuple[torch.Tensor, int] | None = None

    @staticmethod
    def why_not(method: Fp8MoEMethod, layer: Any) -> str | None:
        """Why vLLM's own method stays, or None."""
        moe, parallel = method.moe, method.moe.moe_parallel_config
        config = get_current_vllm_config().parallel_config
        blocks = getattr(method, "moe_block_shape", method.weight_block_size)
        alpha, beta = (getattr(layer, f"swiglu_{x}", None) for x in ("alpha", "beta"))
        reasons = {
            f"moe_backend is {moe.moe_backend}": moe.moe_backend != "auto",
            "experts have biases": moe.has_bias,
            f"swiglu_alpha is {alpha}": alpha not in (None, 1.0),
            f"swiglu_beta is {beta}": beta not in (None, 0.0),
            f"blocks are {blocks}": blocks is None or list(blocks) != [128, 128],
            f"all2all_backend is {parallel.all2all_backend}": parallel.use_all2all_kernels
            and not parallel.use_ag_rs_all2all_kernels,
            "elastic expert parallel": getattr(config, "enable_elastic_ep", False),
        }
        for reason, applies in reasons.items():
            if applies:
                return reason
        _, reason = MoEFP8Experts.is_supported_config(
            MoEFP8Experts,
            moe,
            kFp8Static128BlockSym,
            kFp8Dynamic128Sym,
            MoEFP8Experts.activation_format(),
        )
        return reason

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        super().create_weights(layer, *args, **kwargs)
        for name in ("w13_weight", "w2_weight"):
            take_floats(layer, name)
        self.served.add(self, EXPERTS)
        if self.served.ahead is not None:
            sizes, total = layer.w2_weight.shape, layer.global_num_experts
            self.served.ahead.experts(*sizes, top_k=layer.top_k, num_global_experts=total)

    def process_weights_after_loading(self, layer: Any) -> None:
        parameters = {name: getattr(layer, name) for name in _PARAMETERS}
        super().process_weights_after_loading(layer)
        for name, x in parameters.items():  # vLLM's copies of them lack what loaders ask for
            if getattr(layer, name).data_ptr() == x.data_ptr():
                setattr(layer, name, x)
        if layer.expert_map is not None:
            offset = offset_of(layer.expert_map)
            self.expert_offset = None if offset is None else (layer.expert_map, offset)
        self.served.loaded(self)

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """x: [T, H]; topk_weights, topk_ids: [T, k] -> [T, H], the sum over this rank's experts.

        Where tokens travel between ranks, vLLM's modular kernel calls `MoEFP8Experts`.
        """
        parallel = self.moe.moe_parallel_config
        travels = parallel.use_all2all_kernels or parallel.dp_size > 1
        if travels or layer.apply_router_weight_on_input:
            kernel = self.moe_kernel.impl.fused_experts
            kernel.scales = layer.w13_weight_scale_inv, layer.w2_weight_scale_inv
            return super().apply(layer, x, topk_weights, topk_ids, *args, **kwargs)
        expert_map, expert_offset = layer.expert_map, 0
        if self.expert_offset is not None and self.expert_offset[0] is expert_map:
            expert_offset = self.expert_offset[1]
        elif expert_map is not None:
            topk_ids = local_ids(topk_ids, expert_map, len(layer.w13_weight))
        y = experts(
            *ExpertsInputs(
                hidden_states=x,
                top_k_index=topk_ids,
                top_k_weights=topk_weights,
                gate_up_proj=layer.w13_weight,
                gate_up_proj_scale_inv=layer.w13_weight_scale_inv,
                down_proj=layer.w2_weight,
                down_proj_scale_inv=layer.w2_weight_scale_inv,
                activation=Activation(limit=getattr(layer, "swiglu_limit", None)),
                masked=False,
                expert_offset=expert_offset,
                num_global_experts=layer.global_num_experts,
            )
        )
        return y.to(x.dtype)


def local_ids(topk_ids: torch.Tensor, expert_map: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Ids of the whole model -> those of this rank; `num_experts` for what is held elsewhere.

    topk_ids: [T, k]; below 0 there is no choice. expert_map: [all experts], -1: elsewhere.
    """
    ids = expert_map[topk_ids.clamp(min=0).long()]
    return torch.where((topk_ids < 0) | (ids < 0), num_experts, ids)


def offset_of(expert_map: torch.Tensor) -> int | None:
    """The id of the rank's first expert if it holds consecutive ones in their order, else None."""
    ids = expert_map.tolist()
    here = [i for i, local in enumerate(ids) if local >= 0]
    if not here:
        return None
    first = here[0]
    is_range = here == list(range(first, first + len(here)))
    return first if is_range and [ids[i] for i in here] == list(range(len(here))) else None
