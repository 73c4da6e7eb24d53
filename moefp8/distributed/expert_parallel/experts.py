"""What a layer of a group does: send tokens to their experts, compute, take results back.

T tokens of this rank, k choices each, R tokens received, H hidden, I intermediate.

1. The ranks agree on the call.
2. Each token goes to the ranks that hold its experts, once to each, with its choices and scores.
   For frozen experts it is quantized to 1x128 before, for others it is sent unchanged.
3. Each rank sums the outputs of a token's experts there, weighted, in FP32, and rounds to BF16.
4. The sums go back, and each token's are summed in FP32 in the order of the ranks.

The backward sends the result's gradient; gradients of hidden states and of scores come back. Steps
2 and 4 are those of a `Transport`.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from ...functional.autograd import first_order, no_gradients, records
from ...functional.expert_biases import empty_bias_gradients
from ...functional.experts import ExpertsInputs
from ...functional.experts_backward import ExpertsBackwardInputs
from ...kernels.common.checks import (
    FLOATS,
    check_choices,
    check_same_device,
    check_shape,
    check_tensor,
)
from ...layers.experts import BIASES, WEIGHTS, GroupedExperts
from ...quant.quantize import quantize_1x128
from .agreement import PHASES, Call, T, are_of_one_kind, dtype_and_devices
from .local import LocalExperts
from .shared_batch import SharedBatch
from .transport import Transport

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
        """Check the arguments, and make the call with tokens as rows [T, H]."""
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
        asks = _asked_gradients(calls)
        transport = self.group.transport_for(calls, top_k_index)
        backward = _Backward(self.group, call)
        scores = top_k_weights.float()
        if call.is_fp8 and isinstance(layer, GroupedExperts):
            y = _frozen_experts(layer, transport, backward, hidden_states, scores, asks)
        else:
            y = _any_experts(layer, transport, backward, hidden_states, scores, asks)
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
        dtype, devices = dtype_and_devices(x, ids, scores)
        return Call(
            phase=0,
            layer=self.number,
            num_experts=self.num_experts,
            hidden_size=x.shape[1],
            top_k=ids.shape[1],
            dtype=dtype,
            devices=devices,
            is_fp8=is_fp8,
            is_captured=captures,
            asks=asks,
            num_tokens=len(x),
        )

    def _as_rows(
        self, layer: GroupedExperts | LocalExperts, x: Any, ids: Any, scores: Any, addend: Any
    ) -> tuple[Any, ...]:
        """Check the arguments, and return them with hidden states and addend as rows [T, H]."""
        named = {"hidden_states": x, "top_k_index": ids, "top_k_weights": scores, "addend": addend}
        for name, value in named.items():
            if not isinstance(value, torch.Tensor) and (name != "addend" or value is not None):
                raise TypeError(f"{_LAYER}: {name} must be a tensor, got {type(value).__name__}")
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
    """How the ranks agree on a call's backward. call: the forward's."""

    def __init__(self, group: "ExpertGroup", call: Call) -> None:
        self._group, self._call = group, call

    def agree(self) -> None:
        self._group.agreement.agree(self._call_of("backward"))

    def agree_on_tokens(self) -> None:
        """Agree on the second step of trained experts and adapters: gradients of tokens."""
        self._group.agreement.agree(self._call_of("gradients of tokens"))

    def checked(self, check: Callable[[], T]) -> T:
        return self._group.agreement.checked(self._call_of("backward"), check)

    def _call_of(self, phase: str) -> Call:
        return self._call._replace(phase=PHASES.index(phase), asks=0)


def _asked_gradients(calls: list[Call]) -> int:
    """Bits of what asks for gradients on any rank; if anything does, all ranks run the backward."""
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
    transport: Transport,
    backward: _Backward,
    x: torch.Tensor,
    scores: torch.Tensor,
    asks: int,
) -> torch.Tensor:
    weights = [layer._look_up(name) for name in (*WEIGHTS, *BIASES)]
    anchor = _anchor(x, asks)
    y: torch.Tensor
    if anchor is None:
        y, _ = _forward(layer, transport, x, scores, weights, saves=False)
    else:
        y = _FrozenExperts.apply(layer, transport, backward, anchor, x, scores, *weights)
    return y


def _forward(
    layer: GroupedExperts,
    transport: Transport,
    x: torch.Tensor,
    scores: torch.Tensor,
    weights: list[torch.Tensor],
    *,
    saves: bool,
) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
    """The result, bf16 [T, H], and the tensors that are saved for the backward.

    These are ids and scores of the received tokens, and their gate and up, in bf16 or as codes with
    their scales.
    """
    codes, scale_inv, scores = transport.dispatch_codes(x, scores)
    named_weights: dict[str, Any] = dict(zip((*WEIGHTS, *BIASES), weights, strict=True))
    inputs = ExpertsInputs(
        hidden_states=codes,
        hidden_states_scale_inv=scale_inv,
        top_k_index=transport.received_ids,
        top_k_weights=scores,
        **named_weights,
        activation=layer.activation,
        masked=layer.layout == "masked",
        expert_offset=layer.expert_offset,
        num_global_experts=layer.num_global_experts,
    )
    if not saves:
        return transport.run_experts(inputs, saves=False)[0], ()
    transport.keep_choices()
    scores, saved_scales = scores.clone(), None
    y, gate_up = transport.run_experts(inputs, saves=True)
    assert gate_up is not None
    if layer.saved_dtype != torch.bfloat16:
        gate_up, saved_scales = quantize_1x128(gate_up.flatten(0, 1), False)
    return y, (transport.received_ids, scores, gate_up, saved_scales)


class _FrozenExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        layer: GroupedExperts,
        transport: Transport,
        backward: _Backward,
        anchor: torch.Tensor,
        x: torch.Tensor,
        scores: torch.Tensor,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        y, saved = _forward(layer, transport, x, scores, list(weights), saves=True)
        ctx.save_for_backward(*saved, *weights)
        ctx.transport, ctx.agreement, ctx.dtype = transport, backward, x.dtype
        ctx.options = {
            "activation": layer.activation,
            "keep_transposed": layer.keep_transposed,
            "expert_offset": layer.expert_offset,
            "num_global_experts": layer.num_global_experts,
        }
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ids, scores, gate_up, gate_up_scale_inv, *held = ctx.saved_tensors
        weights, biases = held[: len(WEIGHTS)], dict(zip(BIASES, held[len(WEIGHTS) :], strict=True))
        *needs, needs_gate_up, needs_down = ctx.needs_input_grad[6:]
        grad_weights = ctx.agreement.checked(lambda: no_gradients(grad, _LAYER, needs, weights))
        ctx.agreement.agree()
        needed = dict(zip(BIASES, (needs_gate_up, needs_down), strict=True))
        grad_biases = empty_bias_gradients(needed, ids.device, weights[2].shape)
        codes, scale_inv = ctx.transport.dispatch_gradient_codes(grad)
        inputs = ExpertsBackwardInputs(
            grad=codes,
            grad_scale_inv=scale_inv,
            top_k_index=ids,
            top_k_weights=scores,
            gate_up=gate_up,
            gate_up_scale_inv=gate_up_scale_inv,
            **dict(zip(WEIGHTS, weights, strict=True)),
            down_proj_bias=biases["down_proj_bias"],
            grad_gate_up_proj_bias=grad_biases["gate_up_proj_bias"],
            grad_down_proj_bias=grad_biases["down_proj_bias"],
            **ctx.options,
        )
        dx, grad_scores = ctx.transport.run_experts_backward(inputs)
        made = [None if x is None else x.to(biases[name].dtype) for name, x in grad_biases.items()]
        return None, None, None, None, dx.to(ctx.dtype), grad_scores, *grad_weights, *made


# ---- Any experts: tokens travel in their own dtype ----


def _any_experts(
    layer: GroupedExperts | LocalExperts,
    transport: Transport,
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
        tokens, received_scores = _dispatch(transport, x, scores, dtype)
    else:
        tokens, received_scores = _Dispatch.apply(
            transport, backward, token_anchor, x, scores, dtype
        )
    transport.keep_choices()
    if anchor is not None:  # autograd may leave out `combine`, which checks
        transport.check_turn()
    rows = layer.compute(tokens, transport.received_ids, received_scores).bfloat16()
    if anchor is None:
        return transport.combine(rows)
    y: torch.Tensor = _Combine.apply(transport, backward, anchor, rows)
    return y


def _dispatch(
    transport: Transport, x: torch.Tensor, scores: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The received tokens in `dtype`, and their scores, both in memory of their own."""
    tokens, received_scores = transport.dispatch_tokens(x, scores)
    return tokens.to(dtype, copy=True), received_scores.clone()


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        transport: Transport,
        backward: _Backward,
        anchor: torch.Tensor,
        x: torch.Tensor,
        scores: torch.Tensor,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.transport, ctx.agreement, ctx.dtype = transport, backward, x.dtype
        return _dispatch(transport, x, scores, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: torch.Tensor, grad_scores: torch.Tensor) -> tuple[Any, ...]:
        ctx.agreement.agree_on_tokens()
        summed, grad_scores = ctx.transport.combine_gradients(dx.bfloat16(), grad_scores)
        return None, None, None, summed.to(ctx.dtype), grad_scores, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        transport: Transport,
        backward: _Backward,
        anchor: torch.Tensor,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        ctx.transport, ctx.agreement = transport, backward
        y: torch.Tensor = transport.combine(rows)
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        ctx.agreement.agree()
        grad_rows = ctx.transport.dispatch(grad).clone()
        ctx.transport.check_turn()
        return None, None, None, grad_rows
