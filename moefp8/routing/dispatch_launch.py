"""Launch `dispatch.cu`: plan, quantize and dispatch tokens on a Hopper GPU.

T tokens, k choices each, E experts, H hidden, R rows.
"""

from pathlib import Path
from typing import NamedTuple

import torch

from ..kernels.common.blocks import E4M3, MIN_AMAX, ceil_div, num_blocks, round_up
from ..kernels.common.checks import INPUTS
from ..kernels.common.divisor import Divisor
from ..kernels.jit import (
    Kernel,
    Launch,
    Pointer,
    Source,
    current_driver,
    offset_of,
    pointers,
    struct_of,
)
from .plan_launch import (
    MAX_CHOICES,
    MAX_THREADS,
    WARP,
    RoutingSources,
    num_slots_of,
    routing_of,
    shared_bytes,
    tokens_of_chunk,
)

_OP = "dispatch"
# What kernels take, and their names for it in dispatch.cu.
SHARES = {**{dtype: f"Floats<{name}>" for dtype, name in INPUTS.items()}, E4M3: "Codes"}
_SOURCE = Path(__file__).with_name("dispatch.cu")
_Arguments = struct_of(_SOURCE)
_VECTOR_BYTES = 16  # a thread loads as many at once, if they are aligned
_LANES = 8  # so many threads hold a block of 128 elements
_COUNT_THREADS = 128
_MANY_CHOICES = 2**13  # more are counted faster by a kernel of its own than by each CTA
_MIN_BLOCKS = 8  # a CTA with fewer k-blocks would plan more than it quantizes
_FEW_CHOICES = WARP  # a warp holds so many, and needs no counts
_FEW_THREADS = 128


class Cut(NamedTuple):
    """How the kernels are cut.

    A CTA has `threads`, and owns `k_blocks` of each of the `tokens` of a chunk. It works on `group`
    of these k-blocks of all its tokens before the next ones. `is_counted`: a kernel before it
    counts the choices of each chunk.
    """

    tokens: int
    k_blocks: int
    group: int
    threads: int
    is_counted: bool


