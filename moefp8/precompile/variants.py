"""Which kernels a layer can need on a Hopper GPU, for one token or up to `max_tokens`.

T tokens, k choices each, E experts, H hidden, I intermediate. Nothing is compiled or launched here.
Each layer chooses as the launchers of its op do; a test launches those and compares.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product, starmap
from typing import NamedTuple

import torch

from ..distributed.expert_parallel.needed import NeededByExchange
from ..functional import swiglu_backward_launch, swiglu_launch
from ..functional.expert_configs import (
    Sizes,
    all_gate_up_configs,
)
from ..functional.expert_parts import Given
from ..functional.experts_backward_launch import experts_backward_kernels
from ..functional.experts_launch import experts_kernels
from ..functional.linear import linear_kernels
from ..functional.training.experts_backward_launch import trained_backward_kernels
from ..functional.training.rows import quantized_rows_kernels
from ..kernels.common.blocks import BLOCK, E4M3, round_up
from ..kernels.gemm import call
from ..kernels.gemm.config import GemmConfig, GroupLayout
from ..kernels.gemm.heuristic import deciding_sizes
from ..kernels.gemm.k_grouped import launch as k_grouped_launch
from ..kernels.gemm.launch import kernel_of
from ..kernels.gemm.tuned import ConfigSource
from ..kernels.jit import ARCHITECTURE, Kernel
from ..kernels.program import Target
from ..quant import both_launch, columns_launch, quantize_launch, transpose_launch
from ..routing import (
    combine_launch,
    plan_launch,
    top_k_backward_launch,
    top_k_launch,
)
from ..routing.route import route_kernels
from ..routing.route_backward import route_backward_kernels


class Demand(NamedTuple):
    """What layers are to be ready for.

    max_tokens: the most of one call, at least 1.
    dtypes: those of activations: bf16, fp16 and fp32, or some of them; or e4m3 alone, of codes.
    configs: which configs GEMMs have, on a GPU of so many SMs or as measured on one.
    backward: whether there are gradients through the layers, too.
    """

    max_tokens: int
    dtypes: frozenset[torch.dtype]
    configs: ConfigSource
    backward: bool = False

    @property
    def target(self) -> Target:
        return Target(ARCHITECTURE, self.configs.all_sms, self.configs)

    def taking(self, dtypes: frozenset[torch.dtype] | None) -> "Demand":
        """The same for activations of these dtypes, if they are given."""
        return self if dtypes is None else self._replace(dtypes=dtypes)

    @property
    def scores(self) -> frozenset[torch.dtype]:
        """Our routers give FP32 scores; those of others have the dtype of activations."""
        return self.dtypes - {E4M3} | {torch.float32}

    @property
    def gradients(self) -> frozenset[torch.dtype]:
        """They are BF16 or as activations; of codes they are codes."""
        return self.dtypes if E4M3 in self.dtypes else self.dtypes | {torch.bfloat16}

    def given(self, dtypes: Iterable[torch.dtype]) -> Iterator[Given]:
        """Calls of experts with tokens of these dtypes."""
        return starmap(Given, product(dtypes, self.scores, (True, False)))

    def quantize_kernels(self, k: int) -> Iterator[Kernel]:
        for dtype in self.dtypes:
            yield from self.quantize_rows(dtype, self.max_tokens, k)

    def quantize_rows(self, dtype: torch.dtype, max_rows: int, k: int) -> Iterator[Kernel]:
        yield from quantize_launch.needed_kernels(dtype, max_rows, k, self.configs.all_sms)

    def dense_kernels(
        self, n: int, k: int, bias: torch.dtype | None = None, *, batch_invariant: bool
    ) -> Iterator[Kernel]:
        for m in deciding_sizes(self.max_tokens):
            yield kernel_of(self.configs.dense(m, n, k, batch_invariant), bias)


class Linear(NamedTuple):
    """`fp8_linear`, weights [N, K].

    takes: dtypes of its activations, if not those of the model. batch_invariant: as in the module.
    """

    n: int
    k: int
    bias: torch.dtype | None
    takes: frozenset[torch.dtype] | None = None
    batch_invariant: bool = False

    def kernels(self, demand: Demand) -> Iterator[Kernel]:
        demand = demand.taking(self.takes)
        if self.n and self.k:
            given, is_invariant = (demand.target, demand.max_tokens), self.batch_invariant
            for dtype in demand.dtypes:
                yield from linear_kernels(
                    *given, self.n, self.k, dtype, bias=self.bias, batch_invariant=is_invariant
                )
            if demand.backward:
                yield from transpose_launch.needed_kernels(self.k)
                yield from linear_kernels(
                    *given, self.k, self.n, torch.bfloat16, batch_invariant=is_invariant
                )


class Master(NamedTuple):
    """How weights are held and trained.

    dtype: of the master weights. wgrad: as in the module.
    outputs: what becomes of their gradients: (dtype, whether they are added to what is there);
        nothing if they get none.
    """

    dtype: torch.dtype
    wgrad: str
    outputs: frozenset[tuple[torch.dtype, bool]]

    def weight_kernels(self, m: int, n: int) -> Iterator[Kernel]:
        """Those of gradients in weights [M, N]."""
        for dtype, accumulates in self.outputs:
            yield from k_grouped_launch.needed_kernels(
                m, n, dtype, accumulates=accumulates, blocks_b=self.wgrad == "128x128"
            )


class TrainedLinear(NamedTuple):
    """`trained_linear` with a master weight [N, K], and its gradients."""

    frozen: Linear
    master: Master

    def kernels(self, demand: Demand) -> Iterator[Kernel]:
        n, k, *_ = self.frozen
        if not (n and k):
            return
        yield from both_launch.needed_kernels(self.master.dtype, k)
        yield from self.frozen.kernels(demand._replace(backward=False))
        if demand.backward:
            yield from self.backward_kernels(demand, with_rows=True)

    def backward_kernels(self, demand: Demand, *, with_rows: bool) -> Iterator[Kernel]:
        """with_rows: whether the kernel that makes column codes of x makes those of rows, too."""
        n, k, *_ = self.frozen
        _, wgrad, outputs = self.master
        yield from demand.dense_kernels(k, n, batch_invariant=self.frozen.batch_invariant)
        yield from demand.quantize_rows(torch.bfloat16, demand.max_tokens, n)
        if wgrad == "bf16" or not outputs:
            return
        blocks = wgrad == "128x128"
        for taken in demand.taking(self.frozen.takes).dtypes:
            yield from columns_launch.needed_kernels(taken, k, blocks=blocks, with_rows=with_rows)
        yield from columns_launch.needed_kernels(torch.bfloat16, n, with_rows=True)
        yield from self.master.weight_kernels(n, k)


class FeedForward(NamedTuple):
    """Shared experts as one op. batch_invariant: as in their linears."""

    hidden_size: int
    intermediate_size: int
    batch_invariant: bool = False

    def kernels(self, demand: Demand) -> Iterator[Kernel]:
        h, i, is_invariant = self
        if h and i:
            yield from self.forward_kernels(demand)
            if demand.backward:
                yield from backward_kernels(h, i, {torch.float32})
                yield from demand.quantize_rows(torch.bfloat16, demand.max_tokens, h)
                for n, k in ((i, h), (h, 2 * round_up(i, BLOCK))):
                    yield from demand.dense_kernels(n, k, batch_invariant=is_invariant)

    def forward_kernels(self, demand: Demand) -> Iterator[Kernel]:
        """Those of a forward, and of one that saves for a backward if there is one."""
        h, i, is_invariant = self
        yield from demand.quantize_kernels(h)
        for config in all_gate_up_configs(demand.configs, demand.max_tokens, h, i):
            saving = [replace(config, saves_gate_up=True)]
            yield from gate_up_kernels(config, saving, GroupLayout.OFFSETS, demand)
        yield from demand.dense_kernels(h, i, batch_invariant=is_invariant)


class TrainedFeedForward(NamedTuple):
    """Shared experts with master weights as one op, and their gradients.

    masters: those of gate, up and down.
    """

    frozen: FeedForward
    masters: tuple[Master, ...]

    def kernels(self, demand: Demand) -> Iterator[Kernel]:
        h, i, is_invariant = self.frozen
        if not (h and i):
            return
        yield from self.frozen.forward_kernels(demand)
        gate = up = Linear(i, h, None, None, is_invariant)
        down = Linear(h, i, None, frozenset({torch.float32}), is_invariant)
        for linear, master in zip((gate, up, down), self.masters, strict=True):
            yield from both_launch.needed_kernels(master.dtype, linear.k)
            if demand.backward:
                trained = TrainedLinear(linear, master)
                yield from trained.backward_kernels(demand, with_rows=False)


class Experts(NamedTuple):
    """Routed experts."""

    top_k: int
    num_experts: int
    hidden_size: int
    intermediate_size: int
    masked: bool
    num_global_experts: int | None  # as in `Sizes`

    def kernels(self, demand: Demand) -> Iterator[Kernel]:
        if not (self.num_experts and self.hidden_size and self.intermediate_size):
            return
        yield from self.forward_kernels(demand)
        if demand.backward:
            yield from self._backward_kernels(demand)

    def forward_kernels(self, demand: Demand) -> Iterator[Kernel]:
        """Those of a forward, and of one that saves for a backward if there is one."""
        sizes = self.sizes(demand)
        for given in demand.given(demand.dtypes):
            yield from experts_kernels(demand.target, sizes, given)
            if demand.backward:  # what saves for a backward is contiguous
                saving = sizes._replace(masked=False), given._replace(saved=torch.bfloat16)
                yield from experts_kernels(demand.target, *saving)

    def sizes(self, demand: Demand) -> Sizes:
        return Sizes(demand.max_tokens, *self)

    def quantize_saved(self, demand: Demand) -> Iterator[Kernel]:
        max_rows = 2 * demand.max_tokens * self.top_k
        yield from demand.quantize_rows(torch.bfloat16, max_rows, self.intermediate_size)

    def _backward_kernels(self, demand: Demand) -> Iterator[Kernel]:
        sizes = self.sizes(demand)._replace(masked=False)
        for k in {self.hidden_size, self.intermediate_size}:
            yield from transpose_launch.needed_kernels(k)
        for given in demand.given(demand.gradients):
            for saved in (torch.bfloat16, E4M3):
                kept = given._replace(saved=saved)
                yield from experts_backward_kernels(demand.target, sizes, kept)
        yield from self.quantize_saved(demand)


class TrainedExperts(NamedTuple):
    """Routed experts with master weights, and their gradients."""

    frozen: Experts
    master: Master

    def kernels(self, demand: Demand) -> Iterator[Kernel]:
        _, num_experts, h, i, *_ = self.frozen
        if not (num_experts and h and i):
            return
        for k in {h, i}:
            yield from both_launch.needed_kernels(self.master.dtype, k)
        yield from self.frozen.forward_kernels(demand)
        if demand.backward:
            yield from self.frozen.quantize_saved(demand)
            is_bf16 = self.master.wgrad == "bf16"
            yield from (self._in_bf16(demand) if is_bf16 else self._in_fp8(demand))

    def _in_fp8(self, demand: Demand) -> Iterator[Kernel]:
        sizes, outputs = self.frozen.sizes(demand)._replace(masked=False), self.master.outputs
        blocks = self.master.wgrad == "128x128"
        for dtype, accumulate in outputs or {(None, False)}:
            for given in demand.given(demand.dtypes):
                for saved in (torch.bfloat16, E4M3):
                    yield from trained_backward_kernels(
                        demand.target,
                        sizes,
                        given._replace(saved=saved),
                        blocks=blocks,
                        dtypes=(dtype, dtype),
                        accumulate=accumulate,
                    )

    def _in_bf16(self, demand: Demand) -> Iterator[Kernel]:
        """Step by step, with PyTorch's grouped GEMM for gradients in weights."""
        top_k, num_experts, h, i, *_ = self.frozen
        yield from quantized_rows_kernels(demand.target, self.frozen.sizes(demand))
        max_rows = demand.max_tokens * top_k
        yield from plan_launch.needed_kernels(demand.max_tokens, top_k, demand.configs.all_sms)
        yield swiglu_launch.kernel_of()
        for dtype in {*demand.dtypes, torch.float32}:
            yield swiglu_backward_launch.kernel_of(dtype, is_fp8=False)
        for n, k in ((i, h), (h, 2 * round_up(i, BLOCK))):
            yield from call.needed_kernels(max_rows, num_experts, n, k, demand.configs)


