"""All gradients of routed SwiGLU experts whose weights are trained, by FP8 GEMMs.

T tokens, k choices each, E experts, H hidden, I intermediate, R = T k rows. With dO the gradient of
the result, a backward takes these steps:

1. dO is quantized once for each token, and copied to its rows.
2. dA = dO W_down, rounded to BF16.
3. `activation_columns_backward`: the gradients of the weights w of choices, d[gate | up] in row
   codes and in column codes, and w a in column codes.
4. dX = d[gate | up] W_gate_up, summed over each token's rows in the order of its choices.
5. dW_down = dO^T (w a) and dW_gate_up = d[gate | up]^T X, for which dO and X are gathered from the
   tokens as column codes, in temporary memory.
"""

from typing import NamedTuple

import torch

from ...kernels.common.activation import Activation
from ...kernels.common.blocks import MIN_GRADIENT_AMAX
from ...kernels.common.checks import FLOATS, check_same_device, check_shape, check_tensor
from ...kernels.common.prepared import Launches, layout_of
from ...kernels.gemm.grouped import m_grouped_fp8_gemm_nt_contiguous
from ...kernels.gemm.k_grouped import k_grouped_gemm
from ...kernels.gemm.sizes import Sizes
from ...kernels.jit import current_driver
from ...kernels.program import Codes, Record, layouts, prepare_launches
from ...kernels.registry import Written, register, register_inputs
from ...kernels.targets import target_of
from ...quant.block_scaled import BlockScaled, dequantize
from ...quant.columns import quantize_128x1, readable
from ...routing.combine import sum_rows
from ..activation import readable_saved
from ..activation_rows import weights_of_rows
from ..expert_biases import (
    BIAS_INPUTS,
    BiasGradients,
    add_bias_gradients,
    biases_of,
    check_bias_gradients,
)
from ..expert_parts import Choices, TransposedWeights
from ..grouped_linear import empty_dgrad
from .activation_columns import ActivationColumnsGradients, activation_columns_backward
from .experts_records import INPUTS, describe_trained_backward
from .rows import quantized_rows, tokens_of_rows
from .weights import codes_of

_OP = "trained_experts_backward"


def _dgrad(
    data: torch.Tensor,
    scale_inv: torch.Tensor,
    weight: torch.Tensor,
    expert_offsets: torch.Tensor,
    parts: int,
) -> torch.Tensor:
    grad_rows = empty_dgrad(data, scale_inv, weight)
    codes = codes_of(weight, parts, is_backward=True)
    b = codes.transposed, codes.scale_inv.mT
    m_grouped_fp8_gemm_nt_contiguous((data, scale_inv), b, grad_rows, expert_offsets=expert_offsets)
    return grad_rows


trained_dgrad = register(
    "trained_dgrad(Tensor data, Tensor scale_inv, Tensor weight, Tensor expert_offsets, int parts)"
    " -> Tensor",
    reference=_dgrad,
    fake=empty_dgrad,
    kernels=_dgrad,
)
"""bf16 [R, K]: quantized rows times the master weight [E, N, K] of their expert, as in
`grouped_dgrad`. Rows of no expert are undefined."""


class TrainedExpertsBackwardInputs(NamedTuple):
    """The inputs of `trained_experts_backward`.

    grad: [T, H] bf16, fp16 or fp32, the gradient of the result.
    gate_up: saved by the forward, bf16 [R, 2, I], or its codes e4m3 [2 R, I] with fp32 scales
        [2 R, ceil(I/128)].
    grad_gate_up_proj, grad_down_proj: bf16 or fp32 in the shapes of the weights, written with their
        gradients; None: not wanted.
    grad_gate_up_proj_bias, grad_down_proj_bias: as in `ExpertsBackwardInputs`.
    adds_to_gate_up_proj, adds_to_down_proj: whether gradients are added to these, in fp32.
    blocks: whether column codes of X and of w a have one scale for 128x128.
    The others: as in the forward.
    """

    grad: torch.Tensor
    hidden_states: torch.Tensor
    top_k_index: torch.Tensor
    top_k_weights: torch.Tensor
    gate_up: torch.Tensor
    gate_up_scale_inv: torch.Tensor | None
    gate_up_proj: torch.Tensor
    down_proj: torch.Tensor
    down_proj_bias: torch.Tensor | None
    grad_gate_up_proj: Written | None
    grad_down_proj: Written | None
    grad_gate_up_proj_bias: Written | None
    grad_down_proj_bias: Written | None
    adds_to_gate_up_proj: bool
    adds_to_down_proj: bool
    activation: Activation
    expert_offset: int
    num_global_experts: int | None
    blocks: bool


