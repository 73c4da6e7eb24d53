"""W^T of FP8 weights, for gradients in activations: kept, or made again each time.

FP8 WGMMA takes both operands with the contraction innermost, so dX = dY W needs the codes of W^T in
memory. With 128x128 blocks, these are the transposed codes of W, and its scales a view of W's.
"""

import weakref
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import torch

from ..kernels.common.blocks import BLOCK, round_up
from ..kernels.jit import current_driver
from ..quant.transpose import empty_transposed, transpose_codes_into
from .kept import Completion, attached, attached_or_none, may_be_same, parameter_id

_LEAST_FREE = 0.25  # of a GPU's memory, left for later allocations


class _Cache:
    """The kept W^T of all weights in a storage, attached to it."""

    def __init__(self) -> None:
        self.entries: dict[Any, _Entry] = {}
        self.had_no_room = False  # remembered, since to ask takes as long as a launch


Weights = tuple[torch.Tensor, ...]
_Layout = tuple[int, torch.Size, tuple[int, ...]]


def _layout_of(weight: torch.Tensor) -> _Layout:
    return weight.data_ptr(), weight.shape, weight.stride()


class _Entry(NamedTuple):
    """W^T, and the storages, versions and parameters from which it was made."""

    caches: tuple["weakref.ref[_Cache]", ...]  # of the storages
    versions: tuple[int, ...]
    parameters: tuple[int, ...]
    codes: torch.Tensor
    completion: Completion

    @classmethod
    def now(cls, weights: Weights, codes: torch.Tensor) -> "_Entry":
        """An entry for W^T that was just made on the current stream."""
        caches = tuple([weakref.ref(attached(x, _Cache)) for x in weights])
        return cls(caches, *_state_of(weights), codes, Completion.now(codes.device))

    @property
    def is_freed(self) -> bool:
        """Whether the storage of a weight was freed."""
        return any(cache() is None for cache in self.caches)

    def is_current(self, versions: tuple[int, ...], parameters: tuple[int, ...]) -> bool:
        """Whether the weights in these storages are unchanged, as far as is known."""
        are_same = all(map(may_be_same, self.parameters, parameters))
        return self.versions == versions and are_same


def _state_of(weights: Weights) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple([x._version for x in weights]), tuple(map(parameter_id, weights))


def transposed(weight: torch.Tensor, keep_transposed: bool | None, parts: int = 1) -> torch.Tensor:
    """e4m3 [..., N, K] -> [..., K, N], as `transpose_codes` with `parts` does.

    keep_transposed: True keeps W^T on a GPU until the weight is freed: 1 more byte for each weight,
        and no kernel in later calls. False makes it each time; a W^T that is kept already stays,
        since a CUDA graph may read it. None keeps it if a quarter of the GPU's memory is free
        when it is first made.

    If the weight was changed in place, other than through `.data`, W^T is made again in the same
    memory, which CUDA graphs may read. During a capture of a graph, no new W^T is kept. W^T is
    freed with the memory of the weight, also when FSDP frees gathered weights.
    """
    return _reuse_or_make((weight,), parts, keep_transposed)


def transposed_side_by_side(
    gate: torch.Tensor, up: torch.Tensor, keep_transposed: bool | None
) -> torch.Tensor:
    """`transposed` of gate [I, H] and up [I, H]: [H, 2 I], both at multiples of 128."""
    return _reuse_or_make((gate, up), 1, keep_transposed)


