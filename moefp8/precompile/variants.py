"""Which ops a layer has, and so which kernels it can need for 1 to `max_tokens` tokens.

T tokens, k choices each, E experts, H hidden, I intermediate. Nothing is compiled or launched here.
Each op lists its own kernels, by the records that it makes.
"""

from collections.abc import Iterable, Iterator
from itertools import product, starmap
from typing import NamedTuple

import torch

from ..distributed.expert_parallel.experts import ParallelExperts
from ..distributed.expert_parallel.transport import Traffic, Transport
from ..functional import feed_forward_backward
from ..functional.activation_rows import (
    activation_rows_backward_kernels,
    activation_rows_grad_kernels,
    activation_rows_kernels,
)
from ..functional.expert_parts import BiasDtypes, CallTensors
from ..functional.experts_records import experts_backward_kernels, experts_kernels
from ..functional.feed_forward import feed_forward_kernels
from ..functional.linear import linear_kernels
from ..functional.training import linear_records as trained_linear
from ..functional.training.experts_records import trained_backward_kernels
from ..functional.training.rows import quantized_rows_kernels
from ..kernels.common.activation import SWIGLU, Activation
from ..kernels.common.blocks import BLOCK, E4M3, ceil_div, round_up
from ..kernels.gemm.call import grouped_kernels
from ..kernels.gemm.sizes import Sizes
from ..kernels.jit import Kernel
from ..kernels.program import Target
from ..quant.both import both_kernels
from ..quant.columns import columns_kernels
from ..quant.quantize import quantize_kernels
from ..quant.transpose import transpose_kernels
from ..routing import logits_launch, top_k_backward_launch, top_k_launch
from ..routing.combine import combine_kernels
from ..routing.plan import plan_kernels
from ..routing.route import route_kernels
from ..routing.route_backward import route_backward_kernels

_BF16 = torch.bfloat16


class Demand(NamedTuple):
    """The calls that layers are compiled for.

    max_tokens: the most tokens of one call, at least 1.
    dtypes: of activations: some of bf16, fp16 and fp32; or e4m3 alone, for codes.
    target: the GPU, with configs of GEMMs by the number of its SMs or as measured on it.
    backward: whether there are also gradients through the layers.
    """

    max_tokens: int
    dtypes: frozenset[torch.dtype]
    target: Target
    backward: bool = False

    def taking(self, dtypes: frozenset[torch.dtype] | None) -> "Demand":
        """A copy for activations of these dtypes; `self` for None."""
        return self if dtypes is None else self._replace(dtypes=dtypes)

    @property
    def scores(self) -> frozenset[torch.dtype]:
        """The dtypes of scores: FP32 of our routers, and the activations' of other routers."""
        return self.dtypes - {E4M3} | {torch.float32}

    @property
    def gradients(self) -> frozenset[torch.dtype]:
        """The dtypes of gradients: BF16 and the activations'; for codes, codes alone."""
        return self.dtypes if E4M3 in self.dtypes else self.dtypes | {torch.bfloat16}

    def call_tensors(self, dtypes: Iterable[torch.dtype]) -> Iterator[CallTensors]:
        """The tensors of experts' calls with tokens of these dtypes."""
        return starmap(CallTensors, product(dtypes, self.scores, (True, False)))

    def quantize(self, dtype: torch.dtype, most_rows: int, k: int) -> Iterator[Kernel]:
        return quantize_kernels(self.target, dtype, most_rows, k)


class Linear(NamedTuple):
    """`fp8_linear`, weights [N, K].

    takes: dtypes of its activations; None: those of the model. batch_invariant: as in the module.
    """

    n: int
    k: int
    bias: torch.dtype | None
    takes: frozenset[torch.dtype] | None = None
    batch_invariant: bool = False

    def kernels(self, demand: Demand) -> Iterator[Kernel]:
        if self.n and self.k:
            yield from self.forward_kernels(demand)
            if demand.backward:
                yield from transpose_kernels(demand.target, self.k)
                yield from self.dgrad_kernels(demand)

    def forward_kernels(self, demand: Demand) -> Iterator[Kernel]:
        for dtype in demand.taking(self.takes).dtypes:
            yield from linear_kernels(
                demand.target,
                demand.max_tokens,
                self.n,
                self.k,
                dtype,
                bias=self.bias,
                batch_invariant=self.batch_invariant,
            )

    def dgrad_kernels(self, demand: Demand) -> Iterator[Kernel]:
        """Kernels of the input's gradient, for BF16 gradients of the output."""
        sizes, is_invariant = (demand.max_tokens, self.k, self.n), self.batch_invariant
        return linear_kernels(demand.target, *sizes, _BF16, batch_invariant=is_invariant)