_FIRST_OPTION = TrainedExpertsBackwardInputs._fields.index("adds_to_gate_up_proj")


def _empty_gradients(inputs: TrainedExpertsBackwardInputs) -> tuple[torch.Tensor, torch.Tensor]:
    grad, weights = inputs.grad, inputs.top_k_weights
    dx = torch.empty_like(grad, dtype=torch.bfloat16, memory_format=torch.contiguous_format)
    return dx, weights.new_empty(weights.shape, dtype=torch.float32)


def _check_backward(inputs: TrainedExpertsBackwardInputs) -> None:
    grad, ids, down = inputs.grad, inputs.top_k_index, inputs.down_proj
    check_same_device(_OP, grad=grad, top_k_index=ids, gate_up=inputs.gate_up, down_proj=down)
    check_tensor(_OP, "grad", grad, FLOATS, 2)
    check_shape(_OP, "grad", grad, [len(ids), down.shape[1]], "[T, H]")
    x = inputs.hidden_states
    check_shape(_OP, "hidden_states", x, grad.shape, "[T, H] as grad")
    shape = ids.shape
    check_shape(_OP, "top_k_weights", inputs.top_k_weights, shape, "[T, k] as top_k_index")
    check_bias_gradients(_OP, grad, down.shape, biases_of(inputs))


