"""Show what a checkpoint holds and what is wrong with it, with no model and no GPU.

Headers, config.json and all scales are read, but weights only if --weights asks for it, or if
nothing else tells how gate and up were cut into blocks. A checkpoint that is not FP8 is held
against the model that transformers builds, without weights, to tell whether `quantize` takes it.
The status is 1 if there is an error, which is what load_checkpoint refuses; a note is none.
"""

import argparse
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from textwrap import wrap
from typing import Any

from ..checkpoint import CheckpointError, Inspection, inspect_checkpoint
from ..checkpoint.errors import printable
from ..checkpoint.files.source import open_source
from ..checkpoint.inspect.contents import Kind
from ..checkpoint.inspect.inspect import Amount
from ..checkpoint.quantize.selection import select
from .options import with_options

_UNITS = "KiB", "MiB", "GiB", "TiB"
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
    """Yield the whole report, for people, in lines of at most width where names allow it."""
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
        yield "FP8", f"none, this is not an FP8 checkpoint; {_advice(found.path)}"
    for amount in found.dtypes:
        yield "dtype", f"{amount.name}: {_amount(amount)}"
    num_files = len(found.files)
    yield "total", f"{num_files} file{'s' * (num_files != 1)}: {_amount(*found.files)}"


def _advice(path: str) -> str:
    """Say whether `quantize` takes a checkpoint: it selects what would become FP8, and stops."""
    try:
        select(open_source(path, "nothing was selected"))
    except CheckpointError as error:
        headline, *problems = with_options(str(error), ["skip"]).splitlines()
        return f"`moefp8 quantize` refuses it: {(problems or [headline])[0].removeprefix('  - ')}"
    return "`moefp8 quantize` makes one of it"


def _amount(*amounts: Amount) -> str:
    count, num_bytes = sum(x.count for x in amounts), sum(x.num_bytes for x in amounts)
    return f"{count:,} tensors, {_bytes(num_bytes)}"


def _bytes(num_bytes: int) -> str:
    power = min(max(num_bytes.bit_length() - 1, 0) // 10, len(_UNITS))
    return f"{num_bytes / 1024**power:.1f} {_UNITS[power - 1]}" if power else f"{num_bytes} B"


def _table(kinds: Iterable[Kind], width: int) -> Iterator[str]:
    """Put kinds of one prefix (`model.layers.*.`) under it; a long name has a line of its own."""
    rows = [("", _HEAD), *sorted(map(_row, kinds), key=lambda row: row[0])]
    sizes = [max(map(len, column)) for column in zip(*(cells for _, cells in rows), strict=True)]
    room = max(_MIN_NAME, width - sum(sizes[1:]) - 2 * len(sizes))
    name_size, last = min(sizes[0], room), ""
    for prefix, (name, *cells) in rows:
        if prefix != last:
            yield f"{prefix}*."
        last = prefix
        if len(name) > room:
            yield f"  {name}"
            name = ""
        others = (f"{cell:>{size}}" for cell, size in zip(cells, sizes[1:], strict=True))
        yield "  ".join(["", f"{name:<{name_size}}", *others]).rstrip()


def _row(kind: Kind) -> tuple[str, list[str]]:
    """Return (all up to the first number, cells)."""
    head, star, tail = kind.name.partition("*.")
    prefix, name = (head, tail) if star else ("", kind.name)
    several = map(_few, (kind.shapes, kind.dtypes, kind.scale_dtypes, kind.scale_grids))
    return prefix, [name, f"{kind.count:,}", *several, _bytes(kind.num_bytes)]


def _few(values: Sequence[Any]) -> str:
    """Show the first dtype or shape, and how many others there are."""
    first, *others = values or ("",)
    text = first if isinstance(first, str) else "x".join(map(str, first))
    return f"{text} +{len(others)}" if others else text


def _anomalies(found: Inspection, width: int) -> Iterator[str]:
    """Show anomalies, with paths from the checkpoint's own on, which is told above."""
    for x in found.anomalies:
        text = f"{x.rule}: {x.kind}"
        if x.of_values:
            share = f"{100 * x.num_values / x.of_values:.1f} %"
            text += (
                f": {x.num_values:,} of {x.of_values:,} values ({share}), in {x.count:,} tensors"
            )
        yield from _wrapped(f"{x.severity}: ", text, width)
        for example in x.examples:
            yield from _wrapped("    ", example.replace(f"{found.path.rstrip('/')}/", ""), width)
        if x.count > len(x.examples):
            yield f"    ... and {x.count - len(x.examples):,} more"
    num_errors = sum(x.severity == "error" for x in found.anomalies)
    num_notes = len(found.anomalies) - num_errors
    verdict = "load_checkpoint refuses it" if num_errors else "nothing that load_checkpoint refuses"
    yield f"{num_errors} errors, {num_notes} notes: {verdict}"


def _wrapped(start: str, text: str, width: int) -> list[str]:
    """Break text into lines, but no name, however long it is."""
    return wrap(
        text,
        width,
        initial_indent=start,
        subsequent_indent=" " * (len(start) + 2 * start.isspace()),
        break_long_words=False,
        break_on_hyphens=False,
    )