def cut_dispatch(
    num_tokens: int, top_k: int, num_experts: int, num_k_blocks: int, num_sms: int
) -> Cut:
    """The cut into about one CTA for each SM, which has a chunk, or part of a small one."""
    chunk = tokens_of_chunk(num_tokens, top_k, num_sms)
    parts = min(num_sms // ceil_div(num_tokens, chunk), num_k_blocks // _MIN_BLOCKS)
    k_blocks = ceil_div(num_k_blocks, max(1, parts))
    at_once = max(1, MAX_THREADS // _LANES // chunk)
    group = min(1 << (at_once.bit_length() - 1), 1 << (k_blocks - 1).bit_length())
    num_choices = num_tokens * top_k
    if _is_counted(num_choices, num_experts):
        return Cut(chunk, k_blocks, group, MAX_THREADS, is_counted=True)
    threads = max(chunk * group * _LANES, min(num_choices // 2, 512))
    return Cut(chunk, k_blocks, group, min(MAX_THREADS, round_up(threads, WARP)), is_counted=False)


def _is_counted(num_choices: int, num_experts: int) -> bool:
    return num_choices > _MANY_CHOICES and num_experts < MAX_THREADS


def is_few(num_choices: int, *, masked: bool) -> bool:
    """Whether `dispatch_few_kernel` takes so many."""
    return num_choices <= _FEW_CHOICES and not masked


def few_kernel_of(dtype: torch.dtype, *, vectorized: bool) -> Kernel:
    return Kernel(_SOURCE, f"dispatch_few_kernel<{SHARES[dtype]}, {str(vectorized).lower()}>")


def kernel_of(dtype: torch.dtype, *, vectorized: bool, masked: bool, is_counted: bool) -> Kernel:
    """vectorized: elements lie such that eight can be loaded at once, or 16 codes."""
    flags = ", ".join(str(flag).lower() for flag in (vectorized, masked, is_counted))
    return Kernel(_SOURCE, f"dispatch_kernel<{SHARES[dtype]}, {flags}>")


def count_kernel_of(*, masked: bool) -> Kernel:
    return Kernel(_SOURCE, f"count_kernel<{str(masked).lower()}>")


def needed_kernels(
    dtype: torch.dtype, *, hidden_size: int, masked: bool, num_experts: int, max_choices: int
) -> list[Kernel]:
    """The kernels for up to `max_choices` choices; tokens may lie anywhere.

    dtype: of the tokens; e4m3 if they come with scales.
    """
    counts = [count_kernel_of(masked=masked)] if _is_counted(max_choices, num_experts) else []
    flags = (True, False) if hidden_size % _columns_at_once(dtype) == 0 else (False,)
    few = [] if masked else [few_kernel_of(dtype, vectorized=vectorized) for vectorized in flags]
    if is_few(max_choices, masked=masked):
        return few
    return (
        counts
        + few
        + [
            kernel_of(dtype, vectorized=vectorized, masked=masked, is_counted=is_counted)
            for vectorized in flags
            for is_counted in ((True, False) if counts else (False,))
        ]
    )


def _columns_at_once(dtype: torch.dtype) -> int:
    """What H is a multiple of where kernels are vectorized.

    A thread loads its 16 codes at once. If only the pitch of rows were a multiple of 16, that would
    end behind the last row, where x may end.
    """
    return 16 if dtype == E4M3 else 8


def most_count_bytes(num_tokens: int, top_k: int, num_experts: int) -> int:
    """How much memory `prepare_dispatch` takes for counts, on a GPU of up to 256 SMs."""
    num_places = num_tokens * round_up(top_k, 4)
    num_chunks = min(num_tokens, max(256, ceil_div(2 * num_places, MAX_CHOICES)))
    return num_chunks * num_slots_of(num_experts) * 2


class DispatchSources(NamedTuple):
    """Which addresses of a launch are those of a dispatch."""

    x: Source
    rows: Source
    row_scales: Source
    counts: Source
    zeros: Source
    routing: RoutingSources
    x_scales: Source | None = None

    def pointers(self) -> list[Pointer]:
        named = self._asdict()
        del named["routing"]
        return pointers(_Arguments, **named) + self.routing.pointers(
            offset_of(_Arguments, "routing")
        )


def prepare_dispatch(
    x: torch.Tensor,
    ids: torch.Tensor,
    num_experts: int,
    max_m: int | None,
    *,
    row_pitch: int,
    scale_pitch: int,
    sources: DispatchSources,
    expert_offset: int = 0,
    min_amax: float = MIN_AMAX,
    x_scale_inv: torch.Tensor | None = None,
) -> tuple[Launch, ...]:
    """Quantize every token once, as `quantize_1x128` does, into its rows, and plan these.

    Where x is e4m3, its codes and scales are copied as they are.

    That is one kernel, or two for many tokens: the first counts choices. It may start before the
    stream's previous kernel ends, and waits for it. What `sources` name:

        x: [T, H] like the tensor `x`, whose layout and alignment count; T and H at least 1.
        rows: e4m3 [R, H], at a multiple of 16 bytes. What lies behind the end of a row, up to its
            next multiple of 16, may be written too.
        row_scales: fewer than 2**31 in fp32. Row r and k-block b have [b * scale_pitch + r]; with
            max_m, row i and k-block b of expert e have [(e * ceil(H/128) + b) * scale_pitch + i].
        counts: `most_count_bytes` of memory, at a multiple of 4.
        zeros: int32 [2], which become zeros: counters of the kernels that follow.
        routing: ids [T, k] like the tensor `ids`; one of no expert here has no row. expert_offsets,
            tokens_per_expert, token_to_row are int32 [E + 1], [E], [T, k], contiguous.
        x_scales: fp32 [T, ceil(H/128)] like the tensor `x_scale_inv`, if x is e4m3.

    Args:
        max_m: rows of each expert, at least T; None: the rows of all experts follow one another.
        row_pitch: in bytes, a multiple of 16 and at least H.
        expert_offset: the id of the first of the E experts.
        min_amax: as in `quantize_1x128`.
        x_scale_inv: the scales of an e4m3 `x`, whose layout counts; None for others.

    Raises:
        ValueError: there are more choices or rows than a kernel can count.
        JitError: it cannot be compiled or loaded, or has more choices than shared memory holds.
    """
    (num_tokens, hidden_size), top_k = x.shape, ids.shape[1]
    num_k_blocks = num_blocks(hidden_size)
    driver, device_index = current_driver(), x.get_device()
    num_sms = driver.num_sms(device_index)
    cut = cut_dispatch(num_tokens, top_k, num_experts, num_k_blocks, num_sms)
    num_warps = cut.threads // WARP if cut.is_counted and max_m is None else 0
    routing = routing_of(
        _OP,
        cut.tokens,
        ids,
        num_experts,
        max_m,
        num_warps=num_warps,
        expert_offset=expert_offset,
    )
    parts, num_chunks = ceil_div(num_k_blocks, cut.k_blocks), ceil_div(num_tokens, cut.tokens)
    x_row_bytes = x.stride(0) * x.element_size()
    arguments = _Arguments(
        routing=routing,
        x_row_bytes=x_row_bytes,
        row_pitch=row_pitch,
        scale_pitch=scale_pitch,
        hidden_size=hidden_size,
        num_k_blocks=num_k_blocks,
        part_blocks=cut.k_blocks,
        num_parts=parts,
        group=cut.group,
        parts=Divisor.of(parts),
        in_group=Divisor.of(cut.tokens * cut.group),
        num_chunks=num_chunks,
        min_amax=min_amax,
    )
    if x_scale_inv is not None:
        strides = [4 * stride for stride in x_scale_inv.stride()]
        arguments.x_scale_token_bytes, arguments.x_scale_block_bytes = strides
    fits = hidden_size % _columns_at_once(x.dtype) == 0
    vectorized = fits and not (x.data_ptr() | x_row_bytes) % _VECTOR_BYTES
    masked = max_m is not None
    shared = shared_bytes(routing, 2 if masked else 1)

    def launch(kernel: Kernel, grid: int, threads: int, num_bytes: int = shared) -> Launch:
        """Each waits for the kernel before it, whoever's that is."""
        return Launch(
            driver.load(kernel, device_index),
            grid,
            threads,
            (arguments,),
            sources.pointers(),
            shared_bytes=num_bytes,
            programmatic=True,
        )

    if is_few(num_tokens * top_k, masked=masked):
        arguments.part_blocks = _FEW_THREADS // _LANES
        arguments.num_parts = ceil_div(num_k_blocks, arguments.part_blocks)
        arguments.parts = Divisor.of(arguments.num_parts)
        few = few_kernel_of(x.dtype, vectorized=vectorized)
        return (launch(few, num_tokens * arguments.num_parts + 1, _FEW_THREADS, num_bytes=0),)
    kernel = kernel_of(x.dtype, vectorized=vectorized, masked=masked, is_counted=cut.is_counted)
    grid = num_chunks * parts
    if not cut.is_counted:
        return (launch(kernel, grid, cut.threads),)
    count = count_kernel_of(masked=masked)
    return launch(count, num_chunks, _COUNT_THREADS), launch(kernel, grid, cut.threads)