class ExpertsInSteps(NamedTuple):
    """Routed experts whose steps are ops of their own, as they are with adapters."""

    top_k: int
    num_experts: int
    hidden_size: int
    intermediate_size: int

    def kernels(self, demand: Demand) -> Iterator[Kernel]:
        top_k, num_experts, h, i = self
        if not (num_experts and h and i):
            return
        max_rows = demand.max_tokens * top_k
        yield from plan_launch.needed_kernels(demand.max_tokens, top_k, demand.configs.all_sms)
        for dtype in demand.dtypes:
            yield from demand.quantize_rows(dtype, max_rows, h)
        yield swiglu_launch.kernel_of()
        yield from demand.quantize_rows(torch.bfloat16, max_rows, i)
        of_weights = {*demand.dtypes, torch.float32}
        if h % 8 == 0:
            at_once = combine_launch.at_once_of(self.top_k)
            yield from (combine_launch.kernel_of(dtype, True, at_once) for dtype in of_weights)
        products = [(2 * i if i % BLOCK == 0 else i, h), (h, i)]  # gate and up may have one each
        if demand.backward:
            for k in {h, i}:
                yield from transpose_launch.needed_kernels(k)
            yield from demand.quantize_rows(torch.bfloat16, max_rows, h)
            for dtype in of_weights:
                yield swiglu_backward_launch.kernel_of(dtype, is_fp8=False)
            products += [(i, h), (h, 2 * round_up(i, BLOCK))]
        for n, k in products:
            yield from call.needed_kernels(max_rows, num_experts, n, k, demand.configs)


