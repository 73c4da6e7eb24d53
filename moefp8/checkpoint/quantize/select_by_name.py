"""Select what becomes FP8 by the names and shapes of tensors, where no model is known.

E experts, H hidden, I intermediate.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from ...layers import DEFAULT_SKIP, Conversion
from ...layers.conversion.selection import matches
from ...layers.conversion.stacks import STACKS
from ..errors import raise_if_any
from ..files.config import layer_of
from ..files.header import Entry
from ..files.names import split_expert
from ..files.source import Source
from .moves import Selected, apart, whole

_DTYPES = ("BF16", "F16", "F32")

_KEPT_NAMES = "|".join(map(re.escape, (*DEFAULT_SKIP, "embed_tokens")))
_KEPT = re.compile(rf"(?:.*\.)?(?:{_KEPT_NAMES})(?:\..*)?")
_NO_LINEAR = re.compile(r"(?:.*\.)?[^.]*(?:norm|embed|conv)[^.]*\.weight", re.IGNORECASE)
_IN_EXPERTS = re.compile(r"(.*\bexperts)\.(?!\d)(?!e_score_correction_bias)(.+)")


def select_by_name(source: Source, skip: Sequence[str], headline: str, why: str) -> Selected:
    """Select by name; `why` says why no model is known. Raises CheckpointError with headline."""
    linears = {e.key for e in source.entries.values() if is_linear(e) and not stays(e.key, skip)}
    problems = dtype_problems(source, linears, {})
    stacks = _select_stacks(source, skip, problems)
    problems += split_modules(source.entries.values(), linears)
    if not linears and not stacks and not problems:
        problems.append(
            "no 2-D weight of a decoder layer (model.layers.0. or such) is left for FP8; weights "
            f"were selected by name, since {why}"
        )
    raise_if_any(problems, headline)
    kinds = {key.removesuffix(".weight"): "linear" for key in linears if not split_expert(key)}
    kinds |= {expert[0]: "experts" for key in linears if (expert := split_expert(key))}
    kinds |= {key.rpartition(".")[0]: "experts" for key in stacks}
    kept = dict.fromkeys(kept_modules(source, linears | stacks), "by name, or skipped")
    moves = {key: [whole(source.entries[key])] for key in linears}
    moves |= {key: list(apart(source.entries[key])) for key in stacks}
    return f"names ({why})", moves, Conversion(kinds, kept)


def is_named(key: str, pattern: str) -> bool:
    return matches(key, pattern) or matches(key.removesuffix(".weight"), pattern)


def stays(key: str, skip: Iterable[str]) -> bool:
    is_layer = layer_of(key) is not None or key.startswith("mtp.layers.")
    return not is_layer or bool(_KEPT.fullmatch(key)) or any(is_named(key, x) for x in skip)


def is_linear(entry: Entry) -> bool:
    is_matrix = entry.key.endswith(".weight") and len(entry.shape) == 2
    return is_matrix and not _NO_LINEAR.fullmatch(entry.key)


def dtype_problems(source: Source, keys: Iterable[str], homes: Mapping[str, str]) -> list[str]:
    """List keys of other dtypes. homes: key -> its module, if that can only be skipped whole."""
    return [
        f"{source.entries[key]}: {problem}; {_to_keep(homes.get(key, key))}"
        for key in sorted(keys)
        if (problem := _dtype_problem(source.entries[key]))
    ]


def split_modules(entries: Iterable[Entry], linears: Collection[str]) -> list[str]:
    """List modules of experts that would be partly in FP8, which layers do not compute."""
    fates: dict[str, set[bool]] = defaultdict(set)
    for entry in entries:
        expert = split_expert(entry.key)
        if expert and is_linear(entry):
            fates[expert[0]].add(entry.key in linears)
    both = (module for module, fate in fates.items() if len(fate) > 1)
    return [f"{module}: its experts must be skipped all, or none" for module in both]


def kept_modules(source: Source, quantized: Collection[str]) -> list[str]:
    """List modules_to_not_convert, which names the linears and experts that are not in FP8.

    Experts are one module there. A tied head has no key, and yet it is a linear.
    """
    modules: dict[str, None] = {}
    for key, entry in source.entries.items():
        stack = _IN_EXPERTS.match(key)
        if key not in quantized and (is_linear(entry) or stack):
            expert = split_expert(key)
            experts = expert[0] if expert else stack[1] if stack else None
            modules[experts or key.removesuffix(".weight")] = None
    if not any(matches(module, "lm_head") for module in modules):
        modules["lm_head"] = None
    return list(modules)


def _select_stacks(source: Source, skip: Sequence[str], problems: list[str]) -> set[str]:
    """Return the keys of the stacks to take apart, and add to problems."""
    modules: dict[str, dict[str, Entry]] = defaultdict(dict)
    for key, entry in source.entries.items():
        match = _IN_EXPERTS.fullmatch(key)
        if match and len(entry.shape) >= 2 and not stays(key, ()):
            modules[match[1]][match[2]] = entry
    selected: set[str] = set()
    for module, tensors in modules.items():
        kept = [name for name, entry in tensors.items() if stays(entry.key, skip)]
        if len(kept) == len(tensors):
            continue
        if problem := _stack_problem(tensors, kept):
            where = next(iter(tensors.values())).file
            problems.append(f"{module} in {where}: {problem}; {_to_keep(module)}")
        else:
            selected.update(entry.key for entry in tensors.values())
    return selected


def _stack_problem(tensors: dict[str, Entry], kept: list[str]) -> str | None:
    """Say what is wrong with the tensors of an experts module, by their names in it."""
    shapes = {name: list(entry.shape) for name, entry in tensors.items()}
    wanted = "must hold gate_up_proj [E, 2I, H] and down_proj [E, H, I], gate rows first"
    if kept:
        return f"must be skipped whole, or not at all; skipped is only {', '.join(kept)}"
    if shapes.keys() != set(STACKS) or any(len(shape) != 3 for shape in shapes.values()):
        return f"{wanted}, and neither biases nor others, got {shapes}"
    (e, rows, h), (e_down, h_down, i) = (shapes[name] for name in STACKS)
    if (e, rows, h) != (e_down, 2 * i, h_down):
        return f"{wanted}, got {shapes}; transposed stacks are not supported"
    return next(filter(None, map(_dtype_problem, tensors.values())), None)


def _dtype_problem(entry: Entry) -> str | None:
    if entry.dtype in _DTYPES:
        return None
    return f"dtype must be one of {', '.join(_DTYPES)}, got {entry.dtype}"


def _to_keep(name: str) -> str:
    return f"skip {name!r} to keep it as it is"
