"""Turn a 16-bit checkpoint of any size into one with FP8 weights, from files to files."""

import hashlib
import logging
import os
import shutil
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ...layers.conversion.choose import patterns_of
from ...system.progress import Progress
from ..arguments import usable_device
from ..errors import CheckpointError
from ..files.config import FP8_QUANTIZATION, SEPARATE, config_path, has_ambiguous_blocks
from ..files.header import stamp_of
from ..files.safe_read import check_inside
from ..files.source import Source, open_source
from ..files.target import in_shards, shard_name, target_of, write_index, write_json
from ..files.workplace import Workplace, workplace
from .moves import Move
from .report import QuantizeReport, WeightReport
from .selection import Selection, select
from .shard_file import OUTCOME
from .stream import write_shard

_LOGGER = logging.getLogger("moefp8")

# Weights in other formats and their indices would contradict those that are written.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ckpt", ".h5", ".msgpack", ".onnx")
_BESIDE = (".json", ".jinja", ".model", ".txt", ".py")
_OTHER_FOLDERS = {"original", "__pycache__"}

Shards = dict[str, list[Move]]  # name of a file -> the moves that make it


def quantize_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    skip: str | Iterable[str] | None = (),
    device: torch.device | str | None = None,
    max_shard_bytes: int = 5_000_000_000,
    progress: bool | None = None,
) -> QuantizeReport:
    """Quantize the linears and experts of a checkpoint that `convert` would swap in its model.

    1. Select what `convert` would swap in the model that transformers builds of config.json, if
    loaders find the result; if transformers is missing or does not know the family, every 2-D
    weight of a decoder layer, but for routers, gates, norms and embeddings. A log ("moefp8", INFO)
    says what becomes FP8, what stays, and why; if experts stay, a warning says so. 2. Write one
    shard after the other, in bands of rows: memory does not grow with either, but for a matrix that
    is stored transposed. A weight becomes E4M3 with an FP32 `weight_scale_inv` for each 128x128
    block, bit-equal to `quantize_128x128` of all of it. Stacks of experts are taken apart into
    DeepSeek's names, unless loaders know them as stacks alone; weights in another form, such as a
    `Conv1D` and experts of DBRX, get the form that `convert` gives them. 3. Copy tokenizer, code
    and such, write the index, then config.json, whose `modules_to_not_convert` lists the linears
    that stay; give the directory its name. Until then all is in `.TARGET.partial` beside target:
    if a run ends early, the same call goes on after its finished shards.

    Args:
        source: a directory, or a .safetensors file beside its config.json; weights in bf16, fp16 or
            fp32.
        target: a directory that does not exist or is empty.
        skip: names to keep as they are besides, with all below them: a dotted name or part of one
            ("mlp.shared_experts", "layers.0"), or a pattern (fnmatch), of keys or of the modules
            of the model that transformers builds.
        device: where weights are quantized; the CPU by default.
        max_shard_bytes: a file holds at most so many of tensors, unless one alone is larger.
        progress: show a bar on stderr; None means if it is a terminal.

    Raises:
        CheckpointError: naming keys and files: a source that is broken, in FP8 already or holds NaN
            or Inf; a target that exists, or that another process or thread is writing;
            a disk that is full. Finished shards are kept.
        ValueError: a name in skip that matches nothing; a device or a size that cannot be meant.
        TypeError: skip is no name, or names.
    """
    started = time.perf_counter()
    place = usable_device(device, "quantize_checkpoint")
    if not max_shard_bytes > 0:  # this refuses NaN too
        raise ValueError(f"max_shard_bytes must be positive, got {max_shard_bytes}")
    skip = patterns_of("quantize_checkpoint", "skip", skip)
    path = target_of(target)
    opened = open_source(source, "nothing was written")
    selection = select(opened, skip)
    _LOGGER.info("quantize_checkpoint: selected by %s\n%s", selection.basis, selection.conversion)
    if warning := selection.conversion.warning():
        warnings.warn(f"quantize_checkpoint: {warning}", stacklevel=2)
    cut = list(in_shards(selection.moves, Move.num_output_bytes, max_shard_bytes))
    shards = {shard_name(number, len(cut)): moves for number, moves in enumerate(cut, start=1)}
    target_bytes = sum(move.num_output_bytes() for move in selection.moves)
    try:
        others = dict(_other_files(opened))
        job = _job(opened, others, skip, max_shard_bytes, shards)
        with workplace(path, job) as work:
            reports, num_resumed = _write_shards(work, shards, opened, place, progress)
            for name, file in others.items():
                (work.content / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, work.content / name)
            write_index(work.content, _weight_map(shards), target_bytes)
            write_json(work.content / "config.json", _config(opened, selection))
            work.publish()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be made ({error}); {OUTCOME}") from error
    return QuantizeReport(
        weights=tuple(reports),
        kept=tuple(move.key for move in selection.moves if not move.is_fp8),
        conversion=selection.conversion,
        basis=selection.basis,
        source_bytes=sum(move.num_bytes for move in selection.moves),
        target_bytes=target_bytes,
        num_shards=len(shards),
        num_resumed=num_resumed,
        seconds=time.perf_counter() - started,
    )


