"""Launch `dispatch.cu`: plan, quantize and dispatch tokens in one kernel on a Hopper GPU.

T tokens, k choices each, E experts, H hidden, R rows.
"""

import ctypes
from ctypes import c_int64, c_uint32, c_void_p
from pathlib import Path
from typing import NamedTuple

import torch

from .blocks import ceil_div, num_blocks, round_up
from .divisor import Divisor
from .jit import Kernel, Launch, load
from .routing_plan_launch import MAX_THREADS, Routing, cut_plan, routing_of, shared_bytes

_OP = "dispatch"
_SOURCE = Path(__file__).with_name("dispatch.cu")
_INPUTS = {
    torch.bfloat16: "Input::kBFloat16",
    torch.float16: "Input::kHalf",
    torch.float32: "Input::kFloat",
}
_VECTOR_BYTES = 16  # that a thread loads at once, if they are aligned
_LANES = 8  # that hold a block of 128 elements
_MIN_BLOCKS = 8  # of a CTA: one with fewer would plan more than it quantizes


class _Arguments(ctypes.Structure):
    """`Arguments` in dispatch.cu."""

    _fields_ = (
        *(("routing", Routing), ("x", c_void_p), ("x_row_bytes", c_int64)),
        *(("rows", c_void_p), ("row_pitch", c_int64), ("row_scales", c_void_p)),
        *(("scale_pitch", c_uint32), ("hidden_size", c_uint32), ("num_k_blocks", c_uint32)),
        *(("parts", Divisor), ("part_blocks", Divisor)),
    )


class Cut(NamedTuple):
    """A CTA has `threads` and owns `k_blocks` of each of its `tokens`; `ahead` as in `cut_plan`."""

    tokens: int
    k_blocks: int
    threads: int
    ahead: int


def cut_dispatch(num_tokens: int, top_k: int, num_k_blocks: int, num_sms: int) -> Cut:
    """About one CTA for each SM: it has a chunk of tokens, or of few tokens only a part."""
    chunk = cut_plan(num_tokens, top_k, num_sms).tokens
    parts = min(num_sms // ceil_div(num_tokens, chunk), num_k_blocks // _MIN_BLOCKS)
    k_blocks = ceil_div(num_k_blocks, max(1, parts))
    threads = min(MAX_THREADS, round_up(chunk * k_blocks * _LANES, 32))
    plan = cut_plan(num_tokens, top_k, num_sms, threads)
    return Cut(chunk, k_blocks, plan.threads, plan.ahead)


def kernel_of(cut: Cut, dtype: torch.dtype, vectorized: bool, masked: bool) -> Kernel:
    """vectorized: elements lie such that eight can be loaded at once."""
    flags = f"{str(vectorized).lower()}, {str(masked).lower()}"
    return Kernel(_SOURCE, f"dispatch_kernel<{_INPUTS[dtype]}, {flags}, {cut.ahead}>")


def kernels_of(dtype: torch.dtype) -> list[Kernel]:
    """All kernels that inputs of this dtype can need."""
    cuts = (Cut(1, 8, 128, ahead) for ahead in (1, 4))
    flags = (True, False)
    return [kernel_of(cut, dtype, x, masked) for cut in cuts for x in flags for masked in flags]


def prepare_dispatch(
    device_index: int,
    *,
    x: int,
    x_dtype: torch.dtype,
    x_row_stride_bytes: int,
    ids: int,
    id_bytes: int,
    id_strides: tuple[int, int],
    num_tokens: int,
    top_k: int,
    num_experts: int,
    hidden_size: int,
    max_m: int | None,
    rows: int,
    row_pitch: int,
    row_scales: int,
    scale_pitch: int,
    expert_offsets: int,
    tokens_per_expert: int,
    token_to_row: int,
    stream: int,
    num_sms: int,
    programmatic: bool = False,
) -> Launch:
    """Quantize every token once, as `quantize_1x128`, into its rows; and the plan.

    Addresses are ints.

    Args:
        x: [T, H] of x_dtype, T and H at least 1.
        ids: [T, k] of `id_bytes` 4 or 8; strides in elements. One out of range has no row.
        max_m: rows of each expert, at least T; None: the rows of all experts follow one another.
        rows: e4m3 [R, H]; address and `row_pitch`, in bytes, are multiples of 16. What lies behind
            the end of a row, up to its next multiple of 8, may be written too.
        row_scales: fp32; that of row r and k-block b at [b * scale_pitch + r], with max_m that of
            row i of expert e at [(e * ceil(H/128) + b) * scale_pitch + i].
        expert_offsets, tokens_per_expert, token_to_row: int32 [E + 1], [E], [T, k], contiguous.
        programmatic: it may be launched before the stream's previous kernel ends, and then waits.

    Raises:
        ValueError: more choices, rows or scales than a kernel counts, or rows that are not aligned.
        JitError: it cannot be compiled or loaded, or has more choices than shared memory holds.
    """
    num_k_blocks = num_blocks(hidden_size)
    if (rows | row_pitch) % _VECTOR_BYTES or row_pitch < hidden_size:
        raise ValueError(
            f"{_OP}: rows must begin at multiples of {_VECTOR_BYTES} bytes and hold H = "
            f"{hidden_size}, got address {rows:#x} and pitch {row_pitch}"
        )
    num_scales = num_k_blocks * scale_pitch * (1 if max_m is None else num_experts)
    if num_scales >= 2**31:
        raise ValueError(f"{_OP}: one call takes fewer than 2**31 scales, got {num_scales}")
    cut = cut_dispatch(num_tokens, top_k, num_k_blocks, num_sms)
    routing = routing_of(
        *(_OP, cut.tokens),
        ids=ids,
        id_bytes=id_bytes,
        id_strides=id_strides,
        num_tokens=num_tokens,
        top_k=top_k,
        num_experts=num_experts,
        max_m=max_m,
        tokens_per_expert=tokens_per_expert,
        expert_offsets=expert_offsets,
        token_to_row=token_to_row,
    )
    parts = ceil_div(num_k_blocks, cut.k_blocks)
    arguments = _Arguments(
        *(routing, x, x_row_stride_bytes, rows, row_pitch, row_scales, scale_pitch),
        *(hidden_size, num_k_blocks, Divisor.of(parts), Divisor.of(cut.k_blocks)),
    )
    vectorized = hidden_size % 8 == 0 and not (x | x_row_stride_bytes) % _VECTOR_BYTES
    return Launch(
        load(kernel_of(cut, x_dtype, vectorized, max_m is not None), device_index),
        *(ceil_div(num_tokens, cut.tokens) * parts, cut.threads, (arguments,)),
        stream=stream,
        shared_bytes=shared_bytes(routing, 1 if max_m is None else 2),
        programmatic=programmatic,
    )