class Master(NamedTuple):
    """How weights are held and trained.

    dtype: of the master weights. wgrad: as in the module.
    outputs: (dtype, whether it is added to an existing gradient) of each kind of gradient;
        empty if the weights get none.
    """

    dtype: torch.dtype
    wgrad: str
    outputs: frozenset[tuple[torch.dtype, bool]]

    @property
    def has_columns(self) -> bool:
        """Whether the weights' gradients are computed from column codes."""
        return self.wgrad != "bf16" and bool(self.outputs)

    @property
    def blocks(self) -> bool:
        return self.wgrad == "128x128"


class TrainedLinear(NamedTuple):
    """`trained_linear` with a master weight [N, K], and its gradients."""

    frozen: Linear
    master: Master

    def kernels(self, demand: Demand) -> Iterator[Kernel]:
        linear, master = self
        if not (linear.n and linear.k):
            return
        yield from both_kernels(demand.target, master.dtype, linear.k)
        yield from linear.forward_kernels(demand)
        if demand.backward and master.has_columns:
            for dtype in demand.taking(linear.takes).dtypes:
                yield from trained_linear.forward_kernels(
                    demand.target,
                    demand.max_tokens,
                    linear.n,
                    linear.k,
                    dtype,
                    bias=linear.bias,
                    blocks=master.blocks,
                    batch_invariant=linear.batch_invariant,
                )
        if demand.backward:
            yield from self.backward_kernels(demand)

    def backward_kernels(self, demand: Demand) -> Iterator[Kernel]:
        """Kernels of the input's gradient, alone and with the weight's, for BF16 gradients."""
        linear, master = self
        yield from linear.dgrad_kernels(demand)
        for dtype, accumulates in master.outputs if master.has_columns else ():
            yield from trained_linear.backward_kernels(
                demand.target,
                demand.max_tokens,
                linear.n,
                linear.k,
                dtype,
                accumulates=accumulates,
                blocks=master.blocks,
                batch_invariant=linear.batch_invariant,
            )


class FeedForward(NamedTuple):
    """Shared experts as one op. batch_invariant: as in their linears."""

    hidden_size: int
    intermediate_size: int
    batch_invariant: bool = False
    activation: Activation = SWIGLU

    def kernels(self, demand: Demand) -> Iterator[Kernel]:
        h, i, is_invariant, activation = self
        if h and i:
            yield from self.forward_kernels(demand)
            if demand.backward:
                for k in {h, i}:
                    yield from transpose_kernels(demand.target, k)
                yield from feed_forward_backward.backward_kernels(
                    demand.target,
                    demand.max_tokens,
                    h,
                    i,
                    activation=activation,
                    batch_invariant=is_invariant,
                )

    def forward_kernels(self, demand: Demand) -> Iterator[Kernel]:
        """Kernels of a forward, and of one that saves tensors if there is a backward."""
        h, i, is_invariant, activation = self
        for dtype, saves in product(demand.dtypes, {False, demand.backward}):
            yield from feed_forward_kernels(
                demand.target,
                demand.max_tokens,
                h,
                i,
                dtype,
                activation=activation,
                saves=saves,
                batch_invariant=is_invariant,
            )