def gate_up_kernels(
    config: GemmConfig, saving: Iterable[GemmConfig], layout: GroupLayout, demand: Demand
) -> Iterator[Kernel]:
    """That of a forward, and where a backward follows those that save gate and up."""
    yield kernel_of(config, None, layout)
    if demand.backward:
        for each in saving:
            yield kernel_of(each, None, GroupLayout.OFFSETS)


def backward_kernels(h: int, i: int, weights_dtypes: Iterable[torch.dtype]) -> Iterator[Kernel]:
    """Those of a backward of experts, but for its GEMMs."""
    for k in {h, i}:
        yield from transpose_launch.needed_kernels(k)
    for dtype in weights_dtypes:
        for is_fp8 in (False, True):
            yield swiglu_backward_launch.kernel_of(dtype, is_fp8=is_fp8)


class ExpertsOfRank(NamedTuple):
    """A rank's part of experts, to which tokens of all ranks come; to frozen ones as codes."""

    experts: Experts | TrainedExperts | ExpertsInSteps
    exchange: NeededByExchange

    def kernels(self, demand: Demand) -> Iterator[Kernel]:
        are_codes = isinstance(self.experts, Experts)
        of = self.experts.frozen if isinstance(self.experts, TrainedExperts) else self.experts
        told = of.hidden_size, demand.dtypes, demand.max_tokens, demand.configs.all_sms
        yield from self.exchange.kernels(*told, are_codes=are_codes, backward=demand.backward)
        received = demand.taking(frozenset({E4M3}) if are_codes else None)
        most = self.exchange.most_received(demand.max_tokens)
        yield from self.experts.kernels(received._replace(max_tokens=most))


class Router(NamedTuple):
    """op: "softmax_topk" or "sigmoid_group_topk"."""

    op: str
    num_experts: int
    hidden_size: int

    def kernels(self, demand: Demand) -> Iterator[Kernel]:
        sizes, by_sigmoid = (self.num_experts, self.hidden_size), self.op == "sigmoid_group_topk"
        if self.num_experts > top_k_launch.MAX_EXPERTS:
            return
        yield top_k_launch.kernel_of(self.op, self.num_experts)  # of logits in FP32
        if demand.backward:
            yield top_k_backward_launch.kernel_of(
                self.num_experts, torch.float32, by_sigmoid=by_sigmoid
            )
        if torch.bfloat16 in demand.dtypes and self.hidden_size:
            yield from route_kernels(demand.target, demand.max_tokens, self.op, *sizes)
            if demand.backward:
                yield from route_backward_kernels(
                    demand.target, demand.max_tokens, *sizes, by_sigmoid=by_sigmoid
                )


Layer = (
    Linear
    | TrainedLinear
    | FeedForward
    | TrainedFeedForward
    | Experts
    | TrainedExperts
    | ExpertsInSteps
    | ExpertsOfRank
    | Router
)
