"""Tasks and staging: any box of a tensor arrives, in any dtype, whenever copies are done."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moefp8.checkpoint import CheckpointError, load_checkpoint
from moefp8.checkpoint.files.header import TORCH_DTYPES, Entry
from moefp8.checkpoint.load import load, tasks
from moefp8.checkpoint.load.assign import Copy
from moefp8.checkpoint.load.tasks import Staging, Task, tasks_of
from moefp8.checkpoint.model.slots import ModelTensor, Role, Slot
from moefp8.layers.parts import Part, boxes, local_shape
from tests.checkpoint.cases import Tiny, assert_loads, bytes_of, deepseek_tensors, write

DIRECT, STAGED, GAP = 256, 32, 8
LIMITS = tasks.DIRECT_BYTES, tasks.STAGED_BYTES


class LateQueue:
    """A device that copies only when somebody waits for it; plain memory is its pinned memory."""

    def __init__(self) -> None:
        self.buffers: list[torch.Tensor] = []
        self.pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.most_pending = 0
        self.used: list[int] = []

    def buffer(self, num_bytes: int) -> torch.Tensor:
        self.buffers.append(torch.full((num_bytes,), 0xA5, dtype=torch.uint8))
        return self.buffers[-1]

    def copy(self, target, source):
        assert source.dtype == target.dtype
        assert source.is_contiguous()
        offsets = [source.data_ptr() - buffer.data_ptr() for buffer in self.buffers]
        (own,) = [i for i, x in enumerate(offsets) if 0 <= x < self.buffers[i].numel()]
        self.used.append(own)
        self.pending.append((target, source))
        self.most_pending = max(self.most_pending, len(self.pending))
        last = self.pending[-1]
        return lambda: self._until(last)

    def _until(self, last) -> None:
        while any(pair is last for pair in self.pending):
            target, source = self.pending.pop(0)
            target.copy_(source)

    def finish(self) -> None:
        if self.pending:
            self._until(self.pending[-1])


@pytest.fixture(scope="module", autouse=True)
def _small():
    """Limits at which a few hundred bytes are many tasks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "DIRECT_BYTES", DIRECT)
        patch.setattr(tasks, "STAGED_BYTES", STAGED)
        patch.setattr(tasks, "_GAP_BYTES", GAP)
        yield


def write_entry(path: Path, dtype: str, shape: tuple[int, ...]) -> tuple[Entry, torch.Tensor]:
    """A tensor of any bytes, somewhere in a file."""
    num_bytes = torch.empty(shape, dtype=TORCH_DTYPES[dtype], device="meta").nbytes
    content = torch.randint(0, 256, (64 + num_bytes,), dtype=torch.uint8)
    path.write_bytes(bytes(content.tolist()))
    entry = Entry("x", dtype, shape, path, 64, 64 + num_bytes)
    return entry, content[64:].view(TORCH_DTYPES[dtype]).view(shape)


def run(tasks: list[Task], *new_queue) -> None:
    with tasks[0].entry.file.open("rb") as file, Staging(*new_queue) as stage:
        for task in tasks:
            stage.run(task, file.fileno())


def tasks_for(entry: Entry, here: torch.Tensor, held: dict[int, Part]) -> list[Task]:
    slot = Slot("x", "", ModelTensor(here, held), ("x",), Role.PLAIN, entry.shape)
    return list(tasks_of(Copy(entry, slot)))


