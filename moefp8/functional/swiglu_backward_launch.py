"""Launch `swiglu_backward.cu` on a Hopper GPU. T tokens, k choices each, R rows, I intermediate."""

from pathlib import Path
from typing import NamedTuple

import torch

from ..kernels.common.blocks import BLOCK, MIN_GRADIENT_AMAX, round_up
from ..kernels.common.checks import INPUTS
from ..kernels.jit import Kernel, Launch, Source, current_driver, pointers, struct_of

_SOURCE = Path(__file__).with_name("swiglu_backward.cu")
_Arguments = struct_of(_SOURCE)
_MAX_THREADS, _WARP_COLUMNS, _COLUMNS = 128, 256, 8


class SwigluBackwardSources(NamedTuple):
    """Which addresses of a launch are those of a gradient of SwiGLU.

    saved_scales: only if `saved` is FP8. From token_to_row to is_first: None if each row has one
    token, and no weight. bf16_rows, weight_of_row: None if they are not wanted.
    """

    grad: Source
    saved: Source
    saved_scales: Source | None
    rows: Source
    row_scales: Source
    token_to_row: Source | None = None
    weights: Source | None = None
    of_weights: Source | None = None
    is_first: Source | None = None
    bf16_rows: Source | None = None
    weight_of_row: Source | None = None


def kernel_of(weights_dtype: torch.dtype, *, is_fp8: bool) -> Kernel:
    flag = str(is_fp8).lower()
    return Kernel(_SOURCE, f"swiglu_backward_kernel<{INPUTS[weights_dtype]}, {flag}>")


def prepare_swiglu_backward(
    saved: torch.Tensor,
    saved_scales: torch.Tensor | None,
    weights: torch.Tensor | None,
    limit: float,
    *,
    grad_row_pitch: int,
    scale_pitch: int,
    sources: SwigluBackwardSources,
) -> Launch:
    """The gradients of gate and up in E4M3, for the choices of all tokens.

    What `sources` name, besides `saved`, its scales and `weights`:

        grad: bf16 [R, I] in rows of `grad_row_pitch` elements, a multiple of 8.
        rows: e4m3 [R, 2, I rounded up to 128]; what lies behind I becomes zeros.
        row_scales: fp32 [2 ceil(I/128), scale_pitch], with R columns.
        token_to_row: int32 [T, k], contiguous.
        bf16_rows: bf16 [R, 2, I], lying as `saved` does in bf16: the gradients before they are
            quantized.
        weight_of_row: fp32 [R], the sum of the weights of all choices of a row.
        of_weights: fp32 [T, k], the gradients of `weights`.
        is_first: fp32 [T, k], 1 for the first choice of each row and 0 for others.

    Args:
        saved: bf16 [R, 2, I] as `empty_gate_up` says, or e4m3 [2 R, I], contiguous.
        saved_scales: fp32 [2 R, ceil(I/128)], rows innermost; None for bf16.
        weights: [T, k], or None: there are R rows of one token each.
        limit: that of `swiglu`; infinite if there is none.

    It may be launched before the stream's previous kernel ends, and waits for it.
    """
    driver, device_index = current_driver(), saved.get_device()
    is_fp8 = saved_scales is not None
    size = saved.shape[-1]
    padded_size = round_up(size, BLOCK)
    dtype, num_choices, top_k = torch.float32, saved.shape[0], 1
    arguments = _Arguments(
        grad_row_bytes=grad_row_pitch * 2,
        saved_row_bytes=saved.stride(-2) * saved.element_size(),
        saved_scale_pitch=0 if saved_scales is None else saved_scales.stride(1),
        row_pitch=2 * padded_size,
        scale_pitch=scale_pitch,
        bf16_row_bytes=2 * round_up(size, _COLUMNS),
        size=size,
        padded_size=padded_size,
        limit=limit,
        min_amax=MIN_GRADIENT_AMAX,
    )
    if weights is not None:
        dtype, (num_tokens, top_k) = weights.dtype, weights.shape
        num_choices = num_tokens * top_k
        arguments.weight_token_bytes, arguments.weight_choice_bytes = (
            stride * weights.element_size() for stride in weights.stride()
        )
    elif is_fp8:
        num_choices //= 2
    arguments.num_choices, arguments.top_k = num_choices, top_k
    threads = min(_MAX_THREADS, round_up(padded_size, _WARP_COLUMNS) // _COLUMNS)
    return Launch(
        driver.load(kernel_of(dtype, is_fp8=is_fp8), device_index),
        num_choices,
        threads,
        (arguments,),
        pointers(_Arguments, **sources._asdict()),
        programmatic=True,
    )
