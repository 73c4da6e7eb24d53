"""Copy every token to the rows of its experts. T tokens, k choices, E experts, R rows, H hidden.

`GroupedExperts` also quantizes each token on the way. On a Hopper GPU `dispatch.cu` plans,
quantizes and copies, most often in one kernel: see `describe_dispatch`.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..kernels.common.blocks import (
    E4M3,
    MIN_AMAX,
    TMA_BYTES,
    ceil_div,
    divisor_of,
    num_blocks,
    round_up,
)
from ..kernels.common.checks import FLOATS, INPUTS, check_same_device
from ..kernels.jit import Kernel
from ..kernels.program import Codes, Place, Record, Tensor
from .combine import first_choices, is_transformed, sum_rows
from .plan import (
    MAX_CHOICES,
    MAX_THREADS,
    WARP,
    MapPlaces,
    RoutingPlan,
    num_slots_of,
    routing_of,
    tokens_of_chunk,
)


def dispatch(x: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
    """Copy every token to its rows; padding rows become zeros.

    Its gradient is the sum of the rows of each token, in FP32 and in the order of its choices.

    Args:
        x: [T, ...] of any dtype, FP8 included.

    Returns:
        [R, ...] in the contiguous layout, [E, max_m, ...] in the masked one.

    Raises:
        ValueError: `x` has another number of tokens than the plan, or is on another device.
    """
    num_tokens = plan.token_to_row.shape[0]
    if x.ndim < 1 or x.shape[0] != num_tokens:
        raise ValueError(f"dispatch: x must be [T = {num_tokens}, ...], got {list(x.shape)}")
    check_same_device("dispatch", x=x, plan=plan.row_to_token)
    if x.requires_grad and torch.is_grad_enabled() and x.dtype in FLOATS and not is_transformed():
        rows = _Dispatch.apply(x, plan.row_to_token, plan.token_to_row)
    else:
        rows = dispatch_rows(x, plan.row_to_token)
    return rows.view(*plan.row_shape, *x.shape[1:])


def dispatch_rows(x: torch.Tensor, row_to_token: torch.Tensor) -> torch.Tensor:
    """[R, ...]: row r is x[row_to_token[r]], or zeros where that is -1."""
    if len(x) == 0:  # the masked layout may still have rows
        return x.new_zeros(len(row_to_token), *x.shape[1:])
    values = x.view(torch.uint8) if x.dtype.itemsize == 1 else x  # FP8 has few ops of its own
    rows = values.index_select(0, row_to_token.clamp(min=0))
    rows.masked_fill_((row_to_token < 0).view(-1, *[1] * (x.ndim - 1)), 0)
    return rows if values is x else rows.view(x.dtype)


class _Dispatch(torch.autograd.Function):
    """PyTorch's own gradient would sum a token's rows in their dtype, and on a GPU in any order."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, row_to_token: torch.Tensor, token_to_row: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(token_to_row)
        return dispatch_rows(x, row_to_token)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (token_to_row,) = ctx.saved_tensors
        rows = grad.unsqueeze(-1).flatten(1)
        grad_tokens = sum_rows(rows, token_to_row, first_choices(token_to_row))
        return grad_tokens.view(len(token_to_row), *grad.shape[1:]), None, None


# ---- The kernels ----

_OP = "dispatch"
# The dtypes that kernels take, and how dispatch.cu names them.
SHARES = {**{dtype: f"Floats<{name}>" for dtype, name in INPUTS.items()}, E4M3: "Codes"}
_SOURCE = Path(__file__).with_name("dispatch.cu")
_LANES = 8  # threads that hold a block of 128 elements
_COUNT_THREADS = 128
_MANY_CHOICES = 2**13  # a kernel of its own counts more than these faster than each CTA does
_MIN_BLOCKS = 8  # a CTA with fewer k-blocks would plan more than it quantizes
_FEW_CHOICES = WARP  # a warp holds all of them, and needs no counts
_FEW_THREADS = 128


class DispatchCut(NamedTuple):
    """How the kernels are cut.

    A CTA has `threads` threads, and owns `k_blocks` k-blocks of each of the `tokens` tokens of a
    chunk. It works on `group` k-blocks of all these tokens at a time. `is_counted`: a kernel before
    it counts the choices of each chunk.
    """

    tokens: int
    k_blocks: int
    group: int
    threads: int
    is_counted: bool


