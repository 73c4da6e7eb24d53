"""Cut copies into tasks, and read them; a task is what one thread reads at once, and where it goes.

A sharded model takes boxes of stored tensors. Rows are one run of bytes; columns are short runs
with gaps, which are read too where they are small (docs/design/checkpoint.md has the times).

Bytes reach a GPU by copies on a stream of the thread's own, from two pinned buffers in turns: the
next is read while the last is copied. What has gaps or another dtype is read into plain memory
first, and packed or cast by the CPU.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property

import torch

from ..files.header import TORCH_DTYPES, Entry
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

    source: a meta tensor, part of one like the whole entry, that tells where the values lie.
    """

    entry: Entry
    source: torch.Tensor
    target: torch.Tensor

    @property
    def begin(self) -> int:
        """The first byte to read; from there on, `num_bytes` are read."""
        return self.entry.begin + int(self.source.storage_offset()) * self.source.itemsize

    @cached_property
    def num_bytes(self) -> int:
        return num_spanned_bytes(self.source)

    @property
    def is_plain(self) -> bool:
        """Whether the target takes the bytes as they come."""
        are_contiguous = self.source.is_contiguous() and self.target.is_contiguous()
        return are_contiguous and self.source.dtype == self.target.dtype


def tasks_of(copy: Copy) -> Iterator[Task]:
    """Yield all that is to be read for a copy; no two tasks fill the same bytes."""
    entry, tensor = copy.entry, copy.slot.owner.tensor.detach()
    stored = torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype], device="meta")
    for there, here in copy.slot.pieces:
        task = Task(entry, stored[there], tensor[here])
        if task.target.numel():
            yield from _split(task, DIRECT_BYTES if task.is_plain else STAGED_BYTES)


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
    if step >= source.shape[axis]:  # gaps along the axes behind are smaller
        yield task
        return
    for pair in zip(source.split(step, axis), task.target.split(step, axis), strict=True):
        yield from _split(Task(task.entry, *pair), limit)


class CudaQueue:
    """It copies to a GPU, whose device has an index, while the caller goes on."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """Return pinned uint8 [num_bytes] that copies may read from."""
        with torch.cuda.stream(self._stream):  # else device 0 would be given a context
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
    """What one thread reads tasks with. When it ends, also by an error, all copies are over.

    new_queue: it makes the queue of a device, or None where the CPU writes there itself.
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
            task.target.copy_(self._read(task, file))

    def _read(self, task: Task, file: int) -> torch.Tensor:
        """Return the values of a task, in plain memory that the next one takes over."""
        if self._plain.numel() < task.num_bytes:  # a plain task has more than STAGED_BYTES
            self._plain = torch.empty(max(STAGED_BYTES, task.num_bytes), dtype=torch.uint8)
        values = self._plain[: task.num_bytes].view(task.source.dtype)
        read_into(file, task.begin, values)
        return values.as_strided(task.source.shape, task.source.stride())

    def _send(self, task: Task, file: int, queue: CudaQueue) -> None:
        """Copy through the buffer that was lent longest ago, once the copy from it is over."""
        if len(self._lent) < _NUM_BUFFERS:
            buffer = queue.buffer(DIRECT_BYTES)
        else:
            buffer, wait = self._lent.popleft()
            wait()
        values = buffer[: task.target.nbytes].view(task.target.dtype).view(task.target.shape)
        if task.is_plain:
            read_into(file, task.begin, values)
        else:
            values.copy_(self._read(task, file))
        self._lent.append((buffer, queue.copy(task.target, values)))
