"""MoE layers of SGLang on moefp8.

T tokens, k choices each, E experts of this rank, H hidden, I intermediate.
"""

from typing import Any

from sglang.srt.layers.moe.moe_runner import base, runner
from sglang.srt.layers.moe.moe_runner.runner import MoeRunner
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
from sglang.srt.layers.moe.utils import get_moe_a2a_backend, get_moe_runner_backend
from sglang.srt.runtime_context import get_exec, get_lora
from sglang.srt.utils import is_cpu

from ...functional.experts import ExpertsInputs, experts
from ...kernels.common.activation import Activation
from ..common import local_choices, why_not_on

NAME = "moefp8"
_HAS_REGISTRY = hasattr(runner, "register_moe_runner_core")  # since 0.5.23


def why_not_experts(method: Any, layer: Any, config: Any) -> str | None:
    """Why a MoE layer stays with SGLang. method: its Fp8MoEMethod; config: its MoeRunnerConfig."""
    own = getattr(method, "runner", None)
    rules = (
        (method.quant_config.is_checkpoint_fp8_serialized, "its checkpoint is not FP8"),
        (not method.is_fp4_expert, "its experts are FP4"),
        (
            not method.use_mxfp8 and method.weight_block_size == [128, 128],
            f"weight_block_size is {method.weight_block_size}",
        ),
        (
            get_moe_a2a_backend().is_none(),
            f"--moe-a2a-backend is {get_moe_a2a_backend().value}",
        ),
        (
            own is not None and own.runner_backend.is_triton(),
            f"--moe-runner-backend is {get_moe_runner_backend().value}",
        ),
        (
            config.activation == "silu" and config.is_gated and config.gemm1_alpha is None,
            f"its activation is {_activation_of(config)}",
        ),
        (not layer.with_bias, "its experts have a bias"),
        (not config.apply_router_weight_on_input, "its router weighs inputs"),
        (not config.no_combine, "its outputs are not summed"),
        (not (get_lora().enable_lora or get_lora().lora_paths), "LoRA is on"),
        (not getattr(get_exec().moe, "enable_paged_experts", False), "--enable-paged-experts"),
        (not is_cpu(), "SGLang's CPU engine packs the weights"),
    )
    reason = next((reason for holds, reason in rules if not holds), None)
    return reason or why_not_on(layer.w13_weight.device)


def _activation_of(config: Any) -> str:
    gate = " with a gate" if config.is_gated else ""
    alpha = "" if config.gemm1_alpha is None else f" and alpha {config.gemm1_alpha}"
    return f"{config.activation}{gate}{alpha}"


def run_experts(dispatch_output: Any, quant_info: Any, config: Any) -> Any:
    """Compute the experts of a StandardDispatchOutput: its StandardCombineInput.

    hidden_states: [T, H] bf16 or fp16. topk_ids: int32 [T, k], those of this rank; a negative id
    is an expert elsewhere, or a row of padding. quant_info: a TritonMoeQuantInfo, w13 e4m3
    [E, 2I, H] with gate first, w2 e4m3 [E, H, I], scales fp32 as `GroupedExperts` has them.
    """
    top_k_weights, top_k_index, _ = dispatch_output.topk_output
    hidden_states, weight = dispatch_output.hidden_states, quant_info.w13_weight
    if config.routed_scaling_factor not in (None, 1.0):
        top_k_weights = top_k_weights * config.routed_scaling_factor
    limit = config.swiglu_limit if config.gemm1_clamp_limit is None else config.gemm1_clamp_limit
    inputs = ExpertsInputs(
        hidden_states,
        local_choices(top_k_index, len(weight)),
        top_k_weights,
        weight,
        quant_info.w13_scale,
        quant_info.w2_weight,
        quant_info.w2_scale,
        Activation(limit=limit),
        masked=False,
        num_global_experts=config.num_experts,
    )
    return StandardCombineInput(hidden_states=experts(*inputs).to(hidden_states.dtype))


# ---- Where SGLang's runner calls it ----


def register_runner() -> None:
    """Give newer versions of SGLang our runner by its name."""
    if not _HAS_REGISTRY:
        return

    class Core(base.DispatchMoeRunnerCore):
        @property
        def runner_backend(self) -> Any:
            return runner.resolve_moe_runner_backend(NAME)

        def run_from_dispatch(
            self, dispatch_output: Any, quant_info: Any, runner_config: Any, hooks: Any = None
        ) -> Any:
            return run_experts(dispatch_output, quant_info, runner_config)

    runner.register_moe_runner_core(NAME, Core)


def take_experts(method: Any, config: Any) -> None:
    """Let the runner of an Fp8MoEMethod call `run_experts`."""
    if _HAS_REGISTRY:
        method.runner = MoeRunner(runner.resolve_moe_runner_backend(NAME), config)
    else:
        method.runner.fused_func = run_experts


def is_taken(method: Any) -> bool:
    """Whether an Fp8MoEMethod has our runner, which it does not know; older ones know theirs."""
    own = getattr(method, "runner", None)
    return own is not None and own.runner_backend.value == NAME
