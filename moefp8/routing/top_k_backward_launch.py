"""Launch `top_k_backward.cu`, the gradient of the router's choice, on a Hopper GPU."""

from pathlib import Path
from typing import NamedTuple

import torch

from ..kernels.common.blocks import ceil_div
from ..kernels.common.checks import INPUTS
from ..kernels.common.prepared import layout_of, prepared
from ..kernels.jit import Kernel, Launch, Source, current_driver, pointers, struct_of
from .logits_launch import Sums
from .top_k_launch import MAX_WARPS, THREADS_WITH_SUMS, WARP

_SOURCE = Path(__file__).with_name("top_k_backward.cu")
_Arguments = struct_of(_SOURCE)
NUM_TERMS = 3  # that a gradient is told as, where logits are sums: see `Arguments`


class TopKBackwardInputs(NamedTuple):
    """What `top_k_backward` takes.

    grad: fp32 [T, k], of top_k_weights. logits: [T, E]. top_k_index: int64 [T, k], who was chosen.
    The others: as in `routing.sigmoid_group_topk`.
    """

    grad: torch.Tensor
    logits: torch.Tensor
    top_k_index: torch.Tensor
    by_sigmoid: bool
    renormalize: bool
    scaling_factor: float


class TopKBackwardSources(NamedTuple):
    """Which addresses of a launch are those of its tensors."""

    logits: Source
    grad: Source
    top_k_index: Source
    of_logits: Source


_SOURCES = TopKBackwardSources(*map(Source, range(4)))


def kernel_of(
    num_experts: int, dtype: torch.dtype, parts_of_group: int = 0, *, by_sigmoid: bool
) -> Kernel:
    """parts_of_group: as in `top_k_launch.kernel_of`."""
    items, formula = ceil_div(num_experts, WARP), str(by_sigmoid).lower()
    name = f"top_k_backward_kernel<{INPUTS[dtype]}, {items}, {parts_of_group}, {formula}>"
    return Kernel(_SOURCE, name)


def launch_top_k_backward(inputs: TopKBackwardInputs, of_logits: torch.Tensor) -> None:
    """Write the gradient of logits [T, E] into contiguous of_logits, of the same dtype.

    logits: bf16, fp16 or fp32. There is at least one token.
    """
    inputs = inputs._replace(
        grad=inputs.grad.float().contiguous(), top_k_index=inputs.top_k_index.contiguous()
    )
    key = ("top_k_backward", layout_of(inputs.logits), inputs.grad.shape[1], inputs[3:])
    launch = prepared(key, lambda: prepare_top_k_backward(inputs, _SOURCES))
    tensors = inputs.logits, inputs.grad, inputs.top_k_index, of_logits
    launch.on(inputs.logits.get_device(), tuple([x.data_ptr() for x in tensors]))


def prepare_top_k_backward(
    inputs: TopKBackwardInputs, sources: TopKBackwardSources, sums: Sums | None = None
) -> Launch:
    """What `sources` name: logits that lie like those of `inputs`, and contiguous tensors.

    sums: logits [T, E] are not given, but these, by the kernel before; of_logits is bf16 [T, 3, E]
        then: what is nearest to a gradient, what that lacks, and the first once more.
    """
    _, logits, index, by_sigmoid, renormalize, scaling_factor = inputs
    num_tokens, num_experts = logits.shape
    row_bytes, expert_bytes = (stride * logits.element_size() for stride in logits.stride())
    driver, device_index = current_driver(), logits.get_device()
    tokens_of_cta = min(MAX_WARPS, ceil_div(num_tokens, driver.num_sms(device_index)))
    num_parts, parts_of_group = sums or (0, 0)
    arguments = _Arguments(
        row_bytes=row_bytes,
        expert_bytes=expert_bytes,
        num_tokens=num_tokens,
        num_experts=num_experts,
        top_k=index.shape[1],
        renormalize=renormalize,
        scaling_factor=scaling_factor,
        tokens_of_cta=tokens_of_cta,
        num_parts=num_parts,
    )
    kernel = kernel_of(num_experts, logits.dtype, parts_of_group, by_sigmoid=by_sigmoid)
    return Launch(
        driver.load(kernel, device_index),
        ceil_div(num_tokens, tokens_of_cta),
        tokens_of_cta * WARP if sums is None else THREADS_WITH_SUMS,
        (arguments,),
        pointers(_Arguments, **sources._asdict()),
        programmatic=sums is not None,
    )