def _job(
    source: Source,
    others: dict[str, Path],
    skip: tuple[str, ...],
    max_shard_bytes: int,
    shards: Shards,
) -> dict[str, Any]:
    """Return all that determines the target; sizes and times stand for contents of files.

    plan: a hash of the tensors of each shard; another version of this library may select others.
    Names of files have escapes for bytes that are not UTF-8.
    """
    layout = [[(move.outputs(), move.pieces) for move in moves] for moves in shards.values()]
    files = sorted({*source.shards, *others.values(), config_path(source.path)})
    return {
        "source": {
            os.fsencode(path).decode(errors="backslashreplace"): stamp_of(path.stat())
            for path in files
            if path.exists()
        },
        "skip": skip,
        "max_shard_bytes": max_shard_bytes,
        "plan": hashlib.sha256(repr(layout).encode()).hexdigest(),
    }


def _write_shards(
    work: Workplace, shards: Shards, source: Source, device: torch.device, progress: bool | None
) -> tuple[list[WeightReport], int]:
    """Return the reports of all weights, and the number of shards that were there already."""
    reports = _finished(work, shards, progress)
    missing = {name: moves for name, moves in shards.items() if name not in reports}
    total = sum(move.num_bytes for moves in missing.values() for move in moves)
    with Progress("quantizing", total, "GiB", 2**30, progress) as bar:
        for name, moves in missing.items():

            def write(path: Path, name: str = name, moves: list[Move] = moves) -> dict[str, Any]:
                reports[name] = write_shard(path, moves, source, device, bar.advance)
                return {"weights": [asdict(weight) for weight in reports[name]]}

            work.finish(name, write)
    return [x for name in shards for x in reports[name]], len(shards) - len(missing)


def _finished(
    work: Workplace, shards: Shards, progress: bool | None
) -> dict[str, list[WeightReport]]:
    """Return the reports of shards that an earlier run wrote and that have not changed."""
    written = {name: moves for name, moves in shards.items() if work.is_finished(name)}
    total = sum(move.num_output_bytes() for moves in written.values() for move in moves)
    with Progress("verifying", total, "GiB", 2**30, progress if written else False) as bar:
        reports = {
            name: _reports_of(work.report(name, bar.advance), moves)
            for name, moves in written.items()
        }
    return {name: some for name, some in reports.items() if some is not None}


def _reports_of(report: Any, moves: list[Move]) -> list[WeightReport] | None:
    """Read the reports on these moves from JSON; return None if report is None or on others."""
    try:
        reports = [WeightReport.from_dict(x) for x in report["weights"]]
    except (KeyError, TypeError):
        return None
    wanted = [(move.key, move.shape) for move in moves if move.is_fp8]
    return reports if [(x.key, x.shape) for x in reports] == wanted else None


def _weight_map(shards: Shards) -> dict[str, str]:
    """Return key -> name of the file that holds it."""
    outputs = ((name, move.outputs()) for name, moves in shards.items() for move in moves)
    return {key: name for name, some in outputs for key, _, _ in some}


def _config(source: Source, selection: Selection) -> dict[str, Any]:
    quantization = {**FP8_QUANTIZATION, "modules_to_not_convert": selection.kept_modules}
    if any(x.halves == 2 and has_ambiguous_blocks(x.part_rows) for x in selection.moves):
        quantization |= SEPARATE
    return {**source.config, "quantization_config": quantization}


def _other_files(source: Source) -> Iterator[tuple[str, Path]]:
    """Yield (name below the directory, file) for each file but weights, config and hidden ones.

    If the source is one file, files beside it must have a suffix of `_BESIDE`. Raises OSError,
    and CheckpointError for what cannot be copied, which would be missing in the target.
    """
    config, is_whole = config_path(source.path), source.path.is_dir()
    folders = [config.parent]
    for folder in folders:  # the loop adds more
        with os.scandir(folder) as entries:
            paths = sorted(Path(folder, entry.name) for entry in entries if entry.name[0] != ".")
        for path in paths:
            is_weight = path.name.endswith((*_WEIGHTS, ".index.json"))
            if path.is_dir():
                if is_whole and path.name not in _OTHER_FOLDERS:
                    if path.is_symlink():
                        raise _left_out(path, "a link to a directory")
                    folders.append(path)
            elif path != config and not is_weight and (is_whole or path.suffix in _BESIDE):
                check_inside(path, config.parent)
                if not path.is_file():
                    raise _left_out(path, "no file, or a link to none")
                yield str(path.relative_to(config.parent)), path


def _left_out(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: is {what}, and would be left out; put there what is meant, or remove it"
    )
