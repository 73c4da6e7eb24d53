"""The gradients of experts' biases, and what they add to the gradients of scores.

T tokens, k choices each, E experts, H hidden, I intermediate, R rows. With w the score of a row and
dO the gradient of its token's result:

- The bias of down: `db = sum of w dO` over the rows of an expert.
- The biases of gate and up: `db = sum of d[gate | up]` over these rows, which has w as a factor.
- The gradient of w gets `<dO, b_down>` beside that of the activated values.

All are computed from the E4M3 codes that the GEMMs of the backward take.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..kernels.common.blocks import BLOCK, num_blocks, round_up
from ..kernels.common.checks import (
    INPUTS,
    check_group_bias,
    check_same_device,
    check_shape,
    check_tensor,
)
from ..kernels.jit import Kernel
from ..kernels.program import Codes, Place, Record, Tensor
from ..routing.dispatch import Dispatched
from .grouped_bf16 import grouped_outer

_GRAD_SOURCE = Path(__file__).with_name("bias_grad.cu")
_SCORE_SOURCE = Path(__file__).with_name("bias_score_grad.cu")
_GRAD_THREADS, _SCORE_THREADS = 256, 128


BIASES = "gate_up_proj_bias", "down_proj_bias"  # of a layer


def bias_shapes(
    num_experts: int, hidden_size: int, intermediate_size: int
) -> dict[str, tuple[int, int]]:
    """[E, 2I], gate first, and [E, H], by the names of biases."""
    shapes = (num_experts, 2 * intermediate_size), (num_experts, hidden_size)
    return dict(zip(BIASES, shapes, strict=True))


class BiasGradients(NamedTuple):
    """What a backward takes and gives for biases.

    down: the bias of down [E, H] bf16, fp16 or fp32, contiguous; None: there is none.
    grad_gate_up, grad_down: fp32 [E, 2I] and [E, H], contiguous, to which the gradients of the
        biases are added; None: they are not wanted.
    """

    down: Tensor | None = None
    grad_gate_up: Tensor | None = None
    grad_down: Tensor | None = None

    @classmethod
    def of(
        cls,
        down: torch.Tensor | None,
        grad_gate_up: torch.Tensor | None,
        grad_down: torch.Tensor | None,
    ) -> "BiasGradients":
        """The layouts of a call's tensors, the inputs of `BIAS_INPUTS`."""
        tensors = zip(BIAS_INPUTS, (down, grad_gate_up, grad_down), strict=True)
        return cls(*[None if x is None else Tensor.of(x, name) for name, x in tensors])


NO_BIASES = BiasGradients()
BIAS_INPUTS = "down_bias", "grad_gate_up_bias", "grad_down_bias"
Biases = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def biases_of(inputs: Any) -> Biases:
    """The bias of down, and what the gradients of all biases are added to, of a backward's inputs.

    They are in the order of `BIAS_INPUTS`. A bias that is not contiguous is copied.
    """
    down_bias = inputs.down_proj_bias
    if down_bias is not None:
        down_bias = down_bias.contiguous()
    return down_bias, inputs.grad_gate_up_proj_bias, inputs.grad_down_proj_bias


def check_bias_gradients(op: str, grad: torch.Tensor, sizes: Sequence[int], biases: Biases) -> None:
    """grad: a tensor on the device where all must be. sizes: E, H, I."""
    down_bias, *gradients = biases
    shapes = bias_shapes(*sizes)
    check_group_bias(op, "down_proj_bias", down_bias, shapes["down_proj_bias"], "[E, H]")
    named = {f"grad_{name}": x for name, x in zip(shapes, gradients, strict=True)}
    for (name, x), shape in zip(named.items(), shapes.values(), strict=True):
        if x is not None:
            check_tensor(op, name, x, (torch.float32,), 2)
            check_shape(op, name, x, shape, "[E, N] as the bias")
            if not x.is_contiguous():
                raise ValueError(f"{op}: {name} must be contiguous, got strides {x.stride()}")
    check_same_device(op, grad=grad, down_proj_bias=down_bias, **named)


def empty_bias_gradients(
    needs: dict[str, bool], device: torch.device, sizes: Sequence[int]
) -> dict[str, torch.Tensor | None]:
    """Zeros for the gradients of `gate_up_proj_bias` and `down_proj_bias`; None if not needed.

    sizes: E, H, I.
    """
    return {
        name: torch.zeros(shape, device=device) if needs[name] else None
        for name, shape in bias_shapes(*sizes).items()
    }


def add_bias_gradients(
    down_bias: torch.Tensor | None,
    grad_gate_up_bias: torch.Tensor | None,
    grad_down_bias: torch.Tensor | None,
    grad_rows: torch.Tensor,
    grad_gate_up: torch.Tensor,
    weight_of_row: torch.Tensor,
    expert_offsets: torch.Tensor,
) -> torch.Tensor:
    """Add to the gradients of biases, in PyTorch; return `<dO, b_down>` of each row, fp32 [R].

    grad_rows: dO, fp32 [R, H]. grad_gate_up: fp32 [R, 2I]. weight_of_row: fp32 [R].
    """
    products = torch.zeros_like(weight_of_row)
    for expert, (begin, end) in enumerate(pairwise(expert_offsets.tolist())):
        rows = grad_rows[begin:end]
        if down_bias is not None:
            products[begin:end] = rows @ down_bias[expert].float()
        if grad_down_bias is not None:
            grad_down_bias[expert] += (rows * weight_of_row[begin:end, None]).sum(0)
        if grad_gate_up_bias is not None:
            grad_gate_up_bias[expert] += grad_gate_up[begin:end].sum(0)
    return products


