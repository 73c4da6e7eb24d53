"""Describe `push.cu` and `give_back.cu`, which exchange tokens and results of GPUs of one host.

T tokens of a rank, M of any at most, k choices each, P ranks, E experts, H hidden.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...kernels.common.blocks import BLOCK, MIN_AMAX, TMA_BYTES, ceil_div, divisor_of, num_blocks
from ...kernels.common.checks import INPUTS
from ...kernels.common.prepared import layout_of, prepared
from ...kernels.jit import Kernel, Launch
from ...kernels.program import Place, Record, Target, Tensor, Word, layouts, prepare_launch
from ...kernels.targets import target_of
from .peer_memory import MAX_CHUNKS, GivenBack, PeerMemory, Received

_PUSH = Path(__file__).with_name("push.cu")
_GIVE_BACK = Path(__file__).with_name("give_back.cu")
_THREADS, _LANES, _WARP, _AT_ONCE = 256, 8, 32, 4


def push_codes_kernel_of(dtype: torch.dtype, *, vectorized: bool) -> Kernel:
    return Kernel(_PUSH, f"push_codes_kernel<{INPUTS[dtype]}, {str(vectorized).lower()}>")


def push_rows_kernel_of(unit_bytes: int) -> Kernel:
    return Kernel(_PUSH, f"push_rows_kernel<{_UNITS[unit_bytes]}>")


def give_back_kernel_of(unit_bytes: int) -> Kernel:
    return Kernel(_GIVE_BACK, f"give_back_kernel<{_UNITS[unit_bytes]}>")


COMBINE_AND_GIVE_BACK = Kernel(_GIVE_BACK, "combine_and_give_back_kernel")

_UNITS = {16: "uint4", 2: "uint16_t"}


def _unit_of(*multiples: int) -> int:
    """The bytes that a thread moves at once, for rows with these addresses, pitches and lengths."""
    return 16 if all(x % 16 == 0 for x in multiples) else 2


class Member(NamedTuple):
    """This rank, the number of ranks, and how long it waits for the others."""

    rank: int
    num_ranks: int
    deadline_ns: int


class Sizes(NamedTuple):
    """A call's M, k, E, H."""

    max_tokens: int
    top_k: int
    num_experts: int
    hidden_size: int


_ALONE = Member(0, 1, 0)  # kernels depend on no member


def _given_back(member: Member, sizes: Sizes) -> GivenBack:
    return GivenBack.of(member.num_ranks, sizes.max_tokens, sizes.hidden_size, sizes.top_k)


def _addresses(*tensors: torch.Tensor | None) -> tuple[int, ...]:
    return tuple([0 if x is None else x.data_ptr() for x in tensors])


# ---- Pushing tokens ----

_PUSHING_CTAS = 8  # as many as fit on an SM


def push(
    memory: PeerMemory,
    member: Member,
    sizes: Sizes,
    received: Received,
    turn: int,
    x: torch.Tensor,
    ids: torch.Tensor,
    scores: torch.Tensor | None,
    min_amax: float | None,
) -> None:
    """Push tokens [T, H] on the current stream, and wait there for the other ranks' tokens.

    Args:
        turn: the turn that begins: the signature, below 2^32 - 1, which must be equal on all ranks,
            plus 2^32 times a number that differs for this rank's turns on several streams.
        x: [T, H] with contiguous rows; or [T, 0], for a turn that only brings results back.
        ids: int32 or int64 [T, k], contiguous.
        scores: fp32 [T, k], contiguous, sent with the ids to all slots of all ranks; or None.
        min_amax: tokens are sent as codes, quantized with this; None: tokens are sent unchanged.
    """
    key = (
        "push",
        (layout_of(x), x.data_ptr() % 16, ids.dtype),
        (scores is None, min_amax),
        (member, sizes, received, memory.receiving),
    )

    device_index = x.get_device()

    def prepare() -> Launch:
        others = ("ids", "scores", "state", "turn")
        # Before it waits, a push reads only the state's addresses, which are never written.
        r = Record(target_of(device_index), ("x", *others), older=frozenset({"state"}))
        describe_push(
            r,
            member,
            sizes,
            received,
            memory.receiving_at,
            memory.returning_at,
            **layouts(x=x, ids=ids, scores=scores),
            state=Place("state"),
            turn=Word("turn"),
            min_amax=min_amax,
        )
        return prepare_launch(r, device_index)

    addresses = _addresses(x, ids, scores, memory.state)
    prepared(key, prepare).on(device_index, (*addresses, turn))


