"""Launch `top_k.cu`, the router's choice, on a Hopper GPU.

A launch is prepared once for each choice, shape, layout and stream; after that, a call writes its
addresses and makes one call of the driver.
"""

import ctypes
import threading
from ctypes import c_float, c_int64, c_uint32, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..kernels.common.blocks import ceil_div
from ..kernels.common.inputs import INPUTS
from ..kernels.jit import Kernel, Launch, current_stream, load

_SOURCE = Path(__file__).with_name("top_k.cu")
_WARP = 32
_MAX_WARPS = 4  # `kMaxWarps` in top_k.cu
MAX_EXPERTS = 512  # a lane holds every 32nd in registers


class _Arguments(ctypes.Structure):
    """`Arguments` in top_k.cu."""

    _fields_ = (
        *(("logits", c_void_p), ("bias", c_void_p)),
        *(("top_k_index", c_void_p), ("top_k_weights", c_void_p)),
        *(("row_bytes", c_int64), ("expert_bytes", c_int64), ("num_tokens", c_int64)),
        *(("num_experts", c_uint32), ("top_k", c_uint32)),
        *(("num_groups", c_uint32), ("topk_groups", c_uint32), ("group_lanes", c_uint32)),
        *(("renormalize", c_uint32), ("scaling_factor", c_float)),
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


class _Prepared(NamedTuple):
    """A launch whose addresses are written into `arguments` right before it is made."""

    launch: Launch
    arguments: _Arguments


class _OfThread(threading.local):
    """What this thread has prepared; no other thread may write into its arguments meanwhile."""

    def __init__(self) -> None:
        self.prepared: dict[tuple[Any, ...], _Prepared] = {}


_of_thread = _OfThread()
_MAX_PREPARED = 4096  # then all is forgotten: shapes that come and go must not fill the memory


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
    device_index = logits.get_device()
    stream = current_stream(device_index)
    key = (choice, logits.shape, logits.stride(), logits.dtype, programmatic, device_index, stream)
    prepared = _of_thread.prepared.get(key)
    if prepared is None:
        if len(_of_thread.prepared) >= _MAX_PREPARED:
            _of_thread.prepared.clear()
        prepared = _prepare(choice, logits, programmatic, stream)
        _of_thread.prepared[key] = prepared
    launch, arguments = prepared
    arguments.logits = logits.data_ptr()
    arguments.bias = None if bias is None else bias.data_ptr()
    arguments.top_k_index, arguments.top_k_weights = index.data_ptr(), weights.data_ptr()
    launch.on(device_index)


def _prepare(choice: Choice, logits: torch.Tensor, programmatic: bool, stream: int) -> _Prepared:
    num_tokens, num_experts = logits.shape
    op, k, num_groups, topk_groups, renormalize, scaling_factor = choice
    row_bytes, expert_bytes = (stride * logits.element_size() for stride in logits.stride())
    group_lanes = 1 << (max(1, _WARP // num_groups).bit_length() - 1)
    arguments = _Arguments(
        *(None, None, None, None, row_bytes, expert_bytes, num_tokens, num_experts, k),
        *(num_groups, topk_groups, group_lanes, renormalize, scaling_factor),
    )
    num_sms = torch.cuda.get_device_properties(logits.device).multi_processor_count
    warps = min(_MAX_WARPS, ceil_div(num_tokens, num_sms))
    function = load(kernel_of(op, num_experts, logits.dtype), logits.get_device())
    launch = Launch(
        *(function, ceil_div(num_tokens, warps), warps * _WARP, (arguments,)),
        stream=stream,
        programmatic=programmatic,
    )
    return _Prepared(launch, arguments)
