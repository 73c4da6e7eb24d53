"""W^T of FP8 weights, which gradients in activations are made with: kept, or made anew each time.

FP8 WGMMA wants both operands with the contraction innermost, so dX = dY W needs the codes of W^T in
memory. With 128x128 blocks they are those of W, and the scales of W^T are a view of those of W.
"""

import weakref
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import torch

from ..kernels.common.blocks import BLOCK, round_up
from ..kernels.jit import current_driver
from ..quant.transpose import empty_transposed, transpose_codes_into
from .kept import Made, belonging, belonging_if_any, identity, may_be_same

_LEAST_FREE = 0.25  # of a GPU's memory, for all that is allocated after W^T


class _Memory:
    """What belongs to the memory of a storage, and goes with it."""

    def __init__(self) -> None:
        self.kept: dict[Any, _Kept] = {}
        self.had_no_room = False  # to ask again in each backward would take as long as a launch


Weights = tuple[torch.Tensor, ...]
_Layout = tuple[int, torch.Size, tuple[int, ...]]


def _layout_of(weight: torch.Tensor) -> _Layout:
    return weight.data_ptr(), weight.shape, weight.stride()


class _Kept(NamedTuple):
    """W^T as it was made: of which memory, versions and parameters, and when."""

    memories: tuple["weakref.ref[_Memory]", ...]
    versions: tuple[int, ...]
    identities: tuple[int, ...]
    codes: torch.Tensor
    made: Made

    @classmethod
    def now(cls, weights: Weights, codes: torch.Tensor) -> "_Kept":
        """W^T as it was just made, on the current stream."""
        memories = tuple([weakref.ref(belonging(x, _Memory)) for x in weights])
        return cls(memories, *_state_of(weights), codes, Made.now(codes.device))

    @property
    def is_of_freed(self) -> bool:
        return any(memory() is None for memory in self.memories)

    def is_of(self, versions: tuple[int, ...], identities: tuple[int, ...]) -> bool:
        """Whether nothing tells that the weights, in this memory, are others since."""
        are_same = all(map(may_be_same, self.identities, identities))
        return self.versions == versions and are_same


def _state_of(weights: Weights) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple([x._version for x in weights]), tuple(map(identity, weights))


def transposed(weight: torch.Tensor, keeps: bool | None, parts: int = 1) -> torch.Tensor:
    """e4m3 [..., N, K] -> [..., K, N], as `transpose_codes` with `parts` does.

    keeps: True keeps W^T on a GPU until the weight is freed: 1 more byte for each weight, and no
        kernel in later calls. False makes it anew each time; what is kept already stays, since a
        CUDA graph may read it. None keeps it if a quarter of the GPU's memory is still free when
        it is first made.

    A change of the weight in place is seen, unless it was made through `.data`; W^T is then made
    anew in the same memory, which CUDA graphs may know. While one is captured, nothing new is kept.
    W^T is freed with the memory of the weight, also where FSDP frees what it gathered.
    """
    return _kept_or_made((weight,), parts, keeps)


def transposed_side_by_side(
    gate: torch.Tensor, up: torch.Tensor, keeps: bool | None
) -> torch.Tensor:
    """The same of gate [I, H] and up [I, H]: [H, 2 I], where both begin at multiples of 128."""
    return _kept_or_made((gate, up), 1, keeps)


