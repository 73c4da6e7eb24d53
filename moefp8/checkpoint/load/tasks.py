"""Cut copies into tasks, and read them; a task is one read of one thread, and its target.

A sharded model takes boxes of stored tensors. Rows are one run of bytes; columns are short runs
with gaps, and small gaps are read too (docs/design/checkpoint.md has the times).

Bytes reach a GPU by copies on a stream of the thread's own, from two pinned buffers in turns: the
next is read while the last is copied. Values with gaps or another dtype are read into plain memory
first, where the CPU packs, casts or dequantizes them.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ..files.header import FP8, TORCH_DTYPES, Entry
from ..files.reading import read_into
from ..model.memory import num_spanned_bytes
from .assign import Copy

DIRECT_BYTES = 4 << 20  # at most, in a task that needs nothing but its target
STAGED_BYTES = 512 << 10  # at most, in others; they stay in a cache until they are copied
_GAP_BYTES = 4096
_NUM_BUFFERS = 2


@dataclass(frozen=True, eq=False)
class Task:
    """Fill `target` with values of an entry.

    source: a view of a meta tensor like the whole entry; its offset and strides locate the values.
    scales: the factors of FP8 values; scale_at: for each axis of scales, a tensor like target of
    indices into it.
    """

    entry: Entry
    source: torch.Tensor
    target: torch.Tensor
    scales: torch.Tensor | None = None
    scale_at: tuple[torch.Tensor, ...] = ()

    @property
    def begin(self) -> int:
        """The first byte to read; from there on, `num_bytes` are read."""
        return self.entry.begin + int(self.source.storage_offset()) * self.source.itemsize

    @cached_property
    def num_bytes(self) -> int:
        return num_spanned_bytes(self.source)

    @property
    def is_plain(self) -> bool:
        """Whether the target takes the bytes as they are stored."""
        are_contiguous = self.source.is_contiguous() and self.target.is_contiguous()
        return are_contiguous and self.source.dtype == self.target.dtype

    def values_of(self, stored: torch.Tensor) -> torch.Tensor:
        """The values to write, from those read: FP8 codes become FP32, times their scales."""
        if self.scales is None:
            return stored
        *row_indices, column_indices = self.scale_at
        rows = self.scales[tuple(x.select(-1, 0) for x in row_indices)]
        columns = column_indices[(0,) * (column_indices.ndim - 1)]
        return stored.float().mul_(rows.index_select(-1, columns))

    def split(self, step: int, axis: int) -> "Iterator[Task]":
        """Cut the task along an axis, in steps."""
        cut = [x.split(step, axis) for x in (self.source, self.target, *self.scale_at)]
        for source, target, *scale_at in zip(*cut, strict=True):
            yield replace(self, source=source, target=target, scale_at=tuple(scale_at))


def tasks_of(copy: Copy) -> Iterator[Task]:
    """Yield the tasks of a copy; no two tasks fill the same bytes."""
    entry, owner = copy.entry, copy.slot.owner
    tensor = owner.tensor.detach()
    stored = torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype], device="meta")
    is_scaled = owner.scale is not None and entry.dtype == FP8
    scales = owner.scale.tensor if owner.scale is not None and is_scaled else None
    whole = [x[copy.slot.index] for x in _along_axes(owner.scale_indices)] if is_scaled else []
    for there, here in copy.slot.pieces:
        places = tuple(x[there] for x in whole)
        task = Task(entry, stored[there], tensor[here], scales, places)
        if task.target.numel():
            yield from _split(task, DIRECT_BYTES if task.is_plain else STAGED_BYTES)


def _along_axes(indices: list[torch.Tensor]) -> list[torch.Tensor]:
    """Expand each axis's indices to the shape of all axes, which takes no memory."""
    shape, last = [len(x) for x in indices], len(indices) - 1
    return [x.view(-1, *[1] * (last - axis)).expand(shape) for axis, x in enumerate(indices)]


def _split(task: Task, limit: int) -> Iterator[Task]:
    """Cut a task along its first axes until it reads few bytes, and small gaps."""
    source = task.source
    axis = next((axis for axis, size in enumerate(source.shape) if size > 1), None)
    if axis is None or (source.nbytes <= limit and source.is_contiguous()):
        yield task
        return
    pitch = source.stride(axis) * source.itemsize
    gap = pitch - num_spanned_bytes(source.select(axis, 0))
    step = 1 if gap >= _GAP_BYTES else max(limit // pitch, 1)
    if step >= source.shape[axis]:  # gaps along later axes are smaller
        yield task
        return
    for part in task.split(step, axis):
        yield from _split(part, limit)


class CudaQueue:
    """Copies to a GPU while the caller goes on. device: it has an index."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """Return pinned uint8 [num_bytes] that copies may read from."""
        with torch.cuda.stream(self._stream):  # else device 0 would get a context
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        """Begin a copy and return a function that waits until it is over."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event(blocking=True)
            event.record()
        return event.synchronize

    def finish(self) -> None:
        """Wait for all copies."""
        self._stream.synchronize()


def _cuda_queue(device: torch.device) -> CudaQueue | None:
    return CudaQueue(device) if device.type == "cuda" else None


class Staging(ExitStack):
    """The buffers and queues of one thread that reads tasks. At its end all copies are over.

    new_queue: makes the queue of a device; None if the CPU itself writes there.
    """

    def __init__(self, new_queue: Callable[[torch.device], CudaQueue | None] = _cuda_queue) -> None:
        super().__init__()
        self._new_queue = new_queue
        self._queues: dict[torch.device, CudaQueue | None] = {}
        self._plain = torch.empty(0, dtype=torch.uint8)
        self._lent: deque[tuple[torch.Tensor, Callable[[], None]]] = deque()  # (buffer, its wait)

    def run(self, task: Task, file: int) -> None:
        """Read a task; its target is filled when the context ends. Raises OSError, EOFError."""
        device = task.target.device
        if device not in self._queues:
            self._queues[device] = new = self._new_queue(device)
            if new is not None:
                self.callback(new.finish)
        queue = self._queues[device]
        if queue is not None:
            self._send(task, file, queue)
        elif task.is_plain and device.type == "cpu":
            read_into(file, task.begin, task.target)
        else:
            task.target.copy_(task.values_of(self._read(task, file)))

    def _read(self, task: Task, file: int) -> torch.Tensor:
        """Return the values of a task, in plain memory that the next task overwrites."""
        if self._plain.numel() < task.num_bytes:  # a plain task has more than STAGED_BYTES
            self._plain = torch.empty(max(STAGED_BYTES, task.num_bytes), dtype=torch.uint8)
        values = self._plain[: task.num_bytes].view(task.source.dtype)
        read_into(file, task.begin, values)
        return values.as_strided(task.source.shape, task.source.stride())

    def _send(self, task: Task, file: int, queue: CudaQueue) -> None:
        """Copy through the buffer that was lent first, after the copy from it is over."""
        if len(self._lent) < _NUM_BUFFERS:
            buffer = queue.buffer(DIRECT_BYTES)
        else:
            buffer, wait = self._lent.popleft()
            wait()
        values = buffer[: task.target.nbytes].view(task.target.dtype).view(task.target.shape)
        if task.is_plain:
            read_into(file, task.begin, values)
        else:
            values.copy_(task.values_of(self._read(task, file)))
        self._lent.append((buffer, queue.copy(task.target, values)))
