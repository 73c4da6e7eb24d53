"""DeepGEMM's dense GEMM of weight gradients, whose K are tokens: both operands have 1x128 scales.

M, N, K are GEMM axes, F the features of an operand, M or N.
"""

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from ..kernels import BLOCK, E4M3, ceil_div
from ..kernels.common.checks import (
    check_rows_contiguous,
    check_same_device,
    check_shape,
    check_tensor,
)
from ..kernels.gemm.k_grouped import k_grouped_gemm
from .operands import Operand, check_output, k_major
from .utils.layout import get_mn_major_tma_aligned_tensor

__all__ = ["wgrad_gemm_fp8_fp8_fp32_nt"]


def dense_gradient(
    op: str,
    a: Operand,
    b: Operand,
    d: torch.Tensor,
    c: torch.Tensor | None,
    names: Sequence[str] = ("a", "b", "d"),
) -> None:
    """Write the product of a [M, K] and b [N, K], K-major, plus c, to d; names are for errors."""
    name_a, name_b, name_d = names
    check_tensor(op, name_a, a[0], (E4M3,), 2)
    check_tensor(op, name_b, b[0], (E4M3,), 2)
    (m, k), n = a[0].shape, len(b[0])
    check_shape(op, name_b, b[0], [n, k], f"[N, K] with the K of {name_a}")
    for name, (_, scales), axis, size in ((name_a, a, "M", m), (name_b, b, "N", n)):
        rule = f"[{axis}, ceil(K/128)], of 1x128 blocks,"
        check_shape(op, f"the scales of {name}", scales, [size, ceil_div(k, BLOCK)], rule)
    check_gradient(op, name_d, d, c, [m, n], "[M, N]")
    check_devices(op, a, b, d, c, names)
    accumulates = start_from_c(d, c)
    operands = (a[0], by_blocks(a[1])), (b[0], by_blocks(b[1]))
    multiply(*operands, d, accumulates)


def check_gradient(
    op: str, name: str, d: torch.Tensor, c: torch.Tensor | None, shape: Sequence[int], rule: str
) -> None:
    if c is None:
        check_tensor(op, name, d, (torch.float32, torch.bfloat16), len(shape))
    else:
        check_tensor(op, f"{name}, which the product is added to,", d, (torch.float32,), len(shape))
    check_shape(op, name, d, shape, rule)
    check_rows_contiguous(op, name, d)
    check_output(op, name, d, c)


def check_devices(
    op: str,
    a: Operand,
    b: Operand,
    d: torch.Tensor,
    c: torch.Tensor | None,
    names: Sequence[str] = ("a", "b", "d"),
    **others: torch.Tensor,
) -> None:
    of_a, of_b, name_d = names
    tensors = {of_a: a[0], f"scales of {of_a}": a[1], of_b: b[0], f"scales of {of_b}": b[1]}
    check_same_device(op, **tensors, **{name_d: d, "c": c}, **others)


def start_from_c(d: torch.Tensor, c: torch.Tensor | None) -> bool:
    """Bring c into d, if it is not there. Returns whether the product is added to d."""
    if c is not None and (c.data_ptr(), c.stride()) != (d.data_ptr(), d.stride()):
        d.copy_(c.detach())
    return c is not None


def by_blocks(scales: torch.Tensor) -> torch.Tensor:
    """Scales [F, S] as the GEMM loads them: [S, F] with F contiguous, at a pitch for TMA."""
    return get_mn_major_tma_aligned_tensor(scales).T


def multiply(a: Operand, b: Operand, d: torch.Tensor, accumulates: bool) -> None:
    """Write or add the product of K-major codes [F, K] with scales [ceil(K/128), F]."""
    k = a[0].shape[1]
    if d.numel() == 0 or (k == 0 and accumulates):
        return
    if k == 0:
        d.zero_()
        return
    k_grouped_gemm(in_blocks(a[0]), a[1], in_blocks(b[0]), b[1], d, None, k, accumulates)


def in_blocks(codes: torch.Tensor) -> torch.Tensor:
    """Codes [F, K] as [ceil(K/128), F, 128]: a view, or a padded copy if 128 does not divide K."""
    if codes.shape[1] % BLOCK:
        codes = pad(codes.view(torch.uint8), (0, -codes.shape[1] % BLOCK)).view(E4M3)
    return codes.unflatten(1, (-1, BLOCK)).transpose(0, 1)


def wgrad_gemm_fp8_fp8_fp32_nt(lhs: Operand, rhs: Operand, out: torch.Tensor) -> None:
    """`fp8_gemm_nt(lhs, rhs, out, c=out, recipe=(1, 1, 128))`, under its name of May 2025.

    Args:
        lhs: (e4m3 [M, K], fp32 scales [M, ceil(K/128)]). The scales may be transposed as well,
            where that is another shape.
        rhs: the same with N instead of M.
        out: fp32 [M, N], which the product is added to.

    Raises:
        TypeError, ValueError: naming the argument, the rule and what came.
    """
    op, names = "wgrad_gemm_fp8_fp8_fp32_nt", ("lhs", "rhs", "out")
    a = _either_way(k_major(op, "lhs", lhs))
    b = _either_way(k_major(op, "rhs", rhs))
    dense_gradient(op, a, b, out, out, names)


def _either_way(pair: Operand) -> Operand:
    data, scales = pair
    if data.ndim == 2 and scales.ndim == 2:
        shape = len(data), ceil_div(data.shape[1], BLOCK)
        if scales.shape != shape and scales.T.shape == shape:
            return data, scales.T
    return data, scales
