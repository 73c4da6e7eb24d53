"""Inputs of dispatch and combine, the buffers that they fill, and what these must hold."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from moefp8.kernels import E4M3, num_blocks, round_up
from moefp8.kernels.jit import Launch
from moefp8.kernels.program import Codes, Place, Tensor, layouts
from moefp8.quant.quantize import quantize_1x128
from moefp8.routing import RoutingPlan
from moefp8.routing.combine import describe_combine
from moefp8.routing.dispatch import describe_dispatch, most_count_bytes
from moefp8.routing.plan import build_maps
from tests.records import addresses_of, launches_of, run

_GUARD = 64
DTYPES = torch.bfloat16, torch.float16, torch.float32
KINDS = "distinct", "repeated", "out of range", "one expert", "nowhere"
POISON = 0x7F  # a code, and in each byte of a scale or of a map


def ids_of(kind: str, num_tokens: int, top_k: int, num_experts: int) -> torch.Tensor:
    """int64 [T, k] on the CPU."""
    shape = num_tokens, top_k
    if kind == "nowhere":
        return torch.full(shape, num_experts)
    if kind == "one expert":
        return torch.full(shape, num_experts - 1)
    if kind == "out of range":  # and repeated
        ids = torch.randint(-2, num_experts + 2, shape)
        return ids.masked_fill(ids == -2, -(2**40)).masked_fill(ids == num_experts + 1, 2**40 + 1)
    if kind == "distinct":
        scores = torch.rand(num_tokens, max(num_experts, top_k))
        return scores.argsort(1)[:, :top_k]
    return torch.randint(0, num_experts, shape)  # "repeated"


# How many experts a rank has, the id of its first, and how many there are.
RANKS = (5, 0, 20), (5, 5, 20), (5, 15, 20), (130, 126, 256), (1, 2, 3)


def ids_of_whole(
    kind: str, num_tokens: int, top_k: int, rank: tuple[int, int, int], wide: bool
) -> torch.Tensor:
    """Ids of the whole model; with "out of range", also those beside the rank's, and extremes."""
    num_experts, first, num_global = rank
    ids = ids_of(kind, num_tokens, top_k, num_global)
    if kind == "one expert":
        return torch.full_like(ids, first)
    if kind == "out of range":
        of_dtype = torch.iinfo(torch.int64 if wide else torch.int32)
        edges = first - 1, first, first + num_experts - 1, first + num_experts, 2**31 - 1, -(2**31)
        edges = torch.tensor((*edges, of_dtype.min, of_dtype.max, of_dtype.min + first))
        ids = torch.where(torch.rand(ids.shape) < 0.7, edges[torch.randint(9, ids.shape)], ids)
        ids = ids.clamp(of_dtype.min, of_dtype.max)
    return ids if wide else ids.int()


def plan_of(
    ids: torch.Tensor, num_experts: int, max_m: int | None, expert_offset: int = 0
) -> RoutingPlan:
    """The plan as dispatch makes it: without max_m, every choice has a row of its own."""
    ids = ids.cpu().long()
    is_here = (ids >= expert_offset) & (ids < expert_offset + num_experts)
    ids = torch.where(is_here, ids - expert_offset, num_experts)
    if max_m is not None:
        return RoutingPlan(*build_maps(ids, num_experts, 1, max_m), max_m)
    maps = build_maps(ids.reshape(-1, 1), num_experts, 1, None)
    counts, offsets, row_to_choice, row_to_expert, choice_to_row = maps
    row_to_token = row_to_choice.div(ids.shape[1], rounding_mode="floor").int()  # -1 stays -1
    token_to_row = choice_to_row.view(ids.shape)
    return RoutingPlan(counts, offsets, row_to_token, row_to_expert, token_to_row, None)


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> torch.Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.full((size,), POISON, dtype=torch.uint8, device=device).view(dtype).view(shape)


