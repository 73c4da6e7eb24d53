"""Launch `push.cu` and `give_back.cu`, by which the GPUs of a host exchange tokens and results.

T tokens of a rank, M of any at most, k choices each, P ranks, E experts, H hidden.
"""

from ctypes import Structure
from pathlib import Path
from typing import NamedTuple

import torch

from ...kernels.common.blocks import BLOCK, ceil_div, num_blocks
from ...kernels.common.checks import INPUTS
from ...kernels.common.divisor import Divisor
from ...kernels.common.prepared import layout_of, prepared
from ...kernels.jit import (
    Kernel,
    Launch,
    Pointer,
    Source,
    current_driver,
    offset_of,
    pointers,
    struct_of,
)
from ...routing.combine_launch import CombineSources
from .peer_memory import MAX_CHUNKS, GivenBack, PeerMemory, Received

_PUSH = Path(__file__).with_name("push.cu")
_GIVE_BACK = Path(__file__).with_name("give_back.cu")
PushArguments, GiveBackArguments = struct_of(_PUSH), struct_of(_GIVE_BACK)
_Ranks, _Choices, _Tokens = (struct_of(_PUSH, x) for x in ("Ranks", "Choices", "Tokens"))
_Results, _Rows, _Sums, Order = (
    struct_of(_GIVE_BACK, x) for x in ("Results", "Rows", "Sums", "Order")
)
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
    """How many bytes are moved at once, of rows at these addresses, pitches and lengths."""
    return 16 if all(x % 16 == 0 for x in multiples) else 2


class Place(NamedTuple):
    """Who this rank is among the others, and how long it waits for them."""

    rank: int
    num_ranks: int
    deadline_ns: int


class Sizes(NamedTuple):
    """Of a call: M, k, E, H."""

    max_tokens: int
    top_k: int
    num_experts: int
    hidden_size: int


def _ranks_of(place: Place) -> Structure:
    return _Ranks(deadline_ns=place.deadline_ns, rank=place.rank, num_ranks=place.num_ranks)


def _addresses(*given: torch.Tensor | None) -> tuple[int, ...]:
    return tuple([0 if x is None else x.data_ptr() for x in given])


# ---- Pushing tokens ----

_PUSHING_CTAS = 8  # that an SM has room for

# The addresses of a push, in this order; the turn counts as one.
_X, _IDS, _SCORES, _STATE, _TURN = map(Source, range(5))


def push(
    memory: PeerMemory,
    place: Place,
    sizes: Sizes,
    received: Received,
    turn: int,
    x: torch.Tensor,
    ids: torch.Tensor,
    scores: torch.Tensor | None,
    min_amax: float | None,
) -> None:
    """Push tokens [T, H] on the current stream, and wait there for those of the other ranks.

    Args:
        turn: the turn that begins: the signature, below 2^32 - 1, which must be that of all ranks,
            plus 2^32 times a number that tells this rank's turns of several streams apart.
        x: [T, H], columns lie side by side; or [T, 0], for a turn that only brings results back.
        ids: int32 or int64 [T, k], contiguous.
        scores: fp32 [T, k], contiguous, which go with the ids to all slots of all ranks; or None.
        min_amax: tokens travel as codes, quantized with that; None: as they are.
    """
    key = (
        "push",
        (layout_of(x), x.data_ptr() % 16, ids.dtype),
        (scores is None, min_amax),
        (place, sizes, received, memory.receiving),
    )

    def prepare() -> Launch:
        at, word = memory.receiving_at, x.element_size()
        (num_tokens, h), top_k = x.shape, sizes.top_k
        given_back = _given_back(place, sizes)
        pitch = (x.stride(0) if num_tokens > 1 else sizes.hidden_size) * word
        arguments = PushArguments(
            ranks=_ranks_of(place),
            choices=_Choices(
                num_tokens=num_tokens,
                max_tokens=sizes.max_tokens,
                top_k=top_k,
                num_experts=sizes.num_experts,
                id_bytes=ids.element_size(),
                are_sent=scores is not None,
            ),
            tokens=_Tokens(
                x_row_bytes=pitch,
                row_bytes=h * word,
                hidden_size=h,
                num_k_blocks=num_blocks(h),
                rows=at + received.rows,
                row_pitch=received.row_pitch,
                scales=at + received.scales,
                scale_pitch=received.scale_pitch,
                ids=at + received.ids,
                scores=at + received.scores,
                reached=memory.returning_at + given_back.reached,
                own_scores=memory.returning_at + given_back.scores,
            ),
            min_amax=min_amax or 0.0,
        )
        found = pointers(PushArguments, turn=_TURN)
        found += pointers(_Ranks, at=offset_of(PushArguments, "ranks"), state=_STATE)
        found += pointers(
            _Choices,
            at=offset_of(PushArguments, "choices"),
            ids=_IDS,
            scores=None if scores is None else _SCORES,
        )
        found += pointers(_Tokens, at=offset_of(PushArguments, "tokens"), x=_X)
        if min_amax is not None:
            vectorized = h % 8 == 0 and not (x.data_ptr() | pitch) % 16
            kernel = push_codes_kernel_of(x.dtype, vectorized=vectorized)
            num_threads = num_tokens * num_blocks(h) * _LANES
        else:
            unit = _unit_of(x.data_ptr(), pitch, h * word)
            kernel = push_rows_kernel_of(unit)
            num_threads = num_tokens * ceil_div(h * word, unit * _AT_ONCE * _WARP) * _WARP
        device_index = x.get_device()
        most = current_driver().num_sms(device_index) * _PUSHING_CTAS
        grid = max(1, min(ceil_div(num_threads, _THREADS), most))
        return _launch(kernel, arguments, found, device_index, grid)

    addresses = _addresses(x, ids, scores, memory.state)
    prepared(key, prepare).on(x.get_device(), (*addresses, turn))


