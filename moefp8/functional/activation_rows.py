"""The activation of rows and its gradient, for feed-forwards and experts in separate steps.

T tokens, k choices each, R rows, I intermediate.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from ..kernels.common.activation import Activation
from ..kernels.common.blocks import (
    BLOCK,
    E4M3,
    MIN_GRADIENT_AMAX,
    ceil_div,
    empty_tma_aligned,
    round_up,
    zero_padded,
)
from ..kernels.common.checks import FLOATS, check_same_device, check_shape, check_tensor
from ..kernels.common.prepared import layout_of, prepared
from ..kernels.jit import Kernel, Launch
from ..kernels.program import Codes, Place, Record, Target, Tensor, layouts, prepare_launch
from ..kernels.registry import register_inputs
from ..kernels.targets import target_of
from ..quant.numerics import quantize_1x128
from ..routing.combine import first_choices
from .activation import (
    activate,
    activate_grad,
    describe_activation_backward,
    empty_gate_up,
    in_saved_layout,
)

_OP, _GRAD, _BACKWARD = "activation_rows", "activation_rows_grad", "activation_rows_backward"


class ActivationInputs(NamedTuple):
    """gate_up: bf16 [R, 2, I], best in the layout of `empty_gate_up`."""

    gate_up: torch.Tensor
    activation: Activation


def _allocate(inputs: ActivationInputs) -> torch.Tensor:
    """Check, then allocate the result; this is also the fake body."""
    gate_up = inputs.gate_up
    check_tensor(_OP, "gate_up", gate_up, (torch.bfloat16,), 3)
    num_rows, _, size = gate_up.shape
    check_shape(_OP, "gate_up", gate_up, [num_rows, 2, size], "[R, 2, I]")
    return _empty_rows(gate_up, num_rows, size)


def _empty_rows(like: torch.Tensor, num_rows: int, size: int) -> torch.Tensor:
    """Memory for bf16 [R, I]; rows begin at multiples of 16 bytes."""
    return like.new_empty((num_rows, round_up(size, 8)), dtype=torch.bfloat16)[:, :size]


def _body(inputs: ActivationInputs) -> torch.Tensor:
    activated = _allocate(inputs)
    gate, up = inputs.gate_up.unbind(1)
    return activated.copy_(activate(gate, up, inputs.activation))


def _launch(inputs: ActivationInputs) -> torch.Tensor:
    activated = _allocate(inputs)
    if activated.numel():
        gate_up, activation = in_saved_layout(inputs.gate_up), inputs.activation
        if gate_up.stride(1) != round_up(gate_up.shape[2], 8):  # as in the result
            gate_up = empty_gate_up(gate_up, len(gate_up), gate_up.shape[2]).copy_(gate_up)
        key = _OP, layout_of(gate_up), activation
        launch = prepared(key, lambda: _prepare(gate_up, activation))
        launch.on(gate_up.get_device(), (gate_up.data_ptr(), activated.data_ptr()))
    return activated


def _prepare(gate_up: torch.Tensor, activation: Activation) -> Launch:
    device_index = gate_up.get_device()
    r = Record(target_of(device_index), ("gate_up", "activated"))
    describe_activation_rows(r, Tensor.of(gate_up, "gate_up"), Place("activated"), activation)
    return prepare_launch(r, device_index)


def activation_rows_kernels(target: Target, size: int, activation: Activation) -> Iterator[Kernel]:
    """The kernel of `activation_rows`."""
    r = Record(target, ("gate_up", "activated"))
    describe_activation_rows(
        r, Tensor.contiguous("gate_up", 1, 2, size), Place("activated"), activation
    )
    yield from r.kernels


activation_rows = register_inputs(
    _OP, ActivationInputs, "Tensor", reference=_body, fake=_allocate, kernels=_launch
)
"""`activate` of each row, rounded to BF16: `ActivationInputs` -> [R, I]."""


# ---- The gradient ----


class ActivationGradInputs(NamedTuple):
    """The inputs of `activation_rows_grad`.

    grad: bf16 [R, I], the gradient of activated values. gate_up: as in `activation_rows`.
    """

    grad: torch.Tensor
    gate_up: torch.Tensor
    activation: Activation


def _check_grad(op: str, grad: torch.Tensor, gate_up: torch.Tensor) -> None:
    check_same_device(op, grad=grad, gate_up=gate_up)
    check_tensor(op, "grad", grad, (torch.bfloat16,), 2)
    num_rows, size = grad.shape
    check_tensor(op, "gate_up", gate_up, (torch.bfloat16,), 3)
    check_shape(op, "gate_up", gate_up, [num_rows, 2, size], "[R, 2, I] for grad [R, I]")


def _allocate_grad(inputs: ActivationGradInputs) -> torch.Tensor:
    """Check, then allocate the gradient; this is also the fake body."""
    _check_grad(_GRAD, inputs.grad, inputs.gate_up)
    return empty_gate_up(inputs.grad, *inputs.grad.shape)


def _body_grad(inputs: ActivationGradInputs) -> torch.Tensor:
    grad_gate_up, (gate, up) = _allocate_grad(inputs), inputs.gate_up.unbind(1)
    *grad_halves, _ = activate_grad(inputs.grad.float(), gate, up, inputs.activation)
    return grad_gate_up.copy_(torch.stack(grad_halves, 1))


def _launch_grad(inputs: ActivationGradInputs) -> torch.Tensor:
    grad_gate_up = _allocate_grad(inputs)
    if grad_gate_up.numel():
        grad, gate_up = _in_whole_rows(inputs.grad), in_saved_layout(inputs.gate_up)
        activation, device_index = inputs.activation, grad.get_device()

        def prepare() -> Launch:
            tensors = Tensor.of(grad, "grad"), Tensor.of(gate_up, "gate_up")
            r = _grad_record(target_of(device_index), *tensors, activation)
            return prepare_launch(r, device_index)

        launch = prepared((_GRAD, layout_of(grad), layout_of(gate_up), activation), prepare)
        launch.on(device_index, tuple([x.data_ptr() for x in (grad, gate_up, grad_gate_up)]))
    return grad_gate_up


def _in_whole_rows(grad: torch.Tensor) -> torch.Tensor:
    """grad itself, or a copy if its rows do not begin at multiples of 16 bytes."""
    if (grad.data_ptr() | 2 * grad.stride(0)) % 16 or grad.stride(1) != 1:
        return _empty_rows(grad, *grad.shape).copy_(grad)
    return grad


def _grad_record(target: Target, grad: Tensor, gate_up: Tensor, activation: Activation) -> Record:
    r = Record(target, ("grad", "gate_up", "grad_gate_up"))
    rows = Place("grad_gate_up")
    describe_activation_backward(r, grad, gate_up, None, None, activation, bf16_rows=rows)
    return r


def activation_rows_grad_kernels(
    target: Target, size: int, activation: Activation
) -> Iterator[Kernel]:
    """The kernel of `activation_rows_grad`."""
    grad, gate_up = Tensor.contiguous("grad", 1, size), Tensor.contiguous("gate_up", 1, 2, size)
    yield from _grad_record(target, grad, gate_up, activation).kernels


activation_rows_grad = register_inputs(
    _GRAD,
    ActivationGradInputs,
    "Tensor",
    reference=_body_grad,
    fake=_allocate_grad,
    kernels=_launch_grad,
)
"""The gradient of `activation_rows`, d[gate | up] rounded to BF16: `ActivationGradInputs` ->
[R, 2, I] in the layout of `empty_gate_up`."""


# ---- The gradient of rows of choices ----


class ActivationGradients(NamedTuple):
    """The results of `activation_rows_backward`; rows of no choice are undefined.

    codes, scale_inv: d[gate | up], e4m3 [R, 2 * (I rounded up to 128)], halves padded with zeros,
        and its fp32 1x128 scales as `quantize_1x128` makes them.
    grad_gate_up: d[gate | up], not quantized: bf16 [R, 2, I] in the layout of `empty_gate_up`.
    weight_of_row: fp32 [R], the sum of the weights of all choices of a row.
    grad_weights: fp32 [T, k], 0 where there is no row.
    is_first: fp32 [T, k], 1 for the first choice of each row and 0 for others.
    """

    codes: torch.Tensor
    scale_inv: torch.Tensor
    grad_gate_up: torch.Tensor
    weight_of_row: torch.Tensor
    grad_weights: torch.Tensor
    is_first: torch.Tensor


class ActivationBackwardInputs(NamedTuple):
    """The inputs of `activation_rows_backward`.

    grad: bf16 [R, I], the gradient of activated values, not yet times the weight of a choice.
    gate_up: as in `activation_rows`.
    token_to_row: int32 [T, k], as in `RoutingPlan`.
    top_k_weights: [T, k] bf16, fp16 or fp32.
    """

    grad: torch.Tensor
    gate_up: torch.Tensor
    token_to_row: torch.Tensor
    top_k_weights: torch.Tensor
    activation: Activation


def _allocate_backward(inputs: ActivationBackwardInputs) -> ActivationGradients:
    """Check, then allocate the gradients; this is also the fake body."""
    grad, gate_up, token_to_row, weights, _ = inputs
    _check_grad(_BACKWARD, grad, gate_up)
    check_same_device(_BACKWARD, grad=grad, top_k_weights=weights)
    (num_rows, size), device = grad.shape, grad.device
    check_tensor(_BACKWARD, "top_k_weights", weights, FLOATS, 2)
    check_shape(_BACKWARD, "top_k_weights", weights, token_to_row.shape, "[T, k]")
    padded = 2 * round_up(size, BLOCK)
    per_choice = (weights.new_empty(weights.shape, dtype=torch.float32) for _ in range(2))
    return ActivationGradients(
        grad.new_empty((num_rows, padded), dtype=E4M3),
        empty_tma_aligned((num_rows, padded // BLOCK), device),
        empty_gate_up(grad, num_rows, size),
        grad.new_empty(num_rows, dtype=torch.float32),
        *per_choice,
    )


def _body_backward(inputs: ActivationBackwardInputs) -> ActivationGradients:
    gradients = _allocate_backward(inputs)
    grad, gate_up, token_to_row, top_k_weights, activation = inputs
    num_rows, (gate, up) = len(grad), gate_up.unbind(1)
    weight_of_row, is_first = weights_of_rows(token_to_row, top_k_weights, num_rows)
    *grad_halves, activated = activate_grad(grad.float(), gate, up, activation)
    grad_gate_up = torch.stack(grad_halves, 1) * weight_of_row[:, None, None]
    padded = zero_padded(grad_gate_up, 2).flatten(1)
    data, scale_inv = quantize_1x128(padded, min_amax=MIN_GRADIENT_AMAX)
    products = (grad.float() * activated).sum(-1)
    if num_rows:
        grad_weights = products[token_to_row.clamp(min=0)].masked_fill(token_to_row < 0, 0.0)
    else:
        grad_weights = torch.zeros_like(is_first)
    values = data, scale_inv, grad_gate_up, weight_of_row, grad_weights, is_first
    for x, value in zip(gradients, values, strict=True):
        x.copy_(value)
    return gradients


def weights_of_rows(
    token_to_row: torch.Tensor, top_k_weights: torch.Tensor, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [R], the weight of each row; fp32 [T, k], 1 for the first choice of each row.

    Two choices of one expert by one token share a row.
    """
    same = token_to_row[:, :, None] == token_to_row[:, None, :]
    weights = torch.where(same, top_k_weights.float()[:, None, :], 0.0).sum(-1)
    at = token_to_row.long().masked_fill(token_to_row < 0, num_rows)
    row_weights = weights.new_zeros(num_rows + 1).scatter_(0, at.flatten(), weights.flatten())
    return row_weights[:num_rows], first_choices(token_to_row)


