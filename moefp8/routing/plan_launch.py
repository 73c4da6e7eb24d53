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
from ..kernels.common.prepared import layout_of, prepared
from ..kernels.jit import (
    Kernel,
    Launch,
    Pointer,
    Source,
    current_driver,
    fields,
    launch_all,
    pointers,
)

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

    _fields_ = fields(
        (c_void_p, "ids"),
        (c_int64, "token_bytes choice_bytes"),
        (c_void_p, "tokens_per_expert expert_offsets token_to_row"),
        (c_uint32, "num_tokens top_k num_experts is_wide chunk max_m"),
        (Divisor, "alignment"),
        (c_uint32, "num_slots"),
        (Divisor, "of_k"),
        (c_uint32, "rows_of_token tokens_at_once reciprocal_of_k num_rankers"),
    )


class _Arguments(ctypes.Structure):
    """`Arguments` in plan.cu."""

    _fields_ = fields(
        (Routing, "routing"),
        (c_void_p, "row_to_token row_to_expert"),
        (c_uint32, "num_rows"),
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


class RoutingSources(NamedTuple):
    """Which addresses of a launch are those of a routing."""

    ids: Source
    tokens_per_expert: Source
    expert_offsets: Source
    token_to_row: Source

    def pointers(self, at: int) -> list[Pointer]:
        """Those in a `Routing` that lies `at` bytes into the kernel's only argument."""
        return pointers(Routing, 0, at, **self._asdict())


def routing_of(
    op: str,
    chunk: int,
    ids: torch.Tensor,
    num_experts: int,
    max_m: int | None,
    alignment: int = 1,
    num_warps: int = 0,
) -> Routing:
    """A `Routing` without its addresses.

    ids: [T, k] int32 or int64, of which the layout counts.
    chunk: tokens of a CTA. num_warps: of a CTA that ranks its choices, as many as are useful do;
    0: none does. All else as in `build_plan`.
    """
    num_tokens, top_k = ids.shape
    num_slots = num_slots_of(num_experts)
    most_rows = num_tokens * top_k + num_slots * max(alignment, max_m or 0)
    if most_rows >= 2**31:
        raise ValueError(
            f"{op}: one call takes fewer than 2**31 rows, got T = {num_tokens}, k = {top_k}, "
            f"E = {num_experts}, alignment = {alignment} and max_m = {max_m}: {most_rows} rows"
        )
    token_bytes, choice_bytes = (stride * ids.element_size() for stride in ids.stride())
    most_rankers = max(1, _MOST_RANKED // num_slots)
    return Routing(
        token_bytes=token_bytes,
        choice_bytes=choice_bytes,
        num_tokens=num_tokens,
        top_k=top_k,
        num_experts=num_experts,
        is_wide=ids.element_size() == 8,
        chunk=chunk,
        max_m=max_m or 0,
        alignment=Divisor.of(alignment),
        num_slots=num_slots,
        of_k=Divisor.of(top_k),
        rows_of_token=round_up(top_k, 4),
        tokens_at_once=max(1, WARP // top_k),
        reciprocal_of_k=2**16 // top_k + 1,
        num_rankers=min(num_warps, ceil_div(chunk * top_k, WARP), most_rankers),
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
    num_rows = maps[2].shape[0]
    key = (op, layout_of(top_k_index), num_experts, alignment, max_m)
    launch = prepared(
        key, lambda: _prepare(op, top_k_index, num_experts, alignment, max_m, num_rows)
    )
    addresses = tuple([x.data_ptr() for x in (top_k_index, *maps)])
    launch_all((launch,), top_k_index.get_device(), addresses)


def _prepare(
    op: str, ids: torch.Tensor, num_experts: int, alignment: int, max_m: int | None, num_rows: int
) -> Launch:
    (num_tokens, top_k), device_index, driver = ids.shape, ids.get_device(), current_driver()
    num_sms = driver.num_sms(device_index)
    cut = cut_plan(num_tokens, top_k, num_sms)
    routing = routing_of(op, cut.tokens, ids, num_experts, max_m, alignment)
    of_ids, of_counts, of_offsets, row_to_token, row_to_expert, token_to_row = map(Source, range(6))
    sources = RoutingSources(of_ids, of_counts, of_offsets, token_to_row)
    num_chunks = ceil_div(num_tokens, cut.tokens)
    return Launch(
        driver.load(kernel_of(cut), device_index),
        max(num_chunks, min(num_sms, ceil_div(num_rows, _PADDING_OF_CTA)), 1),
        cut.threads,
        (_Arguments(routing=routing, num_rows=num_rows),),
        [
            *sources.pointers(_Arguments.routing.offset),
            *pointers(_Arguments, row_to_token=row_to_token, row_to_expert=row_to_expert),
        ],
        shared_bytes=shared_bytes(routing),
    )