def _allocate_backward(
    inputs: TrainedExpertsBackwardInputs,
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_backward(inputs)
    return _empty_gradients(inputs)


def _backward(inputs: TrainedExpertsBackwardInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the steps at the head of this file, one by one."""
    _check_backward(inputs)
    grad, x, ids, weights, *gate_up, gate_up_proj, down_proj = inputs[:8]
    grad_gate_up, grad_down = inputs.grad_gate_up_proj, inputs.grad_down_proj
    activation, blocks = inputs.activation, inputs.blocks
    num_experts, rank = len(down_proj), (inputs.expert_offset, inputs.num_global_experts)
    *rows, offsets, to_row = quantized_rows(grad, ids, num_experts, *rank)
    to_token = tokens_of_rows(to_row, ids.numel())
    grad_activated = trained_dgrad(*rows, down_proj, offsets, 1)
    activation_gradients = ActivationColumnsGradients(
        *activation_columns_backward(
            grad_activated, *gate_up, offsets, to_row, weights, activation, blocks
        )
    )
    grad_rows = trained_dgrad(*activation_gradients[:2], gate_up_proj, offsets, 2)
    dx = sum_rows(grad_rows, to_row, activation_gradients.is_first)
    if grad_down is not None:
        grad_columns = quantize_128x1(grad, offsets, to_token, False, MIN_GRADIENT_AMAX, False)
        activated = activation_gradients.activated_columns, activation_gradients.activated_scale_inv
        k_grouped_gemm(*grad_columns, *activated, grad_down, offsets, 0, inputs.adds_to_down_proj)
    if grad_gate_up is not None:
        x_columns = quantize_128x1(x, offsets, to_token, False, MIN_GRADIENT_AMAX, blocks)
        columns = activation_gradients.gate_up_columns, activation_gradients.gate_up_scale_inv
        k_grouped_gemm(*columns, *x_columns, grad_gate_up, offsets, 0, inputs.adds_to_gate_up_proj)
    grad_scores = activation_gradients.grad_weights
    if len(rows[0]) and any(x is not None for x in biases_of(inputs)):
        grad_rows, grad_gate_up = (
            dequantize(BlockScaled(*x), torch.float32) for x in (rows, activation_gradients[:2])
        )
        weight_of_row, _ = weights_of_rows(to_row, weights, len(grad_rows))
        grad_gate_up = grad_gate_up.unflatten(1, (2, -1))[..., : down_proj.shape[2]].flatten(1)
        args = grad_rows, grad_gate_up, weight_of_row, offsets
        products = add_bias_gradients(*biases_of(inputs), *args)
        grad_scores += products[to_row.clamp(min=0)].masked_fill(to_row < 0, 0.0)
    return dx, grad_scores


def _launch_backward(inputs: TrainedExpertsBackwardInputs) -> tuple[torch.Tensor, torch.Tensor]:
    if 0 in (*inputs.top_k_index.shape, *inputs.down_proj.shape):
        return _backward(inputs)
    dx, grad_weights = _empty_gradients(inputs)
    down = codes_of(inputs.down_proj, is_backward=True)
    gate_up = codes_of(inputs.gate_up_proj, parts=2, is_backward=True)
    grad = inputs.grad if inputs.grad.stride(1) == 1 else inputs.grad.contiguous()
    saved, saved_scales = readable_saved(inputs.gate_up, inputs.gate_up_scale_inv)
    tensors = (  # in the order of `INPUTS`
        readable(grad),
        readable(inputs.hidden_states),
        inputs.top_k_index,
        inputs.top_k_weights,
        saved,
        saved_scales,
        down.transposed,
        down.scale_inv.mT,
        gate_up.transposed,
        gate_up.scale_inv.mT,
        inputs.grad_down_proj,
        inputs.grad_gate_up_proj,
        dx,
        grad_weights,
        *biases_of(inputs),
    )
    driver = current_driver()
    key = (
        _OP,
        tuple([None if x is None else (layout_of(x), x.data_ptr() % 16) for x in tensors]),
        len(inputs.down_proj),
        inputs[_FIRST_OPTION:],
        driver.max_sms,
    )
    prepared = driver.prepared().get(key)
    if prepared is None:
        _check_backward(inputs)
        prepared = driver.keep(key, _prepare(inputs, tensors))
    addresses = tuple([0 if x is None else x.data_ptr() for x in tensors])
    prepared(grad.get_device(), addresses)
    return dx, grad_weights


def _prepare(
    inputs: TrainedExpertsBackwardInputs, tensors: tuple[torch.Tensor | None, ...]
) -> Launches:
    """tensors: of a call, in the order of `INPUTS`."""
    (num_tokens, top_k), (e, h, i) = inputs.top_k_index.shape, inputs.down_proj.shape
    sizes = Sizes(num_tokens, top_k, e, h, i, False, inputs.num_global_experts)
    named = layouts(**dict(zip(INPUTS, tensors, strict=True)))
    names = "grad", "x", "saved", "saved_scales", "grad_down", "grad_gate_up", "dx"
    device_index = inputs.grad.get_device()
    r = Record(target_of(device_index), INPUTS)
    describe_trained_backward(
        r,
        sizes,
        **{name: named[name] for name in names},
        choices=Choices(named["ids"], named["scores"]),
        weights=TransposedWeights(
            Codes(named["down"], named["down_scales"]),
            Codes(named["gate_up"], named["gate_up_scales"]),
        ),
        activation=inputs.activation,
        expert_offset=inputs.expert_offset,
        blocks=inputs.blocks,
        accumulate=(inputs.adds_to_down_proj, inputs.adds_to_gate_up_proj),
        biases=BiasGradients(*(named[name] for name in BIAS_INPUTS)),
    )
    return prepare_launches(r, device_index)


trained_experts_backward = register_inputs(
    _OP,
    TrainedExpertsBackwardInputs,
    "(Tensor, Tensor)",
    reference=_backward,
    fake=_allocate_backward,
    kernels=_launch_backward,
)
"""`TrainedExpertsBackwardInputs` -> bf16 dX [T, H] and fp32 [T, k], the gradient of the weights of
choices; the gradients of gate_up_proj and down_proj go to the given tensors."""
