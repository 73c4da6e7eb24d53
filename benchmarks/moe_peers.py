"""Layers of routed experts that are timed beside each other: ours, and what else a user could call.

All get the same tokens in BF16 and the same choice of the router. `block_scaled` ones multiply the
same FP8 weights, and quantize tokens themselves; `bf16` is what these weights stand for.
"""

import atexit
from collections.abc import Callable
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.nn import functional as F

from benchmarks import peers
from benchmarks.moe_cases import Case, dequantized
from benchmarks.peers import DEEP_GEMM, OURS, Call, Peer
from moefp8 import GroupedExperts
from moefp8.kernels import BLOCK

MEGA, HF_FP8, HF_BF16 = "sgl_megamoe", "hf_deepgemm", "hf_bf16"


def _sgl_megamoe(case: Case) -> Call:
    import deep_gemm

    (num_tokens, h), i = case.x.shape, case.model.intermediate_size
    num_experts, top_k = case.model.num_experts, case.model.top_k
    # If there is one rank, memory that others can write is like any other.
    names = {
        "empty": torch.empty,
        "rendezvous": lambda memory, group: SimpleNamespace(buffer_ptrs=[memory.data_ptr()]),
    }
    with mock.patch.multiple("torch.distributed._symmetric_memory", **names):
        buffer = deep_gemm.get_symm_buffer_for_sm90_mega_moe(
            _group_of_one_rank(), num_experts, max(num_tokens, 64), top_k, h, i
        )
    transform = deep_gemm.transform_weights_for_mega_moe_sm90
    gate_up, down = transform(*_block_scaled(case.experts))
    x, index, weights = case.x, case.top_k_index.int(), case.top_k_weights
    inputs = buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights
    y = torch.full_like(x, torch.nan)

    def call() -> torch.Tensor:
        deep_gemm.mega_moe_pre_dispatch_sm90(x, index, weights, *inputs, num_tokens)
        deep_gemm.fp8_mega_moe(y, gate_up, down, buffer)
        return y

    return call


def _group_of_one_rank() -> Any:
    from torch import distributed

    if not distributed.is_initialized():
        store = distributed.TCPStore("127.0.0.1", 0, world_size=1, is_master=True)
        device = torch.device("cuda", torch.cuda.current_device())
        distributed.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
        atexit.register(distributed.destroy_process_group)
    return distributed.group.WORLD


def _block_scaled(experts: GroupedExperts) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """Gate and up, and down, with their scales: plain tensors."""
    return (
        (experts.gate_up_proj.data, experts.gate_up_proj_scale_inv.data),
        (experts.down_proj.data, experts.down_proj_scale_inv.data),
    )


def plug_in_deep_gemm() -> None:
    """Let transformers find the DeepGEMM that is installed, instead of one that it downloads."""
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


def _hf_deepgemm(case: Case) -> Call:
    from transformers.integrations import deepgemm

    plug_in_deep_gemm()
    (gate_up, gate_up_scale_inv), (down, down_scale_inv) = _block_scaled(case.experts)
    module = _as_in_transformers(
        gate_up,
        down,
        gate_up_proj_scale_inv=gate_up_scale_inv,
        down_proj_scale_inv=down_scale_inv,
        block_size=(BLOCK, BLOCK),
        activation_scheme="dynamic",
        _deepgemm_disabled=False,
    )
    return _call_of(deepgemm.deepgemm_fp8_fp4_experts_forward, module, case)


def _hf_bf16(case: Case) -> Call:
    from transformers.integrations import moe

    gate_up, down = (
        torch.empty(weight.shape, dtype=torch.bfloat16, device=weight.device)
        for weight in (case.experts.gate_up_proj, case.experts.down_proj)
    )
    for expert in range(case.model.num_experts):
        gate_up[expert], down[expert] = dequantized(case.experts, expert)
    module = _as_in_transformers(gate_up, down)
    return _call_of(moe.grouped_mm_experts_forward, module, case)


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


def _call_of(forward: Callable[..., torch.Tensor], module: SimpleNamespace, case: Case) -> Call:
    arguments = case.x, case.top_k_index, case.top_k_weights
    return lambda: forward(module, *arguments)


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
        needs=("deep_gemm", "fp8_mega_moe"),
    ),
    HF_FP8: replace(
        _deep_gemm,
        title="transformers, DeepGEMM",
        prepare=_hf_deepgemm,
        needs=("deep_gemm", "m_grouped_fp8_gemm_nt_contiguous"),
    ),
    HF_BF16: Peer(
        "transformers, BF16",
        "bf16",
        _hf_bf16,
        _without_room,
        needs=("transformers.integrations.moe", "grouped_mm_experts_forward"),
        remedy="pip install 'transformers>=5.17'",
    ),
}
