"""The routing plan: which row of which expert each choice of the router gets.

T tokens, k choices each, E experts, R rows. Maps are named from_to; -1 is padding. Every expert
owns one segment of rows; within it, rows keep the order of the tokens. All shapes follow from T, k
and E, so nothing has to be read back from the device. On a Hopper GPU one kernel, `plan.cu`, makes
the maps; each CTA has a chunk of the tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch.nn.functional import pad

from ..kernels.common.blocks import ceil_div, divisor_of, round_up
from ..kernels.common.checks import check_choices, check_rank, check_tensor
from ..kernels.common.prepared import layout_of, prepared
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
from ..kernels.registry import register_inputs
from ..kernels.targets import target_of

Layout = Literal["contiguous", "masked"]


@dataclass(frozen=True)
class RoutingPlan:
    """The row of every choice of the router in the expert layout.

    Contiguous: the R rows of all experts follow one another. Masked: every expert has `max_m`
    rows, so R = E * max_m.

    Attributes:
        tokens_per_expert: int32 [E]; the `masked_m` of the masked GEMM.
        expert_offsets: int32 [E + 1], the first row of every expert.
        row_to_token: int32 [R].
        row_to_expert: int32 [R]; the `grouped_layout` of the contiguous GEMM.
        token_to_row: int32 [T, k]; -1 for a choice held elsewhere. Two choices of one expert by
            one token share a row.
        max_m: rows per expert in the masked layout, None in the contiguous one.
    """

    tokens_per_expert: torch.Tensor
    expert_offsets: torch.Tensor
    row_to_token: torch.Tensor
    row_to_expert: torch.Tensor
    token_to_row: torch.Tensor
    max_m: int | None = None

    @property
    def layout(self) -> Layout:
        return "contiguous" if self.max_m is None else "masked"

    @property
    def row_shape(self) -> tuple[int, ...]:
        """[R] or [E, max_m], the leading axes of tensors in this layout."""
        if self.max_m is None:
            return tuple(self.row_to_token.shape)
        return (self.tokens_per_expert.shape[0], self.max_m)


def build_plan(
    top_k_index: torch.Tensor,
    num_experts: int,
    layout: Layout = "contiguous",
    *,
    alignment: int = 1,
    max_m: int | None = None,
    expert_offset: int = 0,
    num_global_experts: int | None = None,
) -> RoutingPlan:
    """Plan the rows of a routing; on the device, with no synchronisation.

    Args:
        top_k_index: int32 or int64 [T, k], ids in [0, E]; E marks a choice held elsewhere, which
            gets no row. The range is checked on the CPU; on a GPU, where that would cost a
            synchronisation, ids out of range count as E.
        alignment: contiguous only; every segment starts at a multiple of it. 1 wastes no row;
            `get_mk_alignment_for_contiguous_layout()` makes `row_to_expert` fit DeepGEMM.
        max_m: masked only; rows per expert, at least T (the default, and always enough).
        expert_offset, num_global_experts: for a rank of expert parallelism, the id of its first
            expert, and how many the whole model has. Ids are then in [0, num_global_experts], and
            all but [expert_offset, expert_offset + E) are held elsewhere.

    Raises:
        TypeError, ValueError: naming the argument, the rule and what came.
    """
    if layout not in ("contiguous", "masked"):
        raise ValueError(f"build_plan: layout must be 'contiguous' or 'masked', got {layout!r}")
    if layout == "masked":
        if alignment != 1:
            raise ValueError(f"build_plan: alignment is for 'contiguous' only, got {alignment}")
        max_m = top_k_index.shape[0] if max_m is None else max_m
    elif max_m is not None:
        raise ValueError(f"build_plan: max_m is for 'masked' only, got {max_m}")
    rank = expert_offset, num_global_experts
    maps: Maps = _build_plan(top_k_index, num_experts, alignment, max_m, *rank)
    return RoutingPlan(*maps, max_m)


# ---- The op ----

OP = "build_plan"


class Maps(NamedTuple):
    """The tensors of a `RoutingPlan`."""

    tokens_per_expert: torch.Tensor
    expert_offsets: torch.Tensor
    row_to_token: torch.Tensor
    row_to_expert: torch.Tensor
    token_to_row: torch.Tensor


class PlanInputs(NamedTuple):
    """The arguments of the op: see `routing.build_plan`. max_m: None in the contiguous layout."""

    top_k_index: torch.Tensor
    num_experts: int
    alignment: int
    max_m: int | None
    expert_offset: int = 0
    num_global_experts: int | None = None


def _allocate(inputs: PlanInputs) -> Maps:
    """Check, then allocate the maps. Also the fake body."""
    top_k_index, num_experts, alignment, max_m, expert_offset, num_global_experts = inputs
    check_tensor(OP, "top_k_index", top_k_index, (torch.int32, torch.int64), 2)
    num_tokens, top_k = top_k_index.shape
    if top_k < 1:
        raise ValueError(f"{OP}: top_k_index must be [T, k] with k of at least 1, got k = 0")
    for name, value in (("num_experts", num_experts), ("alignment", alignment)):
        if value < 1:
            raise ValueError(f"{OP}: {name} must be at least 1, got {value}")
    check_rank(OP, num_experts, expert_offset, num_global_experts)
    if max_m is None:  # as many as any routing needs
        num_choices = num_tokens * top_k
        num_rows = num_choices + min(num_experts, num_choices) * (alignment - 1)
        num_rows = num_rows // alignment * alignment
    elif max_m >= num_tokens:
        num_rows = num_experts * max_m
    else:
        raise ValueError(
            f"{OP}: max_m must be at least T = {num_tokens}, since every token may choose the same "
            f"expert, got {max_m}"
        )
    shapes = [(num_experts,), (num_experts + 1,), (num_rows,), (num_rows,), (num_tokens, top_k)]
    return Maps(*[top_k_index.new_empty(shape, dtype=torch.int32) for shape in shapes])


def build_maps(
    top_k_index: torch.Tensor,
    num_experts: int,
    alignment: int,
    max_m: int | None,
    expert_offset: int = 0,
) -> Maps:
    """The numerics, in PyTorch. Ids of no expert here have no row."""
    maps = _allocate(PlanInputs(top_k_index, num_experts, alignment, max_m))
    tokens_per_expert, expert_offsets, row_to_token, row_to_expert, token_to_row = maps
    top_k, num_rows, device = top_k_index.shape[1], row_to_token.shape[0], top_k_index.device

    # 1. The expert of every choice; E where it has no row of its own. A token that names one
    #    expert twice gets one row there, which the combine reads twice.
    first_same = (top_k_index[:, :, None] == top_k_index[:, None, :]).int().argmax(dim=-1)
    is_first = first_same == torch.arange(top_k, device=device)
    own = top_k_index.long() - expert_offset
    is_here = (own >= 0) & (own < num_experts)
    expert = torch.where(is_first & is_here, own, num_experts).flatten()

    # 2. Segments: their sizes, and where each starts.
    ones = torch.ones_like(expert)
    counts = expert.new_zeros(num_experts + 1).scatter_add_(0, expert, ones)
    tokens_per_expert.copy_(counts[:num_experts])
    if max_m is None:
        segment_rows = (counts[:num_experts] + alignment - 1) // alignment * alignment
    else:
        segment_rows = torch.full_like(counts[:num_experts], max_m)
    expert_offsets.copy_(pad(segment_rows.cumsum(0), (1, 0)))

    # 3. The row of every choice: the start of its segment plus its rank among that expert's.
    order = expert.argsort(stable=True)
    sorted_expert = expert[order]
    rank = ones.cumsum(0) - 1 - (counts.cumsum(0) - counts)[sorted_expert]
    has_row = sorted_expert < num_experts
    row = torch.where(has_row, expert_offsets[sorted_expert] + rank, num_rows)

    # 4. The maps both ways; slot R collects the choices that have no row.
    for row_map, value in ((row_to_token, order // top_k), (row_to_expert, sorted_expert)):
        row_map.copy_(expert.new_full((num_rows + 1,), -1).scatter_(0, row, value)[:num_rows])
    choice_to_row = torch.empty_like(expert).scatter_(0, order, torch.where(has_row, row, -1))
    token_to_row.copy_(choice_to_row.view(top_k_index.shape).gather(1, first_same))
    return maps


def _cpu(inputs: PlanInputs) -> Maps:
    """The only body that checks the ids: on a GPU that would cost a synchronisation."""
    _allocate(inputs)
    check_choices(OP, inputs.top_k_index, inputs.num_global_experts or inputs.num_experts)
    return build_maps(*inputs[:-1])


_build_plan = register_inputs(
    OP,
    PlanInputs,
    "(Tensor tokens_per_expert, Tensor expert_offsets, Tensor row_to_token, "
    "Tensor row_to_expert, Tensor token_to_row)",
    reference=_cpu,
    fake=_allocate,
    kernels=lambda inputs: launch_plan(inputs, _allocate(inputs)),
    cuda=lambda inputs: build_maps(*inputs[:-1]),
)


# ---- The kernel ----

_SOURCE = Path(__file__).with_name("plan.cu")
WARP = 32
_SLOTS = 128  # experts whose counts a warp reads at once
MAX_THREADS = 1024
_MIN_THREADS = 128
_FEW_CHOICES = 512  # a thread counts each; up to twice as many need no more threads
MAX_CHOICES = 2**13  # of a chunk, with k rounded up to 4: at most 64 KiB of shared memory
_MOST_RANKED = 2**14  # slots times warps that rank choices: 32 KiB of shared memory
_PADDING_OF_CTA = 2**12  # rows of padding that a CTA fills, at most


class MapPlaces(NamedTuple):
    """The places of a plan's maps: int32 [E], [E + 1] and [T, k], contiguous."""

    tokens_per_expert: Place
    expert_offsets: Place
    token_to_row: Place


