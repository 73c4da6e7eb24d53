"""Launch `top_k.cu`, the router's choice, on a Hopper GPU."""

import ctypes
from ctypes import c_float, c_int64, c_uint32, c_void_p
from pathlib import Path
from typing import NamedTuple

import torch

from ..kernels.common.blocks import ceil_div
from ..kernels.common.checks import INPUTS
from ..kernels.common.prepared import layout_of, prepared
from ..kernels.jit import Kernel, Launch, Source, current_driver, fields, pointers

_SOURCE = Path(__file__).with_name("top_k.cu")
_WARP = 32
_MAX_WARPS = 4  # `kMaxWarps` in top_k.cu
MAX_EXPERTS = 512  # a lane holds every 32nd in registers


class _Arguments(ctypes.Structure):
    """`Arguments` in top_k.cu."""

    _fields_ = fields(
        (c_void_p, "logits bias top_k_index top_k_weights"),
        (c_int64, "row_bytes expert_bytes num_tokens"),
        (c_uint32, "num_experts top_k num_groups topk_groups group_lanes renormalize"),
        (c_float, "scaling_factor"),
    )


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


def kernel_of(op: str, num_experts: int, dtype: torch.dtype) -> Kernel:
    return Kernel(_SOURCE, f"{op}_kernel<{INPUTS[dtype]}, {ceil_div(num_experts, _WARP)}>")


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
    launch = prepared(key, lambda: _prepare(op, inputs._replace(logits=logits)))
    tensors = logits, bias, index, weights
    addresses = tuple([0 if x is None else x.data_ptr() for x in tensors])
    launch.on(logits.get_device(), addresses)


def _prepare(op: str, inputs: TopKInputs) -> Launch:
    logits, _, k, num_groups, topk_groups, renormalize, scaling_factor = inputs
    num_tokens, num_experts = logits.shape
    row_bytes, expert_bytes = (stride * logits.element_size() for stride in logits.stride())
    arguments = _Arguments(
        row_bytes=row_bytes,
        expert_bytes=expert_bytes,
        num_tokens=num_tokens,
        num_experts=num_experts,
        top_k=k,
        num_groups=num_groups,
        topk_groups=topk_groups,
        group_lanes=1 << (max(1, _WARP // num_groups).bit_length() - 1),
        renormalize=renormalize,
        scaling_factor=scaling_factor,
    )
    driver, device_index = current_driver(), logits.get_device()
    warps = min(_MAX_WARPS, ceil_div(num_tokens, driver.num_sms(device_index)))
    return Launch(
        driver.load(kernel_of(op, num_experts, logits.dtype), device_index),
        ceil_div(num_tokens, warps),
        warps * _WARP,
        (arguments,),
        pointers(
            _Arguments,
            logits=Source(0),
            bias=Source(1),
            top_k_index=Source(2),
            top_k_weights=Source(3),
        ),
    )
