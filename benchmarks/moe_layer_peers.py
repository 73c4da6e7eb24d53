"""Whole MoE layers and routers that are timed beside each other: ours, and those of peers' parts.

All have the same weights: BF16 tokens come in, BF16 goes out. Peers' routers are PyTorch's
operations, as in transformers; `MEGA` has SGLang's mega-kernel for the routed experts and DeepGEMM
for the shared ones, `HF_FP8` has transformers' FP8 functions for both.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch.nn import functional as F

from benchmarks import moe_peers
from benchmarks.mega_kernel import MegaKernel
from benchmarks.moe_layer_cases import Layer, torch_router
from benchmarks.moe_peers import HF_FP8, MEGA, deep_gemm_experts, deep_gemm_of_transformers
from benchmarks.peers import OURS, Call, Peer
from moefp8.kernels import BLOCK, E4M3
from moefp8.layers.moe import SharedExperts

TORCH = "torch"
FeedForward = Callable[[torch.Tensor], torch.Tensor]


def _with_mega_kernel(layer: Layer) -> Call:
    moe, x = layer.moe, layer.x
    route, experts = torch_router(moe.gate), MegaKernel(moe.experts, len(x), moe.gate.top_k)

    def routed() -> torch.Tensor:
        index, weights = route(x)
        return experts(x, index.int(), weights)

    return _with_shared(layer, routed, _deep_gemm_shared)


def _transformers(layer: Layer) -> Call:
    route, experts = torch_router(layer.moe.gate), deep_gemm_experts(layer.moe.experts)
    return _with_shared(layer, lambda: experts(layer.x, *route(layer.x)), _transformers_shared)


def _with_shared(
    layer: Layer, routed: Call, shared_of: Callable[[SharedExperts], FeedForward]
) -> Call:
    if layer.moe.shared_experts is None:
        return routed
    shared = shared_of(layer.moe.shared_experts)
    return lambda: routed() + shared(layer.x)


def _deep_gemm_shared(shared: SharedExperts) -> FeedForward:
    """Gate and up as one GEMM, and what comes between them as PyTorch's operations."""
    import deep_gemm

    linears = shared.gate_proj, shared.up_proj
    codes = torch.cat([linear.weight.view(torch.uint8) for linear in linears])
    scales = torch.cat([linear.weight_scale_inv for linear in linears])
    gate_up = codes.view(E4M3), scales
    down = shared.down_proj.weight.data, shared.down_proj.weight_scale_inv.data

    def linear(x: torch.Tensor, weight: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        d = x.new_empty(len(x), len(weight[0]))
        deep_gemm.fp8_gemm_nt(deep_gemm.utils.per_token_cast_to_fp8(x, use_ue8m0=False), weight, d)
        return d

    def run(x: torch.Tensor) -> torch.Tensor:
        gate, up = linear(x, gate_up).chunk(2, dim=-1)
        return linear(F.silu(gate) * up, down)

    return run


def _transformers_shared(shared: SharedExperts) -> FeedForward:
    linear = deep_gemm_of_transformers().deepgemm_fp8_fp4_linear
    gate, up, down = (
        (x.weight.data, x.weight_scale_inv.data)
        for x in (shared.gate_proj, shared.up_proj, shared.down_proj)
    )
    block = {"block_size": (BLOCK, BLOCK)}

    def run(x: torch.Tensor) -> torch.Tensor:
        return linear(F.silu(linear(x, *gate, **block)) * linear(x, *up, **block), *down, **block)

    return run


def _ours(layer: Layer) -> Call:
    return lambda: layer.moe(layer.x)


def _our_router(layer: Layer) -> Call:
    return lambda: layer.moe.gate(layer.x)[0]


def _torch_router(layer: Layer) -> Call:
    route = torch_router(layer.moe.gate)
    return lambda: route(layer.x)[0]


LAYERS = {
    OURS: Peer("moefp8", "block_scaled", _ours),
    MEGA: replace(
        moe_peers.PEERS[MEGA],
        title="torch router, SGLang mega-kernel, DeepGEMM",
        prepare=_with_mega_kernel,
    ),
    HF_FP8: replace(moe_peers.PEERS[HF_FP8], prepare=_transformers),
}
# What they give is `top_k_index`; the weights are computed, too.
ROUTERS = {
    OURS: Peer("moefp8", "block_scaled", _our_router),
    TORCH: Peer("torch", "block_scaled", _torch_router),
}