class TrainedFeedForward(NamedTuple):
    """Shared experts with master weights as one op, and their gradients.

    masters: of gate, up and down.
    """

    frozen: FeedForward
    masters: tuple[Master, ...]

    def kernels(self, demand: Demand) -> Iterator[Kernel]:
        h, i, is_invariant, activation = self.frozen
        if not (h and i):
            return
        yield from self.frozen.forward_kernels(demand)
        if demand.backward:
            yield from activation_rows_kernels(demand.target, i, activation)
            yield from activation_rows_grad_kernels(demand.target, i, activation)
        gate = up = Linear(i, h, None, None, is_invariant)
        down = Linear(h, i, None, frozenset({_BF16}), is_invariant)
        for linear, master in zip((gate, up, down), self.masters, strict=True):
            yield from both_kernels(demand.target, master.dtype, linear.k)
            if demand.backward:
                yield from TrainedLinear(linear, master).backward_kernels(demand)
            if demand.backward and master.has_columns:
                for dtype in demand.taking(linear.takes).dtypes:
                    yield from columns_kernels(demand.target, dtype, linear.k, blocks=master.blocks)


class Experts(NamedTuple):
    """Routed experts."""

    top_k: int
    num_experts: int
    hidden_size: int
    intermediate_size: int
    masked: bool
    num_global_experts: int | None  # as in `Sizes`
    activation: Activation = SWIGLU
    biases: BiasDtypes = (None, None)  # as in `CallTensors`

    def kernels(self, demand: Demand) -> Iterator[Kernel]:
        if not (self.num_experts and self.hidden_size and self.intermediate_size):
            return
        yield from self.forward_kernels(demand)
        if demand.backward:
            yield from self._backward_kernels(demand)

    def forward_kernels(self, demand: Demand) -> Iterator[Kernel]:
        """Kernels of a forward, and of one that saves tensors if there is a backward."""
        sizes = self.sizes(demand)
        for call in demand.call_tensors(demand.dtypes):
            tensors = call._replace(biases=self.biases)
            yield from experts_kernels(demand.target, sizes, tensors, self.activation)
            if demand.backward:  # a forward that saves is contiguous
                saving = sizes._replace(masked=False), tensors._replace(saved=_BF16)
                yield from experts_kernels(demand.target, *saving, self.activation)

    def sizes(self, demand: Demand) -> Sizes:
        return Sizes(demand.max_tokens, *self[:6])

    def quantize_saved(self, demand: Demand) -> Iterator[Kernel]:
        max_rows = 2 * demand.max_tokens * self.top_k
        return demand.quantize(_BF16, max_rows, self.intermediate_size)

    def _backward_kernels(self, demand: Demand) -> Iterator[Kernel]:
        sizes = self.sizes(demand)._replace(masked=False)
        for k in {self.hidden_size, self.intermediate_size}:
            yield from transpose_kernels(demand.target, k)
        for tensors in demand.call_tensors(demand.gradients):
            for saved in (_BF16, E4M3):
                saving = tensors._replace(saved=saved, biases=self.biases)
                yield from experts_backward_kernels(demand.target, sizes, saving, self.activation)
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
            yield from both_kernels(demand.target, self.master.dtype, k)
        yield from self.frozen.forward_kernels(demand)
        if demand.backward:
            yield from self.frozen.quantize_saved(demand)
            is_bf16 = self.master.wgrad == "bf16"
            yield from (self._in_bf16(demand) if is_bf16 else self._in_fp8(demand))

    def _in_fp8(self, demand: Demand) -> Iterator[Kernel]:
        sizes, outputs = self.frozen.sizes(demand)._replace(masked=False), self.master.outputs
        for dtype, accumulate in outputs or {(None, False)}:
            for tensors in demand.call_tensors(demand.dtypes):
                for saved in (_BF16, E4M3):
                    yield from trained_backward_kernels(
                        demand.target,
                        sizes,
                        tensors._replace(saved=saved, biases=self.frozen.biases),
                        activation=self.frozen.activation,
                        blocks=self.master.blocks,
                        dtypes=(dtype, dtype),
                        accumulate=accumulate,
                    )

    def _in_bf16(self, demand: Demand) -> Iterator[Kernel]:
        """Step by step, with PyTorch's grouped GEMM for gradients in weights."""
        top_k, num_experts, h, i, *_ = self.frozen
        target, max_rows = demand.target, demand.max_tokens * top_k
        yield from quantized_rows_kernels(target, self.frozen.sizes(demand))
        yield from plan_kernels(target, demand.max_tokens, top_k)
        activation = self.frozen.activation
        yield from activation_rows_kernels(target, i, activation)
        for dtype in {*demand.dtypes, torch.float32}:
            yield from activation_rows_backward_kernels(target, dtype, i, activation)
        for n, k in ((i, h), (h, 2 * round_up(i, BLOCK))):
            yield from grouped_kernels(target, max_rows, num_experts, n, k)


