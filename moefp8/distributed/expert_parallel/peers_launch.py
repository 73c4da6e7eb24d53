"""Launch `push.cu` and `give_back.cu`, by which the GPUs of a host exchange tokens and results.

T tokens of a rank, M of any at most, k choices each, P ranks, E experts, H hidden.
"""

import ctypes
from ctypes import c_float, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import NamedTuple

import torch

from ...kernels.common.blocks import BLOCK, ceil_div, num_blocks
from ...kernels.common.checks import INPUTS
from ...kernels.common.divisor import Divisor
from ...kernels.common.prepared import layout_of, prepared
from ...kernels.jit import Kernel, Launch, Pointer, Source, current_driver, fields, pointers
from ...routing.combine_launch import CombineSources
from .peer_memory import GivenBack, PeerMemory, Received

_PUSH = Path(__file__).with_name("push.cu")
_GIVE_BACK = Path(__file__).with_name("give_back.cu")
_THREADS, _LANES, _WARP, _AT_ONCE = 256, 8, 32, 4
_CTAS_PER_SM = 8


class _Ranks(ctypes.Structure):
    _fields_ = fields((c_void_p, "state"), (c_uint64, "deadline_ns"), (c_uint32, "rank num_ranks"))


class _Choices(ctypes.Structure):
    _fields_ = fields(
        (c_void_p, "ids scores"),
        (c_uint32, "num_tokens max_tokens top_k num_experts id_bytes are_sent"),
    )


class _Tokens(ctypes.Structure):
    _fields_ = fields(
        (c_void_p, "x"),
        (c_int64, "x_row_bytes"),
        (c_uint32, "row_bytes hidden_size num_k_blocks"),
        (c_int64, "rows row_pitch scales scale_pitch ids scores"),
        (c_void_p, "token_to_row"),
    )


class PushArguments(ctypes.Structure):
    """`Arguments` in push.cu."""

    _fields_ = fields(
        (_Ranks, "ranks"),
        (c_uint64, "signature"),
        (_Choices, "choices"),
        (_Tokens, "tokens"),
        (c_float, "min_amax"),
    )


class _Results(ctypes.Structure):
    _fields_ = fields((c_void_p, "y"), (c_uint32, "row_bytes"))


class _Rows(ctypes.Structure):
    _fields_ = fields(
        (c_void_p, "y"),
        (c_int64, "y_row_bytes"),
        (c_void_p, "token_to_row weights"),
        (c_int64, "weight_token_bytes weight_choice_bytes"),
        (c_uint32, "top_k"),
        (Divisor, "units"),
    )


class GiveBackArguments(ctypes.Structure):
    """`Arguments` in give_back.cu."""

    _fields_ = fields(
        (_Ranks, "ranks"),
        (_Choices, "choices"),
        (_Results, "results"),
        (_Rows, "rows"),
        (c_void_p, "of_choices"),
        (c_int64, "to scores_to"),
        (c_uint32, "hidden_size"),
    )


def push_codes_kernel_of(dtype: torch.dtype, *, vectorized: bool) -> Kernel:
    return Kernel(_PUSH, f"push_codes_kernel<{INPUTS[dtype]}, {str(vectorized).lower()}>")


def push_rows_kernel_of(unit_bytes: int) -> Kernel:
    return Kernel(_PUSH, f"push_rows_kernel<{_UNITS[unit_bytes]}>")


def give_back_kernel_of(unit_bytes: int) -> Kernel:
    return Kernel(_GIVE_BACK, f"give_back_kernel<{_UNITS[unit_bytes]}>")


def combine_kernel_of(weights_dtype: torch.dtype) -> Kernel:
    return Kernel(_GIVE_BACK, f"combine_and_give_back_kernel<{INPUTS[weights_dtype]}>")


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


def _ranks_of(place: Place) -> _Ranks:
    return _Ranks(deadline_ns=place.deadline_ns, rank=place.rank, num_ranks=place.num_ranks)


def _addresses(*given: torch.Tensor | None) -> tuple[int, ...]:
    return tuple([0 if x is None else x.data_ptr() for x in given])


# ---- Pushing tokens ----

# The addresses of a push, in this order; the signature counts as one.
_X, _IDS, _SCORES, _TO_ROW, _STATE, _SIGNATURE = map(Source, range(6))


def push(
    memory: PeerMemory,
    place: Place,
    sizes: Sizes,
    received: Received,
    signature: int,
    x: torch.Tensor,
    ids: torch.Tensor,
    scores: torch.Tensor | None,
    token_to_row: torch.Tensor | None,
    min_amax: float | None,
) -> None:
    """Push tokens [T, H] on the current stream, and wait there for those of the other ranks.

    Args:
        x: [T, H], columns lie side by side. ids: int32 or int64 [T, k], contiguous.
        scores: fp32 [T, k], contiguous, which go with the ids to all slots of all ranks; or None.
        token_to_row: int32 [T, P] to be written, or None.
        min_amax: tokens travel as codes, quantized with that; None: as they are.
    """
    key = (
        "push",
        (layout_of(x), x.data_ptr() % 16, ids.dtype),
        (scores is None, token_to_row is None, min_amax),
        (place, sizes, received, memory.receiving),
    )

    def prepare() -> Launch:
        at, word = memory.receiving_at, x.element_size()
        num_tokens, h, top_k = len(x), sizes.hidden_size, sizes.top_k
        pitch = x.stride(0) * word if num_tokens > 1 else h * word
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
            ),
            min_amax=min_amax or 0.0,
        )
        found = pointers(PushArguments, signature=_SIGNATURE)
        found += pointers(_Ranks, at=PushArguments.ranks.offset, state=_STATE)
        found += pointers(
            _Choices,
            at=PushArguments.choices.offset,
            ids=_IDS,
            scores=None if scores is None else _SCORES,
        )
        found += pointers(
            _Tokens,
            at=PushArguments.tokens.offset,
            x=_X,
            token_to_row=None if token_to_row is None else _TO_ROW,
        )
        if min_amax is not None:
            vectorized = h % 8 == 0 and not (x.data_ptr() | pitch) % 16
            kernel = push_codes_kernel_of(x.dtype, vectorized=vectorized)
            num_threads = num_tokens * num_blocks(h) * _LANES
        else:
            unit = _unit_of(x.data_ptr(), pitch, h * word)
            kernel = push_rows_kernel_of(unit)
            num_threads = num_tokens * ceil_div(h * word, unit * _AT_ONCE * _WARP) * _WARP
        return _launch(kernel, arguments, found, x.get_device(), num_threads)

    addresses = _addresses(x, ids, scores, token_to_row, memory.state)
    prepared(key, prepare).on(x.get_device(), (*addresses, signature))


