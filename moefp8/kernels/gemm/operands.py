"""The operands of a GEMM: what they must be, and copies in memory that TMA can address.

M tokens, N weights, K; G groups.
"""

from typing import NamedTuple

import torch

from ..common.blocks import E4M3, TMA_BYTES, num_blocks, tma_aligned
from ..common.checks import (
    check_not_expanded,
    check_rows_contiguous,
    check_same_device,
    check_shape,
    check_tensor,
)
from ..common.tma_operands import empty_fitting, fits, fitting

Operand = tuple[torch.Tensor, torch.Tensor]  # (data, scale_inv)

_MAX_SIZE = 2**31 - 2**10  # coordinates are ints, also at the end of the last tile


class Operands(NamedTuple):
    """a [..., M, K], b [..., N, K], d [..., M, N], and the scales of a and b."""

    a: torch.Tensor
    a_scale_inv: torch.Tensor
    b: torch.Tensor
    b_scale_inv: torch.Tensor
    d: torch.Tensor


def check_operands(
    op: str, operands: Operands, ndims: tuple[int, int], **others: torch.Tensor | None
) -> None:
    """Check what every GEMM asks of its operands.

    `ndims` are the dimensions of `a` and `b`. The caller checks the number of groups, and all of
    `others` but the device.
    """
    check_same_device(op, **operands._asdict(), **others)
    fp8, fp32, bf16 = (E4M3,), (torch.float32,), (torch.bfloat16,)
    a_ndim, b_ndim = ndims
    expected = ((fp8, a_ndim), (fp32, a_ndim), (fp8, b_ndim), (fp32, b_ndim), (bf16, a_ndim))
    for (name, x), (dtypes, ndim) in zip(operands._asdict().items(), expected, strict=True):
        check_tensor(op, name, x, dtypes, ndim)
    a, a_scale_inv, b, b_scale_inv, d = operands
    *a_groups, m, k = a.shape
    *b_groups, n, b_k = b.shape
    if k != b_k:
        raise ValueError(f"{op}: K must be equal in a and b, got {k} and {b_k}")
    a_prefix, b_prefix = ("G, " if groups else "" for groups in (a_groups, b_groups))
    shape = [*a_groups, m, num_blocks(k)]
    check_shape(op, "a_scale_inv", a_scale_inv, shape, f"[{a_prefix}M, ceil(K/128)]")
    shape = [*b_groups, num_blocks(n), num_blocks(k)]
    check_shape(op, "b_scale_inv", b_scale_inv, shape, f"[{b_prefix}ceil(N/128), ceil(K/128)]")
    check_shape(op, "d", d, [*a_groups, m, n], f"[{a_prefix}M, N]")
    for name, x in (("a", a), ("b", b), ("d", d)):
        check_rows_contiguous(op, name, x)
    check_not_expanded(op, "d", d)


def check_pairs(op: str, a: object, b: object) -> None:
    for name, pair in (("a", a), ("b", b)):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"{op}: {name} must be a pair (data, scale_inv), got {type(pair)}")


def check_sizes(op: str, m: int, n: int, k: int) -> None:
    if max(m, n, k) > _MAX_SIZE:
        raise ValueError(f"{op}: M, N and K must be at most {_MAX_SIZE}, got {m}, {n} and {k}")


def fitting_operands(operands: Operands, d_is_padded: bool, *, keep_d: bool) -> Operands:
    """Each operand, or a copy in memory that TMA can address; a copy of d is unset unless keep_d.

    Copied scales of activations have the layout of `empty_tma_aligned`. `a` from `quantize_1x128`
    is copied if 16 does not divide K, `d` if 8 does not divide N. keep_d: not all of d is written.
    """
    a, a_scale_inv, b, b_scale_inv, d = operands
    if not fits(a_scale_inv.mT):
        a_scale_inv = tma_aligned(a_scale_inv)
    # A store moves whole units of 16 bytes, also at the end of a row.
    ends_even = d.shape[-1] * d.element_size() % TMA_BYTES == 0
    if not (fits(d) and (ends_even or d_is_padded)):
        d = empty_fitting(d).copy_(d) if keep_d else empty_fitting(d)
    return Operands(fitting(a), a_scale_inv, fitting(b), b_scale_inv, d)
