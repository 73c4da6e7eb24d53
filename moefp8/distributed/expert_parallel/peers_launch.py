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
from ...kernels.common.prepared import layout_of, prepared
from ...kernels.jit import Kernel, Launch, Pointer, Source, current_driver, fields, pointers
from .peer_memory import (
    GIVE_BACK_ARRIVALS,
    MAX_RANKS,
    PUSH_ARRIVALS,
    GivenBack,
    PeerMemory,
    Received,
)

_PUSH = Path(__file__).with_name("push.cu")
_GIVE_BACK = Path(__file__).with_name("give_back.cu")
_THREADS, _LANES, _WARP, _AT_ONCE = 256, 8, 32, 4
_CTAS_PER_SM = 8


class _Ranks(ctypes.Structure):
    _fields_ = fields((c_void_p * MAX_RANKS, "memory"), (c_uint32, "rank num_ranks"))


class _Meeting(ctypes.Structure):
    _fields_ = fields(
        (c_void_p, "count num_ended"),
        (c_int64, "arrivals"),
        (c_uint64, "signature deadline_ns"),
        (c_void_p, "error"),
    )


class _Choices(ctypes.Structure):
    _fields_ = fields(
        (c_void_p, "ids scores"),
        (c_uint32, "num_tokens max_tokens top_k num_experts id_bytes"),
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
        (_Meeting, "meeting"),
        (_Choices, "choices"),
        (_Tokens, "tokens"),
        (c_float, "min_amax"),
    )


class _Results(ctypes.Structure):
    _fields_ = fields(
        (c_void_p, "y"),
        (c_uint32, "row_bytes"),
        (c_void_p, "of_choices"),
        (c_int64, "rows of_scores"),
    )


class GiveBackArguments(ctypes.Structure):
    """`Arguments` in give_back.cu."""

    _fields_ = fields(
        (_Ranks, "ranks"),
        (_Meeting, "meeting"),
        (_Choices, "choices"),
        (_Results, "results"),
    )


def push_codes_kernel_of(dtype: torch.dtype, *, vectorized: bool) -> Kernel:
    return Kernel(_PUSH, f"push_codes_kernel<{INPUTS[dtype]}, {str(vectorized).lower()}>")


def push_rows_kernel_of(unit_bytes: int) -> Kernel:
    return Kernel(_PUSH, f"push_rows_kernel<{_UNITS[unit_bytes]}>")


def give_back_kernel_of(unit_bytes: int) -> Kernel:
    return Kernel(_GIVE_BACK, f"give_back_kernel<{_UNITS[unit_bytes]}>")


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


# Addresses of a launch, in this order; the signature of the meeting counts as one.
_FIRST, _IDS, _SECOND, _TO_ROW, _SIGNATURE, _STATE, _ERROR, *_MEMORY = map(
    Source, range(7 + MAX_RANKS)
)


def _common(place: Place, arrivals: int, number: int) -> tuple[_Ranks, _Meeting, list[Pointer]]:
    """The structures that both kernels begin with, and their addresses."""
    ranks = _Ranks(rank=place.rank, num_ranks=place.num_ranks)
    meeting = _Meeting(arrivals=arrivals, deadline_ns=place.deadline_ns)
    at, word = PushArguments.meeting.offset, ctypes.sizeof(c_uint64)
    found = pointers(
        _Meeting,
        at=at,
        count=_STATE._replace(plus=number * word),
        num_ended=_STATE._replace(plus=(2 + number) * word),
        signature=_SIGNATURE,
        error=_ERROR,
    )
    memory = PushArguments.ranks.offset + _Ranks.memory.offset
    found += [Pointer(0, memory + i * word, _MEMORY[i]) for i in range(place.num_ranks)]
    return ranks, meeting, found


def _addresses(
    memory: PeerMemory,
    signature: int,
    first: torch.Tensor | None,
    ids: torch.Tensor,
    second: torch.Tensor | None,
    to_row: torch.Tensor | None,
) -> tuple[int, ...]:
    given = [0 if x is None else x.data_ptr() for x in (first, ids, second, to_row)]
    own = signature, memory.state.data_ptr(), memory.error.data_ptr()
    return (*given, *own, *memory.addresses)


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
        ranks, meeting, found = _common(place, PUSH_ARRIVALS, 0)
        arguments = PushArguments(
            ranks=ranks,
            meeting=meeting,
            choices=_Choices(
                num_tokens=num_tokens,
                max_tokens=sizes.max_tokens,
                top_k=top_k,
                num_experts=sizes.num_experts,
                id_bytes=ids.element_size(),
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
        found += pointers(
            _Choices,
            at=PushArguments.choices.offset,
            ids=_IDS,
            scores=None if scores is None else _SECOND,
        )
        found += pointers(
            _Tokens,
            at=PushArguments.tokens.offset,
            x=_FIRST,
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

    addresses = _addresses(memory, signature, x, ids, scores, token_to_row)
    prepared(key, prepare).on(x.get_device(), addresses)


def give_back(
    memory: PeerMemory,
    place: Place,
    sizes: Sizes,
    given_back: GivenBack,
    signature: int,
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
        (place, sizes, given_back, memory.receiving),
    )

    def prepare() -> Launch:
        at, row_bytes = memory.returning_at, sizes.hidden_size * 2
        num_slots = place.num_ranks * sizes.max_tokens
        ranks, meeting, found = _common(place, GIVE_BACK_ARRIVALS, 1)
        arguments = GiveBackArguments(
            ranks=ranks,
            meeting=meeting,
            choices=_Choices(
                num_tokens=num_slots,
                max_tokens=sizes.max_tokens,
                top_k=sizes.top_k,
                num_experts=sizes.num_experts,
                id_bytes=4,
            ),
            results=_Results(
                row_bytes=row_bytes,
                rows=at + given_back.rows,
                of_scores=at + given_back.of_scores,
            ),
        )
        found += pointers(_Choices, at=GiveBackArguments.choices.offset, ids=_IDS)
        found += pointers(
            _Results,
            at=GiveBackArguments.results.offset,
            y=None if y is None else _FIRST,
            of_choices=None if of_choices is None else _SECOND,
        )
        unit = _unit_of(0 if y is None else y.data_ptr(), row_bytes)
        pieces = 0 if y is None else ceil_div(row_bytes, unit * _AT_ONCE * _WARP)
        kernel = give_back_kernel_of(unit)
        return _launch(kernel, arguments, found, ids.get_device(), num_slots * pieces * _WARP)

    addresses = _addresses(memory, signature, y, ids, of_choices, None)
    prepared(key, prepare).on(ids.get_device(), addresses)


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
