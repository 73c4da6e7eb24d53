"""Launch a trained linear on a Hopper GPU: kernels in a row, forward and backward.

M rows, K in, N out. Forward: both codes of x, then the GEMM. Backward: both codes of dY, the GEMM
of dX, that of dW. What lies between the kernels is in one workspace.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from ...kernels.common.blocks import (
    E4M3,
    MIN_AMAX,
    MIN_GRADIENT_AMAX,
    TMA_BYTES,
    empty_tma_aligned,
    num_blocks,
    round_up,
)
from ...kernels.common.prepared import Launches, layout_of, prepared
from ...kernels.common.tma_operands import fits
from ...kernels.gemm.k_grouped import output_of
from ...kernels.gemm.k_grouped.config import choose_config
from ...kernels.gemm.k_grouped.launch import KGroupedOperands, KGroupedSources, prepare_k_grouped
from ...kernels.gemm.launch import GemmSources, prepare_gemm
from ...kernels.gemm.operands import Operands, check_sizes
from ...kernels.gemm.tuned import config_source_of
from ...kernels.jit import Launch, Source, current_driver
from ...quant.columns import empty_columns
from ...quant.columns_launch import ColumnsSources, prepare_columns, readable
from ..workspace import Memory

_OP = "trained_linear"


class Codes(NamedTuple):
    """e4m3 [N, K] and fp32 [ceil(N/128), ceil(K/128)], any strides."""

    data: torch.Tensor
    scale_inv: torch.Tensor


def _is_simple(x: torch.Tensor, codes: Codes) -> bool:
    """Whether no operand of a product x codes^T has to be copied."""
    (m, k), n = x.shape, len(codes.data)
    is_readable = x.stride(1) == 1 and readable(x) is x
    return bool(m and n and k) and k % 16 == n % 8 == 0 and is_readable and fits(codes.data)


def _prepare_product(
    x: torch.Tensor,
    codes: Codes,
    memory: Memory,
    columns: tuple[torch.Tensor, tuple[Source, Source]],
    sources: tuple[Source, Source, Source, Source],
    *,
    bias: torch.Tensor | None = None,
    of_bias: Source | None = None,
    blocks: bool = False,
    min_amax: float = MIN_AMAX,
    batch_invariant: bool,
) -> tuple[Launch, Launch]:
    """Both codes of x, and the product of its rows with the codes of a weight.

    columns: scales of the column codes, and where both go.
    sources: x, the codes, their scales, the product.
    """
    (m, k), n, meta = x.shape, len(codes.data), torch.device("meta")
    check_sizes(_OP, m, n, k)
    of_x, of_codes, of_scales, of_y = sources
    rows, scale_pitch = memory.take(m * k), round_up(m, 4)
    row_scales = memory.take(num_blocks(k) * scale_pitch * 4)
    scale_inv, (of_columns, of_column_scales) = columns
    quantize = prepare_columns(
        x,
        m,
        None,
        num_blocks(m),
        scale_inv.stride(0),
        False,
        min_amax,
        ColumnsSources(
            x=of_x,
            data=of_columns,
            scale_inv=of_column_scales,
            row_data=rows,
            row_scale_inv=row_scales,
        ),
        blocks=blocks,
        row_pitch=scale_pitch,
    )
    configs = config_source_of(x.get_device())
    product = prepare_gemm(
        configs.dense(m, n, k, batch_invariant),
        Operands(
            torch.empty((m, k), dtype=E4M3, device=meta),
            empty_tma_aligned((m, num_blocks(k)), meta),
            *codes,
            torch.empty((m, n), dtype=torch.bfloat16, device=meta),
        ),
        GemmSources(rows, row_scales, of_codes, of_scales, of_y, bias=of_bias),
        configs.sms,
        m,
        bias=None if bias is None else bias.dtype,
    )
    return quantize, product


def _key_of(*tensors: torch.Tensor | None) -> tuple[object, ...]:
    """Layouts and alignments."""
    return tuple([None if x is None else (layout_of(x), x.data_ptr() % 16) for x in tensors])


_X, _DATA, _SCALES, _Y, _COLUMNS, _COLUMN_SCALES, _BIAS, _MEMORY = map(Source, range(8))


def launch_forward(
    check: Callable[[], object],
    x: torch.Tensor,
    codes: Codes,
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
        memory = Memory(_MEMORY)
        launches = _prepare_product(
            x,
            codes,
            memory,
            (columns[1], (_COLUMNS, _COLUMN_SCALES)),
            (_X, _DATA, _SCALES, _Y),
            bias=bias,
            of_bias=None if bias is None else _BIAS,
            blocks=blocks,
            batch_invariant=batch_invariant,
        )
        return Launches(launches, memory.size)

    found = prepared(key, prepare)
    if found.launches:
        tensors = x, *codes, y, *columns
        of_bias = 0 if bias is None else bias.data_ptr()
        found(x.get_device(), (*[z.data_ptr() for z in tensors], of_bias))
    return bool(found.launches)


_GRAD, _OF_X, _OF_X_SCALES, _DX, _D = _X, *map(Source, range(3, 7))


def launch_backward(
    check: Callable[[], object],
    grad: torch.Tensor,
    codes: Codes,
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
        memory, (m, n), device = Memory(_MEMORY), grad.shape, torch.device("meta")
        data, scale_inv = empty_columns(num_blocks(m), n, device)
        places = memory.take(data.nbytes), memory.take(len(data) * scale_inv.stride(0) * 4)
        of_rows = _prepare_product(
            grad,
            codes,
            memory,
            (scale_inv, places),
            (_GRAD, _DATA, _SCALES, _DX),
            min_amax=MIN_GRADIENT_AMAX,
            batch_invariant=batch_invariant,
        )
        operands = KGroupedOperands(data, scale_inv, *of_x, d[None])
        wgrad = prepare_k_grouped(
            choose_config(
                *d.shape,
                output_of(d, accumulates),
                blocks_b=of_x[1].shape[1] != d.shape[1],
                d_fits=d_fits,
            ),
            operands,
            KGroupedSources(*places, _OF_X, _OF_X_SCALES, _D),
            config_source_of(grad.get_device()).sms,
            m,
        )
        return Launches((*of_rows, wgrad), memory.size)

    found = prepared(key, prepare)
    if found.launches:
        tensors = grad, *codes, *of_x, dx, d
        found(grad.get_device(), tuple([z.data_ptr() for z in tensors]))
    return bool(found.launches)
