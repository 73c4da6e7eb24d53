"""Find what a load refuses, or what is worth knowing, in headers and config.json."""

import re
from collections.abc import Callable, Iterator

from ..errors import quoted
from ..files.config import block_problem
from ..files.header import FP8, SCALE_DTYPES, TORCH_DTYPES, Entry
from ..files.names import canonical, folded, has_odd_number, scale_of_weight
from .anomalies import Anomaly, error, note
from .contents import Contents, grid_of, is_ambiguous, readings_of
from .missing import missing_experts, missing_layers
from .patterns import Modules

_PACKED = ("U8", "I8")  # two FP4 numbers in a byte, or eight bits of another meaning
_PACKED_NAME = re.compile(r"(?:^|[._])(?:weight|weight_packed|blocks|qweight|\w+_proj)$")


def check_headers(contents: Contents) -> Iterator[Anomaly]:
    """Check everything that needs no tensor's bytes."""
    for check in _CHECKS:
        yield from check(contents)


def _files(contents: Contents) -> Iterator[Anomaly]:
    for file, problems in contents.scan.problems.items():
        for problem in problems:
            yield error("the file is broken", str(file), problem)
    for entry, first in contents.doubles:
        example = f"{entry}: {first} has the same meaning; delete one of the two"
        yield _of(contents, entry, "two tensors of one meaning", example)


def _numbers(contents: Contents) -> Iterator[Anomaly]:
    for entry in contents.scan.source.entries.values():
        if has_odd_number(entry.key):
            rule = "a number of a layer or an expert that models write otherwise"
            example = f"{entry}: must be a decimal number without zeros before it; rename it"
            yield _of(contents, entry, rule, example)


def _config(contents: Contents) -> Iterator[Anomaly]:
    has_fp8 = any(
        contents.weights[name].dtype == FP8 for name in contents.scales if name in contents.weights
    )
    if has_fp8 and (problem := block_problem(contents.config)):
        yield error("blocks of another size", "config.json", problem)


def _dtypes(contents: Contents) -> Iterator[Anomaly]:
    for name, entry in contents.weights.items():
        if entry.dtype not in TORCH_DTYPES:
            rule = f"dtype {entry.dtype}, which is unknown"
        elif entry.dtype == "F8_E5M2":
            rule = "E5M2, where weights must be E4M3"
        elif _is_packed(contents, name):
            rule = f"{entry.dtype}: packed FP4 (MXFP4, NVFP4) or integers, where FP8 must be"
        else:
            continue
        example = f"{entry}: {entry.dtype} {list(entry.shape)}; quantize the original to {FP8}"
        yield _of(contents, entry, rule, example)


def _is_packed(contents: Contents, name: str) -> bool:
    is_named = name in contents.scales or _PACKED_NAME.search(name)
    return contents.weights[name].dtype in _PACKED and bool(is_named)


def _pairs(contents: Contents) -> Iterator[Anomaly]:
    for name, entry in contents.weights.items():
        scale = canonical(scale_of_weight(name))
        if entry.dtype == FP8 and name not in contents.scales and scale not in contents.named:
            example = f"{entry}: {scale_of_weight(entry.key)} is missing"
            yield _of(contents, entry, "an FP8 weight without its scale", example)
    for name, scale_entry in contents.scales.items():
        weight = contents.weights.get(name)
        if weight is None and name not in contents.named:
            example = f"{scale_entry}: {name} is missing"
            yield _of(contents, scale_entry, "a scale without its weight", example)
        elif weight is not None and weight.dtype in ("F64", "F32", "BF16", "F16"):
            example = f"{scale_entry}: its weight is {weight.dtype}"
            yield _of(contents, scale_entry, "a scale of a weight that is not FP8", example)
        if scale_entry.dtype not in SCALE_DTYPES:
            example = f"{scale_entry}: must be one of {', '.join(SCALE_DTYPES)}"
            yield _of(contents, scale_entry, f"scales are {scale_entry.dtype}", example)


def _grids(contents: Contents) -> Iterator[Anomaly]:
    block = contents.block()
    for name, scale in contents.scales.items():
        weight = contents.weights.get(name)
        if weight is None or weight.dtype != FP8:
            continue
        wanted = grid_of(name, weight.shape, block)
        if wanted == scale.shape:
            if is_ambiguous(name, weight.shape, block):
                rule = "scales that do not tell how gate and up were cut into blocks"
                example = f"{scale}: {list(scale.shape)} for {list(weight.shape)} either way"
                yield _of(contents, scale, rule, example)
            continue
        fits = next(readings_of(name, weight.shape, scale.shape), "no blocks at all")
        must = f"must be {list(wanted)}" if wanted else "a weight must have 2 or 3 dimensions"
        example = f"{scale}: {list(scale.shape)} for {list(weight.shape)}, {must}"
        rule = f"scales do not fit blocks of {list(block)}, but {fits}"
        yield _of(contents, scale, rule, example)


def _lists(contents: Contents) -> Iterator[Anomaly]:
    """Compare config.json's lists of what is not quantized, which drift; loaders go by scales."""
    names = _not_converted(contents)
    if not names:
        return
    listed = Modules(names)
    for pattern, problem in listed.bad.items():
        rule = "a pattern of config.json's lists that is not looked for"
        yield note(rule, "config.json", f"{quoted(pattern)}: {problem}")
    try:
        yield from _drift(contents, listed)
    except TimeoutError as error:
        rule = "config.json's lists of what is not quantized were given up"
        yield note(rule, "config.json", quoted(str(error)))


def _drift(contents: Contents, listed: Modules) -> Iterator[Anomaly]:
    for name, entry in contents.weights.items():
        if not name.endswith(".weight") or contents.is_left_out(entry) or len(entry.shape) != 2:
            continue
        module = entry.key.removesuffix(".weight")
        is_listed = module in listed
        if is_listed and name in contents.scales:
            rule = "config.json lists it as not quantized, but it has scales"
        elif not is_listed and entry.dtype != FP8 and "embed" not in module:
            rule = "it has no scales, but config.json does not list it as not quantized"
        else:
            continue
        yield note(rule, folded(entry.key), f"{entry}: {entry.dtype}")


def _not_converted(contents: Contents) -> list[str]:
    quantization = contents.config.get("quantization_config")
    if not isinstance(quantization, dict):
        return []
    lists = [quantization.get(name) for name in ("modules_to_not_convert", "ignore")]
    return [x for some in lists if isinstance(some, list) for x in some if isinstance(x, str)]


def _of(contents: Contents, entry: Entry, rule: str, example: str) -> Anomaly:
    """Make an error, or a note if a load leaves entry out."""
    make = note if contents.is_left_out(entry) else error
    return make(rule, folded(entry.key), example)


_CHECKS: tuple[Callable[[Contents], Iterator[Anomaly]], ...] = (
    _files,
    _numbers,
    _config,
    _dtypes,
    _pairs,
    _grids,
    missing_experts,
    missing_layers,
    _lists,
)