# ---- Giving back ----


_CTAS_OF_SM = 3  # that it has room for
_SHARE_PUSHING = 0.5  # of these
_CHUNK_BYTES = 1 << 20  # of rows that travel to all other ranks, at least
_MOST_PIECES = 2  # of a warp in an item
_WORKERS = 8  # warps of a CTA that push and sum; one more directs them
_Y, _SLOT_IDS, _OF_CHOICES, _OUT, _OUT_OF_CHOICES, _OWN_STATE, _OWN_TURN = map(Source, range(7))


def give_back(
    memory: PeerMemory,
    place: Place,
    sizes: Sizes,
    turn: int,
    y: torch.Tensor,
    ids: torch.Tensor,
    of_choices: torch.Tensor | None,
    out: torch.Tensor,
    out_of_choices: torch.Tensor | None,
) -> None:
    """Give results back on the current stream, and sum there what all ranks give.

    Args:
        turn: the one that `push` began.
        y: bf16 [P M, H], contiguous: the rows of slots; those without an expert here stay.
        ids: int32 [P M, k], contiguous: the choices of all slots.
        of_choices: fp32 [P M, k], contiguous, or None.
        out: bf16 [T, H] for the sums of y, contiguous.
        out_of_choices: fp32 [T, k] for those of `of_choices`, contiguous, or None.
    """
    num_tokens = len(out)
    key = (
        "give_back",
        (of_choices is None, y.data_ptr() % 16, ids.get_device()),
        (place, sizes, num_tokens, memory.receiving),
    )

    def prepare() -> Launch:
        row_bytes, has_scores = sizes.hidden_size * 2, of_choices is not None
        unit = _unit_of(y.data_ptr(), row_bytes)
        arguments = _give_back_arguments(memory.returning_at, place, sizes, num_tokens, unit)
        first, end = (
            r * sizes.num_experts // place.num_ranks for r in (place.rank, place.rank + 1)
        )
        arguments.results = _Results(first_expert=first, num_experts=end - first)
        found = pointers(GiveBackArguments, turn=_OWN_TURN)
        found += pointers(_Ranks, at=offset_of(GiveBackArguments, "ranks"), state=_OWN_STATE)
        found += pointers(
            _Results,
            at=offset_of(GiveBackArguments, "results"),
            y=_Y,
            ids=_SLOT_IDS,
            of_choices=_OF_CHOICES if has_scores else None,
        )
        found += pointers(
            _Sums,
            at=offset_of(GiveBackArguments, "sums"),
            y=_OUT,
            y_of_choices=_OUT_OF_CHOICES if has_scores else None,
        )
        return _launch_giving(
            give_back_kernel_of(unit), arguments, found, ids.get_device(), place, sizes
        )

    addresses = _addresses(y, ids, of_choices, out, out_of_choices, memory.state)
    prepared(key, prepare).on(ids.get_device(), (*addresses, turn))


def _given_back(place: Place, sizes: Sizes) -> GivenBack:
    return GivenBack.of(place.num_ranks, sizes.max_tokens, sizes.hidden_size, sizes.top_k)


def _give_back_arguments(
    returning_at: int, place: Place, sizes: Sizes, num_tokens: int, unit_bytes: int
) -> Structure:
    given_back, units = _given_back(place, sizes), sizes.hidden_size * 2 // unit_bytes
    return GiveBackArguments(
        ranks=_ranks_of(place),
        sums=_Sums(
            rows=returning_at + given_back.rows,
            of_choices=returning_at + given_back.of_scores,
            reached=returning_at + given_back.reached,
        ),
        num_tokens=num_tokens,
        max_tokens=sizes.max_tokens,
        top_k=sizes.top_k,
        num_units=units,
        num_pieces=Divisor.of(ceil_div(units, _WARP)),
        num_others=Divisor.of(max(1, place.num_ranks - 1)),
    )


