"""A layer of a group sends tokens to their experts, which compute, and takes their results back.

T tokens of this rank, k choices each, R tokens received, H hidden, I intermediate.

1. The ranks agree on the call.
2. Each token goes to the ranks that hold its experts, once to each, with its choices and scores.
   For frozen experts it is quantized to 1x128 before, for others it is sent unchanged.
3. Each rank sums the outputs of a token's experts there, weighted, in FP32, and rounds to BF16.
4. The sums go back, and each token's are summed in FP32 in the order of the ranks.

The backward sends the result's gradient; gradients of hidden states and of scores come back.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from ...functional.autograd import first_order, no_gradients, records
from ...functional.experts import ExpertsInputs
from ...functional.experts_backward import ExpertsBackwardInputs
from ...kernels.common.checks import (
    FLOATS,
    check_choices,
    check_same_device,
    check_shape,
    check_tensor,
)
from ...layers.experts import WEIGHTS, GroupedExperts
from ...quant.quantize import quantize_1x128
from .agreement import PHASES, Call, T, are_of_one_kind, dtype_and_devices
from .local import LocalExperts
from .shared_batch import SharedBatch

if TYPE_CHECKING:
    from .group import ExpertGroup

_LAYER = "ExpertParallel"
_TOKENS, _WEIGHTS, _NO_GRADIENTS = 1, 2, 4  # bits of `Call.asks`


class ParallelExperts:
    """A `GroupedExperts` of a group calls this in place of its own forward.

    `LocalExperts` may call it, too. Ranks that have the same tokens share a `batch`.
    """

    def __init__(
        self, group: "ExpertGroup", num_experts: int, batch: SharedBatch | None = None
    ) -> None:
        self.group, self.num_experts, self.number = group, num_experts, group.number_layer()
        self.batch = batch
        # Not a decorator, which would import Dynamo with this module.
        self._run = torch.compiler.disable(
            self._with_rows, reason="the ranks' hosts agree on each call"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "ParallelExperts":
        return ParallelExperts(self.group, self.num_experts, self.batch)  # a layer of its own

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{_LAYER}: a layer of a group of processes cannot be pickled; save the state_dict() "
            "of every rank"
        )

    def __call__(
        self,
        layer: GroupedExperts | LocalExperts,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        addend: torch.Tensor | None,
    ) -> torch.Tensor:
        """Arguments and result as in `GroupedExperts.forward`."""
        y: torch.Tensor = self._run(layer, hidden_states, top_k_index, top_k_weights, addend)
        return y

    def _with_rows(self, layer: Any, x: torch.Tensor, *others: Any) -> torch.Tensor:
        """The call, with tokens [T, H]."""
        unknown, batch = Call(0, self.number), self.batch
        rows = self.group.agreement.checked(unknown, lambda: self._as_rows(layer, x, *others))
        y = self._call(layer, *rows) if batch is None else self._share(batch, layer, *rows)
        return y if y.shape == x.shape else y.view(x.shape)

    def _call(
        self,
        layer: GroupedExperts | LocalExperts,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        addend: torch.Tensor | None = None,
    ) -> torch.Tensor:
        call = self._as_call(layer, hidden_states, top_k_index, top_k_weights)
        calls = self.group.agreement.agree(call)
        if not are_of_one_kind(call.devices):  # the same on all ranks
            _check_device(hidden_states, top_k_index, top_k_weights)
        asks = _agreed(calls)
        exchange = self.group.exchange(calls, top_k_index)
        backward = _Backward(self.group, call)
        scores = top_k_weights.float()
        if call.is_fp8 and isinstance(layer, GroupedExperts):
            y = _frozen_experts(layer, exchange, backward, hidden_states, scores, asks)
        else:
            y = _any_experts(layer, exchange, backward, hidden_states, scores, asks)
        y = y if addend is None else y + addend
        return y.to(hidden_states.dtype)

    def _share(self, batch: SharedBatch, layer: Any, x: torch.Tensor, *others: Any) -> torch.Tensor:
        own = [batch.own(y) for y in (x, *others) if y is not None]
        return batch.whole(self._call(layer, *own), len(x))

    def _as_call(
        self, layer: Any, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor
    ) -> Call:
        asks = _NO_GRADIENTS
        if torch.is_grad_enabled():
            tokens = x.requires_grad or scores.requires_grad
            weights = any(p.requires_grad for p in layer.parameters())
            asks = _TOKENS * tokens | _WEIGHTS * weights
        captures = x.is_cuda and torch.cuda.is_current_stream_capturing()
        is_fp8 = not (layer.trainable or layer.runs_in_steps)
        alike = self.num_experts, x.shape[1], ids.shape[1], *dtype_and_devices(x, ids, scores)
        return Call(0, self.number, *alike, is_fp8, captures, asks, len(x))

    def _as_rows(
        self, layer: GroupedExperts | LocalExperts, x: Any, ids: Any, scores: Any, addend: Any
    ) -> tuple[Any, ...]:
        """The arguments, with hidden states and addend as rows [T, H], after checks."""
        named = {"hidden_states": x, "top_k_index": ids, "top_k_weights": scores, "addend": addend}
        for name, value in named.items():
            if not isinstance(value, torch.Tensor) and (name != "addend" or value is not None):
                came = type(value).__name__
                raise TypeError(f"{_LAYER}: {name} must be a tensor, got {came}")
        if x.ndim not in (0, 2):
            num_tokens = math.prod(x.shape[:-1])
            if addend is not None and addend.shape == x.shape:
                addend = addend.reshape(num_tokens, x.shape[-1])
            x = x.reshape(num_tokens, x.shape[-1])
        self._check(layer, x, ids, scores, addend)
        return x, ids, scores, addend

    def _check(
        self,
        layer: GroupedExperts | LocalExperts,
        x: torch.Tensor,
        ids: torch.Tensor,
        scores: torch.Tensor,
        addend: torch.Tensor | None,
    ) -> None:
        records(_LAYER, x, scores)
        check_tensor(_LAYER, "hidden_states", x, FLOATS, 2)
        check_tensor(_LAYER, "top_k_index", ids, (torch.int32, torch.int64), 2)
        check_tensor(_LAYER, "top_k_weights", scores, FLOATS, 2)
        num_tokens, top_k = len(x), ids.shape[1]
        check_shape(_LAYER, "hidden_states", x, [num_tokens, layer.hidden_size], "[T, H]")
        check_shape(_LAYER, "top_k_index", ids, [num_tokens, top_k], "[T, k]")
        check_shape(_LAYER, "top_k_weights", scores, [num_tokens, top_k], "[T, k] as top_k_index")
        if addend is not None:
            check_tensor(_LAYER, "addend", addend, (torch.bfloat16,), 2)
            check_shape(_LAYER, "addend", addend, x.shape, "[T, H] as hidden_states")
            check_same_device(_LAYER, hidden_states=x, addend=addend)
        if are_of_one_kind(dtype_and_devices(x, ids, scores)[1]):  # kinds of devices are agreed on
            _check_device(x, ids, scores)
        if ids.is_cpu:
            check_choices(_LAYER, ids, self.num_experts)


def _check_device(x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor) -> None:
    if not x.device == ids.device == scores.device:
        check_same_device(_LAYER, hidden_states=x, top_k_index=ids, top_k_weights=scores)


class _Backward:
    """The agreement of a call's backward. call: the forward's."""

    def __init__(self, group: "ExpertGroup", call: Call) -> None:
        self._group, self._call = group, call

    def agree(self) -> None:
        self._group.agreement.agree(self._as("backward"))

    def agree_on_tokens(self) -> None:
        """Agree on the second step of trained experts and adapters: gradients of tokens."""
        self._group.agreement.agree(self._as("gradients of tokens"))

    def checked(self, check: Callable[[], T]) -> T:
        return self._group.agreement.checked(self._as("backward"), check)

    def _as(self, phase: str) -> Call:
        return self._call._replace(phase=PHASES.index(phase), asks=0)


def _agreed(calls: list[Call]) -> int:
    """Bits of what asks for gradients on any rank; if any does, all ranks run the backward."""
    asks = 0
    for call in calls:
        asks |= call.asks
    if asks & _NO_GRADIENTS and asks & (_TOKENS | _WEIGHTS):
        disabled = [bool(call.asks & _NO_GRADIENTS) for call in calls]
        raise ValueError(
            f"{_LAYER}: all ranks must run {calls[0].name} with gradients, or all without, but "
            f"torch.no_grad() holds on rank {disabled.index(True)} alone, not on rank "
            f"{disabled.index(False)}"
        )
    return asks & (_TOKENS | _WEIGHTS)


def _anchor(x: torch.Tensor, asks: int) -> torch.Tensor | None:
    """An empty tensor that asks for a gradient on each rank if something does on any."""
    return x.new_empty(0, dtype=torch.float32).requires_grad_() if asks else None


# ---- Frozen experts: codes travel ----


def _frozen_experts(
    layer: GroupedExperts,
    exchange: Any,
    backward: _Backward,
    x: torch.Tensor,
    scores: torch.Tensor,
    asks: int,
) -> torch.Tensor:
    weights = [layer._look_up(name) for name in WEIGHTS]
    anchor = _anchor(x, asks)
    y: torch.Tensor
    if anchor is None:
        y, _ = _forward(layer, exchange, x, scores, weights, saves=False)
    else:
        y = _FrozenExperts.apply(layer, exchange, backward, anchor, x, scores, *weights)
    return y


def _forward(
    layer: GroupedExperts,
    exchange: Any,
    x: torch.Tensor,
    scores: torch.Tensor,
    weights: list[torch.Tensor],
    *,
    saves: bool,
) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
    """The result [T, H] bf16, and the tensors that are saved for the backward."""
    codes, scale_inv, scores = exchange.dispatch_codes(x, scores)
    rank, addend = (layer.expert_offset, layer.num_global_experts), None
    options = layer.activation, layer.layout == "masked", *rank, addend, scale_inv
    args: tuple[Any, ...] = (codes, exchange.ids, scores, *weights, *options)
    inputs = ExpertsInputs(*args)
    if not saves:
        return exchange.experts(inputs, saves=False)[0], ()
    exchange.keep_choices()
    scores, saved_scales = scores.clone(), None
    y, gate_up = exchange.experts(inputs, saves=True)
    if layer.saved_dtype != torch.bfloat16:
        gate_up, saved_scales = quantize_1x128(gate_up.flatten(0, 1), False)
    return y, (exchange.ids, scores, gate_up, saved_scales)


class _FrozenExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        layer: GroupedExperts,
        exchange: Any,
        backward: _Backward,
        anchor: torch.Tensor,
        x: torch.Tensor,
        scores: torch.Tensor,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        y, saved = _forward(layer, exchange, x, scores, list(weights), saves=True)
        ctx.save_for_backward(*saved, *weights)
        ctx.exchange, ctx.agreement, ctx.dtype = exchange, backward, x.dtype
        ctx.options = (
            layer.activation,
            layer.keep_transposed,
            layer.expert_offset,
            layer.num_global_experts,
        )
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        exchange, saved = ctx.exchange, ctx.saved_tensors
        needs = ctx.needs_input_grad[6:]
        grad_weights = ctx.agreement.checked(lambda: no_gradients(grad, _LAYER, needs, saved[4:]))
        ctx.agreement.agree()
        codes, scale_inv = exchange.dispatch_codes(grad, are_gradients=True)
        args: tuple[Any, ...] = (codes, *saved, None, None, None, *ctx.options, scale_inv)
        dx, grad_scores = exchange.experts_backward(ExpertsBackwardInputs(*args))
        return None, None, None, None, dx.to(ctx.dtype), grad_scores, *grad_weights


# ---- Any experts: tokens travel in their own dtype ----


def _any_experts(
    layer: GroupedExperts | LocalExperts,
    exchange: Any,
    backward: _Backward,
    x: torch.Tensor,
    scores: torch.Tensor,
    asks: int,
) -> torch.Tensor:
    token_anchor, anchor = _anchor(x, asks & _TOKENS), _anchor(x, asks)
    # FP16 would round small results and gradients to fewer bits than BF16 has.
    widens = x.dtype == torch.float16 and isinstance(layer, GroupedExperts)
    dtype = torch.float32 if widens else x.dtype
    if token_anchor is None:
        tokens, came_scores = _dispatch(exchange, x, scores, dtype)
    else:
        tokens, came_scores = _Dispatch.apply(exchange, backward, token_anchor, x, scores, dtype)
    exchange.keep_choices()
    if anchor is not None:  # autograd may leave out `combine`, which checks
        exchange.check_turn()
    rows = layer.compute(tokens, exchange.ids, came_scores).bfloat16()
    if anchor is None:
        return exchange.combine(rows)
    y: torch.Tensor = _Combine.apply(exchange, backward, anchor, rows)
    return y


def _dispatch(
    exchange: Any, x: torch.Tensor, scores: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that came, in `dtype`, and their choices' scores, both in memory of their own."""
    tokens, came_scores = exchange.dispatch(x, scores)
    return tokens.to(dtype, copy=True), came_scores.clone()


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        exchange: Any,
        backward: _Backward,
        anchor: torch.Tensor,
        x: torch.Tensor,
        scores: torch.Tensor,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.exchange, ctx.agreement, ctx.dtype = exchange, backward, x.dtype
        return _dispatch(exchange, x, scores, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: torch.Tensor, grad_scores: torch.Tensor) -> tuple[Any, ...]:
        ctx.agreement.agree_on_tokens()
        summed, grad_scores = ctx.exchange.combine_gradients(dx.bfloat16(), grad_scores)
        return None, None, None, summed.to(ctx.dtype), grad_scores, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        exchange: Any,
        backward: _Backward,
        anchor: torch.Tensor,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        ctx.exchange, ctx.agreement = exchange, backward
        y: torch.Tensor = exchange.combine(rows)
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        ctx.agreement.agree()
        (grad_rows,) = (x.clone() for x in ctx.exchange.dispatch(grad))
        ctx.exchange.check_turn()
        return None, None, None, grad_rows
