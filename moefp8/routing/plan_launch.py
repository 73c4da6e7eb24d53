"""Launch `plan.cu`, which builds a routing plan, on a Hopper GPU; and what `plan.cuh` is given.

T tokens, k choices each, E experts, R rows.
"""

from ctypes import Structure
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
    offset_of,
    pointers,
    struct_of,
)

OP = "build_plan"
_SOURCE = Path(__file__).with_name("plan.cu")
_Arguments, Routing = struct_of(_SOURCE), struct_of(_SOURCE, "Routing")
WARP = 32
_SLOTS = 128  # a warp reads the counts of as many experts at once
MAX_THREADS = 1024
_MIN_THREADS = 128
_FEW_CHOICES = 512  # each has a thread that counts it; up to twice as many need no more threads
MAX_CHOICES = 2**13  # a chunk has no more, k rounded up to 4: at most 64 KiB of shared memory
_MOST_RANKED = 2**14  # slots times warps that rank choices: 32 KiB of shared memory
_PADDING_OF_CTA = 2**12  # a CTA fills up to as many rows


class Maps(NamedTuple):
    """The tensors of a `RoutingPlan`."""

    tokens_per_expert: torch.Tensor
    expert_offsets: torch.Tensor
    row_to_token: torch.Tensor
    row_to_expert: torch.Tensor
    token_to_row: torch.Tensor


class PlanInputs(NamedTuple):
    """What the op takes: see `routing.build_plan`. max_m: None in the contiguous layout."""

    top_k_index: torch.Tensor
    num_experts: int
    alignment: int
    max_m: int | None
    expert_offset: int = 0
    num_global_experts: int | None = None


class Cut(NamedTuple):
    """A CTA has `threads` and a chunk of `tokens`; its warps count `ahead` rounds at once."""

    tokens: int
    threads: int
    ahead: int


def tokens_of_chunk(num_tokens: int, top_k: int, num_sms: int) -> int:
    """One chunk for each SM, or more where its rows would not fit into shared memory."""
    return max(1, min(ceil_div(num_tokens, num_sms), MAX_CHOICES // round_up(top_k, 4)))


def cut_plan(num_tokens: int, top_k: int, num_sms: int) -> Cut:
    tokens, num_choices = tokens_of_chunk(num_tokens, top_k, num_sms), num_tokens * top_k
    threads = max(_MIN_THREADS, min(round_up(num_choices, WARP), _FEW_CHOICES))
    if num_choices > 2 * threads:
        return Cut(tokens, MAX_THREADS, ahead=4)
    return Cut(tokens, threads, ahead=1)


class RoutingSources(NamedTuple):
    """Which addresses of a launch are those of a routing."""

    ids: Source
    tokens_per_expert: Source
    expert_offsets: Source
    token_to_row: Source

    def pointers(self, at: int) -> list[Pointer]:
        """The pointers in a `Routing` that lies `at` bytes into the kernel's only argument."""
        return pointers(Routing, at=at, **self._asdict())


def routing_of(
    op: str,
    chunk: int,
    ids: torch.Tensor,
    num_experts: int,
    max_m: int | None,
    alignment: int = 1,
    num_warps: int = 0,
    expert_offset: int = 0,
) -> Structure:
    """A `Routing` without its addresses.

    Args:
        op: the name that errors tell.
        chunk: tokens of a CTA.
        ids: int32 or int64 [T, k], whose layout is read and no value.
        num_experts, max_m, alignment, expert_offset: as in `build_plan`.
        num_warps: how many a CTA has, if as many of them as are useful rank its choices; else 0.
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
        first_expert=expert_offset,
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


def shared_bytes(routing: Structure, words_of_choice: int = 1) -> int:
    """What a CTA needs: `words_of_choice` for each choice of its chunk, and its counts."""
    words_of_chunk = routing.chunk * routing.rows_of_token * words_of_choice
    return routing.num_slots * (8 + 2 * routing.num_rankers) + 4 * words_of_chunk


def kernel_of(ahead: int) -> Kernel:
    return Kernel(_SOURCE, f"plan_kernel<{ahead}>")


def needed_kernels(max_tokens: int, top_k: int, num_sms: int) -> list[Kernel]:
    """The kernels for up to `max_tokens` tokens."""
    cuts = (cut_plan(num_tokens, top_k, num_sms) for num_tokens in (1, max_tokens))
    return [kernel_of(ahead) for ahead in sorted({cut.ahead for cut in cuts})]


def launch_plan(inputs: PlanInputs, maps: Maps) -> Maps:
    """Fill the maps by one kernel on the current stream; nothing waits for it."""
    ids = inputs.top_k_index
    key = (OP, layout_of(ids), inputs[1:])
    launch = prepared(key, lambda: _prepare(inputs, num_rows=maps.row_to_token.numel()))
    launch.on(ids.get_device(), tuple([x.data_ptr() for x in (ids, *maps)]))
    return maps


def _prepare(inputs: PlanInputs, num_rows: int) -> Launch:
    ids, num_experts, alignment, max_m, expert_offset, _ = inputs
    (num_tokens, top_k), device_index, driver = ids.shape, ids.get_device(), current_driver()
    num_sms = driver.num_sms(device_index)
    cut = cut_plan(num_tokens, top_k, num_sms)
    routing = routing_of(
        OP, cut.tokens, ids, num_experts, max_m, alignment, expert_offset=expert_offset
    )
    of_ids, of_counts, of_offsets, row_to_token, row_to_expert, token_to_row = map(Source, range(6))
    sources = RoutingSources(of_ids, of_counts, of_offsets, token_to_row)
    num_chunks = ceil_div(num_tokens, cut.tokens)
    return Launch(
        driver.load(kernel_of(cut.ahead), device_index),
        max(num_chunks, min(num_sms, ceil_div(num_rows, _PADDING_OF_CTA)), 1),
        cut.threads,
        (_Arguments(routing=routing, num_rows=num_rows),),
        [
            *sources.pointers(offset_of(_Arguments, "routing")),
            *pointers(_Arguments, row_to_token=row_to_token, row_to_expert=row_to_expert),
        ],
        shared_bytes=shared_bytes(routing),
    )
