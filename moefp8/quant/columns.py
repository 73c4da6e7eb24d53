"""Column codes: E4M3 in blocks of 128 tokens, in which the 128 codes of a feature are neighbours.

T tokens, R rows that are grouped by expert, K features, E experts, B blocks. A gradient in weights
sums over tokens, and FP8 tensor cores need the summed axis innermost: data is [B, K, 128]. Each
feature of a block has an FP32 scale (128x1), scale_inv [B, K], or 128 features share one (128x128),
scale_inv [B, ceil(K/128)], which makes the GEMM faster. All rows of a block belong to one expert.
On a Hopper GPU `columns.cu` makes the codes; each CTA has 128 rows of 128 features.
"""

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..kernels.common.blocks import (
    BLOCK,
    E4M3,
    MIN_AMAX,
    ceil_div,
    divisor_of,
    empty_tma_aligned,
    num_blocks,
    round_up_to_tma,
    zero_padded,
)
from ..kernels.common.checks import FLOATS, INPUTS, check_same_device, check_tensor
from ..kernels.common.prepared import layout_of, prepared
from ..kernels.jit import Kernel, Launch
from ..kernels.program import Codes, Place, Record, Target, Tensor, prepare_launch
from ..kernels.registry import register_inputs
from ..kernels.targets import target_of
from . import numerics

_OP, _BOTH = "quantize_128x1", "quantize_1x128_and_128x1"
Quantized = tuple[torch.Tensor, torch.Tensor]  # data, scale_inv
QuantizedBothWays = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class ColumnsInputs(NamedTuple):
    """The arguments of `quantize_128x1`.

    x: [T, K] bf16, fp16 or fp32.
    expert_offsets: int32 [E + 1]; expert e has the rows from expert_offsets[e] to the next one.
        None: all rows belong to one expert.
    row_to_token: int32 [R]: row r is x[row_to_token[r]], or zeros where that is out of range.
        None: row r is x[r].
    ue8m0: round each scale up to a power of two.
    min_amax: a block's largest magnitude counts as at least this.
    blocks: 128 rows of 128 features share a scale; otherwise, 128 rows of one feature do.
    """

    x: torch.Tensor
    expert_offsets: torch.Tensor | None
    row_to_token: torch.Tensor | None
    ue8m0: bool = False
    min_amax: float = MIN_AMAX
    blocks: bool = False


class RowsAndColumnsInputs(NamedTuple):
    """The arguments of `quantize_1x128_and_128x1`: fields as in `ColumnsInputs`; row r is x[r]."""

    x: torch.Tensor
    expert_offsets: torch.Tensor | None
    ue8m0: bool = False
    min_amax: float = MIN_AMAX
    blocks: bool = False

    @property
    def columns(self) -> ColumnsInputs:
        x, expert_offsets, ue8m0, min_amax, blocks = self
        return ColumnsInputs(x, expert_offsets, None, ue8m0, min_amax, blocks)


def num_column_blocks(num_rows: int, num_experts: int | None) -> int:
    """B: enough blocks for `num_rows` rows, however many of them each expert has.

    num_experts: None if all rows belong to one expert.
    """
    return ceil_div(num_rows, BLOCK) if num_experts is None else num_rows // BLOCK + num_experts


def first_block(first_row: int, expert: int) -> int:
    """The first block of an expert whose rows begin at `first_row`.

    The experts before it have at most this many blocks, so no sum over them is needed. Blocks
    between those of two experts are never read.
    """
    return first_row // BLOCK + expert


