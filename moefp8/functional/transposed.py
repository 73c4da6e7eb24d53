"""W^T of FP8 weights, which gradients in activations are made with: kept, or made anew each time.

FP8 WGMMA wants both operands with the contraction innermost, so dX = dY W needs the codes of W^T in
memory. With 128x128 blocks they are those of W, and the scales of W^T are a view of those of W.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from ..kernels.common.blocks import BLOCK, round_up
from ..kernels.jit import current_driver
from ..quant.transpose import empty_transposed, transpose_codes, transpose_codes_into
from .kept import Made, belonging, identity, may_be_same

_LEAST_FREE = 0.25  # of a GPU's memory, for all that is allocated after W^T


class _Memory:
    """What belongs to the memory of a storage, and goes with it."""

    def __init__(self) -> None:
        self.kept: dict[Any, _Kept] = {}
        self.had_no_room = False  # to ask again in each backward would take as long as a launch


class _Kept(NamedTuple):
    """W^T as it was made: of which memory, versions and parameters, and when."""

    memories: tuple["weakref.ref[_Memory]", ...]
    versions: tuple[int, ...]
    identities: tuple[int, ...]
    codes: torch.Tensor
    made: Made

    @property
    def is_of_freed(self) -> bool:
        return any(memory() is None for memory in self.memories)

    def is_of(self, versions: tuple[int, ...], identities: tuple[int, ...]) -> bool:
        """Whether nothing tells that the weights, in this memory, are others since."""
        are_same = all(map(may_be_same, self.identities, identities))
        return self.versions == versions and are_same


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
    return _kept_or_made((weight,), parts, keeps, partial(transpose_codes, weight, parts))


def transposed_side_by_side(
    gate: torch.Tensor, up: torch.Tensor, keeps: bool | None
) -> torch.Tensor:
    """The same of gate [I, H] and up [I, H]: [H, 2 I], where both begin at multiples of 128."""

    def make() -> torch.Tensor:
        size, h = gate.shape
        wide = round_up(size, BLOCK)
        both = empty_transposed(gate, (h, 2 * wide))
        for i, weight in enumerate((gate, up)):
            transpose_codes_into(weight, 1, both[:, i * wide : (i + 1) * wide])
        return both

    return _kept_or_made((gate, up), 1, keeps, make)


def _kept_or_made(
    weights: tuple[torch.Tensor, ...],
    parts: int,
    keeps: bool | None,
    make: Callable[[], torch.Tensor],
) -> torch.Tensor:
    first = weights[0]
    if keeps is False or not first.is_cuda or any(x.is_inference() for x in weights):
        return make()
    memories = tuple([belonging(x, _Memory) for x in weights])
    kept = memories[0].kept
    layouts = tuple([(x.data_ptr(), x.shape, x.stride()) for x in weights])
    versions, identities = tuple([x._version for x in weights]), tuple(map(identity, weights))
    is_capturing = current_driver().is_capturing()
    found = kept.get((layouts, parts))
    if found is not None and tuple([memory() for memory in found.memories]) != memories:
        found = None  # another weight has this address now
    if found is not None and found.is_of(versions, identities):
        if not is_capturing:
            found.made.wait([found.codes])
        return found.codes
    if is_capturing:
        return make()
    for key in [key for key, x in list(kept.items()) if x.is_of_freed]:
        kept.pop(key, None)
    if found is None and not (keeps or _has_room(weights, memories[0])):
        return make()
    with torch.inference_mode(False):  # it outlives the mode in which it is made
        codes = make() if found is None else found.codes.copy_(make())
    of = tuple(map(weakref.ref, memories))
    kept[layouts, parts] = _Kept(of, versions, identities, codes, Made.now(first.device))
    return codes


def _has_room(weights: tuple[torch.Tensor, ...], memory: _Memory) -> bool:
    if memory.had_no_room:
        return False
    device = weights[0].device
    free, total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    more = sum(x.numel() for x in weights)
    memory.had_no_room = free + cached - more < _LEAST_FREE * total
    return not memory.had_no_room
