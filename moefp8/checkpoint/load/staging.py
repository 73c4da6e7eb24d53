"""Each thread that loads has memory for tensors that a file cannot be read straight into.

Bytes reach a GPU through a pinned buffer, by copies on a stream of the thread's own. Two buffers
take turns, so that the next is read while the last is copied. What has gaps or another dtype is
read into plain memory first, and packed or cast by the CPU.
"""

from collections import deque
from collections.abc import Callable
from contextlib import ExitStack

import torch

from ..files.reading import read_into
from .tasks import DIRECT_BYTES, STAGED_BYTES, Task

_NUM_BUFFERS = 2


class CudaQueue:
    """It copies to a GPU while the caller goes on, on a stream of its own.

    device: it must have an index.
    """

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
    """A context manager: when it ends, also by an error, all copies are over.

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
        read_into(file, task.begin, self._plain[: task.num_bytes])
        return task.view(self._plain)

    def _send(self, task: Task, file: int, queue: CudaQueue) -> None:
        """Copy through the buffer that was lent longest ago, once the copy from it is over."""
        if len(self._lent) < _NUM_BUFFERS:
            buffer = queue.buffer(DIRECT_BYTES)
        else:
            buffer, wait = self._lent.popleft()
            wait()
        target = task.target
        values = buffer[: target.nbytes].view(target.dtype).view(target.shape)
        if task.is_plain:
            read_into(file, task.begin, values)
        else:
            values.copy_(self._read(task, file))
        self._lent.append((buffer, queue.copy(target, values)))
