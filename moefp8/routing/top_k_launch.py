"""Launch `top_k.cu`, the router's choice, on a Hopper GPU."""

from pathlib import Path
from typing import NamedTuple

import torch

from ..kernels.common.blocks import ceil_div
from ..kernels.common.checks import INPUTS
from ..kernels.common.prepared import layout_of, prepared
from ..kernels.jit import Kernel, Launch, Source, current_driver, pointers, struct_of
from .logits_launch import Sums

_SOURCE = Path(__file__).with_name("top_k.cu")
_Arguments = struct_of(_SOURCE)
WARP = 32
MAX_WARPS, THREADS_WITH_SUMS = 4, 256  # `kMaxWarps` and `kMaxThreads` in top_k.cuh
MAX_EXPERTS = 512  # a lane holds every 32nd in registers


class TopKInputs(NamedTuple):
    """What `sigmoid_group_topk` takes: see `routing.sigmoid_group_topk`."""

    logits: torch.Tensor
    bias: torch.Tensor | None
    k: int
    num_groups: int
    topk_groups: int
    renormalize: bool
    scaling_factor: float


def softmax_inputs(logits: torch.Tensor, k: int, renormalize: bool) -> TopKInputs:
    """What `softmax_topk` takes, as its kernel is given it: see `routing.softmax_topk`."""
    return TopKInputs(logits, None, k, 1, 1, renormalize, 1.0)


def can_launch(logits: torch.Tensor, *_: object) -> bool:
    """Whether a kernel chooses among as many experts. The op's checks refuse what is no matrix."""
    return logits.ndim != 2 or logits.shape[1] <= MAX_EXPERTS


def kernel_of(
    op: str, num_experts: int, dtype: torch.dtype = torch.float32, parts_of_group: int = 0
) -> Kernel:
    """parts_of_group: of the sums that logits are given as, in FP32; 0: logits are given."""
    items = ceil_div(num_experts, WARP)
    return Kernel(_SOURCE, f"{op}_kernel<{INPUTS[dtype]}, {items}, {parts_of_group}>")


def launch_top_k(op: str, inputs: TopKInputs, index: torch.Tensor, weights: torch.Tensor) -> None:
    """Write the choice of each token into index and weights: one kernel on the current stream.

    Logits of other dtypes than bf16, fp16 and fp32 are copied first, and so is a bias that is not
    contiguous fp32. There is at least one token.
    """
    logits, bias = inputs[:2]
    if logits.dtype not in INPUTS:
        logits = logits.float()
    if bias is not None:
        bias = bias.float().contiguous()
    key = (op, layout_of(logits), inputs[2:])
    launch = prepared(key, lambda: prepare_top_k(op, inputs._replace(logits=logits), _SOURCES))
    tensors = logits, bias, index, weights
    addresses = tuple([0 if x is None else x.data_ptr() for x in tensors])
    launch.on(logits.get_device(), addresses)


class TopKSources(NamedTuple):
    """Which addresses of a launch are those of a choice."""

    logits: Source
    bias: Source | None
    top_k_index: Source
    top_k_weights: Source


_SOURCES = TopKSources(*map(Source, range(4)))


def prepare_top_k(
    op: str, inputs: TopKInputs, sources: TopKSources, sums: Sums | None = None
) -> Launch:
    """What `sources` name: logits and bias that lie like those of `inputs`, and the results.

    sums: logits [T, E] are not given, but these, by the kernel before; the bias is contiguous fp32.
    """
    logits, _, k, num_groups, topk_groups, renormalize, scaling_factor = inputs
    num_tokens, num_experts = logits.shape
    row_bytes, expert_bytes = (stride * logits.element_size() for stride in logits.stride())
    driver, device_index = current_driver(), logits.get_device()
    tokens_of_cta = min(MAX_WARPS, ceil_div(num_tokens, driver.num_sms(device_index)))
    arguments = _Arguments(
        row_bytes=row_bytes,
        expert_bytes=expert_bytes,
        num_tokens=num_tokens,
        num_experts=num_experts,
        top_k=k,
        num_groups=num_groups,
        topk_groups=topk_groups,
        group_lanes=1 << (max(1, WARP // num_groups).bit_length() - 1),
        renormalize=renormalize,
        scaling_factor=scaling_factor,
        tokens_of_cta=tokens_of_cta,
    )
    parts_of_group = 0
    if sums is not None:
        arguments.num_parts, parts_of_group = sums
    return Launch(
        driver.load(kernel_of(op, num_experts, logits.dtype, parts_of_group), device_index),
        ceil_div(num_tokens, tokens_of_cta),
        tokens_of_cta * WARP if sums is None else THREADS_WITH_SUMS,
        (arguments,),
        pointers(_Arguments, **sources._asdict()),
        programmatic=sums is not None,
    )
