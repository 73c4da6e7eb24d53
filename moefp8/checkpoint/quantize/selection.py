"""Select which tensors of a 16-bit checkpoint become FP8: as `convert` would, or by names."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...layers import Conversion
from ..errors import raise_if_any
from ..files.config import quantization_of
from ..files.header import TORCH_DTYPES, Entry
from ..files.names import weight_of_scale
from ..files.source import Source, disagreement
from ..model.skeleton import Skeleton, skeleton_of
from .moves import Move, whole
from .select_by_model import select_by_model
from .select_by_name import is_named, kept_modules, select_by_name


@dataclass(frozen=True)
class Selection:
    """moves: all of the source, in its order; kept_modules: linears and experts that stay.

    conversion: what becomes FP8 and what stays, and why; basis: the model or names that decided.
    """

    moves: list[Move]
    kept_modules: list[str]
    conversion: Conversion
    basis: str


def select(source: Source, skip: Sequence[str] = ()) -> Selection:
    """Select as `quantize_checkpoint` describes, by the model or by names.

    Stacks of experts are taken apart, unless loaders know them as stacks alone. Raises
    CheckpointError for a source that is quantized already, holds experts of another make or weights
    of another dtype, or nothing to quantize; ValueError for a name in skip that matches nothing.
    """
    headline = f"{source.path} cannot be quantized"
    raise_if_any(_quantized_already(source), headline)
    skeleton = skeleton_of(source.config, len(source.entries))
    _check_skip(source, skip, skeleton)
    if isinstance(skeleton, str):
        basis, fp8, conversion = select_by_name(source, skip, headline, skeleton)
    else:
        basis, fp8, conversion = select_by_model(source, skip, headline, skeleton)
    moves = [
        move
        for key, entry in source.entries.items()
        for move in fp8.get(key, [whole(entry, is_fp8=False)])
    ]
    raise_if_any(_twice(moves), headline)
    # Its loaders look for the model's own names.
    kept = dict.fromkeys([*kept_modules(source, fp8.keys()), *conversion.kept])
    return Selection(moves, list(kept), conversion, basis)


def _check_skip(source: Source, skip: Sequence[str], skeleton: Skeleton | str) -> None:
    if not skip:
        return
    names, where = set(source.entries), f"a key of {source.path}"
    if isinstance(skeleton, Skeleton):
        names.update(map(skeleton.rename, source.entries), skeleton.modules)
        where += ", or a module of its model"
    for pattern in skip:
        if not any(is_named(name, pattern) for name in names):
            raise ValueError(
                f"skip: every pattern must match {where}, got {pattern!r}; stacked experts have "
                "one key for all"
            )


def _quantized_already(source: Source) -> list[str]:
    if stated := quantization_of(source.config):
        return [
            disagreement(source, source.entries.values())  # of 16-bit weights it says the way out
            or f"config.json: has a quantization_config ({stated}); give the checkpoint that it "
            "was made from"
        ]
    problems = []
    for key, entry in source.entries.items():
        weight = weight_of_scale(key)
        if entry.dtype not in TORCH_DTYPES or entry.dtype.startswith("F8_"):
            problems.append(f"{entry}: is {entry.dtype}, so it is quantized already")
        elif weight in source.entries:
            problems.append(f"{entry}: is a scale of {weight}, which is thus quantized already")
    return problems


def _twice(moves: list[Move]) -> list[str]:
    """List the keys that two moves would write."""
    first: dict[str, Entry] = {}
    problems = []
    for move in moves:
        for key, _, _ in move.outputs():
            if first.setdefault(key, move.entry) is not move.entry:
                problems.append(f"{move.entry}: would become {key}, as {first[key]} would")
    return problems
