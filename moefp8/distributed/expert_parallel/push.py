"""Push tokens, or their codes, to the ranks that hold their experts: describe and launch `push.cu`.

T tokens of a rank, M of any at most, k choices each, P ranks, E experts, H hidden.
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from ...kernels.common.blocks import BLOCK, MIN_AMAX, TMA_BYTES, ceil_div, num_blocks
from ...kernels.common.checks import INPUTS
from ...kernels.common.prepared import layout_of, prepared
from ...kernels.jit import Kernel, Launch
from ...kernels.program import Place, Record, Target, Tensor, Word, layouts, prepare_launch
from ...kernels.targets import target_of
from .peer_memory import PeerMemory, Received
from .ranks import ALONE, UNITS, WARP, Member, Sizes, unit_of

_SOURCE = Path(__file__).with_name("push.cu")
_THREADS = 256  # of a CTA, of which as many as fit run on an SM
_CTAS_PER_SM = 8
_LANES = 8  # threads that quantize a block, 16 values each
_AT_ONCE = 4  # units of a row that a thread has in flight
assert BLOCK == _LANES * 16


def push_codes_kernel_of(dtype: torch.dtype, *, vectorized: bool) -> Kernel:
    return Kernel(_SOURCE, f"push_codes_kernel<{INPUTS[dtype]}, {str(vectorized).lower()}>")


def push_rows_kernel_of(unit_bytes: int) -> Kernel:
    return Kernel(_SOURCE, f"push_rows_kernel<{UNITS[unit_bytes]}>")


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
        turn: the turn that begins: a signature below 2^32 - 1, which must be equal on all ranks,
            plus 2^32 times a number that differs for this rank's turns on several streams.
        x: [T, H] with contiguous rows; or [T, 0], for a turn that only brings results back.
        ids: int32 or int64 [T, k], contiguous.
        scores: fp32 [T, k], contiguous, sent with the ids to all slots of all ranks; or None.
        min_amax: of `quantize_1x128`: tokens are sent as codes; None: tokens are sent unchanged.
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
            receiving_at=memory.receiving_at,
            returning_at=memory.returning_at,
            **layouts(x=x, ids=ids, scores=scores),
            state=Place("state"),
            turn=Word("turn"),
            min_amax=min_amax,
        )
        return prepare_launch(r, device_index)

    scores_address = 0 if scores is None else scores.data_ptr()
    tokens = x.data_ptr(), ids.data_ptr(), scores_address
    prepared(key, prepare).on(device_index, (*tokens, memory.state.data_ptr(), turn))


def describe_push(
    r: Record,
    member: Member,
    sizes: Sizes,
    received: Received,
    *,
    receiving_at: int,
    returning_at: int,
    x: Tensor,
    ids: Tensor,
    scores: Tensor | None,
    state: Place,
    turn: Word,
    min_amax: float | None,
) -> None:
    """Record one step that pushes tokens; tensors as in `push`.

    receiving_at, returning_at: bytes from the beginning of a rank's memory to its two areas.
    state: that of the group's `PeerMemory`.
    """
    (num_tokens, h), size = x.shape, x.element_size()
    given_back = sizes.given_back(member.num_ranks)
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
        unit = unit_of(x.alignment, pitch, h * size)
        kernel = push_rows_kernel_of(unit)
        num_threads = num_tokens * ceil_div(h * size, unit * _AT_ONCE * WARP) * WARP
    most = r.target.num_sms * _CTAS_PER_SM
    grid = max(1, min(ceil_div(num_threads, _THREADS), most))
    r.step(kernel, grid, _THREADS, arguments, early=(state,), programmatic=True)


def push_kernels(
    target: Target, dtype: torch.dtype, hidden_size: int, *, are_codes: bool
) -> Iterator[Kernel]:
    """The kernels that push tokens of H columns at any address; are_codes: as FP8 codes."""
    sizes = Sizes(1, 1, 1, hidden_size)
    received = Received.of(1, hidden_size * dtype.itemsize, hidden_size, 1)
    for alignment in (TMA_BYTES, dtype.itemsize):
        r = Record(target, ("x", "ids", "state", "turn"))
        describe_push(
            r,
            ALONE,
            sizes,
            received,
            receiving_at=0,
            returning_at=received.size,
            x=Tensor.contiguous("x", 1, hidden_size, dtype=dtype, alignment=alignment),
            ids=Tensor.contiguous("ids", 1, 1, dtype=torch.int64),
            scores=None,
            state=Place("state"),
            turn=Word("turn"),
            min_amax=MIN_AMAX if are_codes else None,
        )
        yield from r.kernels
