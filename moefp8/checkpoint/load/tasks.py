"""Cut copies into tasks; a task is what one thread reads at once, and where it goes.

A sharded model takes boxes of stored tensors. Rows are one run of bytes; columns are short runs
with gaps, which are read too where they are small: a file is kept in pages anyway, and a call for
each run takes longer (docs/design/checkpoint.md has the times).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..files.header import TORCH_DTYPES, Entry
from ..model.memory import num_spanned_bytes
from .assign import Copy

DIRECT_BYTES = 4 << 20  # the most of a task that needs nothing but its target
STAGED_BYTES = 512 << 10  # the most of others, which stay in a cache until they are copied
_GAP_BYTES = 4096


@dataclass(frozen=True, eq=False)
class Task:
    """Fill `target` from bytes [begin, begin + num_bytes) of entry's file.

    source: a meta tensor of the shape of `target` that tells how the values lie there.
    """

    entry: Entry
    begin: int
    num_bytes: int
    source: torch.Tensor
    target: torch.Tensor

    @property
    def is_plain(self) -> bool:
        """Whether the target takes the bytes as they come."""
        return _is_plain(self.source, self.target)

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the values of this task, whose bytes `memory`, uint8, begins with."""
        values = memory[: self.num_bytes].view(self.source.dtype)
        return values.as_strided(self.source.shape, self.source.stride())


def tasks_of(copy: Copy) -> Iterator[Task]:
    """Yield all that is to be read for a copy; no two tasks fill the same bytes."""
    entry, tensor = copy.entry, copy.slot.owner.tensor.detach()
    stored = torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype], device="meta")
    for there, here in copy.slot.pieces:
        source, target = stored[there], tensor[here]
        limit = DIRECT_BYTES if _is_plain(source, target) else STAGED_BYTES
        if target.numel():
            for values, place in _split(source, target, limit):
                begin = entry.begin + int(values.storage_offset()) * values.itemsize
                yield Task(entry, begin, num_spanned_bytes(values), values, place)


def _is_plain(source: torch.Tensor, target: torch.Tensor) -> bool:
    return source.dtype == target.dtype and source.is_contiguous() and target.is_contiguous()


def _split(
    source: torch.Tensor, target: torch.Tensor, limit: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Cut both along their first axes until what lies between is small: bytes, and gaps."""
    axis = next((axis for axis, size in enumerate(source.shape) if size > 1), None)
    if axis is None or (source.nbytes <= limit and source.is_contiguous()):
        yield source, target
        return
    pitch = source.stride(axis) * source.itemsize
    gap = pitch - num_spanned_bytes(source.select(axis, 0))
    step = 1 if gap >= _GAP_BYTES else max(limit // pitch, 1)
    if step >= source.shape[axis]:  # gaps along the axes behind are smaller
        yield source, target
        return
    for pair in zip(source.split(step, axis), target.split(step, axis), strict=True):
        yield from _split(*pair, limit)
