"""Describe `top_k_backward.cu`, the gradient of the router's choice on a Hopper GPU, and launch it.

T tokens, k choices each, E experts; a warp has a token.
"""

from pathlib import Path
from typing import NamedTuple

import torch

from ..kernels.common.blocks import ceil_div
from ..kernels.common.checks import INPUTS
from ..kernels.common.prepared import layout_of, prepared
from ..kernels.jit import Kernel, Launch
from ..kernels.program import Place, Record, Tensor, prepare_launch
from ..kernels.targets import target_of
from .logits_launch import Sums
from .top_k_launch import WARP, kind_of, step_for_logits

_SOURCE = Path(__file__).with_name("top_k_backward.cu")
NUM_TERMS = 3  # BF16 numbers that a gradient is written as, where logits are sums


class TopKBackwardInputs(NamedTuple):
    """The arguments of `top_k_backward`.

    grad: fp32 [T, k], of top_k_weights. logits: [T, E]. top_k_index: int64 [T, k], the chosen
    experts. The others: as in `routing.sigmoid_group_topk`.
    """

    grad: torch.Tensor
    logits: torch.Tensor
    top_k_index: torch.Tensor
    by_sigmoid: bool
    renormalize: bool
    scaling_factor: float


def kernel_of(
    num_experts: int, dtype: torch.dtype, parts_of_group: int = 0, *, by_sigmoid: bool
) -> Kernel:
    """parts_of_group: as in `top_k_launch.kernel_of`."""
    items, formula = ceil_div(num_experts, WARP), str(by_sigmoid).lower()
    name = f"top_k_backward_kernel<{INPUTS[dtype]}, {items}, {parts_of_group}, {formula}>"
    return Kernel(_SOURCE, name)


def launch_top_k_backward(inputs: TopKBackwardInputs, grad_logits: torch.Tensor) -> None:
    """Write the gradient of logits [T, E] into contiguous grad_logits, of the same dtype.

    logits: bf16, fp16 or fp32. There is at least one token.
    """
    inputs = inputs._replace(
        grad=inputs.grad.float().contiguous(), top_k_index=inputs.top_k_index.contiguous()
    )
    key = ("top_k_backward", layout_of(inputs.logits), inputs.grad.shape[1], inputs[3:])
    launch = prepared(key, lambda: _prepare(inputs))
    tensors = inputs.logits, inputs.grad, inputs.top_k_index, grad_logits
    launch.on(inputs.logits.get_device(), tuple([x.data_ptr() for x in tensors]))


def _prepare(inputs: TopKBackwardInputs) -> Launch:
    _, logits, index, by_sigmoid, renormalize, scaling_factor = inputs
    device_index = logits.get_device()
    r = Record(target_of(device_index), ("logits", "grad", "top_k_index", "grad_logits"))
    describe_top_k_backward(
        r,
        Tensor.of(logits, "logits"),
        Place("grad"),
        Place("top_k_index"),
        Place("grad_logits"),
        index.shape[1],
        by_sigmoid=by_sigmoid,
        renormalize=renormalize,
        scaling_factor=scaling_factor,
    )
    return prepare_launch(r, device_index)


def describe_top_k_backward(
    r: Record,
    logits: Tensor | Sums,
    grad: Place,
    top_k_index: Place,
    grad_logits: Place,
    top_k: int,
    *,
    by_sigmoid: bool,
    renormalize: bool,
    scaling_factor: float,
) -> None:
    """One step that writes the gradient of logits.

    logits: [T, E] in bf16, fp16 or fp32, or sums that the step before writes; T and E at least 1.
    grad: fp32 [T, k], of top_k_weights, contiguous. top_k_index: int64 [T, k], contiguous.
    grad_logits: [T, E] in the dtype of logits, contiguous. If these are sums, bf16 [T, 3, E]: the
        gradient rounded to BF16, the rest rounded to BF16, and the first again.
    """
    arguments = {
        "grad": grad,
        "top_k_index": top_k_index,
        "of_logits": grad_logits,
        "top_k": top_k,
        "renormalize": renormalize,
        "scaling_factor": scaling_factor,
    }
    kernel = kernel_of(logits.shape[1], *kind_of(logits), by_sigmoid=by_sigmoid)
    step_for_logits(r, kernel, logits, arguments)
