"""Fill a model from a checkpoint: check everything, then read every byte once, in threads."""

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from ...system.progress import Progress
from ..arguments import usable_device
from ..errors import CheckpointError, failing_as, raise_if_any
from ..files.cuts import are_separate
from ..files.header import Entry
from ..files.reading import Files, open_files
from ..files.source import Source, open_source
from ..files.thread_pool import run_all
from ..files.values import count_values, not_finite
from ..model.record import remember
from ..model.slots import Inventory, ModelTensor, Role
from .assign import Assignment, Copy, assign
from .tasks import DIRECT_BYTES, Staging, Task, tasks_of

_NUM_THREADS = 4
_UNCHANGED = "the model is unchanged"


@dataclass(frozen=True)
class LoadReport:
    """The result of one load. ignored: the keys of the checkpoint that were left out."""

    num_tensors: int
    num_bytes: int
    seconds: float
    ignored: tuple[str, ...]


def load_checkpoint(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    ignore: Iterable[str] = (),
    rename: Callable[[str], str] | None = None,
    device: torch.device | str | None = None,
    progress: bool | None = None,
) -> LoadReport:
    """Fill every parameter and persistent buffer of model, in place.

    1. Read the headers of all shards. 2. Match them to the model; every place must have its key,
    and every key its place, but for MTP layers and rotary tables. 3. Read the scales, 1/4096 of the
    bytes: all must be finite; and codes, where only these show how gate and up were cut into
    blocks. 4. Materialise what is on meta. 5. Read, each byte once.

    A tensor of another float dtype is cast to the model's, except that scales are upcast to FP32
    exactly, FP8 is taken as it is, and an FP32 e_score_correction_bias stays FP32. FP8 weights are
    dequantized into master weights: `data * scale_inv` in FP32, rounded to their dtype.

    Args:
        model: experts stacked or not; in FP8 where the checkpoint is, or with master weights.
        path: a directory with model.safetensors or its index, or a .safetensors file.
        ignore: patterns (fnmatch) of checkpoint keys to leave out.
        rename: checkpoint key -> model key, where a model has names of its own.
        device: where tensors on meta are made, CPU by default; others stay where they are.
        progress: show a bar on stderr; None means if it is a terminal.

    Raises:
        CheckpointError: naming keys and files; before step 4 the model is then unchanged.
        ValueError, TypeError: a device or an ignore that cannot be meant.
    """
    started = time.perf_counter()
    place = usable_device(device, "load_checkpoint")
    source = open_source(path)
    assignment = assign(source, Inventory(model), ignore, rename)
    with ExitStack() as stack:
        files = open_files(stack, assignment.entries(), source.shards)
        _check_twins(assignment.twins, files)
        check_scales(assignment, files, source)
        _materialise(assignment, place)
        num_bytes = _read(assignment.copies, files, progress)
    remember(model, source.config, assignment.names)
    seconds = time.perf_counter() - started
    return LoadReport(len(assignment.copies), num_bytes, seconds, tuple(assignment.ignored))


def _check_twins(twins: list[tuple[Entry, Entry]], files: Files) -> None:
    """Raise CheckpointError unless two entries for one tied tensor hold the same bytes."""
    for first, second in twins:
        for offset in range(0, first.num_bytes, DIRECT_BYTES):
            num_bytes = min(DIRECT_BYTES, first.num_bytes - offset)
            chunks = []
            for entry in (first, second):
                with failing_as(entry, "reading failed", _UNCHANGED):
                    chunks.append(os.pread(files[entry.file], num_bytes, entry.begin + offset))
            if chunks[0] != chunks[1] or len(chunks[0]) != num_bytes:
                raise CheckpointError(
                    f"{second}: differs from {first}, but the model ties the two; ignore one of "
                    f"them, or untie the model; {_UNCHANGED}"
                )