@st.composite
def parts_of_a_shape(draw):
    """(shape of the whole, the part of each axis that is cut)."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    held = {}
    for axis in draw(st.sets(st.integers(0, len(shape) - 1))):
        halves = 2 if shape[axis] % 2 == 0 and draw(st.booleans()) else 1
        total = shape[axis] // halves
        begin = draw(st.integers(0, total - 1))
        end, padding = draw(st.integers(begin + 1, total)), draw(st.integers(0, 2))
        held[axis] = Part(begin, end, total, padding, halves)
    return shape, held


@given(
    shape_and_parts=parts_of_a_shape(),
    dtypes=st.sampled_from(
        [
            ("F8_E4M3", torch.float8_e4m3fn),
            ("F8_E8M0", torch.float32),
            ("BF16", torch.float64),
            ("F32", torch.float32),
            ("F64", torch.bfloat16),
        ]
    ),
    is_late=st.booleans(),
    is_strided=st.booleans(),
)
def test_every_box_arrives(tmp_path_factory, shape_and_parts, dtypes, is_late, is_strided):
    shape, held = shape_and_parts
    entry, stored = write_entry(tmp_path_factory.mktemp("x") / "f", dtypes[0], shape)
    size = local_shape(shape, held)
    here = torch.ones(size[::-1] if is_strided else size).to(dtypes[1])
    if is_strided:
        here = here.permute(*reversed(range(len(size))))
    wanted = here.clone()
    for box in boxes(shape, held):
        there, place = zip(*box, strict=True)
        wanted[place] = stored[there].to(dtypes[1])
    made = tasks_for(entry, here, held)
    queue = LateQueue() if is_late else None
    run(made, lambda device: queue)
    assert bytes_of(here) == bytes_of(wanted)
    check_sizes(made, wanted.itemsize)
    if is_late:
        assert not queue.pending
        assert len(queue.buffers) == min(2, len(made))
        assert queue.used == [i % 2 for i in range(len(made))]
        assert queue.most_pending == min(2, len(made))  # one is copied while the next is read


def check_sizes(made: list[Task], itemsize: int) -> None:
    """Every task fits where it goes through, and reads no long gap."""
    for task in made:
        assert task.num_bytes <= (DIRECT if task.is_plain else STAGED)
        assert task.target.numel() * itemsize <= DIRECT
        num_values = task.source.numel()
        if num_values > 1:
            wasted = task.num_bytes - num_values * task.source.itemsize
            assert wasted < GAP * (num_values - 1)


@pytest.mark.parametrize(("gap", "num_tasks"), [(56, 4), (57, 1)])
def test_long_gaps_are_left_out(tmp_path, monkeypatch, gap, num_tasks):
    """8 bytes of each row of 64 are ours."""
    monkeypatch.setattr(tasks, "_GAP_BYTES", gap)
    monkeypatch.setattr(tasks, "STAGED_BYTES", 1000)
    entry, _ = write_entry(tmp_path / "f", "F32", (4, 16))
    made = tasks_for(entry, torch.zeros(4, 2), {1: Part(3, 5, 16)})
    assert len(made) == num_tasks
    assert made[0].begin == 64 + 3 * 4


class Elsewhere:
    """Memory of a device for which there is no queue, such as an XPU."""

    device, dtype, itemsize = torch.device("xpu", 0), torch.uint8, 1

    def __init__(self, num_bytes: int) -> None:
        self.memory = torch.zeros(num_bytes, dtype=torch.uint8)
        self.shape = self.memory.shape

    def is_contiguous(self) -> bool:
        return True

    def copy_(self, source: torch.Tensor) -> None:
        self.memory.copy_(source)


def test_a_device_without_a_queue(tmp_path):
    """Plain tasks are longer than what is staged for others."""
    entry, stored = write_entry(tmp_path / "f", "U8", (DIRECT,))
    (task,) = tasks_for(entry, torch.zeros(DIRECT, dtype=torch.uint8), {})
    target = Elsewhere(DIRECT)
    run([replace(task, target=target)])
    assert torch.equal(target.memory, stored)


def test_an_error_leaves_no_copy_pending(tmp_path):
    entry, _ = write_entry(tmp_path / "f", "U8", (40,))
    here, queue = torch.zeros(40, dtype=torch.uint8), LateQueue()
    (task,) = tasks_for(entry, here, {})
    beyond = Task(replace(entry, begin=65), task.source, torch.zeros_like(here))
    with pytest.raises(EOFError):
        run([task, beyond], lambda device: queue)
    assert queue.used == [0]
    assert not queue.pending
    assert here.any()


def test_a_whole_model_arrives_late(tmp_path, monkeypatch):
    tensors, queues = deepseek_tensors(1, torch.bfloat16), []

    def new_queue(device):
        queues.append(LateQueue())
        return queues[-1]

    monkeypatch.setattr(load, "Staging", lambda: Staging(new_queue))
    assert_loads(write(tmp_path / "c", tensors), tensors)
    assert 1 <= len(queues) <= 4
    assert all(len(queue.buffers) <= 2 and not queue.pending for queue in queues)


def test_a_device_that_fails_at_the_end_is_told(tmp_path, monkeypatch):
    class Broken(LateQueue):
        def finish(self) -> None:
            raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(load, "Staging", lambda: Staging(lambda device: Broken()))
    path = write(tmp_path / "c", deepseek_tensors(1))
    with pytest.raises(CheckpointError, match=r"illegal memory access.*partly written"):
        load_checkpoint(Tiny(1), path)


def test_a_cast_of_the_largest_task_fits_in_a_buffer():
    """One byte may become 8. The limits are those outside of this file."""
    assert LIMITS[1] * 8 <= LIMITS[0]
