"""`MoE`, the whole feed-forward of a layer: router, routed experts, optional shared experts."""

import math
from collections.abc import Callable
from functools import lru_cache
from inspect import signature
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

from ..functional.activation import activate
from ..functional.feed_forward import FeedForwardInputs
from ..functional.feed_forward_backward import shared_experts
from ..functional.training.feed_forward import shared_experts as trained_shared_experts
from ..functional.training.wgrad import Wgrad
from ..kernels.common.activation import Activation, activation_of
from ..kernels.common.checks import FLOATS, check_tensor
from ..routing.logits import exact_logits
from .experts import PARALLELIZERS, ExpertLayout, GroupedExperts
from .linear import FP8Linear
from .module import is_wrapped
from .router import TopKRouter


class SharedExperts(nn.Module):
    """A gated feed-forward that every token takes: `down(silu(gate(x)) * up(x))`.

    activation, swiglu_limit: as in `GroupedExperts`.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str | Activation = "swiglu",
        swiglu_limit: float | None = None,
        device: torch.device | str | None = None,
        **linear_options: Any,
    ) -> None:
        super().__init__()
        self.activation = activation_of("SharedExperts", activation, swiglu_limit)
        options: dict[str, Any] = {"bias": False, "device": device, **linear_options}
        self.gate_proj = FP8Linear(hidden_size, intermediate_size, **options)
        self.up_proj = FP8Linear(hidden_size, intermediate_size, **options)
        self.down_proj = FP8Linear(intermediate_size, hidden_size, **options)

    @property
    def swiglu_limit(self) -> float | None:
        """The limit of `activation`."""
        return self.activation.limit

    @swiglu_limit.setter
    def swiglu_limit(self, limit: float | None) -> None:
        self.activation = self.activation._replace(limit=limit)

    @property
    def is_one_op(self) -> bool:
        """Whether each projection multiplies by its weight and does no more, and all are alike."""
        kinds = set()
        for x in (self.gate_proj, self.up_proj, self.down_proj):
            if type(x) is not FP8Linear or x.bias is not None or is_wrapped(x):
                return False
            kinds.add((x.batch_invariant, x.trainable, x.trainable and x.wgrad))
        return len(kinds) == 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., H] bf16, fp16 or fp32 -> the same shape and dtype.

        If a projection has a bias or hooks, the projections are called one by one, and the outputs
        of gate and up are rounded to BF16. Else frozen and trainable ones give the same bits.
        """
        if not self.is_one_op:
            gate, up = project(self.gate_proj, x), project(self.up_proj, x)
            return project(self.down_proj, activate(gate, up, self.activation)).to(x.dtype)
        projections, down = (self.gate_proj, self.up_proj, self.down_proj), self.down_proj
        rows, activation = x.reshape(-1, x.shape[-1]), self.activation
        if down.trainable:
            y = trained_shared_experts(
                "SharedExperts",
                rows,
                [z.weight for z in projections],
                activation,
                down.wgrad,
                reuse_codes=self.training,
                batch_invariant=down.batch_invariant,
            )
        else:
            weights = [y for z in projections for y in (z.weight, z.weight_scale_inv)]
            args: tuple[Any, ...] = rows, *weights, activation, down.batch_invariant
            y = shared_experts("SharedExperts", FeedForwardInputs(*args), down.keep_transposed)
        y = y.view(x.shape)
        return y if y.dtype == x.dtype else y.to(x.dtype)


