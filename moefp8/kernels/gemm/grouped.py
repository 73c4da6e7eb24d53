"""Grouped FP8 GEMMs: every group (expert) g has its own b[g]; rows of a belong to one group each.

Contiguous: the rows of all groups follow one another in one [M, K]. Masked: every group has a
slab [max_m, K] of which the first `masked_m[g]` rows count.
"""

from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch

from ..common.blocks import BLOCK
from ..common.checks import check_group_bias, check_shape, check_tensor
from ..registry import Written, register_inputs
from .call import GemmCall, launch_gemm
from .dense import block_scaled_matmul, check_recipe
from .interface import GroupLayout
from .operands import Operand, Operands, check_operands, check_pairs

_CONTIGUOUS = "m_grouped_fp8_gemm_nt_contiguous"
_MASKED = "m_grouped_fp8_gemm_nt_masked"

Segment = tuple[int, int, int]  # group, first row, end row


def get_mk_alignment_for_contiguous_layout() -> int:
    """Rows to which segments must be aligned when groups are named by `grouped_layout`."""
    return BLOCK


def _segments_of_layout(grouped_layout: torch.Tensor, num_groups: int) -> list[Segment]:
    """Every run of equal ids, padding left out."""
    ids, counts = torch.unique_consecutive(grouped_layout, return_counts=True)
    segments, row = [], 0
    for group, count in zip(ids.tolist(), counts.tolist(), strict=True):
        if not -1 <= group < num_groups:
            raise ValueError(
                f"{_CONTIGUOUS}: grouped_layout must hold -1 (padding) or a group below "
                f"{num_groups}, got {group} at row {row}"
            )
        if group >= 0:
            if row % BLOCK:
                raise ValueError(
                    f"{_CONTIGUOUS}: segments in grouped_layout must start at multiples of "
                    f"{BLOCK} rows, got group {group} from row {row}; align it, or pass "
                    "expert_offsets, which needs no alignment"
                )
            segments.append((group, row, row + count))
        row += count
    return segments


def _segments_of_offsets(expert_offsets: torch.Tensor, num_rows: int) -> list[Segment]:
    offsets = expert_offsets.tolist()
    if offsets != sorted(offsets) or offsets[0] < 0 or offsets[-1] > num_rows:
        raise ValueError(
            f"{_CONTIGUOUS}: expert_offsets must rise from 0 or more to at most M = {num_rows}, "
            f"got {offsets}"
        )
    segments = enumerate(pairwise(offsets))
    return [(group, start, end) for group, (start, end) in segments if end > start]


class ContiguousInputs(NamedTuple):
    """The arguments of `m_grouped_fp8_gemm_nt_contiguous`, with its pairs unpacked."""

    a: torch.Tensor
    a_scale_inv: torch.Tensor
    b: torch.Tensor
    b_scale_inv: torch.Tensor
    d: Written
    grouped_layout: torch.Tensor | None
    expert_offsets: torch.Tensor | None
    zero_padding: bool = False
    bias: torch.Tensor | None = None


def _check_contiguous(inputs: ContiguousInputs) -> None:
    """Check all that a contiguous GEMM asks of its arguments, except their values."""
    *operands, grouped_layout, expert_offsets, _, bias = inputs
    optional = {
        "grouped_layout": grouped_layout,
        "expert_offsets": expert_offsets,
        "bias": bias,
    }
    check_operands(_CONTIGUOUS, Operands(*operands), (2, 3), **optional)
    if (grouped_layout is None) == (expert_offsets is None):
        came = "neither" if grouped_layout is None else "both"
        raise ValueError(f"{_CONTIGUOUS}: give grouped_layout or expert_offsets, got {came}")
    if grouped_layout is not None:
        check_tensor(_CONTIGUOUS, "grouped_layout", grouped_layout, (torch.int32,), 1)
        check_shape(_CONTIGUOUS, "grouped_layout", grouped_layout, [len(inputs.a)], "[M]")
    if expert_offsets is not None:
        check_tensor(_CONTIGUOUS, "expert_offsets", expert_offsets, (torch.int32,), 1)
        check_shape(_CONTIGUOUS, "expert_offsets", expert_offsets, [len(inputs.b) + 1], "[G + 1]")
    check_group_bias(_CONTIGUOUS, "bias", bias, inputs.b.shape[:2], "[G, N]")