def describe_push(
    r: Record,
    member: Member,
    sizes: Sizes,
    received: Received,
    receiving_at: int,
    returning_at: int,
    x: Tensor,
    ids: Tensor,
    scores: Tensor | None,
    *,
    state: Place,
    turn: Word,
    min_amax: float | None,
) -> None:
    """One step that pushes tokens, as `push`.

    receiving_at, returning_at: bytes from the beginning of a rank's memory to its two areas.
    state: of the group's `PeerMemory`.
    """
    (num_tokens, h), size = x.shape, x.element_size()
    given_back = _given_back(member, sizes)
    pitch = (x.strides[0] if num_tokens > 1 else sizes.hidden_size) * size
    arguments = {
        "ranks": {"state": state, **member._asdict()},
        "turn": turn,
        "choices": {
            "ids": ids.place,
            "scores": None if scores is None else scores.place,
            "num_tokens": num_tokens,
            "max_tokens": sizes.max_tokens,
            "top_k": sizes.top_k,
            "num_experts": sizes.num_experts,
            "id_bytes": ids.element_size(),
            "are_sent": scores is not None,
        },
        "tokens": {
            "x": x.place,
            "x_row_bytes": pitch,
            "row_bytes": h * size,
            "hidden_size": h,
            "num_k_blocks": num_blocks(h),
            "rows": receiving_at + received.rows,
            "row_pitch": received.row_pitch,
            "scales": receiving_at + received.scales,
            "scale_pitch": received.scale_pitch,
            "ids": receiving_at + received.ids,
            "scores": receiving_at + received.scores,
            "reached": returning_at + given_back.reached,
            "own_scores": returning_at + given_back.scores,
        },
        "min_amax": min_amax or 0.0,
    }
    if min_amax is not None:
        vectorized = h % 8 == 0 and x.is_aligned and pitch % 16 == 0
        kernel = push_codes_kernel_of(x.dtype, vectorized=vectorized)
        num_threads = num_tokens * num_blocks(h) * _LANES
    else:
        unit = _unit_of(x.alignment, pitch, h * size)
        kernel = push_rows_kernel_of(unit)
        num_threads = num_tokens * ceil_div(h * size, unit * _AT_ONCE * _WARP) * _WARP
    most = r.target.num_sms * _PUSHING_CTAS
    grid = max(1, min(ceil_div(num_threads, _THREADS), most))
    r.step(kernel, grid, _THREADS, arguments, early=(state,), programmatic=True)


def push_kernels(
    target: Target, dtype: torch.dtype, hidden_size: int, *, are_codes: bool
) -> Iterator[Kernel]:
    """The kernels that push tokens of H columns, at any address; are_codes: as FP8 codes."""
    sizes = Sizes(1, 1, 1, hidden_size)
    received = Received.of(1, hidden_size * dtype.itemsize, hidden_size, 1)
    for alignment in (TMA_BYTES, dtype.itemsize):
        r = Record(target, ("x", "ids", "state", "turn"))
        describe_push(
            r,
            _ALONE,
            sizes,
            received,
            0,
            received.size,
            Tensor.contiguous("x", 1, hidden_size, dtype=dtype, alignment=alignment),
            Tensor.contiguous("ids", 1, 1, dtype=torch.int64),
            None,
            state=Place("state"),
            turn=Word("turn"),
            min_amax=MIN_AMAX if are_codes else None,
        )
        yield from r.kernels


# ---- Giving back ----


_CTAS_OF_SM = 3  # as many as fit on it
_SHARE_PUSHING = 0.5  # of these
_CHUNK_BYTES = 1 << 20  # of rows that travel to all other ranks, at least
_MOST_PIECES = 2  # of a warp in an item
_WORKERS = 8  # warps of a CTA that push and sum; one more directs them


class Order(NamedTuple):
    """How results are cut into items, and which CTAs push first: `Order` in director.cuh."""

    num_chunks: int
    num_tokens: int
    num_pushes: int
    num_sums: int
    pieces_of_warp: int
    num_pushing: int


