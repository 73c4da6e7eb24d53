"""Select which tensors of a 16-bit checkpoint become FP8: as `convert` would, or by names."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...layers import Conversion
from ..errors import raise_if_any
from ..files.config import is_leftover
from ..files.header import TORCH_DTYPES, Entry
from ..files.names import weight_of_scale
from ..files.source import Source
from .moves import Move, Selected, whole
from .select_by_model import select_by_model
from .select_by_name import (
    dtype_problems,
    is_linear,
    is_named,
    kept_modules,
    select_by_name,
    split_modules,
    stays,
)
from .skeleton import Skeleton, skeleton_of


@dataclass(frozen=True)
class Selection:
    """moves: all of the source, in its order; kept_modules: linears and experts that stay.

    conversion: what becomes FP8 and what stays, and why; basis: what told.
    """

    moves: list[Move]
    kept_modules: list[str]
    conversion: Conversion
    basis: str


def select(source: Source, skip: Sequence[str] = ()) -> Selection:
    """Select what `convert` would swap in the model that transformers builds, if loaders find it.

    If transformers is missing or does not know the family, every 2-D weight of a decoder layer is
    selected, but for routers, gates, and what KEPT and skip name. Experts stacked as `gate_up_proj`
    [E, 2I, H] and `down_proj` [E, H, I] are taken apart into DeepSeek's names, since gate and up
    have scale blocks of their own; where a loader knows these as stacks alone, they stay stacks, or
    become such.

    Raises:
        CheckpointError: a source that is quantized already, holds experts of another make or
            weights of another dtype, or nothing to quantize.
        ValueError: a name in skip that matches nothing.
    """
    headline = f"{source.path} cannot be quantized"
    raise_if_any(_quantized_already(source), headline)
    skeleton = skeleton_of(source.config, len(source.entries))
    if isinstance(skeleton, str):
        _check_skip(source, skip, lambda key: key)
        selected = select_by_name(source, skip, headline, skeleton)
        in_model: Collection[str] = ()
    else:
        _check_skip(source, skip, skeleton.rename, skeleton.modules)
        selected = _select_by_model(source, skip, headline, skeleton)
        in_model = selected.kept  # by the names that the model's loaders look for
    moves = list(_moves(source, selected.moves))
    raise_if_any(_twice(moves), headline)
    kept = dict.fromkeys([*kept_modules(source, selected.moves.keys()), *in_model])
    conversion = Conversion(selected.swapped, selected.kept, selected.experts)
    return Selection(moves, list(kept), conversion, selected.basis)


def _select_by_model(
    source: Source, skip: Sequence[str], headline: str, skeleton: Skeleton
) -> Selected:
    """Select by the model, and by name in layers for multi-token prediction: models hold none."""

    def is_skipped(key: str) -> bool:
        return any(is_named(name, part) for part in skip for name in (key, skeleton.rename(key)))

    selected = select_by_model(source, skeleton, skip, is_skipped)
    left = [source.entries[key] for key in selected.unknown if is_leftover(source.config, key)]
    leftover = {e.key for e in left if is_linear(e) and not stays(e.key, skip)}
    by_name = {key: [whole(source.entries[key], key, is_fp8=True)] for key in leftover}
    selected.moves = by_name | selected.moves
    selected.swapped |= {key.removesuffix(".weight"): "linear" for key in leftover}
    problems = dtype_problems(source, selected.moves, selected.homes)
    problems += split_modules(left, selected.moves.keys())
    if not selected.moves and not problems:
        told = Conversion({}, selected.kept).warning() or ""
        problems.append(
            f"{told}; convert the model instead, or load it by "
            "from_pretrained(..., quantization_config=FP8Config()), which may swap more"
        )
    raise_if_any(problems, headline)
    return selected


def _moves(source: Source, fp8: Mapping[str, list[Move]]) -> Iterator[Move]:
    for shard in source.shards.values():
        for entry in sorted(shard.entries, key=lambda entry: (entry.begin, entry.end)):
            yield from fp8.get(entry.key, [whole(entry, entry.key, is_fp8=False)])


def _check_skip(
    source: Source,
    skip: Sequence[str],
    rename: Callable[[str], str],
    modules: Collection[str] = (),
) -> None:
    names = {name for key in source.entries for name in (key, rename(key))} if skip else set()
    or_module = ", or a module of its model" if modules else ""
    for pattern in skip:
        if not any(is_named(name, pattern) for name in names.union(modules)):
            raise ValueError(
                f"skip: every pattern must match a key of {source.path}{or_module}, got "
                f"{pattern!r}; stacked experts have one key for all"
            )


def _quantized_already(source: Source) -> list[str]:
    text = source.config.get("text_config")
    configs: list[dict[str, Any]] = [source.config, *([text] if isinstance(text, dict) else [])]
    problems = [
        f"config.json: has a {key} ({config[key]}); give the checkpoint that it was made from"
        for config in configs
        for key in ("quantization_config", "compression_config")
        if config.get(key)
    ]
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