def _contiguous(inputs: ContiguousInputs) -> None:
    _check_contiguous(inputs)
    a, a_scale_inv, b, b_scale_inv, d, grouped_layout, expert_offsets, zero_padding, bias = inputs
    segments = []
    if expert_offsets is not None:
        segments = _segments_of_offsets(expert_offsets, len(a))
    elif grouped_layout is not None:
        segments = _segments_of_layout(grouped_layout, len(b))
    if zero_padding:
        d.zero_()
    for group, start, end in segments:
        rows = slice(start, end)
        y = block_scaled_matmul(a[rows], a_scale_inv[rows], b[group], b_scale_inv[group])
        d[rows] = y if bias is None else y + bias[group].float()


def finds_segments(num_rows: int, num_groups: int) -> bool:
    """Whether a kernel finds the segments of `grouped_layout` [num_rows] before the GEMM.

    That takes as long as a launch does, and pays where groups have more than a block of rows; the
    numbers come from timings on an H100, see docs/design/grouped.md.
    """
    return num_rows >= max(2048, 160 * num_groups)


def _launch_contiguous(inputs: ContiguousInputs) -> None:
    *operands, grouped_layout, expert_offsets, zero_padding, bias = inputs
    layout, bounds = GroupLayout.OFFSETS, expert_offsets
    if expert_offsets is None and grouped_layout is not None:
        bounds, layout = grouped_layout, GroupLayout.ROWS
        b = operands[2]  # it is checked later
        if b.ndim and finds_segments(grouped_layout.numel(), b.shape[0]):
            layout = GroupLayout.SEGMENTS
    check = partial(_check_contiguous, inputs)
    if bounds is None or (grouped_layout is not None and expert_offsets is not None):
        check()  # this raises
        return
    if zero_padding:  # which rows are padding, only the device knows
        check()
        inputs.d.zero_()
    launch_gemm(
        [*operands, bounds] if bias is None else [*operands, bias, bounds],
        (_CONTIGUOUS, layout),
        lambda: GemmCall(_CONTIGUOUS, check, Operands(*operands), bias, layout, bounds),
    )


class MaskedInputs(NamedTuple):
    """The arguments of `m_grouped_fp8_gemm_nt_masked`, with its pairs unpacked."""

    a: torch.Tensor
    a_scale_inv: torch.Tensor
    b: torch.Tensor
    b_scale_inv: torch.Tensor
    d: Written
    masked_m: torch.Tensor
    expected_m: int


def _check_masked(inputs: MaskedInputs) -> None:
    *operands, masked_m, _ = inputs  # expected_m may be anything
    check_operands(_MASKED, Operands(*operands), (3, 3), masked_m=masked_m)
    num_groups, b_groups = len(inputs.a), len(inputs.b)
    if num_groups != b_groups:
        raise ValueError(f"{_MASKED}: G must be equal in a and b, got {num_groups} and {b_groups}")
    check_tensor(_MASKED, "masked_m", masked_m, (torch.int32,), 1)
    check_shape(_MASKED, "masked_m", masked_m, [num_groups], "[G]")


def _masked(inputs: MaskedInputs) -> None:
    _check_masked(inputs)
    *operands, d, masked_m, _ = inputs
    counts, max_m = masked_m.tolist(), d.shape[1]
    for group, m in enumerate(counts):
        if not 0 <= m <= max_m:
            raise ValueError(
                f"{_MASKED}: masked_m must be in [0, max_m] = [0, {max_m}], got {m} for group "
                f"{group}"
            )
    for group, (m, a, a_scale_inv, *weights) in enumerate(zip(counts, *operands, strict=True)):
        d[group, :m] = block_scaled_matmul(a[:m], a_scale_inv[:m], *weights)