def _launch_backward(inputs: ActivationBackwardInputs) -> ActivationGradients:
    grad, gate_up, token_to_row, weights, activation = inputs
    if grad.numel() == 0:
        return _body_backward(inputs)
    gradients = _allocate_backward(inputs)
    gate_up, token_to_row = in_saved_layout(gate_up), token_to_row.contiguous()
    grad = _in_whole_rows(grad)
    inputs = ActivationBackwardInputs(grad, gate_up, token_to_row, weights, activation)
    key = (_BACKWARD, *map(layout_of, inputs[:4]), activation)
    launch = prepared(key, lambda: _prepare_backward(inputs, gradients))
    launch.on(grad.get_device(), tuple([x.data_ptr() for x in (*inputs[:4], *gradients)]))
    return gradients


def _prepare_backward(inputs: ActivationBackwardInputs, gradients: ActivationGradients) -> Launch:
    grad, gate_up, _, weights, activation = inputs
    device_index = grad.get_device()
    r = Record(target_of(device_index), (*ActivationBackwardInputs._fields[:4], *gradients._fields))
    tensors = layouts(grad=grad, gate_up=gate_up, top_k_weights=weights)
    describe_activation_backward(
        r,
        tensors["grad"],
        tensors["gate_up"],
        None,
        Codes(Tensor.of(gradients.codes, "codes"), Tensor.of(gradients.scale_inv, "scale_inv")),
        activation,
        weights=tensors["top_k_weights"],
        token_to_row=Place("token_to_row"),
        grad_weights=Place("grad_weights"),
        is_first=Place("is_first"),
        bf16_rows=Place("grad_gate_up"),
        weight_of_row=Place("weight_of_row"),
    )
    return prepare_launch(r, device_index)


