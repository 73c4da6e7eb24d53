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
from typing import Any, NoReturn

import torch

from ...layers.conversion.choose import patterns_of
from ...progress import Progress
from ..arguments import usable_device
from ..errors import CheckpointError
from ..files.config import FP8_QUANTIZATION, config_path
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

    1. Select what `convert` would swap in the model that transformers builds of config.json, as far
    as loaders find it again; if transformers is missing or does not know the family, every 2-D
    weight of a decoder layer, but for routers, gates, norms and embeddings. Each becomes E4M3
    with an FP32 `weight_scale_inv` for each 128x128 block, bit-equal to `quantize_128x128` of the
    whole weight. Stacks of experts are taken apart, unless loaders know them as stacks alone; what
    is stored in another form, as a `Conv1D` and experts of DBRX are, becomes what `convert` makes
    of it. What becomes FP8 and what stays, and why, is logged ("moefp8", INFO) before the first
    byte is written; that experts stay is a warning. 2. Write one shard after the other, in bands of
    rows: memory does not grow with either, but for a matrix that is stored transposed. 3. Copy
    tokenizer, code and such, write the index, then config.json, whose `modules_to_not_convert`
    lists the linears that stay; give the directory its name.

    Until then all lies in `.TARGET.partial` beside target. If a run ends early, the same call
    takes it up again, with the shards that were finished.

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
            or Inf; a target that is there, or that another process or thread is writing;
            a disk that is full. Finished shards are kept.
        ValueError: a name in skip that matches nothing; a device or a size that cannot be meant.
        TypeError: skip is no name, or names.
    """
    started = time.perf_counter()
    place = usable_device(device, "quantize_checkpoint")
    if not max_shard_bytes > 0:  # NaN is neither
        raise ValueError(f"max_shard_bytes must be positive, got {max_shard_bytes}")
    skip = patterns_of("quantize_checkpoint", "skip", skip)
    path = target_of(target)
    opened = open_source(source, "nothing was written")
    selection = select(opened, skip)
    _LOGGER.info("quantize_checkpoint: told by %s\n%s", selection.basis, selection.conversion)
    if warning := selection.conversion.warning():
        warnings.warn(f"quantize_checkpoint: {warning}", stacklevel=2)
    try:
        others = dict(_other_files(opened))
        shards = list(in_shards(selection.moves, Move.num_output_bytes, max_shard_bytes))
        job = _job(opened, others, skip, max_shard_bytes, shards)
        with workplace(path, job) as work:
            reports, num_resumed = _write_shards(work, shards, opened, place, progress)
            _write_others(work, opened, others, selection, shards)
            work.publish()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be made ({error}); {OUTCOME}") from error
    return QuantizeReport(
        weights=tuple(reports),
        kept=tuple(move.key for move in selection.moves if not move.is_fp8),
        conversion=selection.conversion,
        basis=selection.basis,
        source_bytes=sum(move.num_bytes for move in selection.moves),
        target_bytes=sum(move.num_output_bytes() for move in selection.moves),
        num_shards=len(shards),
        num_resumed=num_resumed,
        seconds=time.perf_counter() - started,
    )


def _job(
    source: Source,
    others: dict[str, Path],
    skip: tuple[str, ...],
    max_shard_bytes: int,
    shards: list[list[Move]],
) -> dict[str, Any]:
    """Return all that decides what is written; for contents of files, their sizes and times.

    plan: which tensor is in which shard; another version of this library may select others.
    """
    layout = [[(move.outputs(), move.pieces) for move in moves] for moves in shards]
    files = sorted({*source.shards, *others.values(), config_path(source.path)})
    return {
        "source": {_in_json(path): stamp_of(path.stat()) for path in files if path.exists()},
        "skip": skip,
        "max_shard_bytes": max_shard_bytes,
        "plan": hashlib.sha256(repr(layout).encode()).hexdigest(),
    }


def _in_json(path: Path) -> str:
    """Write bytes of a name that are not UTF-8 as escapes, which can be read back."""
    return os.fsencode(path).decode(errors="backslashreplace")


def _write_shards(
    work: Workplace,
    shards: list[list[Move]],
    source: Source,
    device: torch.device,
    progress: bool | None,
) -> tuple[list[WeightReport], int]:
    """Return the reports of all weights, and how many shards were there already."""
    names = [shard_name(number, len(shards)) for number in range(1, len(shards) + 1)]
    found = _finished(work, names, shards, progress)
    missing = [moves for name, moves in zip(names, shards, strict=True) if name not in found]
    total = sum(move.num_bytes for moves in missing for move in moves)
    reports = []
    with Progress("quantizing", total, "GiB", 2**30, progress) as bar:
        for name, moves in zip(names, shards, strict=True):

            def write(path: Path, moves: list[Move] = moves) -> dict[str, Any]:
                weights = write_shard(path, moves, source, device, bar.advance)
                return {"weights": [asdict(weight) for weight in weights]}

            if name not in found:
                found[name] = _reports_of(work.finish(name, write), moves) or []
            reports += found[name]
    return reports, len(shards) - len(missing)


def _finished(
    work: Workplace, names: list[str], shards: list[list[Move]], progress: bool | None
) -> dict[str, list[WeightReport]]:
    """Return the reports of shards that an earlier run wrote, and that are still as they were."""
    there = [
        (name, moves) for name, moves in zip(names, shards, strict=True) if work.is_finished(name)
    ]
    total = sum(move.num_output_bytes() for _, moves in there for move in moves)
    with Progress("verifying", total, "GiB", 2**30, progress if there else False) as bar:
        found = {name: _reports_of(work.report(name, bar.advance), moves) for name, moves in there}
    return {name: reports for name, reports in found.items() if reports is not None}


def _reports_of(report: dict[str, Any] | None, moves: list[Move]) -> list[WeightReport] | None:
    """Read the reports on these moves; return None if report holds others."""
    if report is None:
        return None
    try:
        found = [WeightReport.from_dict(x) for x in report["weights"]]
    except (KeyError, TypeError):
        return None
    of = [(move.key, move.shape) for move in moves if move.is_fp8]
    return found if [(x.key, x.shape) for x in found] == of else None


def _write_others(
    work: Workplace,
    source: Source,
    others: dict[str, Path],
    selection: Selection,
    shards: list[list[Move]],
) -> None:
    for name, path in others.items():
        (work.content / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, work.content / name)
    weight_map = {
        key: shard_name(number, len(shards))
        for number, moves in enumerate(shards, start=1)
        for move in moves
        for key, _, _ in move.outputs()
    }
    write_index(work.content, weight_map, sum(move.num_output_bytes() for move in selection.moves))
    quantization = {**FP8_QUANTIZATION, "modules_to_not_convert": selection.kept_modules}
    config = {**source.config, "quantization_config": quantization}
    write_json(work.content / "config.json", config)


def _raise(error: OSError) -> None:
    """Raise what `os.walk` would leave out because it cannot read it."""
    raise error


def _other_files(source: Source) -> Iterator[tuple[str, Path]]:
    """Yield (name below the directory, file) for all that is neither weights, config nor hidden.

    If the source is one file, only files beside it count whose suffix belongs to models. Raises
    CheckpointError for what cannot be copied: it would be missing in the target.
    """
    directory = config_path(source.path).parent
    is_whole = source.path.is_dir()
    for folder, folders, names in os.walk(directory, onerror=_raise):
        kept = (x for x in folders if x not in _OTHER_FOLDERS and x[0] != ".")
        folders[:] = sorted(kept) if is_whole else []
        for name in folders:
            if os.path.islink(os.path.join(folder, name)):
                _refuse_other(Path(folder, name), "a link to a directory")
        for name in sorted(names):
            path = Path(folder, name)
            is_other = not name.startswith(".") and not name.endswith((*_WEIGHTS, ".index.json"))
            if not is_whole and path.suffix not in _BESIDE:
                continue
            if is_other and path != config_path(source.path):
                check_inside(path, directory)
                if not path.is_file():
                    _refuse_other(path, "no file, or a link to none")
                yield str(path.relative_to(directory)), path


def _refuse_other(path: Path, what: str) -> NoReturn:
    raise CheckpointError(
        f"{path}: is {what}, and would be left out; put there what is meant, or remove it"
    )
