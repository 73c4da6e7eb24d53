"""Give results back and sum those of all ranks: describe and launch `give_back.cu`.

`CombineAndGiveBack` does so in the last kernel of the experts.

T tokens of a rank, M of any at most, k choices each, P ranks, E experts, H hidden.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...kernels.common.blocks import ceil_div, divisor_of
from ...kernels.common.prepared import prepared
from ...kernels.jit import Kernel, Launch
from ...kernels.program import Place, Record, Target, Tensor, Word, prepare_launch
from ...kernels.targets import target_of
from .peer_memory import MAX_CHUNKS, PeerMemory
from .ranks import ALONE, UNITS, WARP, Member, Sizes, unit_of

_SOURCE = Path(__file__).with_name("give_back.cu")
COMBINE_AND_GIVE_BACK = Kernel(_SOURCE, "combine_and_give_back_kernel")
_CTAS_PER_SM = 3  # as many as fit
_SHARE_PUSHING = 0.5  # of all CTAs
_CHUNK_BYTES = 1 << 20  # the least bytes that a chunk sends to all other ranks together
_MOST_PIECES = 2  # of a warp in an item
_WORKERS = 8  # warps of a CTA that push and sum; one more directs them


def give_back_kernel_of(unit_bytes: int) -> Kernel:
    return Kernel(_SOURCE, f"give_back_kernel<{UNITS[unit_bytes]}>")


def give_back(
    memory: PeerMemory,
    member: Member,
    sizes: Sizes,
    turn: int,
    y: torch.Tensor,
    ids: torch.Tensor,
    grad_scores: torch.Tensor | None,
    out: torch.Tensor,
    out_grad_scores: torch.Tensor | None,
) -> None:
    """Give this rank's results back on the current stream, and sum all ranks' results for it there.

    Args:
        turn: the turn that `push` began.
        y: bf16 [P M, H], contiguous: a row for each slot; rows without an expert here are not sent.
        ids: int32 [P M, k], contiguous: the choices of all slots.
        grad_scores: fp32 [P M, k], contiguous, sent with the rows; or None.
        out: bf16 [T, H], contiguous, for the sums of y.
        out_grad_scores: fp32 [T, k], contiguous, for the sums of `grad_scores`; or None.
    """
    num_tokens, device_index = len(out), ids.get_device()
    key = (
        "give_back",
        (grad_scores is None, y.data_ptr() % 16, device_index),
        (member, sizes, num_tokens, memory.receiving),
    )

    def prepare() -> Launch:
        others = ("ids", "grad_scores", "out", "out_grad_scores", "state", "turn")
        r = Record(target_of(device_index), ("y", *others))
        has_grads = grad_scores is not None
        describe_give_back(
            r,
            member,
            sizes,
            num_tokens,
            memory.returning_at,
            y=Tensor.of(y, "y"),
            ids=Place("ids"),
            grad_scores=Place("grad_scores") if has_grads else None,
            out=Place("out"),
            out_grad_scores=Place("out_grad_scores") if has_grads else None,
            state=Place("state"),
            turn=Word("turn"),
        )
        return prepare_launch(r, device_index)

    tensors = y, ids, grad_scores, out, out_grad_scores, memory.state
    addresses = tuple([0 if x is None else x.data_ptr() for x in tensors])
    prepared(key, prepare).on(device_index, (*addresses, turn))


def describe_give_back(
    r: Record,
    member: Member,
    sizes: Sizes,
    num_tokens: int,
    returning_at: int,
    *,
    y: Tensor,
    ids: Place,
    grad_scores: Place | None,
    out: Place,
    out_grad_scores: Place | None,
    state: Place,
    turn: Word,
) -> None:
    """Record one step that gives results back; tensors as in `give_back`.

    num_tokens: T. returning_at: as in `describe_push`. state: that of the group's `PeerMemory`.
    """
    rank, num_ranks = member.rank, member.num_ranks
    first, end = (r * sizes.num_experts // num_ranks for r in (rank, rank + 1))
    unit = unit_of(y.alignment, sizes.hidden_size * 2)
    arguments = {
        "ranks": {"state": state, **member._asdict()},
        "turn": turn,
        "results": {
            "y": y.place,
            "ids": ids,
            "of_choices": grad_scores,
            "first_expert": first,
            "num_experts": end - first,
        },
        "sums": {
            **_sum_offsets(returning_at, member, sizes),
            "y": out,
            "y_of_choices": out_grad_scores,
        },
    }
    _give_back_step(r, give_back_kernel_of(unit), member, sizes, num_tokens, unit, arguments)


def give_back_kernels(target: Target, hidden_size: int) -> Iterator[Kernel]:
    """The kernel that gives rows of H columns back."""
    r = Record(target, ("y", "ids", "out", "state", "turn"))
    describe_give_back(
        r,
        ALONE,
        Sizes(1, 1, 1, hidden_size),
        num_tokens=1,
        returning_at=0,
        y=Tensor.contiguous("y", 1, hidden_size),
        ids=Place("ids"),
        grad_scores=None,
        out=Place("out"),
        out_grad_scores=None,
        state=Place("state"),
        turn=Word("turn"),
    )
    yield from r.kernels


class CombineAndGiveBack(NamedTuple):
    """Replaces `describe_combine`: one kernel combines, gives back and sums.

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
        """Record one step, as `describe_combine`; it reads `token_to_row` and weights early.

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
        sums: dict[str, Any] = _sum_offsets(self.returning_at, self.member, self.sizes)
        sums["y"] = out.place
        if grad_weights is None:
            sums["scores"] = self.returning_at + self.sizes.given_back(self.member.num_ranks).scores
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
        _give_back_step(r, COMBINE_AND_GIVE_BACK, *call_sizes, 16, arguments, early)


def _sum_offsets(returning_at: int, member: Member, sizes: Sizes) -> dict[str, int]:
    """Offsets, in bytes of a rank's memory, of what its sums read."""
    given_back = sizes.given_back(member.num_ranks)
    return {
        "rows": returning_at + given_back.rows,
        "of_choices": returning_at + given_back.grad_scores,
        "reached": returning_at + given_back.reached,
    }


# ---- How results are cut ----


class Order(NamedTuple):
    """How results are cut into items, and which CTAs push first: `Order` in director.cuh."""

    num_chunks: int
    num_tokens: int
    num_pushes: int
    num_sums: int
    pieces_of_warp: int
    num_pushing: int


def order_of(member: Member, sizes: Sizes, num_pieces: int, num_ctas: int) -> Order:
    """Cut a call's results; chunks have a MiB or more, and are the same on all ranks.

    num_pieces: the pieces of a row. num_ctas: how many CTAs run at once.
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


def _give_back_step(
    r: Record,
    kernel: Kernel,
    member: Member,
    sizes: Sizes,
    num_tokens: int,
    unit_bytes: int,
    arguments: dict[str, Any],
    early: Iterable[Place] = (),
) -> None:
    """Record a step with as many CTAs as run at once: some push first, the others sum.

    arguments: the kernel's arguments without sizes and order.
    """
    units = sizes.hidden_size * 2 // unit_bytes
    num_pieces = ceil_div(units, WARP)
    most = r.target.num_sms * _CTAS_PER_SM
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
    threads = (_WORKERS + 1) * WARP
    r.step(kernel, grid, threads, {**arguments, **sizes_and_order}, early=early, programmatic=True)