def project(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Call `linear`; one without FP8, which `dequantize` leaves, takes the dtype of its weight.

    It may be in a wrapper that has its `weight`, as PEFT's.
    """
    if isinstance(linear, FP8Linear):  # a master weight of any dtype takes any
        y: torch.Tensor = linear(x)
        return y
    dtype = getattr(getattr(linear, "weight", None), "dtype", None)
    return linear(x.to(dtype) if dtype in FLOATS else x)


class MoE(nn.Module):
    """`experts(x, router(x)) + sigmoid(shared_gate(x)) * shared(x)`, with DeepSeek's names.

    In a CUDA graph, shared and routed experts of few tokens are computed side by side. Else the
    shared ones come first, and the last kernel of the routed ones adds their output. Either way the
    output of the routed experts is rounded to BF16, and then the sum: the bits are the same.

    Args:
        hidden_size: H.
        intermediate_size: I of a routed expert (`moe_intermediate_size`).
        num_experts, top_k: E (`n_routed_experts`) and k (`num_experts_per_tok`).
        shared_intermediate_size: I of all shared experts together (`n_shared_experts * I`), or 0.
        shared_expert_gate: weigh the shared experts with the sigmoid of a linear gate (Qwen3-Next).
        activation, swiglu_limit, layout: as in `GroupedExperts`; the shared experts have the same
            activation.
        trainable, wgrad, dtype: as in `GroupedExperts`, for all experts.
        batch_invariant: as in `FP8Linear`, for the shared experts and their gate. Of the others no
            bit depends on the batch: `set_batch_invariant` says where.
        expert_mesh: the `DeviceMesh` of one dimension, or process group, whose ranks share the
            routed experts, each with tokens of its own: see `moefp8.distributed.ExpertParallel`.
        router: further arguments of `TopKRouter`, such as scoring.

    Attributes:
        gate, experts: `TopKRouter` and `GroupedExperts`.
        shared_experts: `gate_proj`, `up_proj`, `down_proj` as `FP8Linear`; or None.
        shared_expert_gate: `nn.Linear` to one number, or None.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        shared_intermediate_size: int = 0,
        shared_expert_gate: bool = False,
        activation: str | Activation = "swiglu",
        swiglu_limit: float | None = None,
        layout: ExpertLayout = "auto",
        device: torch.device | str | None = None,
        trainable: bool = False,
        wgrad: Wgrad = "128x1",
        dtype: torch.dtype = torch.bfloat16,
        expert_mesh: Any = None,
        batch_invariant: bool = False,
        **router: Any,
    ) -> None:
        super().__init__()
        self.hidden_size, self.batch_invariant = hidden_size, batch_invariant
        if shared_expert_gate and not shared_intermediate_size:
            raise ValueError("MoE: shared_expert_gate needs shared_intermediate_size > 0, got 0")
        if unknown := ", ".join(router.keys() - signature(TopKRouter).parameters.keys()):
            raise TypeError(f"MoE: keywords must be its own or TopKRouter's, got {unknown}")
        activation = activation_of("MoE", activation, swiglu_limit)
        options: dict[str, Any] = {"activation": activation, "device": device}
        options |= {"trainable": trainable, "wgrad": wgrad, "dtype": dtype}
        self.gate = TopKRouter(hidden_size, num_experts, top_k, device=device, **router)
        sizes = num_experts, hidden_size, intermediate_size
        self.experts = GroupedExperts(*sizes, layout=layout, **options)
        if expert_mesh is not None:
            for distribute in PARALLELIZERS:
                distribute(self.experts, expert_mesh)
        self.shared_experts: SharedExperts | None = None
        self.shared_expert_gate: nn.Linear | None = None
        if shared_intermediate_size:
            options["batch_invariant"] = batch_invariant
            self.shared_experts = SharedExperts(hidden_size, shared_intermediate_size, **options)
        if shared_expert_gate:
            self.shared_expert_gate = nn.Linear(hidden_size, 1, bias=False, device=device)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states: [..., H] bf16, fp16 or fp32 -> the same shape and dtype.

        Raises TypeError for another dtype, ValueError for another width.
        """
        check_tensor("MoE", "hidden_states", hidden_states, FLOATS)
        if hidden_states.ndim < 1 or hidden_states.shape[-1] != self.hidden_size:
            raise ValueError(
                f"MoE: hidden_states must be [..., H = {self.hidden_size}], got shape "
                f"{list(hidden_states.shape)}"
            )
        tokens = hidden_states.reshape(math.prod(hidden_states.shape[:-1]), self.hidden_size)
        if self.shared_experts is None:
            return self._routed(tokens).view(hidden_states.shape)
        if _may_run_beside(tokens):
            y, shared = _side_by_side(self._routed, self._shared, tokens)
            return (y + shared).view(hidden_states.shape)
        shared = self._shared(tokens)
        if self._can_add(tokens, shared):
            return self._routed(tokens, addend=shared).view(hidden_states.shape)
        return (self._routed(tokens) + shared).view(hidden_states.shape)

    def _can_add(self, tokens: torch.Tensor, shared: torch.Tensor) -> bool:
        """Whether `experts` can add `shared`, and no hook of its own would notice."""
        experts = self.experts
        return (
            type(experts) is GroupedExperts
            and not is_wrapped(experts)
            and tokens.dtype == shared.dtype == torch.bfloat16
            and tokens.shape == shared.shape
            and forward_ad._current_level < 0
        )

    def _routed(self, tokens: torch.Tensor, addend: torch.Tensor | None = None) -> torch.Tensor:
        inputs = tokens, *self.gate(tokens)
        if addend is None:  # experts of others know no addend
            y: torch.Tensor = self.experts(*inputs)
        else:
            y = self.experts(*inputs, addend=addend)
        return y

    def _shared(self, tokens: torch.Tensor) -> torch.Tensor:
        assert self.shared_experts is not None
        shared: torch.Tensor = self.shared_experts(tokens)
        if self.shared_expert_gate is None:
            return shared
        gate = self.shared_expert_gate
        if self.batch_invariant and type(gate) is nn.Linear and not is_wrapped(gate):
            logit = exact_logits(tokens, gate.weight).to(gate.weight.dtype)
        else:
            logit = gate(tokens.to(gate.weight.dtype))
        return shared * logit.sigmoid().to(shared.dtype)


_FEW_TOKENS = 128


def _may_run_beside(x: torch.Tensor) -> bool:
    """Whether there are few tokens, in a CUDA graph.

    With more tokens the GPU gains nothing; without a graph it gains less than the host loses.
    """
    is_on_gpu = x.is_cuda and not torch.compiler.is_compiling()
    is_few = is_on_gpu and x.shape[0] <= _FEW_TOKENS
    return is_few and torch.cuda.is_current_stream_capturing()


@lru_cache(maxsize=64)
def _side_stream(device: torch.device, thread: int, current: int) -> torch.cuda.Stream:
    """A stream for each thread and current stream, since several may be at work at once."""
    return torch.cuda.Stream(device)


def _side_by_side(
    first: Callable[[torch.Tensor], torch.Tensor],
    second: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(first(x), second(x)), computed at the same time."""
    current = torch.cuda.current_stream(x.device)
    side = _side_stream(x.device, get_ident(), current.cuda_stream)
    # The result is allocated on this stream: memory of the side stream would be free for its next
    # work, maybe that of another layer, while this stream still reads it.
    beside = torch.empty_like(x)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        beside.copy_(second(x))
    result = first(x)
    current.wait_stream(side)
    return result, beside
