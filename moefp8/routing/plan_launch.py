"""Launch `plan.cu`, which builds a routing plan; fields of `Routing` in `plan.cuh`.

T tokens, k choices each, E experts, R rows.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from ..kernels.common.blocks import ceil_div, round_up
from ..kernels.common.divisor import divisor_of
from ..kernels.common.prepared import layout_of, prepared
from ..kernels.gemm.tuned import target_of
from ..kernels.jit import Kernel, Launch
from ..kernels.program import (
    Arguments,
    Place,
    Record,
    Span,
    Target,
    Tensor,
    kernels_of,
    prepare_launch,
)

OP = "build_plan"
_SOURCE = Path(__file__).with_name("plan.cu")
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


class MapPlaces(NamedTuple):
    """Where a plan is written: int32 [E], [E + 1] and [T, k], contiguous."""

    tokens_per_expert: Place
    expert_offsets: Place
    token_to_row: Place


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


class Routing(NamedTuple):
    """A routing of tokens to the rows of experts, as `Routing` in plan.cuh.

    arguments: its fields. shared_bytes: what a CTA needs for its chunk and its counts.
    """

    arguments: Arguments
    shared_bytes: int


def routing_of(
    op: str,
    chunk: int,
    ids: Tensor,
    num_experts: int,
    max_m: int | None,
    maps: MapPlaces,
    *,
    alignment: int = 1,
    num_warps: int = 0,
    expert_offset: int = 0,
    words_of_choice: int = 1,
) -> Routing:
    """The fields that kernels with a plan in them take.

    Args:
        op: the name that errors tell.
        chunk: tokens of a CTA.
        ids: int32 or int64 [T, k].
        num_experts, max_m, alignment, expert_offset: as in `build_plan`.
        maps: where the plan is written.
        num_warps: how many a CTA has, if as many of them as are useful rank its choices; else 0.
        words_of_choice: of shared memory, for each choice of a chunk.
    """
    num_tokens, top_k = ids.shape
    num_slots = num_slots_of(num_experts)
    most_rows = num_tokens * top_k + num_slots * max(alignment, max_m or 0)
    if most_rows >= 2**31:
        raise ValueError(
            f"{op}: one call takes fewer than 2**31 rows, got T = {num_tokens}, k = {top_k}, "
            f"E = {num_experts}, alignment = {alignment} and max_m = {max_m}: {most_rows} rows"
        )
    most_rankers = max(1, _MOST_RANKED // num_slots)
    num_rankers = min(num_warps, ceil_div(chunk * top_k, WARP), most_rankers)
    rows_of_token = round_up(top_k, 4)
    arguments = {
        "ids": ids.place,
        "token_bytes": ids.bytes_of_stride(0),
        "choice_bytes": ids.bytes_of_stride(1),
        "first_expert": expert_offset,
        **maps._asdict(),
        "num_tokens": num_tokens,
        "top_k": top_k,
        "num_experts": num_experts,
        "is_wide": ids.element_size() == 8,
        "chunk": chunk,
        "max_m": max_m or 0,
        "alignment": divisor_of(alignment),
        "num_slots": num_slots,
        "of_k": divisor_of(top_k),
        "rows_of_token": rows_of_token,
        "tokens_at_once": max(1, WARP // top_k),
        "reciprocal_of_k": 2**16 // top_k + 1,
        "num_rankers": num_rankers,
    }
    counts, words = num_slots * (8 + 2 * num_rankers), chunk * rows_of_token * words_of_choice
    return Routing(arguments, counts + 4 * words)


def num_slots_of(num_experts: int) -> int:
    return round_up(num_experts + 1, _SLOTS)


def kernel_of(ahead: int) -> Kernel:
    return Kernel(_SOURCE, f"plan_kernel<{ahead}>")


def plan_kernels(target: Target, most_tokens: int, top_k: int) -> Iterator[Kernel]:
    """The kernels for up to so many tokens."""

    def describe(span: Span) -> Record:
        r = Record(target, ("ids", *Maps._fields), span=span)
        ids = Tensor.contiguous("ids", span.first, top_k, dtype=torch.int64)
        describe_plan(r, ids, 1, num_rows=span.first * top_k)
        return r

    return kernels_of(describe, most_tokens)


def launch_plan(inputs: PlanInputs, maps: Maps) -> Maps:
    """Fill the maps by one kernel on the current stream; nothing waits for it."""
    ids = inputs.top_k_index
    key = (OP, layout_of(ids), inputs[1:])
    launch = prepared(key, lambda: _prepare(inputs, num_rows=maps.row_to_token.numel()))
    launch.on(ids.get_device(), tuple([x.data_ptr() for x in (ids, *maps)]))
    return maps


def _prepare(inputs: PlanInputs, num_rows: int) -> Launch:
    ids, num_experts, alignment, max_m, expert_offset, _ = inputs
    device_index = ids.get_device()
    r = Record(target_of(device_index), ("ids", *Maps._fields))
    describe_plan(
        r,
        Tensor.of(ids, "ids"),
        num_experts,
        num_rows=num_rows,
        alignment=alignment,
        max_m=max_m,
        expert_offset=expert_offset,
    )
    return prepare_launch(r, device_index)


def describe_plan(
    r: Record,
    ids: Tensor,
    num_experts: int,
    *,
    num_rows: int,
    alignment: int = 1,
    max_m: int | None = None,
    expert_offset: int = 0,
) -> None:
    """One step that fills the inputs that `Maps` names; num_rows: of row_to_token."""
    num_sms, (num_tokens, top_k) = r.target.num_sms, ids.shape
    cut = cut_plan(num_tokens, top_k, num_sms)
    if cut.ahead == 1:
        r.hold(num_tokens * top_k, lambda _: 2 * _FEW_CHOICES)
    routing = routing_of(
        OP,
        cut.tokens,
        ids,
        num_experts,
        max_m,
        MapPlaces(*map(Place, MapPlaces._fields)),
        alignment=alignment,
        expert_offset=expert_offset,
    )
    num_chunks = ceil_div(num_tokens, cut.tokens)
    r.step(
        kernel_of(cut.ahead),
        max(num_chunks, min(num_sms, ceil_div(num_rows, _PADDING_OF_CTA)), 1),
        cut.threads,
        {
            "routing": routing.arguments,
            "row_to_token": Place("row_to_token"),
            "row_to_expert": Place("row_to_expert"),
            "num_rows": num_rows,
        },
        programmatic=False,
        shared_bytes=routing.shared_bytes,
    )