def check_scales(assignment: Assignment, files: Files, source: Source) -> None:
    """Raise CheckpointError unless all scales are finite and the blocks that they scale are known.

    One scale that is not finite makes a token's output NaN.
    """
    unsure = [problem for x, problem in assignment.unsure if not are_separate(x, files[x.file])]
    raise_if_any(unsure, f"checkpoint {source.path} does not fit the model; {_UNCHANGED}")
    scales = [copy.entry for copy in assignment.copies if copy.slot.role is Role.SCALE]
    num_wrong = count_values(scales, files, {"not finite": not_finite})["not finite"]
    raise_if_any(
        [
            f"{entry}: {num_wrong[entry]} of {math.prod(entry.shape)} scales are NaN or infinite; "
            "fetch the file again, or quantize the weight again"
            for entry in scales
            if entry in num_wrong
        ],
        f"checkpoint {source.path} has scales that are not finite; {_UNCHANGED}",
    )


@torch.inference_mode(False)  # parameters outlive the mode in which they are loaded
def _materialise(assignment: Assignment, device: torch.device) -> None:
    """Give memory to meta tensors, and FP32 to widened ones; to all of them or to none."""
    new: dict[ModelTensor, torch.Tensor] = {}
    for owner in [copy.slot.owner for copy in assignment.copies]:
        old, is_widened = owner.tensor, owner in assignment.widened
        if owner in new or not (old.is_meta or is_widened):
            continue
        dtype = torch.float32 if is_widened else old.dtype
        place = device if old.is_meta else old.device
        if not owner.places:  # scales of a master weight, with which the CPU dequantizes
            place = torch.device("cpu")
        with failing_as(owner.names[0], f"no memory on {place}", _UNCHANGED):
            new[owner] = torch.empty(old.shape, dtype=dtype, device=place)
    for owner, data in new.items():
        owner.replace(data)


def _read(copies: list[Copy], files: Files, progress: bool | None) -> int:
    """Fill every slot; return the bytes read. Raises CheckpointError naming key and file."""
    copies = sorted(copies, key=lambda copy: (str(copy.entry.file), copy.entry.begin))
    scales = [task for copy in copies if not copy.slot.owner.places for task in tasks_of(copy)]
    others = [task for copy in copies if copy.slot.owner.places for task in tasks_of(copy)]
    total = sum(task.num_bytes for task in (*scales, *others))
    _prepare(copies)
    try:
        with Progress("loading", total, "GiB", 2**30, progress) as bar:
            for tasks in filter(None, (scales, others)):  # others need the scales
                run_all(tasks, partial(_work, files, bar), _NUM_THREADS, "moefp8-load")
    finally:
        _tell_autograd(copies)
    return total


def _tell_autograd(copies: list[Copy]) -> None:
    """Count versions up, since autograd does not see reads from files into memory."""
    written = {copy.slot.owner: copy.slot.owner.tensor for copy in copies}
    watched = [x for x in written.values() if not x.is_inference() and not x.is_meta]
    torch.autograd.graph.increment_version(watched)


@torch.inference_mode()  # else tensors made in inference mode could not be written to
def _prepare(copies: list[Copy]) -> None:
    """Zero the places of other ranks' entries, and wait until nothing else writes to the model."""
    owners = dict.fromkeys(copy.slot.owner for copy in copies)
    for owner in owners:
        owner.clear_padding()
    for device in {owner.tensor.device for owner in owners}:
        if device.type == "cuda":  # the streams of tasks wait for no other
            torch.cuda.synchronize(device)


def _work(files: Files, bar: Progress, tasks: Iterator[Task]) -> None:
    """Run tasks in one thread."""
    outcome = "the model is now partly written: load again before using it"
    failing = partial(failing_as, failed="reading failed", outcome=outcome)
    with failing("the last copies"), Staging() as staging:
        for task in tasks:
            with failing(task.entry):
                staging.run(task, files[task.entry.file])
            bar.advance(task.num_bytes)
