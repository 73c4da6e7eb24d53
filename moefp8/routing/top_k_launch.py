"""Launch `top_k.cu`, the router's choice, on a Hopper GPU.

Launches are kept as `kernels/common/prepared.py` says.
"""

import ctypes
from ctypes import c_float, c_int64, c_uint32, c_void_p
from pathlib import Path
from typing import NamedTuple

import torch

from ..kernels.common.blocks import ceil_div
from ..kernels.common.inputs import INPUTS
from ..kernels.common.prepared import layout_of, prepared
from ..kernels.jit import Kernel, Launch, Source, current_driver, fields, launch_all, pointers

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


class Choice(NamedTuple):
    """What is chosen: `op` is "softmax_topk" or "sigmoid_group_topk", the rest its arguments."""

    op: str
    k: int
    num_groups: int
    topk_groups: int
    renormalize: bool
    scaling_factor: float


def can_launch(logits: torch.Tensor, *_: object) -> bool:
    """Whether there is a kernel for as many experts; what is no matrix, its checks refuse."""
    return logits.ndim != 2 or logits.shape[1] <= MAX_EXPERTS


def kernel_of(op: str, num_experts: int, dtype: torch.dtype) -> Kernel:
    items = ceil_div(num_experts, _WARP)
    return Kernel(_SOURCE, f"{op}_kernel<{INPUTS[dtype]}, {items}>")


def launch_top_k(
    choice: Choice,
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    index: torch.Tensor,
    weights: torch.Tensor,
    *,
    programmatic: bool,
) -> None:
    """Write the choice of each token into index and weights: one kernel on the current stream.

    Logits of other dtypes than bf16, fp16 and fp32 are copied first, and so is a bias that is not
    contiguous fp32. programmatic: as in `Launch`.
    """
    if not index.numel():
        return
    if logits.dtype not in INPUTS:
        logits = logits.float()
    if bias is not None:
        bias = bias.float().contiguous()
    key = (choice, layout_of(logits), bias is None, programmatic)
    launch = prepared(key, lambda: _prepare(choice, logits, bias is not None, programmatic))
    addresses = (
        logits.data_ptr(),
        index.data_ptr(),
        weights.data_ptr(),
        0 if bias is None else bias.data_ptr(),
    )
    launch_all((launch,), logits.get_device(), addresses)


def _prepare(choice: Choice, logits: torch.Tensor, has_bias: bool, programmatic: bool) -> Launch:
    num_tokens, num_experts = logits.shape
    row_stride, expert_stride = logits.stride()
    group_lanes = 1 << (max(1, _WARP // choice.num_groups).bit_length() - 1)
    arguments = _Arguments(
        row_bytes=row_stride * logits.element_size(),
        expert_bytes=expert_stride * logits.element_size(),
        num_tokens=num_tokens,
        num_experts=num_experts,
        top_k=choice.k,
        num_groups=choice.num_groups,
        topk_groups=choice.topk_groups,
        group_lanes=group_lanes,
        renormalize=choice.renormalize,
        scaling_factor=choice.scaling_factor,
    )
    driver, device_index = current_driver(), logits.get_device()
    warps = min(_MAX_WARPS, ceil_div(num_tokens, driver.num_sms(device_index)))
    return Launch(
        driver.load(kernel_of(choice.op, num_experts, logits.dtype), device_index),
        ceil_div(num_tokens, warps),
        warps * _WARP,
        (arguments,),
        pointers(
            _Arguments,
            logits=Source(0),
            top_k_index=Source(1),
            top_k_weights=Source(2),
            bias=Source(3) if has_bias else None,
        ),
        programmatic=programmatic,
    )
