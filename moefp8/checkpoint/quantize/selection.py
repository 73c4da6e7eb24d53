"""Which tensors of a 16-bit checkpoint become FP8: as `convert` chooses, or by names and shapes.

E experts, H hidden, I intermediate.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...layers import DEFAULT_SKIP, Conversion
from ...layers.selection import matches
from ..errors import raise_if_any
from ..files.config import is_leftover, layer_of
from ..files.header import TORCH_DTYPES, Entry
from ..files.names import split_expert, weight_of_scale
from ..files.source import Source
from .by_model import select_by_model
from .moves import Move, apart, whole
from .skeleton import Skeleton, skeleton_of

_DTYPES = ("BF16", "F16", "F32")

KEPT = (*DEFAULT_SKIP, "embed_tokens")
_KEPT = re.compile(rf"(?:.*\.)?(?:{'|'.join(map(re.escape, KEPT))})(?:\..*)?")
_NO_LINEAR = re.compile(r"(?:.*\.)?[^.]*(?:norm|embed|conv)[^.]*\.weight", re.IGNORECASE)
_IN_EXPERTS = re.compile(r"(.*\bexperts)\.(?!\d)(?!e_score_correction_bias)(.+)")
_STACKS = {"gate_up_proj", "down_proj"}


@dataclass(frozen=True)
class Selection:
    """moves: all of the source, in its order; kept_modules: linears and experts that stay.

    conversion: what becomes FP8 and what stays, and why. basis: what told.
    """

    moves: list[Move]
    kept_modules: list[str]
    conversion: Conversion
    basis: str


@dataclass(frozen=True)
class _Picked:
    """moves: key -> what becomes of it in FP8; none of a key that goes into another's."""

    moves: dict[str, list[Move]]
    conversion: Conversion
    basis: str


def select(source: Source, skip: Sequence[str] = ()) -> Selection:
    """What `convert` would swap in the model that transformers builds, as loaders can find it.

    Of a family that transformers does not know, or without it: every 2-D weight of a decoder layer,
    but for routers, gates, and what KEPT and skip name. Experts stacked as `gate_up_proj`
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
        picked = _pick_by_names(source, skip, headline, skeleton)
    else:
        _check_skip(source, skip, skeleton.rename, skeleton.modules)
        picked = _pick_by_model(source, skip, headline, skeleton)
    moves = list(_moves(source, picked.moves))
    raise_if_any(_twice(moves), headline)
    kept = dict.fromkeys(
        [*_kept_modules(source, picked.moves.keys()), *_kept_in_model(skeleton, picked)]
    )
    return Selection(moves, list(kept), picked.conversion, picked.basis)


def _pick_by_names(source: Source, skip: Sequence[str], headline: str, why: str) -> _Picked:
    linears = {e.key for e in source.entries.values() if _is_linear(e) and not _stays(e.key, skip)}
    problems = _dtype_problems(source, linears, {})
    stacks = _select_stacks(source, skip, problems)
    problems += _split_modules(source.entries.values(), linears)
    if not linears and not stacks and not problems:
        problems.append(
            "no 2-D weight of a decoder layer (model.layers.0. or such) is left for FP8; names "
            f"told, for {why}"
        )
    raise_if_any(problems, headline)
    kinds = {key.removesuffix(".weight"): "linear" for key in linears if not split_expert(key)}
    kinds |= {found[0]: "experts" for key in linears if (found := split_expert(key))}
    kinds |= {key.rpartition(".")[0]: "experts" for key in stacks}
    kept = dict.fromkeys(_kept_modules(source, linears | stacks), "by name, or skipped")
    moves = {key: [whole(source.entries[key], key, is_fp8=True)] for key in linears}
    moves |= {key: list(apart(source.entries[key])) for key in stacks}
    return _Picked(moves, Conversion(kinds, kept), f"names ({why})")


def _pick_by_model(
    source: Source, skip: Sequence[str], headline: str, skeleton: Skeleton
) -> _Picked:
    def is_skipped(key: str) -> bool:
        return any(_is_named(name, part) for part in skip for name in (key, skeleton.rename(key)))

    selected = select_by_model(source, skeleton, skip, is_skipped)
    left = [source.entries[key] for key in selected.unknown if is_leftover(source.config, key)]
    leftover = {e.key for e in left if _is_linear(e) and not _stays(e.key, skip)}
    moves = {key: [whole(source.entries[key], key, is_fp8=True)] for key in leftover}
    moves |= selected.moves  # leftover are layers for multi-token prediction: models hold none
    problems = _dtype_problems(source, moves, selected.homes)
    problems += _split_modules(left, moves.keys())
    if not moves and not problems:
        told = Conversion({}, selected.kept).warning() or ""
        problems.append(
            f"{told}; convert the model instead, or load it by "
            "from_pretrained(..., quantization_config=FP8Config()), which may swap more"
        )
    raise_if_any(problems, headline)
    swapped = selected.swapped | {key.removesuffix(".weight"): "linear" for key in leftover}
    basis = f"transformers' {type(skeleton.model).__name__}"
    conversion = Conversion(swapped, selected.kept, selected.experts)
    return _Picked(moves, conversion, basis)


def _kept_in_model(skeleton: Skeleton | str, picked: _Picked) -> list[str]:
    """Linears and experts by the model's own names, by which its loaders may look for them."""
    return [] if isinstance(skeleton, str) else list(picked.conversion.kept)