class PlanCut(NamedTuple):
    """A CTA has `threads` and a chunk of `tokens`; its warps count `ahead` rounds at once."""

    tokens: int
    threads: int
    ahead: int


def tokens_of_chunk(num_tokens: int, top_k: int, num_sms: int) -> int:
    """One chunk for each SM, or more where its rows would not fit into shared memory."""
    return max(1, min(ceil_div(num_tokens, num_sms), MAX_CHOICES // round_up(top_k, 4)))


def cut_plan(num_tokens: int, top_k: int, num_sms: int) -> PlanCut:
    tokens, num_choices = tokens_of_chunk(num_tokens, top_k, num_sms), num_tokens * top_k
    threads = max(_MIN_THREADS, min(round_up(num_choices, WARP), _FEW_CHOICES))
    if num_choices > 2 * threads:
        return PlanCut(tokens, MAX_THREADS, ahead=4)
    return PlanCut(tokens, threads, ahead=1)


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
    """The routing for a kernel that plans. Raises ValueError for 2**31 rows or more.

    Args:
        op: the name of the op in errors.
        chunk: tokens of a CTA.
        ids: int32 or int64 [T, k].
        num_experts, max_m, alignment, expert_offset: as in `build_plan`.
        maps: where the plan is written.
        num_warps: warps of a CTA, of which as many as are useful rank its choices; 0: none does.
        words_of_choice: words of shared memory for each choice of a chunk.
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


def plan_kernel_of(ahead: int) -> Kernel:
    return Kernel(_SOURCE, f"plan_kernel<{ahead}>")


def plan_kernels(target: Target, most_tokens: int, top_k: int) -> Iterator[Kernel]:
    """The kernels for up to `most_tokens` tokens."""

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
    """One step that fills the maps, which are inputs named as in `Maps`; num_rows: R."""
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
        plan_kernel_of(cut.ahead),
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