def _launch_masked(inputs: MaskedInputs) -> None:
    *operands, masked_m, expected_m = inputs
    layout, expected_m = GroupLayout.MASKED, max(1, expected_m)
    check = partial(_check_masked, inputs)
    launch_gemm(
        inputs[:6],
        (_MASKED, expected_m),
        lambda: GemmCall(_MASKED, check, Operands(*operands), None, layout, masked_m, expected_m),
    )


_contiguous_op = register_inputs(
    _CONTIGUOUS,
    ContiguousInputs,
    "()",
    reference=_contiguous,
    fake=_check_contiguous,
    kernels=_launch_contiguous,
)
_masked_op = register_inputs(
    _MASKED, MaskedInputs, "()", reference=_masked, fake=_check_masked, kernels=_launch_masked
)


def m_grouped_fp8_gemm_nt_contiguous(
    a: Operand,
    b: Operand,
    d: torch.Tensor,
    grouped_layout: torch.Tensor | None = None,
    recipe: tuple[int, int, int] | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    *,
    expert_offsets: torch.Tensor | None = None,
    zero_padding: bool = False,
    bias: torch.Tensor | None = None,
) -> None:
    """Write `d[r] = dequantize(a)[r] @ dequantize(b)[group of r].T` for all rows of groups.

    Args:
        a: (e4m3 [M, K], fp32 scale_inv [M, ceil(K/128)]). Padding rows may hold anything.
        b: (e4m3 [G, N, K], fp32 scale_inv [G, ceil(N/128), ceil(K/128)]).
        d: bf16 [M, N]; rows of padding are left untouched, unless zero_padding is set.
        grouped_layout: int32 [M], DeepGEMM's contract: the group of every row, -1 for padding.
            Rows of a group follow each other, from a multiple of
            `get_mk_alignment_for_contiguous_layout()` on; padding follows them.
        expert_offsets: int32 [G + 1], instead of `grouped_layout`: group g has the rows from
            `expert_offsets[g]` to `expert_offsets[g + 1]`, with no alignment. Rows outside are
            padding. This is faster, since no row is padded.
        zero_padding: rows of padding become zeros. A GPU zeroes all of d first, which takes one
            more launch and writes 2 M N bytes.
        bias: [G, N] bf16, fp16 or fp32, any strides, added in FP32 to the rows of each group; or
            None.
        recipe, compiled_dims, disable_ue8m0_cast: as in `fp8_gemm_nt`.

    Raises:
        TypeError, ValueError: naming the argument, the rule and what came. Values of
            `grouped_layout` and `expert_offsets` are checked on the CPU only: on a GPU that
            would cost a synchronisation.
    """
    check_recipe(_CONTIGUOUS, recipe)
    check_pairs(_CONTIGUOUS, a, b)
    _contiguous_op(*a, *b, d, grouped_layout, expert_offsets, zero_padding, bias)


def m_grouped_fp8_gemm_nt_masked(
    a: Operand,
    b: Operand,
    d: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    recipe: tuple[int, int, int] | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:
    """Write `d[g, :masked_m[g]] = dequantize(a)[g] @ dequantize(b)[g].T`, and no other row.

    Args:
        a: (e4m3 [G, max_m, K], fp32 scale_inv [G, max_m, ceil(K/128)]).
        b: (e4m3 [G, N, K], fp32 scale_inv [G, ceil(N/128), ceil(K/128)]).
        d: bf16 [G, max_m, N]; rows at and past `masked_m[g]` are left untouched.
        masked_m: int32 [G], rows that count, each in [0, max_m] (checked on the CPU only).
        expected_m: a hint, the mean of `masked_m`; it never changes the result.
        recipe, compiled_dims, disable_ue8m0_cast: as in `fp8_gemm_nt`.

    Raises:
        TypeError, ValueError: naming the argument, the rule and what came.
    """
    check_recipe(_MASKED, recipe)
    check_pairs(_MASKED, a, b)
    _masked_op(*a, *b, d, masked_m, expected_m)
