"""Describe `combine.cu`, the weighted sum of each token's rows.

T tokens, k choices each, H hidden, R rows.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..kernels.common.blocks import ceil_div
from ..kernels.common.checks import INPUTS
from ..kernels.common.divisor import divisor_of
from ..kernels.jit import Kernel
from ..kernels.program import Place, Record, Target, Tensor

_OP = "combine"
_SOURCE = Path(__file__).with_name("combine.cu")
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


def combine_kernels(
    target: Target, dtype: torch.dtype, top_k: int, hidden_size: int
) -> Iterator[Kernel]:
    """The kernel of a combine alone, whose result is aligned; dtype: of the weights."""
    r = Record(target, ("y", "token_to_row", "weights", "out"))
    y, out = (Tensor.contiguous(name, 1, hidden_size) for name in ("y", "out"))
    weights = Tensor.contiguous("weights", 1, top_k, dtype=dtype)
    at_once = at_once_of(top_k)
    describe_combine(r, y, Place("token_to_row"), weights, out, at_once=at_once)
    yield from r.kernels


def describe_combine(
    r: Record,
    y: Tensor,
    token_to_row: Place,
    weights: Tensor,
    out: Tensor,
    addend: Tensor | None = None,
    *,
    programmatic: bool = False,
    at_once: int = MOST_AT_ONCE,
) -> None:
    """One step: `out[t] = sum over j of weights[t, j] * y[token_to_row[t, j]]`.

    All but `y` is read early, where it is older than the step before.

    Args:
        y: bf16 [..., R, H], at a multiple of 16 bytes, in rows of whole 16 bytes. What follows the
            end of a row, up to its next multiple of 16 bytes, is read too.
        token_to_row: int32 [T, k], contiguous; a negative row counts as zeros (row 0 is read).
        weights: [T, k].
        out: bf16 [T, H], contiguous; T and H at least 1.
        addend: bf16 [T, H], contiguous, which is added to the sum once that is rounded to BF16.
        programmatic: it may start before the stream's previous kernel ends, and all that it reads
            early is older than that kernel.
        at_once: as in `kernel_of`.

    Raises:
        ValueError: there are more elements than a kernel can count.
    """
    (num_tokens, top_k), hidden_size = weights.shape, out.shape[1]
    units = ceil_div(hidden_size, _COLUMNS)
    num_units = num_tokens * units
    if num_units > _MAX_UNITS:
        raise ValueError(
            f"{_OP}: one call takes at most {_MAX_UNITS} times {_COLUMNS} columns, got "
            f"T = {num_tokens} and H = {hidden_size}; split the tokens"
        )
    arguments: dict[str, Any] = {
        "y": y.place,
        "y_row_bytes": y.bytes_of_stride(-2),
        "token_to_row": token_to_row,
        "weights": weights.place,
        "weight_token_bytes": weights.bytes_of_stride(0),
        "weight_choice_bytes": weights.bytes_of_stride(1),
        "out": out.place,
        "addend": None if addend is None else addend.place,
        "num_tokens": num_tokens,
        "top_k": top_k,
        "hidden_size": hidden_size,
        "units": divisor_of(units),
    }
    is_aligned = out.is_aligned and (addend is None or addend.is_aligned)
    vectorized = hidden_size % _COLUMNS == 0 and is_aligned
    threads = threads_of(num_units, r.target.num_sms)
    r.step(
        kernel_of(weights.dtype, vectorized, at_once),
        ceil_div(num_units, threads),
        threads,
        arguments,
        early=(token_to_row, weights.place, arguments["addend"]),
        programmatic=programmatic,
    )
