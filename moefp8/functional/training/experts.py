"""Routed SwiGLU experts whose weights are trained: the forward and its autograd function.

T tokens, k choices each, E experts, H hidden, I intermediate, R = T k rows. The forward is that of
frozen experts with the codes of the master weights. It saves x, and gate and up of each row before
SwiGLU. `experts_backward` computes the gradients; with `wgrad="bf16"`, this file does.
"""

from collections import Counter
from typing import Any, NamedTuple

import torch

from ...kernels.common.activation import Activation
from ...kernels.common.blocks import E4M3
from ...kernels.gemm.sizes import Sizes
from ...kernels.registry import register_inputs
from ...quant.block_scaled import BlockScaled, dequantize
from ...quant.quantize import quantize_1x128
from ...routing.combine import sum_rows
from ...routing.dispatch import dispatch_rows
from ..activation import empty_gate_up
from ..activation_rows import ActivationGradients, activation_rows, activation_rows_backward
from ..autograd import first_order, records
from ..expert_biases import bias_gradients_of_rows, bias_products, empty_bias_gradients
from ..experts import TRAINED, check_saved_dtype, experts, experts_saving
from ..experts_records import experts_backward_record, experts_record
from ..grouped_bf16 import grouped_outer
from ..parts import parts_of, split
from . import main_grad
from .experts_backward import trained_dgrad, trained_experts_backward
from .experts_records import trained_backward_record
from .rows import quantized_rows, tokens_of_rows
from .weights import codes_of
from .wgrad import Wgrad, as_written, put

_OP = "trained_experts"


class TrainedExpertsInputs(NamedTuple):
    """The inputs of `trained_experts`.

    gate_up_proj: [E, 2I, H], gate first, and down_proj: [E, H, I], bf16, fp16 or fp32.
    gate_up_proj_bias, down_proj_bias: as in `ExpertsInputs`.
    reuse_codes: as in `codes_of`. saves: whether gate and up of each row are saved for a backward.
    The others: as in `ExpertsInputs`.
    """

    hidden_states: torch.Tensor
    top_k_index: torch.Tensor
    top_k_weights: torch.Tensor
    gate_up_proj: torch.Tensor
    down_proj: torch.Tensor
    gate_up_proj_bias: torch.Tensor | None
    down_proj_bias: torch.Tensor | None
    activation: Activation
    masked: bool
    expert_offset: int
    num_global_experts: int | None
    addend: torch.Tensor | None
    reuse_codes: bool
    saves: bool


def _allocate(inputs: TrainedExpertsInputs) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.empty_like(
        inputs.hidden_states, dtype=torch.bfloat16, memory_format=torch.contiguous_format
    )
    num_rows = inputs.top_k_index.numel() if inputs.saves else 0
    return y, empty_gate_up(y, num_rows, inputs.down_proj.shape[2])


def _forward(inputs: TrainedExpertsInputs) -> tuple[torch.Tensor, torch.Tensor]:
    *tokens, gate_up_proj, down_proj, gate_up_bias, down_bias = inputs[:7]
    gate_up = codes_of(gate_up_proj, parts=2, reuse_codes=inputs.reuse_codes)
    down = codes_of(down_proj, reuse_codes=inputs.reuse_codes)
    weights = gate_up.data, gate_up.scale_inv, down.data, down.scale_inv
    args = (*tokens, *weights, *inputs[7:12], None, gate_up_bias, down_bias)
    if inputs.saves:
        y, saved = experts_saving(*args)
        return y, saved
    return experts(*args), _allocate(inputs)[1]


trained_experts = register_inputs(
    _OP,
    TrainedExpertsInputs,
    "(Tensor, Tensor)",
    reference=_forward,
    fake=_allocate,
    kernels=_forward,
)
"""`experts` with the codes of master weights -> (bf16 [T, H]; gate and up of each row, bf16
[R, 2, I], as in `experts_saving`, or empty without `saves`)."""


class _Saved(NamedTuple):
    """The tensors that a forward saves for its backward."""

    hidden_states: torch.Tensor
    top_k_index: torch.Tensor
    top_k_weights: torch.Tensor
    gate_up_proj: torch.Tensor
    down_proj: torch.Tensor
    down_proj_bias: torch.Tensor | None
    gate_up: torch.Tensor
    gate_up_scale_inv: torch.Tensor | None


class _Options(NamedTuple):
    activation: Activation
    expert_offset: int
    num_global_experts: int | None
    wgrad: Wgrad