def _dtype_problems(source: Source, keys: Iterable[str], homes: Mapping[str, str]) -> list[str]:
    """homes: key -> the module to skip, of which a part cannot be."""
    return [
        f"{source.entries[key]}: {problem}; {_to_keep(homes.get(key, key))}"
        for key in sorted(keys)
        if (problem := _dtype_problem(source.entries[key]))
    ]


def _moves(source: Source, fp8: Mapping[str, list[Move]]) -> Iterator[Move]:
    for shard in source.shards.values():
        for entry in sorted(shard.entries, key=lambda entry: (entry.begin, entry.end)):
            yield from fp8.get(entry.key, [whole(entry, entry.key, is_fp8=False)])


def _select_stacks(source: Source, skip: Sequence[str], problems: list[str]) -> set[str]:
    """Keys of the stacks to take apart."""
    selected: set[str] = set()
    for module, tensors in _stacked(source).items():
        kept = [name for name in tensors if _stays(f"{module}.{name}", skip)]
        if len(kept) == len(tensors):
            continue
        if problem := _stack_problem(tensors, kept):
            where = next(iter(tensors.values())).file
            problems.append(f"{module} in {where}: {problem}; {_to_keep(module)}")
        else:
            selected.update(f"{module}.{name}" for name in tensors)
    return selected


def _check_skip(
    source: Source,
    skip: Sequence[str],
    rename: Callable[[str], str],
    modules: Collection[str] = (),
) -> None:
    names = {name for key in source.entries for name in (key, rename(key))} if skip else set()
    or_module = ", or a module of its model" if modules else ""
    for pattern in skip:
        if not any(_is_named(name, pattern) for name in names.union(modules)):
            raise ValueError(
                f"skip: every pattern must match a key of {source.path}{or_module}, got "
                f"{pattern!r}; stacked experts have one key for all"
            )


def _is_named(key: str, pattern: str) -> bool:
    return matches(key, pattern) or matches(key.removesuffix(".weight"), pattern)


def _stays(key: str, skip: Iterable[str]) -> bool:
    is_layer = layer_of(key) is not None or key.startswith("mtp.layers.")
    return not is_layer or bool(_KEPT.fullmatch(key)) or any(_is_named(key, x) for x in skip)


def _is_linear(entry: Entry) -> bool:
    is_matrix = entry.key.endswith(".weight") and len(entry.shape) == 2
    return is_matrix and not _NO_LINEAR.fullmatch(entry.key)


def _to_keep(name: str) -> str:
    return f"skip {name!r} to keep it as it is"


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


def _stacked(source: Source) -> dict[str, dict[str, Entry]]:
    """Experts module -> name in it -> entry, of tensors that hold all experts at once."""
    found: dict[str, dict[str, Entry]] = {}
    for key, entry in source.entries.items():
        match = _IN_EXPERTS.fullmatch(key)
        if match and len(entry.shape) >= 2 and not _stays(key, ()):
            found.setdefault(match[1], {})[match[2]] = entry
    return found


def _stack_problem(tensors: dict[str, Entry], kept: list[str]) -> str | None:
    """What is wrong with the tensors of an experts module, by their names in it."""
    shapes = {name: list(entry.shape) for name, entry in tensors.items()}
    wanted = "must hold gate_up_proj [E, 2I, H] and down_proj [E, H, I], gate rows first"
    if kept:
        return f"must be skipped whole, or not at all; skipped is only {', '.join(kept)}"
    if shapes.keys() != _STACKS or any(len(shape) != 3 for shape in shapes.values()):
        return f"{wanted}, and neither biases nor others, got {shapes}"
    (e, rows, h), (e_down, h_down, i) = shapes["gate_up_proj"], shapes["down_proj"]
    if (e, rows, h) != (e_down, 2 * i, h_down):
        return f"{wanted}, got {shapes}; transposed stacks are not supported"
    return next(filter(None, map(_dtype_problem, tensors.values())), None)


def _dtype_problem(entry: Entry) -> str | None:
    if entry.dtype in _DTYPES:
        return None
    return f"dtype must be one of {', '.join(_DTYPES)}, got {entry.dtype}"


def _split_modules(entries: Iterable[Entry], linears: Collection[str]) -> list[str]:
    """Layers compute all experts of a module in FP8, or none."""
    fates: dict[str, set[bool]] = {}
    for entry in entries:
        expert = split_expert(entry.key)
        if expert and _is_linear(entry):
            fates.setdefault(expert[0], set()).add(entry.key in linears)
    return [
        f"{module}: its experts must be skipped all, or none"
        for module, fate in fates.items()
        if len(fate) > 1
    ]


def _twice(moves: list[Move]) -> list[str]:
    """Keys that two moves would write."""
    first: dict[str, Entry] = {}
    problems = []
    for move in moves:
        for key, _, _ in move.outputs():
            if first.setdefault(key, move.entry) is not move.entry:
                problems.append(f"{move.entry}: would become {key}, as {first[key]} would")
    return problems


def _kept_modules(source: Source, quantized: Collection[str]) -> list[str]:
    """For modules_to_not_convert, by which loaders tell what is no FP8 module.

    Experts stand there as one module. A head that is tied has no key, and yet it is a linear.
    """
    kept = [
        entry.key
        for entry in source.entries.values()
        if entry.key not in quantized and (_is_linear(entry) or _IN_EXPERTS.match(entry.key))
    ]
    modules: dict[str, None] = {}
    for key in kept:
        expert = split_expert(key)
        stack = _IN_EXPERTS.fullmatch(key)
        experts = expert[0] if expert else stack[1] if stack else None
        modules[experts or key.removesuffix(".weight")] = None
    if not any(matches(module, "lm_head") for module in modules):
        modules["lm_head"] = None
    return list(modules)