# ---- Giving back ----

_Y, _SLOT_IDS, _OF_CHOICES, _OWN_STATE = map(Source, range(4))


def give_back(
    memory: PeerMemory,
    place: Place,
    sizes: Sizes,
    y: torch.Tensor | None,
    ids: torch.Tensor,
    of_choices: torch.Tensor | None,
) -> None:
    """Give results back on the current stream, and wait there for those of the other ranks.

    Args:
        y: bf16 [P M, H], contiguous: the rows of slots; those without an expert here stay. None:
            nothing is given back, but all ranks know that what they pushed has been read.
        ids: int32 [P M, k], contiguous: the choices of all slots.
        of_choices: fp32 [P M, k], contiguous, or None.
    """
    key = (
        "give_back",
        (y is None, of_choices is None, 0 if y is None else y.data_ptr() % 16, ids.get_device()),
        (place, sizes, memory.receiving),
    )

    def prepare() -> Launch:
        row_bytes, num_slots = sizes.hidden_size * 2, place.num_ranks * sizes.max_tokens
        arguments = _give_back_arguments(memory.returning_at, place, sizes)
        arguments.results = _Results(row_bytes=row_bytes)
        found = pointers(GiveBackArguments, of_choices=None if of_choices is None else _OF_CHOICES)
        found += pointers(_Ranks, at=GiveBackArguments.ranks.offset, state=_OWN_STATE)
        found += pointers(_Choices, at=GiveBackArguments.choices.offset, ids=_SLOT_IDS)
        source = None if y is None else _Y
        found += pointers(_Results, at=GiveBackArguments.results.offset, y=source)
        unit = _unit_of(0 if y is None else y.data_ptr(), row_bytes)
        pieces = 0 if y is None else ceil_div(row_bytes, unit * _AT_ONCE * _WARP)
        kernel = give_back_kernel_of(unit)
        return _launch(kernel, arguments, found, ids.get_device(), num_slots * pieces * _WARP)

    prepared(key, prepare).on(ids.get_device(), _addresses(y, ids, of_choices, memory.state))


def _give_back_arguments(returning_at: int, place: Place, sizes: Sizes) -> GiveBackArguments:
    num_slots = place.num_ranks * sizes.max_tokens
    given_back = GivenBack.of(num_slots, sizes.hidden_size, sizes.top_k)
    return GiveBackArguments(
        ranks=_ranks_of(place),
        choices=_Choices(
            num_tokens=num_slots,
            max_tokens=sizes.max_tokens,
            top_k=sizes.top_k,
            num_experts=sizes.num_experts,
            id_bytes=4,
        ),
        to=returning_at + given_back.rows,
        scores_to=returning_at + given_back.of_scores,
        hidden_size=sizes.hidden_size,
    )


class CombineAndGiveBack(NamedTuple):
    """What stands for `prepare_combine` where results are given back at once.

    The address of the result is then that of `PeerMemory.state`.
    """

    place: Place
    sizes: Sizes
    returning_at: int

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
        """As `prepare_combine`, of the slots' choices."""
        num_slots, top_k = weights.shape
        units = hidden_size // 8
        token_stride, choice_stride = weights.stride()
        arguments = _give_back_arguments(self.returning_at, self.place, self.sizes)
        arguments.rows = _Rows(
            y_row_bytes=y_row_pitch * 2,
            weight_token_bytes=token_stride * weights.element_size(),
            weight_choice_bytes=choice_stride * weights.element_size(),
            top_k=top_k,
            units=Divisor.of(units),
        )
        found = pointers(
            _Rows,
            at=GiveBackArguments.rows.offset,
            y=sources.y,
            token_to_row=sources.token_to_row,
            weights=sources.weights,
        )
        found += pointers(_Ranks, at=GiveBackArguments.ranks.offset, state=sources.out)
        kernel = combine_kernel_of(weights.dtype)
        return _launch(kernel, arguments, found, weights.get_device(), num_slots * units)


def _launch(
    kernel: Kernel,
    arguments: ctypes.Structure,
    found: list[Pointer],
    device_index: int,
    num_threads: int,
) -> Launch:
    driver = current_driver()
    most = driver.num_sms(device_index) * _CTAS_PER_SM
    grid = max(1, min(ceil_div(num_threads, _THREADS), most))
    function = driver.load(kernel, device_index)
    return Launch(function, grid, _THREADS, (arguments,), found, programmatic=True)


assert BLOCK == _LANES * 16
