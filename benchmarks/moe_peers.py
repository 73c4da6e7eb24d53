"""Layers of routed experts that are timed beside each other: ours, and what else a user could call.

All get the same tokens in BF16 and the same choice of the router. `block_scaled` ones multiply the
same FP8 weights, and quantize tokens themselves; `bf16` is what these weights stand for.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks import mega_kernel, peers
from benchmarks.mega_kernel import MegaKernel, block_scaled
from benchmarks.moe_cases import Case, dequantized
from benchmarks.peers import DEEP_GEMM, OURS, Call, Peer, has
from moefp8 import GroupedExperts
from moefp8.kernels import BLOCK

Experts = Callable[..., torch.Tensor]  # x, top_k_index, top_k_weights -> y

MEGA, HF_FP8, HF_BF16 = "sgl_megamoe", "hf_deepgemm", "hf_bf16"


def _sgl_megamoe(case: Case) -> Call:
    run = MegaKernel(case.experts, len(case.x), case.model.top_k)
    x, index, weights = case.x, case.top_k_index.int(), case.top_k_weights
    return lambda: run(x, index, weights)


def _hf_deepgemm(case: Case) -> Call:
    return _call_of(deep_gemm_experts(case.experts), case)


def deep_gemm_of_transformers() -> Any:
    """transformers' module for DeepGEMM, which takes the one that is installed."""
    import deep_gemm
    from transformers.integrations import deepgemm, finegrained_fp8

    # This stands for what transformers would download, and name after its module.
    names = dict.fromkeys(field.name for field in fields(deepgemm.DeepGEMM)) | {
        "fp8_fp4_matmul": deep_gemm.fp8_gemm_nt,
        "grouped_fp8_fp4_matmul_nt": deep_gemm.m_grouped_fp8_gemm_nt_contiguous,
        "per_token_cast_to_fp8": deep_gemm.utils.per_token_cast_to_fp8,
        "transform_sf_into_required_layout": deep_gemm.transform_sf_into_required_layout,
        "m_alignment": deep_gemm.get_mk_alignment_for_contiguous_layout(),
    }
    deepgemm._DEEPGEMM = deepgemm.DeepGEMM(**names)
    finegrained_fp8.is_deepgemm_loadable = lambda raise_error=False: True
    return deepgemm


def deep_gemm_experts(experts: GroupedExperts) -> Experts:
    (gate_up, gate_up_scale_inv), (down, down_scale_inv) = block_scaled(experts)
    module = _as_in_transformers(
        gate_up,
        down,
        gate_up_proj_scale_inv=gate_up_scale_inv,
        down_proj_scale_inv=down_scale_inv,
        block_size=(BLOCK, BLOCK),
        activation_scheme="dynamic",
        _deepgemm_disabled=False,
    )
    return partial(deep_gemm_of_transformers().deepgemm_fp8_fp4_experts_forward, module)


def _hf_bf16(case: Case) -> Call:
    from transformers.integrations import moe

    gate_up, down = (
        torch.empty(weight.shape, dtype=torch.bfloat16, device=weight.device)
        for weight in (case.experts.gate_up_proj, case.experts.down_proj)
    )
    for expert in range(case.model.num_experts):
        gate_up[expert], down[expert] = dequantized(case.experts, expert)
    module = _as_in_transformers(gate_up, down)
    return _call_of(partial(moe.grouped_mm_experts_forward, module), case)


def _as_in_transformers(
    gate_up: torch.Tensor, down: torch.Tensor, **more: object
) -> SimpleNamespace:
    """What transformers' functions read of the module whose `forward` they are."""

    def apply_gate(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    return SimpleNamespace(
        gate_up_proj=gate_up,
        down_proj=down,
        num_experts=len(down),
        has_gate=True,
        has_bias=False,
        has_post_expert_norm=False,
        is_concatenated=True,
        is_transposed=False,
        _is_expert_parallel=False,
        _apply_gate=apply_gate,
        **more,
    )


def _call_of(experts: Experts, case: Case) -> Call:
    arguments = case.x, case.top_k_index, case.top_k_weights
    return lambda: experts(*arguments)


def _without_room(case: Case) -> str | None:
    """Why it lacks room for its weights and some 12 bytes for each element between its GEMMs."""
    model = case.model
    sizes = model.hidden_size + model.intermediate_size
    needed = 2 * model.num_experts * model.weights_of_expert
    needed += 12 * case.top_k_index.numel() * sizes
    free, _ = torch.cuda.mem_get_info()
    if needed <= free:
        return None
    return f"it would take about {needed / 1e9:.1f} GB, and {free / 1e9:.1f} are free"


_deep_gemm = peers.PEERS[DEEP_GEMM]
PEERS = {
    OURS: Peer("moefp8", "block_scaled", lambda case: case.run),
    MEGA: replace(
        _deep_gemm,
        title="SGLang mega-kernel",
        prepare=_sgl_megamoe,
        needs=mega_kernel.module,
        remedy=mega_kernel.REMEDY,
    ),
    HF_FP8: replace(
        _deep_gemm,
        title="transformers, DeepGEMM",
        prepare=_hf_deepgemm,
        needs=has("deep_gemm", "m_grouped_fp8_gemm_nt_contiguous"),
    ),
    HF_BF16: Peer(
        "transformers, BF16",
        "bf16",
        _hf_bf16,
        _without_room,
        needs=has("transformers.integrations.moe", "grouped_mm_experts_forward"),
        remedy="pip install 'transformers>=5.17'",
    ),
}
