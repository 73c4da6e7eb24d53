"""Which kernels a layer can need on a Hopper GPU, for one token or up to `max_tokens`.

T tokens, k choices each, E experts, H hidden, I intermediate. Nothing is compiled or launched here.
Each layer chooses as the launchers of its op do; a test launches those and compares.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..functional.expert_configs import Sizes, all_experts_configs, all_gate_up_configs
from ..kernels.gemm.config import GroupLayout
from ..kernels.gemm.heuristic import deciding_sizes
from ..kernels.gemm.launch import kernel_of
from ..kernels.gemm.tuned import ConfigSource
from ..kernels.jit import Kernel
from ..quant import quantize_launch
from ..routing import combine_launch, dispatch_launch, logits_launch, top_k_launch


class Demand(NamedTuple):
    """What layers are to be ready for.

    max_tokens: the most of one call, at least 1.
    dtypes: those of activations: bf16, fp16 and fp32, or some of them.
    configs: which configs GEMMs have, on a GPU of so many SMs or as measured on one.
    """

    max_tokens: int
    dtypes: frozenset[torch.dtype]
    configs: ConfigSource

    def quantize_kernels(self, k: int) -> Iterator[Kernel]:
        for dtype in self.dtypes:
            num_sms = self.configs.all_sms
            yield from quantize_launch.needed_kernels(dtype, self.max_tokens, k, num_sms)

    def dense_kernels(self, n: int, k: int, bias: torch.dtype | None = None) -> Iterator[Kernel]:
        for m in deciding_sizes(self.max_tokens):
            yield kernel_of(self.configs.dense(m, n, k), bias)


class Linear(NamedTuple):
    """`fp8_linear`, weights [N, K]."""

    n: int
    k: int
    bias: torch.dtype | None

    def kernels(self, demand: Demand) -> Iterator[Kernel]:
        if self.n and self.k:
            yield from demand.quantize_kernels(self.k)
            yield from demand.dense_kernels(*self)


class FeedForward(NamedTuple):
    """Shared experts as one op."""

    hidden_size: int
    intermediate_size: int

    def kernels(self, demand: Demand) -> Iterator[Kernel]:
        if self.hidden_size and self.intermediate_size:
            yield from demand.quantize_kernels(self.hidden_size)
            for config in all_gate_up_configs(demand.configs, demand.max_tokens, *self):
                yield kernel_of(config, None, GroupLayout.OFFSETS)
            yield from demand.dense_kernels(*self)


class Experts(NamedTuple):
    """Routed experts."""

    top_k: int
    num_experts: int
    hidden_size: int
    intermediate_size: int
    masked: bool
    num_global_experts: int | None  # as in `Sizes`

    def kernels(self, demand: Demand) -> Iterator[Kernel]:
        sizes, h = Sizes(demand.max_tokens, *self), self.hidden_size
        if not (self.num_experts and h and self.intermediate_size):
            return
        group_layout = GroupLayout.MASKED if self.masked else GroupLayout.OFFSETS
        for pair in all_experts_configs(demand.configs, sizes):
            for config in pair:
                yield kernel_of(config, None, group_layout)
        for dtype in demand.dtypes:
            yield from dispatch_launch.needed_kernels(
                dtype,
                hidden_size=h,
                masked=self.masked,
                num_experts=self.num_experts,
                max_choices=demand.max_tokens * self.top_k,
            )
        # Our routers give FP32 scores; those of others have the dtype of activations.
        for dtype in {*demand.dtypes, torch.float32}:
            for aligned in {h % 8 == 0, False}:  # an addend may lie anywhere
                yield combine_launch.kernel_of(dtype, aligned)


class Router(NamedTuple):
    """op: "softmax_topk" or "sigmoid_group_topk"."""

    op: str
    num_experts: int
    hidden_size: int

    def kernels(self, demand: Demand) -> Iterator[Kernel]:
        num_experts, h = self.num_experts, self.hidden_size
        if num_experts > top_k_launch.MAX_EXPERTS:
            return
        yield top_k_launch.kernel_of(self.op, num_experts)
        if torch.bfloat16 in demand.dtypes and h:
            num_sms = demand.configs.all_sms
            tiles = logits_launch.needed_tiles(demand.max_tokens, num_experts, h, num_sms)
            yield from map(logits_launch.kernel_of, tiles)
            for parts in {tile.parts_of_group for tile in tiles}:
                yield top_k_launch.kernel_of(self.op, num_experts, parts_of_group=parts)


Layer = Linear | FeedForward | Experts | Router
