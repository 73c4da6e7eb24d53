"""Column codes: E4M3 of 128 tokens of a feature at a time, one FP32 scale each. The op.

T tokens, R rows that are grouped by expert, K features, E experts, B blocks. A gradient in weights
sums over tokens, and FP8 tensor cores want what they sum over innermost: so the codes of 128 rows
of one feature lie side by side, data [B, K, 128] and scale_inv [B, K]. A block has rows of one
expert only; where its blocks begin, `first_block` says.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch.nn import functional as F

from ..kernels.common.blocks import BLOCK, E4M3, MIN_AMAX, ceil_div, round_up_to_tma
from ..kernels.common.checks import FLOATS, check_same_device, check_tensor
from ..kernels.common.registry import register_inputs
from . import numerics

_OP = "quantize_128x1"
Quantized = tuple[torch.Tensor, torch.Tensor]  # data, scale_inv


class ColumnsInputs(NamedTuple):
    """What `quantize_128x1` takes.

    x: [T, K] bf16, fp16 or fp32.
    expert_offsets: int32 [E + 1]; expert e has the rows from expert_offsets[e] to the next one.
        None: all rows are of one.
    row_to_token: int32 [R], which row of x is row r; None: x[r] is. Negative or too large: zeros.
    ue8m0: round each scale up to a power of two.
    min_amax: a block's largest magnitude counts as at least this.
    """

    x: torch.Tensor
    expert_offsets: torch.Tensor | None
    row_to_token: torch.Tensor | None
    ue8m0: bool = False
    min_amax: float = MIN_AMAX


def num_column_blocks(num_rows: int, num_experts: int | None) -> int:
    """B: how many blocks there are room for, whatever the experts' shares of `num_rows` are.

    num_experts: None if all rows are of one.
    """
    return ceil_div(num_rows, BLOCK) if num_experts is None else num_rows // BLOCK + num_experts


def first_block(first_row: int, expert: int) -> int:
    """Where the blocks of an expert begin, which has rows from `first_row` on.

    It takes no sum over the experts before: they have at most so many blocks. What is between the
    blocks of two experts is never read.
    """
    return first_row // BLOCK + expert


def empty_columns(
    num_blocks: int, num_features: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised data [B, K, 128] and scale_inv [B, K], whose rows are 16 bytes' multiples."""
    data = torch.empty((num_blocks, num_features, BLOCK), dtype=E4M3, device=device)
    pitch = round_up_to_tma(num_features, torch.float32.itemsize)
    scale_inv = torch.empty((num_blocks, pitch), dtype=torch.float32, device=device)
    return data, scale_inv[:, :num_features]


def _allocate(inputs: ColumnsInputs) -> Quantized:
    """Check, then allocate; this is also the fake body."""
    x, expert_offsets, row_to_token, *_ = inputs
    check_same_device(_OP, x=x, expert_offsets=expert_offsets, row_to_token=row_to_token)
    check_tensor(_OP, "x", x, FLOATS, 2)
    num_rows, num_experts = len(x), None
    if row_to_token is not None:
        check_tensor(_OP, "row_to_token", row_to_token, (torch.int32,), 1)
        num_rows = len(row_to_token)
    if expert_offsets is not None:
        check_tensor(_OP, "expert_offsets", expert_offsets, (torch.int32,), 1)
        num_experts = len(expert_offsets) - 1
        if num_experts < 1:
            raise ValueError(f"{_OP}: expert_offsets must be [E + 1] for E >= 1 experts, got [0]")
    return empty_columns(num_column_blocks(num_rows, num_experts), x.shape[1], x.device)


def _body(inputs: ColumnsInputs) -> Quantized:
    x, expert_offsets, row_to_token, ue8m0, min_amax = inputs
    data, scale_inv = _allocate(inputs)
    rows = x.float()
    if row_to_token is not None:
        exists = (row_to_token >= 0) & (row_to_token < len(x))
        rows = rows.new_zeros(len(row_to_token), x.shape[1])
        rows[exists] = x.float()[row_to_token[exists].long()]
    offsets = [0, len(rows)] if expert_offsets is None else expert_offsets.tolist()
    for expert, (begin, end) in enumerate(pairwise(offsets)):
        begin, end = max(begin, 0), min(end, len(rows))
        if begin >= end:
            continue
        columns = rows[begin:end].T
        codes, scales = numerics.quantize_1x128(columns, ue8m0, min_amax)
        first, count = first_block(begin, expert), scales.shape[1]
        whole = F.pad(codes.view(torch.uint8), (0, count * BLOCK - codes.shape[1])).view(E4M3)
        data[first : first + count] = whole.unflatten(1, (count, BLOCK)).transpose(0, 1)
        scale_inv[first : first + count] = scales.T
    return data, scale_inv


quantize_128x1 = register_inputs(_OP, ColumnsInputs, "(Tensor, Tensor)", cpu=_body, fake=_allocate)
"""`ColumnsInputs` -> (e4m3 [B, K, 128], fp32 [B, K]), with B = `num_column_blocks`.

Rows behind an expert's last one are zeros up to the next multiple of 32; behind that, and in blocks
that no expert has, nothing is defined. Raises TypeError, ValueError."""