class ExpertsInSteps(NamedTuple):
    """Routed experts whose steps are ops of their own, as they are with adapters."""

    top_k: int
    num_experts: int
    hidden_size: int
    intermediate_size: int
    activation: Activation = SWIGLU
    biases: BiasDtypes = (None, None)  # as in `CallTensors`

    def kernels(self, demand: Demand) -> Iterator[Kernel]:
        top_k, num_experts, h, i, activation, (gate_up_bias, down_bias) = self
        if not (num_experts and h and i):
            return
        target, max_rows = demand.target, demand.max_tokens * top_k
        yield from plan_kernels(target, demand.max_tokens, top_k)
        for dtype in demand.dtypes:
            yield from demand.quantize(dtype, max_rows, h)
        yield from activation_rows_kernels(target, i, activation)
        yield from demand.quantize(_BF16, max_rows, i)
        scores = {*demand.dtypes, torch.float32}
        if h % 8 == 0:
            for dtype in scores:
                yield from combine_kernels(target, dtype, top_k, h)
        # Gate and up may have one each.
        products = [(2 * i if i % BLOCK == 0 else i, h, gate_up_bias), (h, i, down_bias)]
        if demand.backward:
            for k in {h, i}:
                yield from transpose_kernels(target, k)
            yield from demand.quantize(_BF16, max_rows, h)
            for dtype in scores:
                yield from activation_rows_backward_kernels(target, dtype, i, activation)
            products += [(i, h, None), (h, 2 * round_up(i, BLOCK), None)]
        for n, k, bias in products:
            yield from grouped_kernels(target, max_rows, num_experts, n, k, bias)


class Exchange(NamedTuple):
    """How ranks exchange the tokens of experts.

    num_ranks: P. num_sharing: how many ranks share a call's tokens before the exchange.
    transports: those that the group may choose for tokens on GPUs.
    """

    num_ranks: int
    num_sharing: int
    transports: tuple[type[Transport], ...]

    @classmethod
    def of(cls, experts: ParallelExperts) -> "Exchange":
        num_sharing = experts.batch.size if experts.batch else 1
        return cls(experts.group.size, num_sharing, experts.group.candidates)

    def most_sent(self, max_tokens: int) -> int:
        """The most tokens that a rank sends, in calls with up to max_tokens."""
        return ceil_div(max_tokens, self.num_sharing)

    def most_received(self, max_tokens: int) -> int:
        """The most tokens that a rank's experts receive."""
        return self.most_sent(max_tokens) * self.num_ranks

    def kernels(self, demand: Demand, hidden_size: int, *, are_codes: bool) -> Iterator[Kernel]:
        """are_codes: tokens travel as FP8 codes."""
        gradients = {_BF16} if demand.backward else set()
        traffic = Traffic(
            num_ranks=self.num_ranks,
            hidden_size=hidden_size,
            max_tokens=self.most_sent(demand.max_tokens),
            dtypes=demand.dtypes | gradients,
            are_codes=are_codes,
        )
        for transport in self.transports:
            yield from transport.list_kernels(demand.target, traffic)


class ExpertsOfRank(NamedTuple):
    """A rank's part of experts, which takes tokens of all ranks; frozen experts take codes."""

    experts: Experts | TrainedExperts | ExpertsInSteps
    exchange: Exchange

    def kernels(self, demand: Demand) -> Iterator[Kernel]:
        are_codes = isinstance(self.experts, Experts)
        sizes = self.experts.frozen if isinstance(self.experts, TrainedExperts) else self.experts
        yield from self.exchange.kernels(demand, sizes.hidden_size, are_codes=are_codes)
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
        has_logits = demand.target.arch in logits_launch.ARCHITECTURES
        if has_logits and torch.bfloat16 in demand.dtypes and self.hidden_size:
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
