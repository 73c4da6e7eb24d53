"""Launch `plan.cu`, which builds a routing plan, on a Hopper GPU; and what `plan.cuh` asks.

T tokens, k choices each, E experts, R rows.
"""

import ctypes
from ctypes import c_int64, c_uint32, c_void_p
from pathlib import Path
from typing import NamedTuple

import torch

from ..kernels.common.blocks import ceil_div, round_up
from ..kernels.common.divisor import Divisor
from ..kernels.jit import Kernel, Launch, current_stream, load

_SOURCE = Path(__file__).with_name("plan.cu")
WARP = 32
_SLOTS = 128  # of experts, that a warp reads at once
MAX_THREADS = 1024
MAX_CHOICES = 2**13  # of a chunk, k rounded up to 4: 64 KiB of shared memory say where they go
_FEW_CHOICES = 512  # to count which no more threads are worth while
_MOST_RANKED = 2**14  # slots times warps that rank choices: 32 KiB of shared memory
_PADDING_OF_CTA = 2**12  # rows that a CTA may fill up


class Routing(ctypes.Structure):
    """`Routing` in plan.cuh."""

    _fields_ = (
        *(("ids", c_void_p), ("token_bytes", c_int64), ("choice_bytes", c_int64)),
        *(("tokens_per_expert", c_void_p), ("expert_offsets", c_void_p)),
        *(("token_to_row", c_void_p), ("num_tokens", c_uint32), ("top_k", c_uint32)),
        *(("num_experts", c_uint32), ("is_wide", c_uint32), ("chunk", c_uint32)),
        *(("max_m", c_uint32), ("alignment", Divisor), ("num_slots", c_uint32)),
        *(("of_k", Divisor), ("rows_of_token", c_uint32)),
        *(("tokens_at_once", c_uint32), ("reciprocal_of_k", c_uint32), ("num_rankers", c_uint32)),
    )


class _Arguments(ctypes.Structure):
    """`Arguments` in plan.cu."""

    _fields_ = (
        *(("routing", Routing), ("row_to_token", c_void_p), ("row_to_expert", c_void_p)),
        ("num_rows", c_uint32),
    )


class Cut(NamedTuple):
    """A CTA has `threads` and a chunk of `tokens`; its warps count `ahead` rounds at once."""

    tokens: int
    threads: int
    ahead: int


def cut_plan(num_tokens: int, top_k: int, num_sms: int, min_threads: int = 128) -> Cut:
    """One chunk for each SM, or more where its rows would not fit into shared memory."""
    tokens = max(1, min(ceil_div(num_tokens, num_sms), MAX_CHOICES // round_up(top_k, 4)))
    num_choices = num_tokens * top_k
    threads = max(min_threads, min(round_up(num_choices, WARP), _FEW_CHOICES))
    ahead = 1
    if num_choices > 2 * threads:
        threads, ahead = MAX_THREADS, 4
    return Cut(tokens, min(threads, MAX_THREADS), ahead)


def routing_of(
    op: str,
    chunk: int,
    *,
    ids: int,
    id_bytes: int,
    id_strides: tuple[int, int],
    num_tokens: int,
    top_k: int,
    num_experts: int,
    max_m: int | None,
    tokens_per_expert: int,
    expert_offsets: int,
    token_to_row: int,
    alignment: int = 1,
    num_warps: int = 0,
) -> Routing:
    """Addresses as ints; `id_strides` of tokens and of choices, in elements of `id_bytes`.

    chunk: tokens of a CTA. num_warps: of a CTA that ranks its choices, as many as are useful do;
    0: none does. All else as in `build_plan`.
    """
    num_slots = num_slots_of(num_experts)
    most_rows = num_tokens * top_k + num_slots * max(alignment, max_m or 0)
    if most_rows >= 2**31:
        raise ValueError(
            f"{op}: one call takes fewer than 2**31 rows, got T = {num_tokens}, k = {top_k}, "
            f"E = {num_experts}, alignment = {alignment} and max_m = {max_m}: {most_rows} rows"
        )
    token_bytes, choice_bytes = (stride * id_bytes for stride in id_strides)
    return Routing(
        *(ids, token_bytes, choice_bytes, tokens_per_expert, expert_offsets, token_to_row),
        *(num_tokens, top_k, num_experts, id_bytes == 8, chunk, max_m or 0),
        *(Divisor.of(alignment), num_slots, Divisor.of(top_k), round_up(top_k, 4)),
        *(max(1, WARP // top_k), 2**16 // top_k + 1),
        min(num_warps, ceil_div(chunk * top_k, WARP), max(1, _MOST_RANKED // num_slots)),
    )


def num_slots_of(num_experts: int) -> int:
    return round_up(num_experts + 1, _SLOTS)


def shared_bytes(routing: Routing, words_of_choice: int = 1) -> int:
    """`words_of_choice`: for each choice of a chunk."""
    words_of_chunk = routing.chunk * routing.rows_of_token * words_of_choice
    return routing.num_slots * (8 + 2 * routing.num_rankers) + 4 * words_of_chunk


def kernel_of(cut: Cut) -> Kernel:
    return Kernel(_SOURCE, f"plan_kernel<{cut.ahead}>")


def kernels_of() -> list[Kernel]:
    """All kernels that a plan can need."""
    return [kernel_of(Cut(1, 128, ahead)) for ahead in (1, 4)]


def launch_plan(
    op: str,
    top_k_index: torch.Tensor,
    num_experts: int,
    alignment: int,
    max_m: int | None,
    maps: tuple[torch.Tensor, ...],
) -> None:
    """Fill the maps, in the order of the op's schema: one kernel on the current stream."""
    tokens_per_expert, expert_offsets, row_to_token, row_to_expert, token_to_row = maps
    (num_tokens, top_k), num_rows = top_k_index.shape, row_to_token.shape[0]
    token_stride, choice_stride = top_k_index.stride()
    device_index = top_k_index.get_device()
    properties = torch.cuda.get_device_properties(top_k_index.device)
    num_sms = properties.multi_processor_count
    cut = cut_plan(num_tokens, top_k, num_sms)
    routing = routing_of(
        *(op, cut.tokens),
        ids=top_k_index.data_ptr(),
        id_bytes=top_k_index.element_size(),
        id_strides=(token_stride, choice_stride),
        num_tokens=num_tokens,
        top_k=top_k,
        num_experts=num_experts,
        max_m=max_m,
        alignment=alignment,
        tokens_per_expert=tokens_per_expert.data_ptr(),
        expert_offsets=expert_offsets.data_ptr(),
        token_to_row=token_to_row.data_ptr(),
    )
    arguments = _Arguments(routing, row_to_token.data_ptr(), row_to_expert.data_ptr(), num_rows)
    num_chunks = ceil_div(num_tokens, cut.tokens)
    grid = max(num_chunks, min(num_sms, ceil_div(num_rows, _PADDING_OF_CTA)), 1)
    Launch(
        load(kernel_of(cut), device_index),
        *(grid, cut.threads, (arguments,)),
        stream=current_stream(device_index),
        shared_bytes=shared_bytes(routing),
    ).on(device_index)