def cut_dispatch(
    num_tokens: int, top_k: int, num_experts: int, num_k_blocks: int, num_sms: int
) -> DispatchCut:
    """The cut into about one CTA for each SM; a CTA has a chunk, or a part of a small chunk."""
    chunk = tokens_of_chunk(num_tokens, top_k, num_sms)
    parts = min(num_sms // ceil_div(num_tokens, chunk), num_k_blocks // _MIN_BLOCKS)
    k_blocks = ceil_div(num_k_blocks, max(1, parts))
    at_once = max(1, MAX_THREADS // _LANES // chunk)
    group = min(1 << (at_once.bit_length() - 1), 1 << (k_blocks - 1).bit_length())
    num_choices = num_tokens * top_k
    if _is_counted(num_choices, num_experts):
        return DispatchCut(chunk, k_blocks, group, MAX_THREADS, is_counted=True)
    threads = max(chunk * group * _LANES, min(num_choices // 2, 512))
    return DispatchCut(
        chunk, k_blocks, group, min(MAX_THREADS, round_up(threads, WARP)), is_counted=False
    )


def _is_counted(num_choices: int, num_experts: int) -> bool:
    return num_choices > _MANY_CHOICES and num_experts < MAX_THREADS


def is_few(num_choices: int, *, masked: bool) -> bool:
    """Whether `dispatch_few_kernel` takes this many choices."""
    return num_choices <= _FEW_CHOICES and not masked


def few_kernel_of(dtype: torch.dtype, *, vectorized: bool) -> Kernel:
    return Kernel(_SOURCE, f"dispatch_few_kernel<{SHARES[dtype]}, {str(vectorized).lower()}>")


def dispatch_kernel_of(
    dtype: torch.dtype, *, vectorized: bool, masked: bool, is_counted: bool
) -> Kernel:
    """vectorized: the layout of x lets a thread load eight elements at once, or 16 codes."""
    flags = ", ".join(str(flag).lower() for flag in (vectorized, masked, is_counted))
    return Kernel(_SOURCE, f"dispatch_kernel<{SHARES[dtype]}, {flags}>")


def count_kernel_of(*, masked: bool) -> Kernel:
    return Kernel(_SOURCE, f"count_kernel<{str(masked).lower()}>")


def _columns_at_once(dtype: torch.dtype) -> int:
    """Kernels are vectorized only if H is a multiple of this.

    A thread loads its 16 codes at once. If only the pitch of rows were a multiple of 16, the last
    load of the last row could read past the end of x.
    """
    return 16 if dtype == E4M3 else 8


def most_count_bytes(num_tokens: int, top_k: int, num_experts: int) -> int:
    """How many bytes a dispatch takes for counts, at most, on a GPU of up to 256 SMs."""
    num_places = num_tokens * round_up(top_k, 4)
    num_chunks = min(num_tokens, max(256, ceil_div(2 * num_places, MAX_CHOICES)))
    return num_chunks * num_slots_of(num_experts) * 2


class Dispatched(NamedTuple):
    """The results of a dispatch, besides rows, for the steps after it.

    maps: int32 expert_offsets [E + 1], tokens_per_expert [E] and token_to_row [T, k].
    tile_counters: int32 [2], zeros, which the GEMMs after it may use to count tiles.
    """

    maps: MapPlaces
    tile_counters: Place


def describe_dispatch(
    r: Record,
    x: Tensor,
    ids: Tensor,
    rows: Codes,
    num_experts: int,
    *,
    x_scale_inv: Tensor | None = None,
    expert_offset: int = 0,
    is_masked: bool = False,
    maps: MapPlaces | None = None,
    min_amax: float = MIN_AMAX,
) -> Dispatched:
    """Plan the rows, quantize every token once, as `quantize_1x128` does, and copy it to its rows.

    Where x is e4m3, its codes and scales are copied as they are. This is one step, or for many
    tokens two, of which the first counts choices. Each waits for the step before it.

    Args:
        x: [T, H]; T and H at least 1, columns contiguous.
        ids: [T, k], int32 or int64; an id of no expert here has no row.
        rows: e4m3 [1, R, H], or if is_masked [E, R, H] with R >= T, in rows of whole 16 bytes. The
            bytes after the end of a row, up to the next multiple of 16, may be written too. There
            are fewer than 2**31 scales.
        x_scale_inv: fp32 [T, ceil(H/128)], the scales of an e4m3 `x`; None for others.
        expert_offset: the id of the first of the E experts.
        is_masked: each expert has a matrix of rows; else the rows of all follow one another.
        maps: where the plan is written; None: into buffers.
        min_amax: as in `quantize_1x128`.

    Raises:
        ValueError: there are more choices or rows than a kernel can count.
    """
    (num_tokens, hidden_size), top_k = x.shape, ids.shape[1]
    if maps is None:
        counts, offsets = (
            r.buffer("tokens_per_expert", num_experts * 4),
            r.buffer("expert_offsets", (num_experts + 1) * 4),
        )
        maps = MapPlaces(counts, offsets, r.buffer("token_to_row", num_tokens * top_k * 4))
    tile_counters = r.buffer("tile_counters", 2 * 4)
    num_k_blocks = num_blocks(hidden_size)
    cut = cut_dispatch(num_tokens, top_k, num_experts, num_k_blocks, r.target.num_sms)
    routing = routing_of(
        _OP,
        cut.tokens,
        ids,
        num_experts,
        rows.data.shape[1] if is_masked else None,
        maps,
        num_warps=cut.threads // WARP if cut.is_counted and not is_masked else 0,
        expert_offset=expert_offset,
        words_of_choice=2 if is_masked else 1,
    )
    num_choices = num_tokens * top_k
    has_few = is_few(num_choices, masked=is_masked)
    bounds = [_FEW_CHOICES] * (not is_masked) + [_MANY_CHOICES] * (num_experts < MAX_THREADS)
    r.hold(num_choices, lambda most: min([x for x in bounds if x >= num_choices], default=most))
    k_blocks = _FEW_THREADS // _LANES if has_few else cut.k_blocks
    parts, num_chunks = ceil_div(num_k_blocks, k_blocks), ceil_div(num_tokens, cut.tokens)
    x_row_bytes = x.bytes_of_stride(0)
    arguments = {
        "routing": routing.arguments,
        "x": x.place,
        "x_row_bytes": x_row_bytes,
        "rows": rows.data.place,
        "row_pitch": rows.data.strides[1],
        "row_scales": rows.scale_inv.place,
        "scale_pitch": rows.scale_inv.strides[2],
        "hidden_size": hidden_size,
        "num_k_blocks": num_k_blocks,
        "part_blocks": k_blocks,
        "num_parts": parts,
        "group": cut.group,
        "parts": divisor_of(parts),
        "in_group": divisor_of(cut.tokens * cut.group),
        "num_chunks": num_chunks,
        "counts": r.buffer("counts", most_count_bytes(num_tokens, top_k, num_experts)),
        "zeros": tile_counters,
        "min_amax": min_amax,
    }
    if x_scale_inv is not None:
        arguments |= {
            "x_scales": x_scale_inv.place,
            "x_scale_token_bytes": x_scale_inv.bytes_of_stride(0),
            "x_scale_block_bytes": x_scale_inv.bytes_of_stride(1),
        }
    fits = hidden_size % _columns_at_once(x.dtype) == 0
    vectorized = fits and x.is_aligned and x_row_bytes % TMA_BYTES == 0

    def step(kernel: Kernel, grid: int, threads: int, shared_bytes: int) -> None:
        r.step(kernel, grid, threads, arguments, programmatic=True, shared_bytes=shared_bytes)

    if has_few:
        few = few_kernel_of(x.dtype, vectorized=vectorized)
        step(few, num_tokens * parts + 1, _FEW_THREADS, 0)
        return Dispatched(maps, tile_counters)
    if cut.is_counted:
        step(count_kernel_of(masked=is_masked), num_chunks, _COUNT_THREADS, routing.shared_bytes)
    kernel = dispatch_kernel_of(
        x.dtype, vectorized=vectorized, masked=is_masked, is_counted=cut.is_counted
    )
    step(kernel, num_chunks * parts, cut.threads, routing.shared_bytes)
    return Dispatched(maps, tile_counters)