_Gradients = dict[str, torch.Tensor | None]  # by the names of inputs


class _Parts:
    """Counts parts of a call, to find the first that adds to a weight's gradient in a backward."""

    def __init__(self) -> None:
        self._num_parts, self._num_done = 0, Counter[str]()

    def add(self) -> None:
        self._num_parts += 1

    def begins(self, name: str) -> bool:
        num_done = self._num_done[name]
        self._num_done[name] = (num_done + 1) % self._num_parts
        return num_done == 0


def _begins(parts: _Parts | None, name: str) -> bool:
    return parts is None or parts.begins(name)


def _gradients(
    grad: torch.Tensor,
    saved: _Saved,
    options: _Options,
    parts: _Parts | None,
    needs: dict[str, bool],
    masters: dict[str, torch.Tensor],
) -> _Gradients:
    """masters: the parameters, whose attributes say where their gradients go."""
    x, ids, weights, gate_up_proj, down_proj, down_bias, *gate_up = saved
    *others, wgrad = options
    if wgrad == "bf16":
        return _with_bf16_weights(grad, saved, options, parts, needs, masters)
    targets = {
        name: main_grad.target(x, begins=_begins(parts, name))
        for name, x in masters.items()
        if needs[name]
    }
    written = {name: as_written(d) for name, (d, _) in targets.items()}
    biases = empty_bias_gradients(needs, grad.device, down_proj.shape)
    dx, grad_weights = trained_experts_backward(
        *(grad, x, ids, weights, *gate_up, gate_up_proj, down_proj, down_bias),
        *(written.get(name) for name in masters),
        *biases.values(),
        *(name in targets and targets[name][1] for name in masters),
        *(*others, wgrad == "128x128"),
    )
    gradients: _Gradients = {"hidden_states": dx, "top_k_weights": grad_weights, **biases}
    for name, (d, _) in targets.items():
        if written[name] is not d:
            d.copy_(written[name])
        gradients[name] = main_grad.result(masters[name], d)
    return gradients


def _with_bf16_weights(
    grad: torch.Tensor,
    saved: _Saved,
    options: _Options,
    parts: _Parts | None,
    needs: dict[str, bool],
    masters: dict[str, torch.Tensor],
) -> _Gradients:
    """`_gradients`, with gradients of weights from BF16 products of rows that are not quantized."""
    x, ids, weights, gate_up_proj, down_proj, down_bias, gate_up, gate_up_scales = saved
    gradients: _Gradients = {}
    num_experts = len(down_proj)
    if gate_up_scales is not None:
        values = dequantize(BlockScaled(gate_up, gate_up_scales), torch.bfloat16)
        gate_up = values.unflatten(0, (-1, 2))
    rank = options.expert_offset, options.num_global_experts
    *rows, offsets, to_row = quantized_rows(grad, ids, num_experts, *rank)
    to_token = tokens_of_rows(to_row, ids.numel())
    grad_activated = trained_dgrad(*rows, down_proj, offsets, 1)
    activation_gradients = ActivationGradients(
        *activation_rows_backward(grad_activated, gate_up, to_row, weights, options.activation)
    )
    grad_scores = activation_gradients.grad_weights
    if down_bias is not None:
        grad_scores = grad_scores + bias_products(grad, down_bias, ids - options.expert_offset)
    gradients["top_k_weights"] = grad_scores
    gradients |= bias_gradients_of_rows(
        needs,
        lambda: dispatch_rows(grad.bfloat16(), to_token),
        activation_gradients.weight_of_row,
        activation_gradients.grad_gate_up,
        offsets,
    )
    if needs["down_proj"]:
        activated = activation_rows(gate_up, options.activation)
        weighted = (activation_gradients.weight_of_row[:, None] * activated).bfloat16()
        grad_rows_bf16 = dispatch_rows(grad.bfloat16(), to_token)
        product = grouped_outer(grad_rows_bf16, weighted, offsets)
        gradients["down_proj"] = put(
            masters["down_proj"], product, begins=_begins(parts, "down_proj")
        )
    if needs["hidden_states"]:
        grad_rows = trained_dgrad(*activation_gradients[:2], gate_up_proj, offsets, 2)
        gradients["hidden_states"] = sum_rows(grad_rows, to_row, activation_gradients.is_first)
    if needs["gate_up_proj"]:
        x_rows = dispatch_rows(x.bfloat16(), to_token)
        product = grouped_outer(activation_gradients.grad_gate_up.flatten(1), x_rows, offsets)
        begins = _begins(parts, "gate_up_proj")
        gradients["gate_up_proj"] = put(masters["gate_up_proj"], product, begins=begins)
    return gradients