def codes_of(num_tokens: int, hidden_size: int, device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 [T, H] and fp32 [T, ceil(H/128)] of any bits, NaN and infinities among them."""
    codes = torch.randint(0, 256, (num_tokens, hidden_size), dtype=torch.uint8)
    shape = num_tokens, num_blocks(hidden_size)
    bits = torch.randint(-(2**31), 2**31, shape, dtype=torch.int32)
    bits.view(-1)[::3] = torch.tensor([0x7F800000, 0x7FC00001, -1], dtype=torch.int32)[
        torch.arange(bits.view(-1)[::3].numel()) % 3
    ]
    return codes.to(device).view(E4M3), bits.to(device).view(torch.float32)


def _in_rows(x: torch.Tensor, pitch: int, first: int = 0) -> torch.Tensor:
    """A copy in rows of a pitch, which begin so many elements behind an aligned place."""
    num_rows, size = x.shape
    memory = torch.zeros(first + num_rows * pitch + size, dtype=x.dtype, device=x.device)
    return memory[first:][: num_rows * pitch].view(num_rows, pitch)[:, :size].copy_(x)


# Where codes, as uint8, and scales may lie: `zip` has a place of scales for each place of codes.
CODE_PLACES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "own": lambda x: x,
    "wide rows": lambda x: _in_rows(x, round_up(x.shape[1], 16) + 16),
    "unaligned": lambda x: _in_rows(x, round_up(x.shape[1], 16), 1),
    "odd rows": lambda x: _in_rows(x, round_up(x.shape[1], 2) + 1),
    "one row": lambda x: x[:1].expand(x.shape),
}
SCALE_PLACES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "own": lambda x: x,
    "rows": lambda x: x.contiguous(),
    "columns": lambda x: x.mT.contiguous().mT,
    "apart": lambda x: torch.stack([x, x], 2)[..., 1],
    "one row": lambda x: x[:1].expand(x.shape),
}


class Dispatched(NamedTuple):
    """The tensors of a dispatch, by the names of its inputs and buffers, and its kernels."""

    x: torch.Tensor
    rows: torch.Tensor  # uint8 [R, pitch]
    row_scales: torch.Tensor  # [..., num_k_blocks, scale_pitch]
    counts: torch.Tensor  # uint8: what the kernels may write, and _GUARD bytes behind it
    tile_counters: torch.Tensor  # int32 [2 + _GUARD]
    ids: torch.Tensor
    tokens_per_expert: torch.Tensor
    expert_offsets: torch.Tensor
    token_to_row: torch.Tensor
    x_scale_inv: torch.Tensor  # empty if x is of floats
    launches: Sequence[Launch] = ()

    def launch(self, launches: Sequence[Launch]) -> None:
        *tensors, _ = self
        for launch in launches:
            launch.on(self.x.get_device(), addresses_of(tensors))


def run_dispatch(
    x: torch.Tensor,
    ids: torch.Tensor,
    num_experts: int,
    max_m: int | None,
    expert_offset: int = 0,
    x_scale_inv: torch.Tensor | None = None,
) -> Dispatched:
    (num_tokens, hidden_size), top_k = x.shape, ids.shape[1]
    num_rows = num_tokens * top_k if max_m is None else num_experts * max_m
    pitch, num_k_blocks = round_up(hidden_size, 16) + 16, num_blocks(hidden_size)
    matrices, in_matrix = (1, num_rows) if max_m is None else (num_experts, max_m)
    scale_pitch = round_up(in_matrix, 4)
    scale_strides = num_k_blocks * scale_pitch, 1, scale_pitch
    of_matrices = () if max_m is None else (num_experts,)
    count_bytes = most_count_bytes(num_tokens, top_k, num_experts)
    done = Dispatched(
        x,
        poisoned((num_rows, pitch), torch.uint8, x.device),
        poisoned((*of_matrices, num_k_blocks, scale_pitch), torch.float32, x.device),
        poisoned((count_bytes + _GUARD,), torch.uint8, x.device),
        poisoned((2 + _GUARD,), torch.int32, x.device),
        ids,
        poisoned((num_experts,), torch.int32, x.device),
        poisoned((num_experts + 1,), torch.int32, x.device),
        poisoned((num_tokens, top_k), torch.int32, x.device),
        torch.empty(0) if x_scale_inv is None else x_scale_inv,
    )
    rows = Codes(
        Tensor(
            (matrices, in_matrix, hidden_size), (in_matrix * pitch, pitch, 1), E4M3, Place("rows")
        ),
        Tensor(
            (matrices, in_matrix, num_k_blocks), scale_strides, torch.float32, Place("row_scales")
        ),
    )
    tensors = layouts(x=x, ids=ids, x_scale_inv=x_scale_inv)
    launches = launches_of(
        lambda r: describe_dispatch(
            r,
            **tensors,
            rows=rows,
            num_experts=num_experts,
            expert_offset=expert_offset,
            is_masked=max_m is not None,
        ),
        Dispatched._fields[:-1],
        x.get_device(),
    )
    done = done._replace(launches=launches)
    done.launch(launches)
    return done


def check_dispatch(
    done: Dispatched,
    x: torch.Tensor,
    ids: torch.Tensor,
    num_experts: int,
    max_m: int | None,
    expert_offset: int = 0,
    x_scale_inv: torch.Tensor | None = None,
) -> None:
    """Bit for bit; nothing else is written."""
    plan = plan_of(ids, num_experts, max_m, expert_offset)
    for name in ("expert_offsets", "tokens_per_expert", "token_to_row"):
        assert torch.equal(getattr(done, name), getattr(plan, name).to(x.device)), name
    data, scale_inv = x, x_scale_inv
    if scale_inv is None:
        data, scale_inv = quantize_1x128.overload(x, False)
    hidden_size, unit_end = x.shape[1], round_up(x.shape[1], 16)
    row_to_token = plan.row_to_token.to(x.device)
    row_to_token = row_to_token[: done.rows.shape[0]]
    is_row, token = (row_to_token >= 0)[:, None], row_to_token.clamp(min=0)
    codes = torch.where(is_row, data.view(torch.uint8)[token], POISON)
    assert torch.equal(done.rows[:, :hidden_size], codes)
    assert (done.rows[:, unit_end:] == POISON).all()
    untouched = poisoned((1,), torch.int32, x.device)
    scales = torch.where(is_row, scale_inv.view(torch.int32)[token], untouched)  # [R, H/128]
    ours = done.row_scales.view(torch.int32).transpose(-1, -2)
    if max_m is not None:
        scales = scales.view(num_experts, max_m, -1)
    num_rows = scales.shape[-2]
    assert torch.equal(ours[..., :num_rows, :], scales)
    assert (ours[..., num_rows:, :] == untouched).all()
    assert (done.tile_counters[:2] == 0).all()
    assert (done.tile_counters[2:] == untouched).all()
    assert (done.counts[-_GUARD:] == POISON).all()


def run_combine(
    y: torch.Tensor,
    hidden_size: int,
    plan: RoutingPlan,
    weights: torch.Tensor,
    programmatic: bool = False,
    addend: torch.Tensor | None = None,
    offset: int = 0,
) -> torch.Tensor:
    """y [R, pitch] of which `hidden_size` columns count.

    offset: where in memory the result begins, in elements; nothing around it is written.
    """
    token_to_row, size = plan.token_to_row.to(y.device), weights.shape[0] * hidden_size
    guarded = poisoned((size + offset + _GUARD,), torch.bfloat16, y.device)
    out = guarded[offset : offset + size].view(-1, hidden_size)
    tensors = layouts(y=y, weights=weights, out=out, addend=addend)
    run(
        lambda r: describe_combine(
            r, token_to_row=Place("token_to_row"), **tensors, programmatic=programmatic
        ),
        y=y,
        token_to_row=token_to_row,
        weights=weights,
        out=out,
        addend=addend,
    )
    around = torch.cat([guarded[:offset].cpu(), guarded[offset + size :].cpu()])
    assert (around.view(torch.uint8) == POISON).all()
    return out


def expected_combine(
    y: torch.Tensor,
    hidden_size: int,
    plan: RoutingPlan,
    weights: torch.Tensor,
    addend: torch.Tensor | None = None,
) -> torch.Tensor:
    """What combine gives on the CPU, of the same rows; an addend is added behind it."""
    rows = y.cpu()[:, :hidden_size]
    summed = torch.ops.moefp8.combine(rows, plan.token_to_row.cpu(), weights.cpu())
    return summed if addend is None else summed + addend.cpu()


def placed_addend(num_tokens: int, hidden_size: int, offset: int, device: Any) -> torch.Tensor:
    """bf16 [T, H], contiguous, that begins so many elements behind an aligned place."""
    memory = torch.randn(num_tokens * hidden_size + offset, device=device).bfloat16()
    return memory[offset:].view(num_tokens, hidden_size)
