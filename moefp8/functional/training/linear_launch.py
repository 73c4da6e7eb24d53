"""Launch a trained linear on a Hopper GPU: kernels in a row, forward and backward.

M rows, K in, N out. Forward: both codes of x, then the GEMM. Backward: both codes of dY, the GEMM
of dX, that of dW. What lies between the kernels is in one workspace.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from ...kernels.common.blocks import MIN_AMAX, MIN_GRADIENT_AMAX, TMA_BYTES, num_blocks
from ...kernels.common.prepared import Launches, layout_of, prepared
from ...kernels.common.tma_operands import fits
from ...kernels.gemm.k_grouped import output_of
from ...kernels.gemm.k_grouped.config import choose_config
from ...kernels.gemm.k_grouped.launch import describe_k_grouped
from ...kernels.gemm.launch import describe_gemm
from ...kernels.gemm.operands import check_sizes
from ...kernels.gemm.tuned import target_of
from ...kernels.jit import current_driver
from ...kernels.program import Codes, Record, Tensor, layouts, prepare_launches
from ...quant.columns import column_codes
from ...quant.columns_launch import describe_columns, readable

_OP = "trained_linear"


class WeightCodes(NamedTuple):
    """e4m3 [N, K] and fp32 [ceil(N/128), ceil(K/128)], any strides."""

    data: torch.Tensor
    scale_inv: torch.Tensor


def _is_simple(x: torch.Tensor, codes: WeightCodes) -> bool:
    """Whether no operand of a product x codes^T has to be copied."""
    (m, k), n = x.shape, len(codes.data)
    is_readable = x.stride(1) == 1 and readable(x) is x
    return bool(m and n and k) and k % 16 == n % 8 == 0 and is_readable and fits(codes.data)


def _describe_product(
    r: Record,
    x: Tensor,
    weights: Codes,
    y: Tensor,
    columns: Codes,
    *,
    bias: Tensor | None = None,
    blocks: bool = False,
    min_amax: float = MIN_AMAX,
    batch_invariant: bool,
) -> None:
    """Both codes of x [M, K], and y [M, N], the product of its rows with the weights [N, K]."""
    (m, k), n = x.shape, weights.data.shape[0]
    check_sizes(_OP, m, n, k)
    rows = r.codes("rows", (1, m, k)).first()
    describe_columns(r, x, columns, m, rows=rows, min_amax=min_amax, blocks=blocks)
    config = r.target.configs.dense(m, n, k, batch_invariant)
    describe_gemm(r, config, rows, weights, y, m, bias=bias)


def _key_of(*tensors: torch.Tensor | None) -> tuple[object, ...]:
    """Layouts and alignments."""
    return tuple([None if x is None else (layout_of(x), x.data_ptr() % 16) for x in tensors])


_FORWARD = "x", "weight", "weight_scales", "y", "columns", "columns_scales", "bias"


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

    check: raises what is wrong with the operands; called for layouts that are new.
    y: bf16 [M, N], contiguous. columns: as `empty_columns` gives them.
    """
    key = (_OP, _key_of(x, *codes, bias), blocks, batch_invariant, current_driver().max_sms)

    def prepare() -> Launches:
        check()
        if not _is_simple(x, codes) or (bias is not None and not bias.is_contiguous()):
            return Launches((), 0)
        device_index = x.get_device()
        r = Record(target_of(device_index), _FORWARD)
        _describe_product(
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

    found = prepared(key, prepare)
    if found.launches:
        tensors = x, *codes, y, *columns
        of_bias = 0 if bias is None else bias.data_ptr()
        found(x.get_device(), (*[z.data_ptr() for z in tensors], of_bias))
    return bool(found.launches)


_BACKWARD = "grad", "weight", "weight_scales", "x_columns", "x_columns_scales", "dx", "d"


def launch_backward(
    check: Callable[[], object],
    grad: torch.Tensor,
    codes: WeightCodes,
    of_x: tuple[torch.Tensor, torch.Tensor],
    dx: torch.Tensor,
    d: torch.Tensor,
    accumulates: bool,
    batch_invariant: bool,
) -> bool:
    """Write dX, and dW into d or to what is there; False if an operand must be copied first.

    check: as for `launch_forward`. codes: those of W^T, [K, N]. of_x: column codes of x. dx: bf16
        [M, K], contiguous. d: [N, K].
    """
    options = accumulates, batch_invariant, current_driver().max_sms
    key = (_OP, "backward", _key_of(grad, *codes, *of_x, d), *options)

    def prepare() -> Launches:
        check()
        d_fits = fits(d) and d.shape[1] * d.element_size() % TMA_BYTES == 0
        if not (_is_simple(grad, codes) and all(map(fits, of_x)) and d.stride(1) == 1):
            return Launches((), 0)
        device_index = grad.get_device()
        r = Record(target_of(device_index), _BACKWARD)
        columns = column_codes(r, "columns", num_blocks(len(grad)), grad.shape[1])
        _describe_product(
            r,
            Tensor.of(grad, "grad"),
            Codes.of(*codes, "weight"),
            Tensor.of(dx, "dx"),
            columns,
            min_amax=MIN_GRADIENT_AMAX,
            batch_invariant=batch_invariant,
        )
        config = choose_config(
            *d.shape,
            output_of(d, accumulates),
            blocks_b=of_x[1].shape[1] != d.shape[1],
            d_fits=d_fits,
        )
        x_columns, out = Codes.of(*of_x, "x_columns"), Tensor.of(d, "d").batched()
        describe_k_grouped(r, config, columns, x_columns, out, len(grad))
        return prepare_launches(r, device_index)

    found = prepared(key, prepare)
    if found.launches:
        tensors = grad, *codes, *of_x, dx, d
        found(grad.get_device(), tuple([z.data_ptr() for z in tensors]))
    return bool(found.launches)
