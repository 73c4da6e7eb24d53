"""Show what a checkpoint holds and what is wrong with it, with no model and no GPU.

Headers, config.json and all scales are read, but no weights unless --weights asks for it. The
status is 1 if there is an error, which is what load_checkpoint refuses; a note is none.
"""

import argparse
import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from textwrap import wrap

from ..checkpoint import Inspection, inspect_checkpoint
from ..checkpoint.errors import printable
from ..checkpoint.inspect.anomalies import Anomaly
from ..checkpoint.inspect.contents import Kind
from ..checkpoint.inspect.inspect import Amount

_UNITS = "B", "KiB", "MiB", "GiB", "TiB"
_HEAD = ["", "count", "shape", "dtype", "scales", "grid", "bytes"]
_MAX_LINE = 4000
_MIN_NAME = 24  # narrower than that, a terminal wraps lines


def add_to(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="a directory, or a .safetensors file")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--weights", action="store_true", help="read all FP8 weights: is one NaN?")


def run(arguments: argparse.Namespace) -> int:
    found = inspect_checkpoint(arguments.checkpoint, weights=arguments.weights)
    if arguments.json:
        verdict = {"is_loadable": found.is_loadable, "is_fp8": found.is_fp8}
        print(json.dumps({**verdict, **asdict(found)}, indent=1))
    else:
        for line in lines_of(found, shutil.get_terminal_size((100, 24)).columns):
            print(printable(line, _MAX_LINE))
    return 0 if found.is_loadable else 1


def lines_of(found: Inspection, width: int) -> Iterator[str]:
    """The whole report, for people; lines are at most width long where names allow it."""
    yield from (f"{topic:<10}{text}".rstrip() for topic, text in _facts(found))
    yield ""
    yield from _table(found.kinds, width)
    yield ""
    for amount in found.left_out:
        yield f"left out by a load: {amount.name} ({_amount(amount)})"
    yield from _anomalies(found, width)


def _facts(found: Inspection) -> Iterator[tuple[str, str]]:
    family = found.family
    yield "path", found.path
    yield "family", ", ".join([family.model_type or "not told", *family.architectures])
    yield "names", ", ".join(family.naming) or "of no known experts"
    sizes = {
        "layers": family.num_layers,
        "experts": family.num_experts,
        "top-k": family.top_k,
        "hidden": family.hidden_size,
        "intermediate": family.intermediate_size,
        "of experts": family.moe_intermediate_size,
    }
    yield "sizes", ", ".join(f"{name} {n}" for name, n in sizes.items() if n is not None)
    yield "scales", family.quantization
    if not found.is_fp8:
        yield "FP8", "none, this is not an FP8 checkpoint; `moefp8 quantize` makes one of it"
    for amount in found.dtypes:
        yield "dtype", f"{amount.name}: {_amount(amount)}"
    total = Amount(
        f"{len(found.files)} file{'s' * (len(found.files) != 1)}",
        sum(file.count for file in found.files),
        sum(file.num_bytes for file in found.files),
    )
    yield "total", f"{total.name}: {_amount(total)}"


def _amount(amount: Amount) -> str:
    return f"{amount.count:,} tensors, {_bytes(amount.num_bytes)}"


def _bytes(num_bytes: float) -> str:
    for unit in _UNITS:
        if num_bytes < 1024 or unit == _UNITS[-1]:
            break
        num_bytes /= 1024
    return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"


def _table(kinds: Iterable[Kind], width: int) -> Iterator[str]:
    """Kinds of one prefix (`model.layers.*.`) under it; a long name has a line of its own."""
    rows = sorted((_row(kind) for kind in kinds), key=lambda row: row[0])
    rows = [("", _HEAD), *rows]
    sizes = [max(len(cells[i]) for _, cells in rows) for i in range(len(_HEAD))]
    room = max(_MIN_NAME, width - sum(sizes[1:]) - 2 * len(sizes))
    sizes[0] = min(sizes[0], room)
    last = ""
    for prefix, cells in rows:
        if prefix != last:
            yield f"{prefix}*."
        last = prefix
        if len(cells[0]) > room:
            yield f"  {cells[0]}"
            cells = ["", *cells[1:]]
        name, *others = (f"{cell:>{size}}" for cell, size in zip(cells, sizes, strict=True))
        yield "  ".join(["", f"{cells[0]:<{len(name)}}", *others]).rstrip()


def _row(kind: Kind) -> tuple[str, list[str]]:
    """(all up to the first number, cells)"""
    head, star, tail = kind.name.partition("*.")
    prefix, name = (head, tail) if star else ("", kind.name)
    shapes, grids = (
        _few("x".join(map(str, x)) for x in y) for y in (kind.shapes, kind.scale_grids)
    )
    dtypes, scales = _few(kind.dtypes), _few(kind.scale_dtypes)
    return prefix, [name, f"{kind.count:,}", shapes, dtypes, scales, grids, _bytes(kind.num_bytes)]


def _few(values: Iterable[str]) -> str:
    first, *others = [*values] or [""]
    return f"{first} +{len(others)}" if others else first


def _anomalies(found: Inspection, width: int) -> Iterator[str]:
    """Paths are told from the checkpoint's own on, for its own is told above."""
    for anomaly in found.anomalies:
        yield from _wrapped(f"{anomaly.severity}: ", _headline(anomaly), width)
        for example in anomaly.examples:
            text = example.replace(f"{found.path.rstrip('/')}/", "")
            yield from _wrapped("    ", text, width)
        if anomaly.count > len(anomaly.examples):
            yield f"    ... and {anomaly.count - len(anomaly.examples):,} more"
    num_errors = sum(anomaly.severity == "error" for anomaly in found.anomalies)
    num_notes = len(found.anomalies) - num_errors
    verdict = "load_checkpoint refuses it" if num_errors else "nothing that load_checkpoint refuses"
    yield f"{num_errors} errors, {num_notes} notes: {verdict}"


def _headline(anomaly: Anomaly) -> str:
    text = f"{anomaly.rule}: {anomaly.kind}"
    if not anomaly.of_values:
        return text
    share = 100 * anomaly.num_values / anomaly.of_values
    return (
        f"{text}: {anomaly.num_values:,} of {anomaly.of_values:,} values ({share:.1f} %), in "
        f"{anomaly.count:,} tensors"
    )


def _wrapped(start: str, text: str, width: int) -> list[str]:
    """Names are not cut, however long they are."""
    return wrap(
        text,
        width,
        initial_indent=start,
        subsequent_indent=" " * (len(start) + 2 * start.isspace()),
        break_long_words=False,
        break_on_hyphens=False,
    )