def _empty(weights: Weights, parts: int) -> torch.Tensor:
    """Memory for W^T of one weight in parts, or of several side by side."""
    *batch, n, k = weights[0].shape
    num_parts = parts * len(weights)
    columns = n if num_parts == 1 else num_parts * round_up(n // parts, BLOCK)
    return empty_transposed(weights[0], (*batch, k, columns))


def _fill(weights: Weights, parts: int, codes: torch.Tensor) -> None:
    """Make W^T in this memory, on the current stream."""
    rows = whole_rows(codes)
    wide = rows.shape[-1] // len(weights)
    for i, weight in enumerate(weights):
        transpose_codes_into(weight, parts, rows[..., i * wide : (i + 1) * wide])


def whole_rows(codes: torch.Tensor) -> torch.Tensor:
    """W^T with what lies between its rows, which become zeros."""
    if not codes.numel():
        return codes
    return codes.as_strided((*codes.shape[:-1], codes.stride(-2)), codes.stride())


def _made(weights: Weights, parts: int) -> torch.Tensor:
    codes = _empty(weights, parts)
    _fill(weights, parts, codes)
    return codes


def _found(weights: Weights, parts: int) -> _Kept | None:
    """What is kept of weights in this memory."""
    memories = tuple([belonging(x, _Memory) for x in weights])
    found = memories[0].kept.get((tuple(map(_layout_of, weights)), parts))
    if found is not None and tuple([memory() for memory in found.memories]) != memories:
        return None  # another weight has this address now
    return found


def _kept_or_made(weights: Weights, parts: int, keeps: bool | None) -> torch.Tensor:
    first = weights[0]
    if keeps is False or not first.is_cuda or any(x.is_inference() for x in weights):
        return _made(weights, parts)
    found, is_capturing = _found(weights, parts), current_driver().is_capturing()
    if found is not None and found.is_of(*_state_of(weights)):
        if not is_capturing:
            found.made.wait([found.codes])
        return found.codes
    if is_capturing:
        return _made(weights, parts)
    memory = belonging(first, _Memory)
    for key in [key for key, x in list(memory.kept.items()) if x.is_of_freed]:
        memory.kept.pop(key, None)
    if found is None and not (keeps or _has_room(weights, memory)):
        return _made(weights, parts)
    with torch.inference_mode(False):  # it outlives the mode in which it is made
        codes = _empty(weights, parts) if found is None else found.codes
    _fill(weights, parts, codes)
    memory.kept[tuple(map(_layout_of, weights)), parts] = _Kept.now(weights, codes)
    return codes


def kept_transposed(weight: torch.Tensor, parts: int = 1) -> torch.Tensor | None:
    """W^T that is kept of a weight as it is now, whole rows; None where nothing is kept.

    For what writes both: `refresh_transposed` has to be told.
    """
    if weight.is_inference() or belonging_if_any(weight, _Memory) is None:
        return None
    found = _found((weight,), parts)
    if found is None or not found.is_of(*_state_of((weight,))):
        return None
    found.made.wait([found.codes])
    return whole_rows(found.codes)


def refresh_transposed(
    weights: Iterable[torch.Tensor], written: Collection[torch.Tensor] = ()
) -> None:
    """Make W^T that is kept of weights again, in its memory, where the weights have changed.

    So the next replay of a CUDA graph reads W^T of what the weights are now. It is made on the
    current stream, and nothing is kept that was not before.

    written: those whose W^T holds the change already, since `kept_transposed` told where to write.
    """
    by_layout = {_layout_of(x): x for x in weights if not x.is_inference()}
    fresh = {id(x) for x in written}
    for weight in by_layout.values():
        memory = belonging_if_any(weight, _Memory)
        for key in [] if memory is None else list(memory.kept):
            layouts, parts = key
            sources = tuple([by_layout[x] for x in layouts if x in by_layout])
            if memory is None or len(sources) < len(layouts):
                continue
            found = _found(sources, parts)
            if found is None or found.is_of(*_state_of(sources)):
                continue
            found.made.wait([found.codes])
            if len(sources) > 1 or id(sources[0]) not in fresh:
                _fill(sources, parts, found.codes)
            memory.kept[key] = _Kept.now(sources, found.codes)


def _has_room(weights: Weights, memory: _Memory) -> bool:
    if memory.had_no_room:
        return False
    device = weights[0].device
    free, total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    more = sum(x.numel() for x in weights)
    memory.had_no_room = free + cached - more < _LEAST_FREE * total
    return not memory.had_no_room