def empty_columns(
    num_blocks: int, num_features: int, device: torch.device, *, blocks: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised data [B, K, 128] and scale_inv, whose row pitch is a multiple of 16 bytes.

    blocks: scale_inv is [B, ceil(K/128)], not [B, K].
    """
    data = torch.empty((num_blocks, num_features, BLOCK), dtype=E4M3, device=device)
    num_scales = ceil_div(num_features, BLOCK) if blocks else num_features
    pitch = round_up_to_tma(num_scales, torch.float32.itemsize)
    scale_inv = torch.empty((num_blocks, pitch), dtype=torch.float32, device=device)
    return data, scale_inv[:, :num_scales]


def _allocate(inputs: ColumnsInputs, op: str = _OP) -> Quantized:
    """Check, then allocate; this is also the fake body."""
    x, expert_offsets, row_to_token, *_ = inputs
    check_same_device(op, x=x, expert_offsets=expert_offsets, row_to_token=row_to_token)
    check_tensor(op, "x", x, FLOATS, 2)
    if row_to_token is not None:
        check_tensor(op, "row_to_token", row_to_token, (torch.int32,), 1)
    if expert_offsets is not None:
        check_tensor(op, "expert_offsets", expert_offsets, (torch.int32,), 1)
        if len(expert_offsets) < 2:
            raise ValueError(
                f"{op}: expert_offsets must be [E + 1] for E >= 1 experts, got "
                f"{list(expert_offsets.shape)}"
            )
    num_blocks = num_column_blocks(*_sizes(inputs))
    return empty_columns(num_blocks, x.shape[1], x.device, blocks=inputs.blocks)


def _sizes(inputs: ColumnsInputs) -> tuple[int, int | None]:
    """The number of rows and the number of experts; the latter is None without offsets."""
    rows = inputs.x if inputs.row_to_token is None else inputs.row_to_token
    return len(rows), None if inputs.expert_offsets is None else len(inputs.expert_offsets) - 1


def _allocate_both(inputs: RowsAndColumnsInputs) -> QuantizedBothWays:
    """Check, then allocate; this is also the fake body."""
    x, columns = inputs.x, _allocate(inputs.columns, _BOTH)
    row_data = torch.empty(x.shape, dtype=E4M3, device=x.device)
    return row_data, empty_tma_aligned([len(x), num_blocks(x.shape[1])], x.device), *columns


def _body(inputs: ColumnsInputs) -> Quantized:
    x, expert_offsets, row_to_token, ue8m0, min_amax, blocks = inputs
    data, scale_inv = _allocate(inputs)
    quantize = numerics.quantize_128x128 if blocks else numerics.quantize_1x128
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
        codes, scales = quantize(rows[begin:end].T, ue8m0, min_amax)
        first, count = first_block(begin, expert), scales.shape[1]
        whole = zero_padded(codes.view(torch.uint8), 1).view(E4M3)
        data[first : first + count] = whole.unflatten(1, (count, BLOCK)).transpose(0, 1)
        scale_inv[first : first + count] = scales.T
    return data, scale_inv


def _body_both(inputs: RowsAndColumnsInputs) -> QuantizedBothWays:
    _allocate(inputs.columns, _BOTH)
    rows = numerics.quantize_1x128(inputs.x, inputs.ue8m0, inputs.min_amax)
    return *rows, *_body(inputs.columns)


def launch_quantize_128x1(inputs: ColumnsInputs) -> Quantized:
    """`quantize_128x1` on a Hopper GPU: one kernel on the current stream; nothing waits for it."""
    data, scale_inv = _allocate(inputs)
    _launch(inputs, data, scale_inv)
    return data, scale_inv


def launch_quantize_1x128_and_128x1(inputs: RowsAndColumnsInputs) -> QuantizedBothWays:
    """`quantize_1x128_and_128x1` on a Hopper GPU, likewise by one kernel."""
    outputs = _allocate_both(inputs)
    row_data, row_scale_inv, data, scale_inv = outputs
    _launch(inputs.columns, data, scale_inv, (row_data, row_scale_inv))
    return outputs


def _launch(
    inputs: ColumnsInputs,
    data: torch.Tensor,
    scale_inv: torch.Tensor,
    rows: Quantized | None = None,
) -> None:
    x, expert_offsets, row_to_token, ue8m0, min_amax, blocks = inputs
    num_rows, num_experts = _sizes(inputs)
    if num_rows == 0 or data.numel() == 0:
        return
    x = readable(x)
    tensors = {"x": x, "columns": data, "columns_scales": scale_inv}
    if expert_offsets is not None:
        tensors["expert_offsets"] = expert_offsets.contiguous()
    if row_to_token is not None:
        tensors["row_to_token"] = row_to_token.contiguous()
    if rows is not None:
        tensors["rows"], tensors["rows_scales"] = rows
    device_index = x.get_device()

    def prepare() -> Launch:
        r = Record(target_of(device_index), tuple(tensors))
        describe_columns(
            r,
            Tensor.of(x, "x"),
            Codes.of(data, scale_inv, "columns"),
            num_rows,
            num_experts=num_experts,
            expert_offsets=None if expert_offsets is None else Place("expert_offsets"),
            row_to_token=None if row_to_token is None else Place("row_to_token"),
            rows=None if rows is None else Codes.of(*rows, "rows"),
            ue8m0=ue8m0,
            min_amax=min_amax,
            blocks=blocks,
        )
        return prepare_launch(r, device_index)

    sizes = num_rows, num_experts, len(data), scale_inv.stride(0), ue8m0, min_amax
    alignment = x.data_ptr() % _VECTOR_BYTES
    key = (_OP, layout_of(x), alignment, row_to_token is None, rows is None, blocks, *sizes)
    addresses = tuple([tensor.data_ptr() for tensor in tensors.values()])
    prepared(key, prepare).on(device_index, addresses)


quantize_128x1 = register_inputs(
    _OP,
    ColumnsInputs,
    "(Tensor, Tensor)",
    reference=_body,
    fake=_allocate,
    kernels=launch_quantize_128x1,
)
"""`ColumnsInputs` -> (e4m3 [B, K, 128], fp32 [B, K]), with B = `num_column_blocks`; with `blocks`,
the scales are fp32 [B, ceil(K/128)]. The row pitch of scales is a multiple of 16 bytes.

Rows after an expert's last one are zeros up to the next multiple of 32; later ones, and blocks of
no expert, are undefined. Raises TypeError, ValueError."""

quantize_1x128_and_128x1 = register_inputs(
    _BOTH,
    RowsAndColumnsInputs,
    "(Tensor, Tensor, Tensor, Tensor)",
    reference=_body_both,
    fake=_allocate_both,
    kernels=launch_quantize_1x128_and_128x1,
)
"""`RowsAndColumnsInputs` -> (e4m3 [T, K], fp32 [T, ceil(K/128)], e4m3 [B, K, 128], fp32 [B, K]):
the bits of `quantize_1x128`, then of `quantize_128x1` with `blocks`. x is read once.

Rows of no expert may get any codes and scales. Raises TypeError, ValueError."""


# ---- The kernel ----

_SOURCE = Path(__file__).with_name("columns.cu")
_VECTOR_BYTES = 16  # bytes that a thread loads at once, if they are aligned
_THREADS = 256
_MAX_TILES = 2**31 - 2**10  # `Divisor` takes n < 2**31
_MAX_PITCH = 2**32  # in bytes: the kernel multiplies 32-bit numbers


def column_codes(
    r: Record, name: str, num_blocks: int, num_features: int, *, blocks: bool = False
) -> Codes:
    """Buffers of a record with the layouts of `empty_columns`."""
    shape = num_blocks, num_features, BLOCK
    data = Tensor(shape, (num_features * BLOCK, BLOCK, 1), E4M3, r.buffer(name, math.prod(shape)))
    num_scales = ceil_div(num_features, BLOCK) if blocks else num_features
    pitch = round_up_to_tma(num_scales, torch.float32.itemsize)
    place = r.buffer(f"{name}_scales", num_blocks * pitch * 4)
    return Codes(data, Tensor((num_blocks, num_scales), (pitch, 1), torch.float32, place))


def kernel_of(
    dtype: torch.dtype, *, blocks: bool = False, with_rows: bool, vectorized: bool
) -> Kernel:
    """blocks: 128 features share a scale. with_rows: 1x128 codes of the rows are written, too.
    vectorized: eight elements are loaded at once."""
    flags = ", ".join(str(flag).lower() for flag in (blocks, with_rows, vectorized))
    return Kernel(_SOURCE, f"columns_kernel<{INPUTS[dtype]}, {flags}>")


def columns_kernels(
    target: Target, dtype: torch.dtype, k: int, *, blocks: bool
) -> Iterator[Kernel]:
    """The kernels of `quantize_128x1` for rows of K features, at any addresses."""
    for alignment in (_VECTOR_BYTES, dtype.itemsize):
        r = Record(target, ("x",))
        x = Tensor.contiguous("x", 1, k, dtype=dtype, alignment=alignment)
        columns = column_codes(r, "columns", 1, k, blocks=blocks)
        describe_columns(r, x, columns, 1, min_amax=MIN_AMAX, blocks=blocks)
        yield from r.kernels


def readable(x: torch.Tensor) -> torch.Tensor:
    """x [T, K], or a copy of it if its rows are not contiguous or too far apart."""
    is_near = len(x) <= 1 or x.stride(0) * x.element_size() < _MAX_PITCH
    return x if is_near and (x.stride(1) == 1 or x.shape[1] == 1) else x.contiguous()


def describe_columns(
    r: Record,
    x: Tensor,
    columns: Codes,
    num_rows: int,
    *,
    num_experts: int | None = None,
    expert_offsets: Place | None = None,
    row_to_token: Place | None = None,
    rows: Codes | None = None,
    ue8m0: bool = False,
    min_amax: float,
    blocks: bool = False,
    programmatic: bool = False,
) -> None:
    """One step that writes column codes of rows, and their 1x128 codes into `rows` if it is given.

    The next kernel may start before this one ends, as with `describe_transpose`.

    Args:
        x: [T, K], as `readable` returns it.
        columns: e4m3 [B, K, 128], contiguous, at a multiple of 16 bytes; fp32 [B, K], or with
            `blocks` [B, ceil(K/128)].
        num_rows: R, at least 1.
        num_experts: E; None: all rows belong to one expert.
        expert_offsets: int32 [E + 1]; None without experts.
        row_to_token: int32 [R]; None: row r is x[r].
        rows: e4m3 [R, K], contiguous; fp32 [R, ceil(K/128)], rows innermost.
        blocks: 128 features share a scale of columns.
        programmatic: it may start before the stream's previous kernel ends; it reads and writes
            after that end.

    Raises:
        ValueError: there are more rows, features or tiles than a kernel can count.
    """
    num_tokens, k = x.shape
    num_k_blocks = num_blocks(k)
    num_tiles = columns.data.shape[0] * num_k_blocks
    if max(num_tiles, num_rows, num_tokens, k) > _MAX_TILES:
        raise ValueError(
            f"quantize_128x1: one call takes at most {_MAX_TILES} rows, features and tiles of "
            f"128x128, got x {list(x.shape)}, {num_rows} rows, {num_tiles} tiles; split the tensor"
        )
    row_bytes = x.bytes_of_stride(0) if num_tokens > 1 else 0
    arguments: dict[str, Any] = {
        "x": x.place,
        "expert_offsets": expert_offsets,
        "row_to_token": row_to_token,
        "data": columns.data.place,
        "scale_inv": columns.scale_inv.place,
        "pitch": columns.scale_inv.strides[0],
        "row_bytes": row_bytes,
        "k": k,
        "num_tokens": num_tokens,
        "num_rows": num_rows,
        "num_experts": num_experts or 0,
        "num_k_blocks": divisor_of(num_k_blocks),
        "ue8m0": ue8m0,
        "min_amax": min_amax,
    }
    if rows is not None:
        arguments |= {
            "row_data": rows.data.place,
            "row_scale_inv": rows.scale_inv.place,
            "row_pitch": rows.scale_inv.strides[-1],
        }
    vectorized = x.is_aligned and not any(step % _VECTOR_BYTES for step in (row_bytes, k * 2))
    r.step(
        kernel_of(x.dtype, blocks=blocks, with_rows=rows is not None, vectorized=vectorized),
        num_tiles,
        _THREADS,
        arguments,
        programmatic=programmatic,
    )