def order_of(place: Place, sizes: Sizes, num_pieces: int, num_ctas: int) -> Structure:
    """Chunks, of a MiB or more, depend on nothing but what is the same on all ranks.

    num_pieces: of a row. num_ctas: as many as run at once.
    """
    num_others, most = place.num_ranks - 1, sizes.max_tokens
    num_bytes = num_others * most * sizes.hidden_size * 2
    num_chunks = max(1, min(MAX_CHUNKS, num_bytes // _CHUNK_BYTES, most))
    num_tokens = ceil_div(most, num_chunks)
    num_chunks = ceil_div(most, num_tokens)
    num_pushing = max(1, int(num_ctas * _SHARE_PUSHING))
    # Two items or more for each CTA that pushes: with one and a few over, all would wait for these.
    of_warp = num_others * most * num_pieces // (2 * num_pushing * _WORKERS)
    of_warp = max(1, min(of_warp, _MOST_PIECES))
    of_item = of_warp * _WORKERS
    return Order(
        num_chunks=num_chunks,
        num_tokens=num_tokens,
        num_pushes=ceil_div(num_tokens * num_others * num_pieces, of_item),
        num_sums=ceil_div(num_tokens * num_pieces, of_item),
        pieces_of_warp=of_warp,
        num_pushing=num_pushing,
    )


def _launch_giving(
    kernel: Kernel,
    arguments: Structure,
    found: list[Pointer],
    device_index: int,
    place: Place,
    sizes: Sizes,
) -> Launch:
    """As many CTAs as run at once: some push first, the others sum."""
    most = current_driver().num_sms(device_index) * _CTAS_OF_SM
    order = order_of(place, sizes, arguments.num_pieces.value, most)
    num_pushes, num_sums = (order.num_chunks * n for n in (order.num_pushes, order.num_sums))
    if num_pushes > order.num_pushing:
        grid = min(most, order.num_pushing + num_sums)
    else:  # each takes one, and sums then
        order.num_pushing = grid = min(most, max(num_pushes, num_sums))
    arguments.order = order
    threads = (_WORKERS + 1) * _WARP
    return _launch(kernel, arguments, found, device_index, grid, threads)


class CombineAndGiveBack(NamedTuple):
    """What stands for `prepare_combine` where results are given back at once, and summed.

    The result is bf16 [T, H]; behind it, where there is something of choices, fp32 [T, k]. Without,
    weights are the scores that have come with tokens; else they are of this rank's own. The word of
    a call is the turn that it ends.

    num_tokens: T. returning_at, state: of the group's `PeerMemory`.
    """

    place: Place
    sizes: Sizes
    num_tokens: int
    returning_at: int
    state: int

    def prepare(
        self,
        weights: torch.Tensor,
        hidden_size: int,
        *,
        y_row_pitch: int,
        is_aligned: bool,
        sources: CombineSources,
        programmatic: bool,
    ) -> Launch:
        """As `prepare_combine`, of the slots' choices, with weights fp32 [P M, k], contiguous."""
        assert weights.dtype == torch.float32
        assert weights.is_contiguous()
        given = self.returning_at, self.place, self.sizes, self.num_tokens
        arguments = _give_back_arguments(*given, unit_bytes=16)
        arguments.ranks.state = self.state
        if sources.of_choices is None:
            arguments.sums.scores = self.returning_at + _given_back(self.place, self.sizes).scores
        arguments.rows = _Rows(y_row_bytes=y_row_pitch * 2)
        found = pointers(
            _Rows,
            at=offset_of(GiveBackArguments, "rows"),
            y=sources.y,
            token_to_row=sources.token_to_row,
            weights=sources.weights,
        )
        found += pointers(GiveBackArguments, turn=sources.word)
        behind = None
        if sources.of_choices is not None:
            behind = sources.out._replace(plus=self.num_tokens * hidden_size * 2)
        at = offset_of(GiveBackArguments, "results")
        found += pointers(_Results, at=at, of_choices=sources.of_choices)
        at = offset_of(GiveBackArguments, "sums")
        found += pointers(_Sums, at=at, y=sources.out, y_of_choices=behind)
        launched = arguments, found, weights.get_device(), self.place, self.sizes
        return _launch_giving(COMBINE_AND_GIVE_BACK, *launched)


def _launch(
    kernel: Kernel,
    arguments: Structure,
    found: list[Pointer],
    device_index: int,
    grid: int,
    threads: int = _THREADS,
) -> Launch:
    function = current_driver().load(kernel, device_index)
    return Launch(function, grid, threads, (arguments,), found, programmatic=True)


assert BLOCK == _LANES * 16