_NAMES = TrainedExpertsInputs._fields[:12]  # those of an autograd function


class _TrainedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        saved_dtype: torch.dtype,
        wgrad: Wgrad,
        reuse_codes: bool,
        parts: _Parts | None,
        *inputs: Any,
    ) -> torch.Tensor:
        x, ids, weights, gate_up_proj, down_proj, _, down_bias = inputs[:7]
        activation, _, offset, num_global, _ = inputs[7:]
        ctx.saves = any(ctx.needs_input_grad[4:-1])
        y: torch.Tensor
        y, gate_up = trained_experts(*inputs, reuse_codes, ctx.saves)
        if ctx.saves:
            scale_inv = None
            if saved_dtype == E4M3:
                gate_up, scale_inv = quantize_1x128(gate_up.flatten(0, 1), False)
            projections = gate_up_proj, down_proj, down_bias
            ctx.save_for_backward(x, ids, weights, *projections, gate_up, scale_inv)
        ctx.masters = main_grad.master(gate_up_proj), main_grad.master(down_proj)
        ctx.parts = parts
        ctx.options = _Options(activation, offset, num_global, wgrad)
        named = dict(zip(_NAMES, inputs, strict=True))
        ctx.dtypes = {name: named[name].dtype for name in TRAINED if named[name] is not None}
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needs = dict(zip(_NAMES, ctx.needs_input_grad[4:], strict=True))
        gradients: _Gradients = {}
        if ctx.saves:
            saved = _Saved(*ctx.saved_tensors)
            masters = {"gate_up_proj": saved.gate_up_proj, "down_proj": saved.down_proj}
            for name, master in zip(masters, ctx.masters, strict=True):
                masters[name] = masters[name] if master is None else master
                needs[name] = needs[name] and main_grad.is_asked_for(masters[name])
            gradients = _gradients(grad, saved, ctx.options, ctx.parts, needs, masters)
            for name, dtype in ctx.dtypes.items():
                if (gradient := gradients.get(name)) is not None:
                    gradients[name] = gradient.to(dtype)
        gradients["addend"] = grad
        return None, None, None, None, *(gradients.get(x) if needs[x] else None for x in _NAMES)


def trainable_experts(
    layer: str,
    inputs: tuple[Any, ...],
    saved_dtype: torch.dtype,
    wgrad: Wgrad,
    *,
    reuse_codes: bool,
    parts: _Parts | None = None,
) -> torch.Tensor:
    """`trained_experts` -> bf16 [T, H], with gradients in all floating-point inputs.

    layer: the name in errors.
    inputs: the first twelve of `TrainedExpertsInputs`. Very many tokens are computed in parts.
    saved_dtype: as in `experts.routed_experts`. wgrad: see `Wgrad`.
    parts: of the whole call, if this call computes one part of it.
    """
    y: torch.Tensor
    x, ids, scores, gate_up_proj, down_proj, *options, addend = inputs
    biases = inputs[5:7]
    if not records(layer, x, scores, gate_up_proj, down_proj, *biases, addend):
        y, _ = trained_experts(*inputs, reuse_codes, False)
        return y
    check_saved_dtype(layer, saved_dtype)
    (num_tokens, top_k), (e, h, i) = ids.shape, down_proj.shape
    sizes = Sizes(num_tokens, top_k, e, h, i, False)
    trains = wgrad != "bf16" and (gate_up_proj.requires_grad or down_proj.requires_grad)
    backward = trained_backward_record if trains else experts_backward_record
    num_parts = parts_of(sizes, experts_record, backward)
    if num_parts <= 1:
        if parts is not None:
            parts.add()
        y = _TrainedExperts.apply(saved_dtype, wgrad, reuse_codes, parts, *inputs)
        return y
    if parts is None and any(map(main_grad.overwrites, (gate_up_proj, down_proj))):
        parts = _Parts()
    return torch.cat(
        [
            trainable_experts(
                layer,
                (*tokens, gate_up_proj, down_proj, *options, added),
                saved_dtype,
                wgrad,
                reuse_codes=reuse_codes,
                parts=parts,
            )
            for *tokens, added in split(num_parts, num_tokens, x, ids, scores, addend)
        ]
    )
