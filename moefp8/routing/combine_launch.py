"""Launch `combine.cu`, the weighted sum of each token's rows, on a Hopper GPU.

T tokens, k choices each, H hidden, R rows.
"""

from pathlib import Path
from typing import NamedTuple

import torch

from ..kernels.common.blocks import ceil_div
from ..kernels.common.checks import INPUTS
from ..kernels.common.divisor import Divisor
from ..kernels.jit import Kernel, Launch, Source, current_driver, pointers, struct_of

_OP = "combine"
_SOURCE = Path(__file__).with_name("combine.cu")
_Arguments = struct_of(_SOURCE)
MOST_AT_ONCE, _FEW_AT_ONCE = 8, 2
_COLUMNS = 8  # a thread owns as many: 16 B of BF16
_MAX_UNITS = 2**31 - 2**10  # `Divisor` is right for these and for the idle threads behind them


def threads_of(num_units: int, num_sms: int) -> int:
    """How many a CTA has: few where there are few units, so that many SMs work."""
    return next((n for n in (256, 128, 64) if num_units >= n * num_sms), 32)


def kernel_of(weights_dtype: torch.dtype, vectorized: bool, at_once: int = MOST_AT_ONCE) -> Kernel:
    """vectorized: eight elements of the result can be stored at once, and of the addend loaded.

    at_once: choices whose rows are loaded together, as many for all tokens.
    """
    more = "" if at_once == MOST_AT_ONCE else f", {at_once}"
    flag = str(vectorized).lower()
    return Kernel(_SOURCE, f"combine_kernel<{INPUTS[weights_dtype]}, {flag}{more}>")


def at_once_of(top_k: int) -> int:
    """As many as there are, if few: else a token loads the row of its last choice again."""
    return _FEW_AT_ONCE if top_k <= _FEW_AT_ONCE else MOST_AT_ONCE


class CombineSources(NamedTuple):
    """Which addresses of a launch are those of a combine; addend: None if there is none.

    of_choices: fp32 [T, k], which a combine that brings sums to another GPU brings there, too.
    word: a number for such a combine, which may differ from call to call.
    """

    y: Source
    token_to_row: Source
    weights: Source
    out: Source
    addend: Source | None = None
    of_choices: Source | None = None
    word: Source | None = None


def prepare_combine(
    weights: torch.Tensor,
    hidden_size: int,
    *,
    y_row_pitch: int,
    is_aligned: bool,
    sources: CombineSources,
    programmatic: bool = False,
    at_once: int = MOST_AT_ONCE,
) -> Launch:
    """`out[t] = sum over j of weights[t, j] * y[token_to_row[t, j]]`, as `routing.combine` does.

    What `sources` name:

        y: bf16 [R, H], at a multiple of 16 bytes. What lies behind the end of a row, up to its next
            multiple of 8 elements, is read too.
        token_to_row: int32 [T, k], contiguous; a negative row counts as zeros (row 0 is read).
        weights: [T, k] like the tensor `weights`, whose layout counts.
        out: bf16 [T, H], contiguous; T and H at least 1.
        addend: bf16 [T, H], contiguous, which is added to the sum once that is rounded to BF16.

    Args:
        y_row_pitch: in elements, a multiple of 8 and at least H.
        is_aligned: whether out, and addend if there is one, lie at multiples of 16 bytes.
        programmatic: it may be launched before the stream's previous kernel ends. It waits before
            it reads `y`, but all else that it reads must be older than that kernel.
        at_once: as in `kernel_of`.

    Raises:
        ValueError: there are more elements than a kernel can count.
        JitError: it cannot be compiled or loaded.
    """
    num_tokens, top_k = weights.shape
    units = ceil_div(hidden_size, _COLUMNS)
    num_units = num_tokens * units
    if num_units > _MAX_UNITS:
        raise ValueError(
            f"{_OP}: one call takes at most {_MAX_UNITS} times {_COLUMNS} columns, got "
            f"T = {num_tokens} and H = {hidden_size}; split the tokens"
        )
    token_stride, choice_stride = weights.stride()
    arguments = _Arguments(
        y_row_bytes=y_row_pitch * torch.bfloat16.itemsize,
        weight_token_bytes=token_stride * weights.element_size(),
        weight_choice_bytes=choice_stride * weights.element_size(),
        num_tokens=num_tokens,
        top_k=top_k,
        hidden_size=hidden_size,
        units=Divisor.of(units),
    )
    driver, device_index = current_driver(), weights.get_device()
    vectorized = hidden_size % _COLUMNS == 0 and is_aligned
    threads = threads_of(num_units, driver.num_sms(device_index))
    return Launch(
        driver.load(kernel_of(weights.dtype, vectorized, at_once), device_index),
        ceil_div(num_units, threads),
        threads,
        (arguments,),
        pointers(_Arguments, **sources._replace(of_choices=None, word=None)._asdict()),
        programmatic=programmatic,
    )