def give_back(
    memory: PeerMemory,
    member: Member,
    sizes: Sizes,
    turn: int,
    y: torch.Tensor,
    ids: torch.Tensor,
    grad_weights: torch.Tensor | None,
    out: torch.Tensor,
    out_grad_weights: torch.Tensor | None,
) -> None:
    """Give results back on the current stream, and sum all ranks' results there.

    Args:
        turn: the one that `push` began.
        y: bf16 [P M, H], contiguous: the rows of slots; rows without an expert here stay.
        ids: int32 [P M, k], contiguous: the choices of all slots.
        grad_weights: fp32 [P M, k], contiguous, sent with the rows; or None.
        out: bf16 [T, H] for the sums of y, contiguous.
        out_grad_weights: fp32 [T, k] for the sums of `grad_weights`, contiguous, or None.
    """
    num_tokens, device_index = len(out), ids.get_device()
    key = (
        "give_back",
        (grad_weights is None, y.data_ptr() % 16, device_index),
        (member, sizes, num_tokens, memory.receiving),
    )

    def prepare() -> Launch:
        others = ("ids", "grad_weights", "out", "out_grad_weights", "state", "turn")
        r = Record(target_of(device_index), ("y", *others))
        has_grads = grad_weights is not None
        describe_give_back(
            r,
            member,
            sizes,
            num_tokens,
            memory.returning_at,
            Tensor.of(y, "y"),
            Place("ids"),
            Place("grad_weights") if has_grads else None,
            Place("out"),
            Place("out_grad_weights") if has_grads else None,
            state=Place("state"),
            turn=Word("turn"),
        )
        return prepare_launch(r, device_index)

    addresses = _addresses(y, ids, grad_weights, out, out_grad_weights, memory.state)
    prepared(key, prepare).on(device_index, (*addresses, turn))


def describe_give_back(
    r: Record,
    member: Member,
    sizes: Sizes,
    num_tokens: int,
    returning_at: int,
    y: Tensor,
    ids: Place,
    grad_weights: Place | None,
    out: Place,
    out_grad_weights: Place | None,
    *,
    state: Place,
    turn: Word,
) -> None:
    """One step that gives results back, as `give_back`.

    num_tokens: T. returning_at: as in `describe_push`. state: of the group's `PeerMemory`.
    """
    first, end = (
        rank * sizes.num_experts // member.num_ranks for rank in (member.rank, member.rank + 1)
    )
    unit = _unit_of(y.alignment, sizes.hidden_size * 2)
    arguments = {
        "ranks": {"state": state, **member._asdict()},
        "turn": turn,
        "results": {
            "y": y.place,
            "ids": ids,
            "of_choices": grad_weights,
            "first_expert": first,
            "num_experts": end - first,
        },
        "sums": {
            **_places_of_sums(returning_at, member, sizes),
            "y": out,
            "y_of_choices": out_grad_weights,
        },
    }
    _step_that_gives(r, give_back_kernel_of(unit), member, sizes, num_tokens, unit, arguments)


def give_back_kernels(target: Target, hidden_size: int) -> Iterator[Kernel]:
    """The kernel that gives rows of H columns back."""
    r = Record(target, ("y", "ids", "out", "state", "turn"))
    describe_give_back(
        r,
        _ALONE,
        Sizes(1, 1, 1, hidden_size),
        1,
        0,
        Tensor.contiguous("y", 1, hidden_size),
        Place("ids"),
        None,
        Place("out"),
        None,
        state=Place("state"),
        turn=Word("turn"),
    )
    yield from r.kernels


def _places_of_sums(returning_at: int, member: Member, sizes: Sizes) -> dict[str, int]:
    """The offsets, in a rank's memory, of the parts to sum."""
    given_back = _given_back(member, sizes)
    return {
        "rows": returning_at + given_back.rows,
        "of_choices": returning_at + given_back.grad_scores,
        "reached": returning_at + given_back.reached,
    }


