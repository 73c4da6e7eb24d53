"""Which kernels a layer can need on a Hopper GPU, for one token or up to `max_tokens`.

T tokens, k choices each, E experts, H hidden, I intermediate. Nothing is compiled or launched here.
Each function chooses as the launchers of its op do; a test launches those and compares.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from ..kernels.gemm.config import GroupLayout
from ..kernels.gemm.experts_sizes import Sizes
from ..kernels.gemm.heuristic import deciding_sizes
from ..kernels.gemm.launch import kernel_of
from ..kernels.gemm.tuned import ConfigSource
from ..kernels.jit import Kernel
from ..quant import quantize_launch
from ..routing import combine_launch, dispatch_launch, top_k_launch


class Demand(NamedTuple):
    """What layers are to be ready for.

    max_tokens: of one call, at least 1.
    dtypes: of activations; of bf16, fp16 and fp32.
    configs: where those of GEMMs come from, by the GPU's number of SMs and what was measured on it.
    """

    max_tokens: int
    dtypes: frozenset[torch.dtype]
    configs: ConfigSource


def linear_kernels(demand: Demand, n: int, k: int, bias: torch.dtype | None) -> Iterator[Kernel]:
    """Of `fp8_linear`, weights [N, K]."""
    if n and k:
        yield from _quantize_kernels(demand, k)
        yield from _dense_kernels(demand, n, k, bias)


def feed_forward_kernels(demand: Demand, h: int, i: int) -> Iterator[Kernel]:
    if h and i:
        yield from _quantize_kernels(demand, h)
        for config in demand.configs.all_gate_up(demand.max_tokens, h, i):
            yield kernel_of(config, None, GroupLayout.OFFSETS)
        yield from _dense_kernels(demand, h, i, None)


def experts_kernels(
    demand: Demand,
    sizes: Sizes,
    weights_dtypes: Iterable[torch.dtype],
) -> Iterator[Kernel]:
    """Of `experts`, for as many tokens as `sizes` says or fewer.

    weights_dtypes: of the router's weights.
    """
    h, masked = sizes.hidden_size, sizes.masked
    if not (sizes.num_experts and h and sizes.intermediate_size):
        return
    group_layout = GroupLayout.MASKED if masked else GroupLayout.OFFSETS
    for pair in demand.configs.all_experts(sizes):
        for config in pair:
            yield kernel_of(config, None, group_layout)
    for dtype in demand.dtypes:
        yield from dispatch_launch.needed_kernels(
            dtype,
            hidden_size=h,
            masked=masked,
            num_experts=sizes.num_experts,
            max_choices=sizes.num_tokens * sizes.top_k,
        )
    for dtype in weights_dtypes:
        yield combine_launch.kernel_of(dtype, h % 8 == 0)


def router_kernels(op: str, num_experts: int) -> Iterator[Kernel]:
    """op: "softmax_topk" or "sigmoid_group_topk", of FP32 logits."""
    if num_experts <= top_k_launch.MAX_EXPERTS:
        yield top_k_launch.kernel_of(op, num_experts, torch.float32)


def _quantize_kernels(demand: Demand, k: int) -> Iterator[Kernel]:
    for dtype in demand.dtypes:
        num_sms = demand.configs.all_sms
        yield from quantize_launch.needed_kernels(dtype, demand.max_tokens, k, num_sms)


def _dense_kernels(demand: Demand, n: int, k: int, bias: torch.dtype | None) -> Iterator[Kernel]:
    for m in deciding_sizes(demand.max_tokens):
        yield kernel_of(demand.configs.dense(m, n, k), bias)
