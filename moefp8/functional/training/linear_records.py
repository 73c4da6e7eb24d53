"""What a trained linear launches: descriptions of its forward and backward, prepared once a layout.

M rows, K in, N out.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from ...kernels.common.blocks import MIN_AMAX, MIN_GRADIENT_AMAX, num_blocks
from ...kernels.common.prepared import Launches, layout_of, prepared
from ...kernels.common.tma_operands import fits
from ...kernels.gemm.operands import check_sizes
from ...kernels.jit import Kernel, current_driver
from ...kernels.program import (
    Codes,
    Record,
    Span,
    Target,
    Tensor,
    kernels_at_any_address,
    layouts,
    prepare_launches,
)
from ...kernels.targets import target_of
from ...quant.columns import column_codes, describe_columns, readable

_OP = "trained_linear"


class WeightCodes(NamedTuple):
    """e4m3 [N, K] and fp32 [ceil(N/128), ceil(K/128)], any strides."""

    data: torch.Tensor
    scale_inv: torch.Tensor


def _can_address(x: torch.Tensor, codes: WeightCodes) -> bool:
    """Whether no operand of a product x codes^T has to be copied."""
    (m, k), n = x.shape, len(codes.data)
    is_readable = x.stride(1) == 1 and readable(x) is x
    return bool(m and n and k) and k % 16 == n % 8 == 0 and is_readable and fits(codes.data)


def describe_forward(
    r: Record,
    x: Tensor,
    weights: Codes,
    y: Tensor,
    columns: Codes,
    *,
    bias: Tensor | None = None,
    blocks: bool = False,
    min_amax: float = MIN_AMAX,
    batch_invariant: bool = False,
) -> None:
    """Add the steps that make both codes of x [M, K], and y [M, N], x times the weights [N, K]."""
    (m, k), n = x.shape, weights.data.shape[0]
    check_sizes(_OP, m, n, k)
    rows = r.codes("rows", (1, m, k)).first()
    describe_columns(r, x, columns, m, rows=rows, min_amax=min_amax, blocks=blocks)
    r.target.gemms.dense(r, rows, weights, y, bias=bias, batch_invariant=batch_invariant)


def describe_backward(
    r: Record,
    grad: Tensor,
    weights: Codes,
    x_columns: Codes,
    dx: Tensor,
    d: Tensor,
    *,
    accumulates: bool,
    batch_invariant: bool = False,
) -> None:
    """Add steps: dX [M, K] of grad [M, N] and W^T [K, N], and dW [N, K], written or added to d."""
    m, n = grad.shape
    columns = column_codes(r, "columns", num_blocks(m), n)
    describe_forward(
        r,
        grad,
        weights,
        dx,
        columns,
        min_amax=MIN_GRADIENT_AMAX,
        batch_invariant=batch_invariant,
    )
    r.target.gemms.k_grouped(r, columns, x_columns, d.batched(), m, accumulates=accumulates)


def _key_of(*tensors: torch.Tensor | None) -> tuple[object, ...]:
    """Layouts and alignments."""
    return tuple([None if x is None else (layout_of(x), x.data_ptr() % 16) for x in tensors])


_FORWARD_INPUTS = "x", "weight", "weight_scales", "y", "columns", "columns_scales", "bias"


def launch_forward(
    check: Callable[[], object],
    x: torch.Tensor,
    codes: WeightCodes,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    columns: tuple[torch.Tensor, torch.Tensor],
    blocks: bool,
    batch_invariant: bool,
) -> bool:
    """Write y and the column codes of x; False if an operand would have to be copied first.

    check: raises an error if operands are wrong; called once for each layout.
    y: bf16 [M, N], contiguous. columns: as `empty_columns` gives them.
    """
    key = (_OP, _key_of(x, *codes, bias), blocks, batch_invariant, current_driver().max_sms)

    def prepare() -> Launches:
        check()
        if not _can_address(x, codes) or (bias is not None and not bias.is_contiguous()):
            return Launches((), 0)
        device_index = x.get_device()
        r = Record(target_of(device_index), _FORWARD_INPUTS)
        describe_forward(
            r,
            Tensor.of(x, "x"),
            Codes.of(*codes, "weight"),
            Tensor.of(y, "y"),
            Codes.of(*columns, "columns"),
            blocks=blocks,
            batch_invariant=batch_invariant,
            **layouts(bias=bias),
        )
        return prepare_launches(r, device_index)

    entry = prepared(key, prepare)
    if entry.launches:
        tensors = x, *codes, y, *columns
        bias_address = 0 if bias is None else bias.data_ptr()
        entry(x.get_device(), (*[z.data_ptr() for z in tensors], bias_address))
    return bool(entry.launches)


def forward_kernels(
    target: Target,
    most_tokens: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    *,
    bias: torch.dtype | None = None,
    blocks: bool = False,
    batch_invariant: bool = False,
) -> Iterator[Kernel]:
    """The kernels of a forward that saves column codes: weights [N, K], x at any address."""

    def describe(span: Span, alignment: int) -> Record:
        r, m = Record(target, _FORWARD_INPUTS, span=span), span.first
        describe_forward(
            r,
            Tensor.contiguous("x", m, k, dtype=dtype, alignment=alignment),
            Codes.contiguous("weight", n, k),
            Tensor.contiguous("y", m, n),
            column_codes(r, "x_columns", num_blocks(m), k, blocks=blocks),
            bias=None if bias is None else Tensor.contiguous("bias", n, dtype=bias),
            blocks=blocks,
            batch_invariant=batch_invariant,
        )
        return r

    return kernels_at_any_address(describe, most_tokens, dtype.itemsize)


_BACKWARD_INPUTS = "grad", "weight", "weight_scales", "x_columns", "x_columns_scales", "dx", "d"


def launch_backward(
    check: Callable[[], object],
    grad: torch.Tensor,
    codes: WeightCodes,
    x_columns: tuple[torch.Tensor, torch.Tensor],
    dx: torch.Tensor,
    d: torch.Tensor,
    accumulates: bool,
    batch_invariant: bool,
) -> bool:
    """Write dX, and write dW to d or add it; False if an operand would have to be copied first.

    check: as in `launch_forward`. codes: of W^T, [K, N]. x_columns: column codes of x.
    dx: bf16 [M, K], contiguous. d: [N, K].
    """
    options = accumulates, batch_invariant, current_driver().max_sms
    key = (_OP, "backward", _key_of(grad, *codes, *x_columns, d), *options)

    def prepare() -> Launches:
        check()
        if not (_can_address(grad, codes) and all(map(fits, x_columns)) and d.stride(1) == 1):
            return Launches((), 0)
        device_index = grad.get_device()
        r = Record(target_of(device_index), _BACKWARD_INPUTS)
        describe_backward(
            r,
            Tensor.of(grad, "grad"),
            Codes.of(*codes, "weight"),
            Codes.of(*x_columns, "x_columns"),
            Tensor.of(dx, "dx"),
            Tensor.of(d, "d"),
            accumulates=accumulates,
            batch_invariant=batch_invariant,
        )
        return prepare_launches(r, device_index)

    entry = prepared(key, prepare)
    if entry.launches:
        tensors = grad, *codes, *x_columns, dx, d
        entry(grad.get_device(), tuple([z.data_ptr() for z in tensors]))
    return bool(entry.launches)


def backward_kernels(
    target: Target,
    most_tokens: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    *,
    accumulates: bool = False,
    blocks: bool = False,
    batch_invariant: bool = False,
) -> Iterator[Kernel]:
    """The kernels of a backward of BF16 gradients with weights [N, K], tensors at any addresses.

    dtype: of dW.
    """

    def describe(span: Span, alignment: int) -> Record:
        r, m = Record(target, _BACKWARD_INPUTS, span=span), span.first
        describe_backward(
            r,
            Tensor.contiguous("grad", m, n, alignment=alignment),
            Codes.contiguous("weight", k, n),
            column_codes(r, "saved_columns", num_blocks(m), k, blocks=blocks),
            Tensor.contiguous("dx", m, k),
            Tensor.contiguous("d", n, k, dtype=dtype, alignment=alignment),
            accumulates=accumulates,
            batch_invariant=batch_invariant,
        )
        return r

    return kernels_at_any_address(describe, most_tokens, torch.bfloat16.itemsize)
