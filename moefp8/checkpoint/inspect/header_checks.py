"""Check headers and config.json for what a load refuses, and what a user should know."""

import re
from collections.abc import Iterator

from ..errors import quoted
from ..files.config import format_problem
from ..files.header import FP8, SCALE_DTYPES, TORCH_DTYPES, Entry
from ..files.names import folded, has_odd_number, scale_of_weight
from ..files.source import disagreement
from .anomalies import Anomaly
from .contents import Contents, grid_of, readings_of
from .missing import missing_experts, missing_layers
from .patterns import Modules

_PACKED = ("U8", "I8")  # two FP4 numbers in a byte, or eight bits of another meaning
_PACKED_NAME = re.compile(r"(?:(?:^|[._])(?:weight|weight_packed|blocks|qweight)|\w_proj)$")

Faults = Iterator[tuple[Entry, str, str]]  # tensor, the rule that it breaks, and how


def check_headers(contents: Contents) -> Iterator[Anomaly]:
    """Check everything that needs no tensor's bytes.

    Another format is reported first; its dtypes and scales are then not checked by FP8's rules.
    """
    formats = [*_config(contents)]
    yield from formats
    is_other = bool(formats) and format_problem(contents.config) is not None
    for file, problems in contents.scan.problems.items():
        for problem in problems:
            yield Anomaly("error", "the file is broken", str(file), (problem,))
    for check in (_doubles, _numbers, *(() if is_other else (_dtypes, _pairs)), _grids):
        for entry, rule, text in check(contents):
            severity = "note" if entry.key in contents.left_out else "error"
            yield Anomaly(severity, rule, folded(entry.key), (f"{entry}: {text}",))
    for further in (missing_experts, missing_layers, _lists):
        yield from further(contents)


def _doubles(contents: Contents) -> Faults:
    for entry, first in contents.doubles:
        text = f"{first} has the same meaning; delete one of the two"
        yield entry, "two tensors of one meaning", text


def _numbers(contents: Contents) -> Faults:
    for entry in contents.scan.source.entries.values():
        if has_odd_number(entry.key):
            rule = "a number of a layer or an expert that models write otherwise"
            yield entry, rule, "must be a decimal number without zeros before it; rename it"


def _dtypes(contents: Contents) -> Faults:
    for name, entry in contents.weights.items():
        if entry.dtype not in TORCH_DTYPES:
            rule = f"dtype {entry.dtype}, which is unknown"
        elif entry.dtype == "F8_E5M2":
            rule = "E5M2, where weights must be E4M3"
        elif entry.dtype in _PACKED and (name in contents.scales or _PACKED_NAME.search(name)):
            rule = f"{entry.dtype}: packed FP4 (MXFP4, NVFP4) or integers, where FP8 must be"
        else:
            continue
        yield entry, rule, f"{entry.dtype} {list(entry.shape)}; quantize the original to {FP8}"


def _pairs(contents: Contents) -> Faults:
    for name, entry in contents.weights.items():
        is_alone = name not in contents.scales and scale_of_weight(name) not in contents.named
        if entry.dtype == FP8 and is_alone:
            text = f"{scale_of_weight(entry.key)} is missing"
            yield entry, "an FP8 weight without its scale", text
    for name, scale in contents.scales.items():
        weight = contents.weights.get(name)
        if weight is None and name not in contents.named:
            yield scale, "a scale without its weight", f"{name} is missing"
        elif weight is not None and weight.dtype in ("F64", "F32", "BF16", "F16"):
            yield scale, "a scale of a weight that is not FP8", f"its weight is {weight.dtype}"
        if scale.dtype not in SCALE_DTYPES:
            yield scale, f"scales are {scale.dtype}", f"must be one of {', '.join(SCALE_DTYPES)}"


def _grids(contents: Contents) -> Faults:
    block = contents.block()
    for name, scale in contents.scales.items():
        weight = contents.weights.get(name)
        if weight is None or weight.dtype != FP8:
            continue
        wanted = grid_of(name, weight.shape, block)
        shapes = f"{list(scale.shape)} for {list(weight.shape)}"
        if wanted != scale.shape:
            fits = next(readings_of(name, weight.shape, scale.shape), "no blocks at all")
            must = f"must be {list(wanted)}" if wanted else "a weight must have 2 or 3 dimensions"
            rule = f"scales do not fit blocks of {list(block)}, but {fits}"
            yield scale, rule, f"{shapes}, {must}"


def _config(contents: Contents) -> Iterator[Anomaly]:
    source = contents.scan.source
    entries = (entry for key, entry in source.entries.items() if key not in contents.left_out)
    problem = disagreement(source, entries)
    if problem and (contents.scales or not contents.scan.problems):
        yield Anomaly("error", "another format", "config.json", (problem,))


def _lists(contents: Contents) -> Iterator[Anomaly]:
    """Check config.json's lists of modules that are not quantized; loaders go by scales."""
    lists = [contents.quantization.get(name) for name in ("modules_to_not_convert", "ignore")]
    names = [x for some in lists if isinstance(some, list) for x in some if isinstance(x, str)]
    listed = Modules(names)
    for pattern, problem in listed.bad.items():
        rule = "a pattern of config.json's lists that is not looked for"
        yield Anomaly("note", rule, "config.json", (f"{quoted(pattern)}: {problem}",))
    try:
        yield from _drift(contents, listed) if names else ()
    except TimeoutError as error:
        rule = "config.json's lists of what is not quantized were given up"
        yield Anomaly("note", rule, "config.json", (quoted(str(error)),))


def _drift(contents: Contents, listed: Modules) -> Iterator[Anomaly]:
    for name, entry in contents.weights.items():
        is_matrix = name.endswith(".weight") and len(entry.shape) == 2
        if not is_matrix or entry.key in contents.left_out:
            continue
        module = entry.key.removesuffix(".weight")
        is_listed = module in listed
        if is_listed and name in contents.scales:
            rule = "config.json lists it as not quantized, but it has scales"
        elif not is_listed and entry.dtype != FP8 and "embed" not in module:
            rule = "it has no scales, but config.json does not list it as not quantized"
        else:
            continue
        yield Anomaly("note", rule, folded(entry.key), (f"{entry}: {entry.dtype}",))