# ---- Where each step of a backward is an op ----


def bias_products(
    grad: torch.Tensor, down_bias: torch.Tensor, choices: torch.Tensor
) -> torch.Tensor:
    """`<dO, b_down>` of each choice, fp32 [T, k]; 0 for ids outside of [0, E).

    grad: dO [T, H]. choices: ids [T, k] of the experts held here.
    """
    products = grad.float() @ down_bias.float().mT
    num_experts = len(down_bias)
    is_here = (choices >= 0) & (choices < num_experts)
    chosen = products.gather(1, choices.long().clamp(0, num_experts - 1))
    return chosen.masked_fill(~is_here, 0)


def bias_gradients_of_rows(
    needs: dict[str, bool],
    grad_rows: Callable[[], torch.Tensor],
    weight_of_row: torch.Tensor,
    grad_gate_up: torch.Tensor,
    expert_offsets: torch.Tensor,
) -> dict[str, torch.Tensor | None]:
    """The gradients of biases that are needed, bf16 [E, 2I] and [E, H], by their names.

    grad_rows: makes dO of each row, bf16 [R, H]. weight_of_row: fp32 [R].
    grad_gate_up: d[gate | up], bf16 [R, 2, I].
    """
    gradients: dict[str, torch.Tensor | None] = {}
    weights = weight_of_row[:, None].bfloat16()
    if needs["down_proj_bias"]:
        gradients["down_proj_bias"] = grouped_outer(grad_rows(), weights, expert_offsets)[..., 0]
    if needs["gate_up_proj_bias"]:
        sums = grouped_outer(grad_gate_up.flatten(1), torch.ones_like(weights), expert_offsets)
        gradients["gate_up_proj_bias"] = sums[..., 0]
    return gradients


# ---- On a Hopper GPU, as steps of a backward ----


def describe_bias_gradients(
    r: Record,
    biases: BiasGradients,
    grad_rows: Codes,
    grad_gate_up_rows: Codes,
    dispatched: Dispatched,
    grad_scores: Place,
    num_choices: int,
    weight_of_row: Place | None,
) -> None:
    """Add steps to r for the biases that there are. Each waits for the previous step.

    Args:
        grad_rows: e4m3 [1, R, H], the gradient of each row's token, and fp32 scales.
        grad_gate_up_rows: e4m3 [1, R, 2 (I rounded up to 128)] and fp32 scales.
        grad_scores: fp32 [T, k], to which `<dO, b_down>` is added. num_choices: T k.
        weight_of_row: fp32 [R]; it is needed for `biases.grad_down`.
    """
    offsets, token_to_row = dispatched.maps.expert_offsets, dispatched.maps.token_to_row
    if biases.down is not None:
        _describe_score_grad(
            r, grad_rows, biases.down, offsets, token_to_row, grad_scores, num_choices
        )
    if biases.grad_down is not None:
        _describe_grad(r, grad_rows, offsets, biases.grad_down, weight_of_row=weight_of_row)
    if biases.grad_gate_up is not None:
        _describe_grad(r, grad_gate_up_rows, offsets, biases.grad_gate_up, parts=2)


def _describe_grad(
    r: Record,
    rows: Codes,
    expert_offsets: Place,
    grad_bias: Tensor,
    *,
    parts: int = 1,
    weight_of_row: Place | None = None,
) -> None:
    """Add a step to r: `grad_bias += the sum of each expert's rows`.

    rows: e4m3 [..., R, N], or [..., R, parts * (N / parts rounded up to 128)].
    grad_bias: [E, N]. weight_of_row: multiplies rows.
    """
    num_experts, size = grad_bias.shape[0], grad_bias.shape[1] // parts
    blocks = parts * num_blocks(size)
    r.step(
        Kernel(_GRAD_SOURCE, "bias_grad_kernel"),
        num_experts * blocks,
        _GRAD_THREADS,
        {
            "rows": rows.data.place,
            "row_bytes": rows.data.bytes_of_stride(-2),
            "scales": rows.scale_inv.place,
            "scale_pitch": rows.scale_inv.strides[-1],
            "expert_offsets": expert_offsets,
            "weight_of_row": weight_of_row,
            "grad_bias": grad_bias.place,
            "num_blocks": blocks,
            "size": size,
            "padded_size": round_up(size, BLOCK),
        },
        programmatic=True,
    )


def _describe_score_grad(
    r: Record,
    rows: Codes,
    bias: Tensor,
    expert_offsets: Place,
    token_to_row: Place,
    grad_scores: Place,
    num_choices: int,
) -> None:
    """Add a step to r: `grad_scores += <row, bias of its expert>`; bias: [E, H], contiguous."""
    num_experts, size = bias.shape
    r.step(
        Kernel(_SCORE_SOURCE, f"bias_score_grad_kernel<{INPUTS[bias.dtype]}>"),
        num_choices,
        _SCORE_THREADS,
        {
            "rows": rows.data.place,
            "row_bytes": rows.data.bytes_of_stride(-2),
            "scales": rows.scale_inv.place,
            "scale_pitch": rows.scale_inv.strides[-1],
            "bias": bias.place,
            "expert_offsets": expert_offsets,
            "token_to_row": token_to_row,
            "grad_scores": grad_scores,
            "num_experts": num_experts,
            "size": size,
        },
        programmatic=True,
    )