def activation_rows_backward_kernels(
    target: Target, dtype: torch.dtype, size: int, activation: Activation
) -> Iterator[Kernel]:
    """The kernel of `activation_rows_backward`. dtype: of the weights of choices."""
    r = Record(target, ActivationBackwardInputs._fields[:4])
    describe_activation_backward(
        r,
        Tensor.contiguous("grad", 1, size),
        Tensor.contiguous("gate_up", 1, 2, size),
        None,
        r.codes("rows", (1, 1, 2 * round_up(size, BLOCK))),
        activation,
        weights=Tensor.contiguous("top_k_weights", 1, 1, dtype=dtype),
        token_to_row=Place("token_to_row"),
    )
    yield from r.kernels


activation_rows_backward = register_inputs(
    _BACKWARD,
    ActivationBackwardInputs,
    "(Tensor codes, Tensor scale_inv, Tensor grad_gate_up, Tensor weight_of_row, "
    "Tensor grad_weights, Tensor is_first)",
    reference=_body_backward,
    fake=_allocate_backward,
    kernels=_launch_backward,
)
"""The gradient of `activation_rows` times the weights of choices: `ActivationBackwardInputs` ->
`ActivationGradients`. grad_weights[t, j] is the dot product of grad and the activated values in the
row of choice j of token t."""


# ---- The kernel of rows ----

_SOURCE = Path(__file__).with_name("activation_rows.cu")
_WARP, _MAX_THREADS, _COLUMNS = 32, 256, 8


def describe_activation_rows(
    r: Record, gate_up: Tensor, activated: Place, activation: Activation
) -> None:
    """Add a step to r: `activate` of gate and up. It waits for the previous step.

    Args:
        gate_up: bf16 [R, 2, I] in the layout of `empty_gate_up`.
        activated: bf16 [R, I], in rows of the same pitch.
    """
    num_rows, _, size = gate_up.shape
    r.step(
        Kernel(_SOURCE, f"activation_rows_kernel<{activation.enumerator}>"),
        num_rows,
        min(_MAX_THREADS, round_up(ceil_div(size, _COLUMNS), _WARP)),
        {
            "gate_up": gate_up.place,
            "activated": activated,
            "row_bytes": gate_up.bytes_of_stride(1),
            "size": size,
            "activation": activation.arguments,
        },
        programmatic=True,
    )