def _empty(weights: Weights, parts: int) -> torch.Tensor:
    """Memory for W^T of one weight in parts, or of several weights side by side."""
    *batch, n, k = weights[0].shape
    num_parts = parts * len(weights)
    columns = n if num_parts == 1 else num_parts * round_up(n // parts, BLOCK)
    return empty_transposed(weights[0], (*batch, k, columns))


def _fill(weights: Weights, parts: int, codes: torch.Tensor) -> None:
    """Write W^T to `codes`, on the current stream."""
    rows = whole_rows(codes)
    wide = rows.shape[-1] // len(weights)
    for i, weight in enumerate(weights):
        transpose_codes_into(weight, parts, rows[..., i * wide : (i + 1) * wide])


def whole_rows(codes: torch.Tensor) -> torch.Tensor:
    """W^T with the padding of its rows, which is written as zeros."""
    if not codes.numel():
        return codes
    return codes.as_strided((*codes.shape[:-1], codes.stride(-2)), codes.stride())


def _make(weights: Weights, parts: int) -> torch.Tensor:
    codes = _empty(weights, parts)
    _fill(weights, parts, codes)
    return codes


def _find(weights: Weights, parts: int) -> _Entry | None:
    """The entry of weights at these addresses, current or not."""
    caches = tuple([attached(x, _Cache) for x in weights])
    entry = caches[0].entries.get((tuple(map(_layout_of, weights)), parts))
    if entry is not None and tuple([cache() for cache in entry.caches]) != caches:
        return None  # another weight has this address now
    return entry


def _reuse_or_make(weights: Weights, parts: int, keep_transposed: bool | None) -> torch.Tensor:
    first = weights[0]
    if keep_transposed is False or not first.is_cuda or any(x.is_inference() for x in weights):
        return _make(weights, parts)
    entry, is_capturing = _find(weights, parts), current_driver().is_capturing()
    if entry is not None and entry.is_current(*_state_of(weights)):
        if not is_capturing:
            entry.completion.wait([entry.codes])
        return entry.codes
    if is_capturing:
        return _make(weights, parts)
    cache = attached(first, _Cache)
    for key in [key for key, x in list(cache.entries.items()) if x.is_freed]:
        cache.entries.pop(key, None)
    if entry is None and not (keep_transposed or _has_room(weights, cache)):
        return _make(weights, parts)
    with torch.inference_mode(False):  # it outlives the mode in which it is made
        codes = _empty(weights, parts) if entry is None else entry.codes
    _fill(weights, parts, codes)
    cache.entries[tuple(map(_layout_of, weights)), parts] = _Entry.now(weights, codes)
    return codes


def kept_transposed(weight: torch.Tensor, parts: int = 1) -> torch.Tensor | None:
    """The kept W^T of a weight as it is now, whole rows; None if there is none.

    For callers that write both, and then pass the weight to `refresh_transposed` as `written`.
    """
    if weight.is_inference() or attached_or_none(weight, _Cache) is None:
        return None
    entry = _find((weight,), parts)
    if entry is None or not entry.is_current(*_state_of((weight,))):
        return None
    entry.completion.wait([entry.codes])
    return whole_rows(entry.codes)


def refresh_transposed(
    weights: Iterable[torch.Tensor], written: Collection[torch.Tensor] = ()
) -> None:
    """Make kept W^T again, in the same memory, if its weights have changed.

    So the next replay of a CUDA graph reads W^T of the current weights. It is made on the current
    stream. No weight gets a W^T that had none.

    written: weights whose W^T the caller has written already, to the memory of `kept_transposed`.
    """
    by_layout = {_layout_of(x): x for x in weights if not x.is_inference()}
    fresh = {id(x) for x in written}
    for weight in by_layout.values():
        cache = attached_or_none(weight, _Cache)
        for key in [] if cache is None else list(cache.entries):
            layouts, parts = key
            sources = tuple([by_layout[x] for x in layouts if x in by_layout])
            if cache is None or len(sources) < len(layouts):
                continue
            entry = _find(sources, parts)
            if entry is None or entry.is_current(*_state_of(sources)):
                continue
            entry.completion.wait([entry.codes])
            if len(sources) > 1 or id(sources[0]) not in fresh:
                _fill(sources, parts, entry.codes)
            cache.entries[key] = _Entry.now(sources, entry.codes)


def _has_room(weights: Weights, cache: _Cache) -> bool:
    if cache.had_no_room:
        return False
    device = weights[0].device
    free, total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    more = sum(x.numel() for x in weights)
    cache.had_no_room = free + cached - more < _LEAST_FREE * total
    return not cache.had_no_room
