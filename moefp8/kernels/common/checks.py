"""Argument checks shared by the launchers: the rule, what came, the way out.

Only dtypes, shapes, strides and devices are looked at, so no check waits for a device; but for
`check_choices`, which is for the CPU.
"""

from collections.abc import Sequence

import torch

from .blocks import E4M3, num_blocks

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def check_tensor(
    op: str, name: str, x: torch.Tensor, dtypes: Sequence[torch.dtype], ndim: int | None = None
) -> None:
    if x.dtype not in dtypes:
        allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        came = str(x.dtype).removeprefix("torch.")
        raise TypeError(f"{op}: {name} must be {allowed}, got {came}")
    if ndim is not None and x.ndim != ndim:
        raise ValueError(f"{op}: {name} must have {ndim} dimensions, got shape {list(x.shape)}")


def check_shape(op: str, name: str, x: torch.Tensor, shape: Sequence[int], rule: str) -> None:
    """`x.shape` must be `shape`; `rule` says where that comes from, e.g. "[M, ceil(K/128)]"."""
    if list(x.shape) != list(shape):
        raise ValueError(f"{op}: {name} must be {rule} = {list(shape)}, got {list(x.shape)}")


def check_rows_contiguous(op: str, name: str, x: torch.Tensor) -> None:
    if x.shape[-1] > 1 and x.stride(-1) != 1 and x.numel():  # of nothing, strides say nothing
        raise ValueError(
            f"{op}: the last dimension of {name} must be contiguous, got strides "
            f"{list(x.stride())} for shape {list(x.shape)}; call .contiguous()"
        )


def check_same_device(op: str, **tensors: torch.Tensor | None) -> None:
    devices = {name: x.device for name, x in tensors.items() if x is not None}
    if len(set(devices.values())) > 1:
        found = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"{op}: all tensors must be on one device, got {found}")


def check_pairs(op: str, a: object, b: object) -> None:
    for name, pair in (("a", a), ("b", b)):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"{op}: {name} must be a pair (data, scale_inv), got {type(pair)}")


def check_operands(
    op: str,
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    d: torch.Tensor,
    ndims: tuple[int, int],
    **others: torch.Tensor | None,
) -> None:
    """The operands of every GEMM: a [..., M, K], b [..., N, K], d [..., M, N] and their scales.

    `ndims` are the dimensions of `a` and `b`; the number of groups is the caller's to check, and of
    `others` all but the device.
    """
    operands = {"a": a, "a_scale_inv": a_scale_inv, "b": b, "b_scale_inv": b_scale_inv, "d": d}
    check_same_device(op, **operands, **others)
    for name, x, dtypes, ndim in (
        ("a", a, (E4M3,), ndims[0]),
        ("a_scale_inv", a_scale_inv, (torch.float32,), ndims[0]),
        ("b", b, (E4M3,), ndims[1]),
        ("b_scale_inv", b_scale_inv, (torch.float32,), ndims[1]),
        ("d", d, (torch.bfloat16,), ndims[0]),
    ):
        check_tensor(op, name, x, dtypes, ndim)
    *a_groups, m, k = a.shape
    *b_groups, n, b_k = b.shape
    if k != b_k:
        raise ValueError(f"{op}: K must be equal in a and b, got {k} and {b_k}")
    of_a, of_b = ("G, " if groups else "" for groups in (a_groups, b_groups))
    shape = [*a_groups, m, num_blocks(k)]
    check_shape(op, "a_scale_inv", a_scale_inv, shape, f"[{of_a}M, ceil(K/128)]")
    shape = [*b_groups, num_blocks(n), num_blocks(k)]
    check_shape(op, "b_scale_inv", b_scale_inv, shape, f"[{of_b}ceil(N/128), ceil(K/128)]")
    check_shape(op, "d", d, [*a_groups, m, n], f"[{of_a}M, N]")
    for name, x in (("a", a), ("b", b), ("d", d)):
        check_rows_contiguous(op, name, x)


def check_dense_gemm(
    op: str,
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    d: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    """All that a dense GEMM asks of its arguments."""
    check_operands(op, a, a_scale_inv, b, b_scale_inv, d, (2, 2), bias=bias)
    check_bias(op, bias, b.shape[0])


def check_contiguous_gemm(
    op: str,
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    d: torch.Tensor,
    grouped_layout: torch.Tensor | None,
    expert_offsets: torch.Tensor | None,
) -> None:
    """All that a contiguous GEMM asks of its arguments but their values."""
    groups = {"grouped_layout": grouped_layout, "expert_offsets": expert_offsets}
    check_operands(op, a, a_scale_inv, b, b_scale_inv, d, (2, 3), **groups)
    if (grouped_layout is None) == (expert_offsets is None):
        came = "neither" if grouped_layout is None else "both"
        raise ValueError(f"{op}: give grouped_layout or expert_offsets, got {came}")
    if grouped_layout is not None:
        check_tensor(op, "grouped_layout", grouped_layout, (torch.int32,), 1)
        check_shape(op, "grouped_layout", grouped_layout, [a.shape[0]], "[M]")
    if expert_offsets is not None:
        check_tensor(op, "expert_offsets", expert_offsets, (torch.int32,), 1)
        check_shape(op, "expert_offsets", expert_offsets, [b.shape[0] + 1], "[G + 1]")


def check_masked_gemm(
    op: str,
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    d: torch.Tensor,
    masked_m: torch.Tensor,
) -> None:
    """All that a masked GEMM asks of its arguments but their values."""
    check_operands(op, a, a_scale_inv, b, b_scale_inv, d, (3, 3), masked_m=masked_m)
    if a.shape[0] != b.shape[0]:
        raise ValueError(f"{op}: G must be equal in a and b, got {a.shape[0]} and {b.shape[0]}")
    check_tensor(op, "masked_m", masked_m, (torch.int32,), 1)
    check_shape(op, "masked_m", masked_m, [a.shape[0]], "[G]")


def check_bias(op: str, bias: torch.Tensor | None, n: int) -> None:
    if bias is not None:
        check_tensor(op, "bias", bias, FLOATS, 1)
        check_shape(op, "bias", bias, [n], "[N]")


def check_choices(op: str, top_k_index: torch.Tensor, num_experts: int) -> None:
    """Its values: only on a CPU, where that costs no synchronisation."""
    if top_k_index.numel() == 0:
        return
    low, high = (int(x) for x in top_k_index.aminmax())
    if low < 0 or high > num_experts:
        raise ValueError(
            f"{op}: top_k_index must be in [0, E] for E = {num_experts} experts (E itself marks "
            f"a choice held elsewhere, of weight 0), got ids from {low} to {high}"
        )