def order_of(member: Member, sizes: Sizes, num_pieces: int, num_ctas: int) -> Order:
    """Cut a call's results. Chunks have a MiB or more, and are the same on all ranks.

    num_pieces: of a row. num_ctas: how many run at once.
    """
    num_others, most = member.num_ranks - 1, sizes.max_tokens
    num_bytes = num_others * most * sizes.hidden_size * 2
    num_chunks = max(1, min(MAX_CHUNKS, num_bytes // _CHUNK_BYTES, most))
    num_tokens = ceil_div(most, num_chunks)
    num_chunks = ceil_div(most, num_tokens)
    num_pushing = max(1, int(num_ctas * _SHARE_PUSHING))
    # Each pushing CTA gets two items or more: with little more than one, all would wait for a few.
    warp_pieces = num_others * most * num_pieces // (2 * num_pushing * _WORKERS)
    warp_pieces = max(1, min(warp_pieces, _MOST_PIECES))
    item_pieces = warp_pieces * _WORKERS
    return Order(
        num_chunks=num_chunks,
        num_tokens=num_tokens,
        num_pushes=ceil_div(num_tokens * num_others * num_pieces, item_pieces),
        num_sums=ceil_div(num_tokens * num_pieces, item_pieces),
        pieces_of_warp=warp_pieces,
        num_pushing=num_pushing,
    )


def _step_that_gives(
    r: Record,
    kernel: Kernel,
    member: Member,
    sizes: Sizes,
    num_tokens: int,
    unit_bytes: int,
    arguments: dict[str, Any],
    early: Iterable[Place] = (),
) -> None:
    """A step with as many CTAs as run at once: some push first, the others sum.

    arguments: all but sizes and order.
    """
    units = sizes.hidden_size * 2 // unit_bytes
    num_pieces = ceil_div(units, _WARP)
    most = r.target.num_sms * _CTAS_OF_SM
    order = order_of(member, sizes, num_pieces, most)
    num_pushes, num_sums = (order.num_chunks * n for n in (order.num_pushes, order.num_sums))
    if num_pushes > order.num_pushing:
        grid = min(most, order.num_pushing + num_sums)
    else:  # each CTA pushes one item, then sums
        grid = min(most, max(num_pushes, num_sums))
        order = order._replace(num_pushing=grid)
    sizes_and_order = {
        "order": order._asdict(),
        "num_tokens": num_tokens,
        "max_tokens": sizes.max_tokens,
        "top_k": sizes.top_k,
        "num_units": units,
        "num_pieces": divisor_of(num_pieces),
        "num_others": divisor_of(max(1, member.num_ranks - 1)),
    }
    threads = (_WORKERS + 1) * _WARP
    r.step(kernel, grid, threads, {**arguments, **sizes_and_order}, early=early, programmatic=True)


class CombineAndGiveBack(NamedTuple):
    """Takes the place of `describe_combine` to combine, give back and sum in one kernel.

    num_tokens: T. returning_at: as in `describe_push`. state: the address of the `state` of
    the group's `PeerMemory`.
    """

    member: Member
    sizes: Sizes
    num_tokens: int
    returning_at: int
    state: int

    def describe(
        self,
        r: Record,
        y: Tensor,
        token_to_row: Place,
        weights: Tensor,
        out: Tensor,
        *,
        grad_weights: Place | None,
        word: Word,
    ) -> None:
        """One step, as `describe_combine` of the slots' choices. It reads map and weights early.

        Args:
            y: bf16 [..., R, H], at a multiple of 16 bytes, in rows of whole 16 bytes.
            token_to_row: int32 [P M, k], contiguous.
            weights: fp32 [P M, k], contiguous. Without grad_weights, this rank's own slots have
                the scores that it pushed instead.
            out: bf16 [T, H], contiguous; fp32 [T, k] follows it, for the sums of grad_weights.
            grad_weights: fp32 [P M, k], contiguous, sent with the rows; or None.
            word: the turn that ends.
        """
        assert weights.dtype == torch.float32
        assert weights.strides == (self.sizes.top_k, 1)
        sums: dict[str, Any] = _places_of_sums(self.returning_at, self.member, self.sizes)
        sums["y"] = out.place
        if grad_weights is None:
            sums["scores"] = self.returning_at + _given_back(self.member, self.sizes).scores
        else:
            out_bytes = self.num_tokens * self.sizes.hidden_size * 2
            sums["y_of_choices"] = out.place.after(out_bytes)
        arguments = {
            "ranks": {"state": self.state, **self.member._asdict()},
            "turn": word,
            "results": {"of_choices": grad_weights},
            "rows": {
                "y": y.place,
                "y_row_bytes": y.bytes_of_stride(-2),
                "token_to_row": token_to_row,
                "weights": weights.place,
            },
            "sums": sums,
        }
        call_sizes = self.member, self.sizes, self.num_tokens
        early = token_to_row, weights.place
        _step_that_gives(r, COMBINE_AND_GIVE_BACK, *call_sizes, 16, arguments, early)


assert BLOCK == _LANES * 16
