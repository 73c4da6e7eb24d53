"""Sort the tensors of a checkpoint by name: weights, their scales, and those a load leaves out."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from ..files.config import BLOCK, block_sizes, has_ambiguous_blocks, is_leftover, quantization_of
from ..files.header import Entry
from ..files.names import canonical, folded, split_expert, weight_of_scale
from ..files.source import Scan

_FUSED_GATE_UP = "gate_up_proj"


@dataclass(frozen=True)
class Contents:
    """The tensors of a checkpoint that can be read.

    weights: canonical name -> tensor that is no scale; scales: canonical name of a weight -> its
    scale; doubles: (tensor, an earlier one of its canonical name); named: canonical names of all
    keys that headers or the index contain, readable or not; kept: the names of weights among them
    that a load takes; left_out: keys that it leaves out, which are of MTP layers and rotary tables.
    """

    scan: Scan
    weights: dict[str, Entry]
    scales: dict[str, Entry]
    doubles: tuple[tuple[Entry, Entry], ...]
    named: frozenset[str]
    kept: tuple[str, ...]
    left_out: frozenset[str]

    @property
    def config(self) -> dict[str, Any]:
        return self.scan.source.config

    @property
    def quantization(self) -> dict[str, Any]:
        """The entry of config.json on quantization, or {} if it has none."""
        quantization = quantization_of(self.config)
        return quantization if isinstance(quantization, dict) else {}

    @cached_property
    def expert_numbers(self) -> dict[str, dict[str, set[int]]]:
        """Return `X.experts` -> `gate_proj.weight` -> the numbers of experts that have it."""
        numbers: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        for name in self.kept:
            if expert := split_expert(name):
                module, number = expert
                numbers[module][name.removeprefix(f"{module}.{number}.")].add(number)
        return numbers

    def block(self) -> tuple[int, int]:
        """Return the block of config.json if that is valid, else 128 x 128."""
        match sizes := block_sizes(self.config):
            case [[int(rows), int(columns)], *_] if min(rows, columns) > 0:
                if all(size == sizes[0] for size in sizes):
                    return rows, columns
        return BLOCK[0], BLOCK[1]


def contents_of(scan: Scan) -> Contents:
    weights: dict[str, Entry] = {}
    scales: dict[str, Entry] = {}
    doubles = []
    named = frozenset(canonical(key) for key in scan.named)
    config, entries = scan.source.config, scan.source.entries
    for key, entry in entries.items():
        weight = weight_of_scale(key)
        if weight and key.endswith(".scale") and canonical(weight) not in named:
            weight = None  # a tensor of its own, such as Gemma 4's routers have
        names = weights if weight is None else scales
        first = names.setdefault(canonical(weight or key), entry)
        if first is not entry:
            doubles.append((entry, first))
    kept = (name for name in sorted(named) if weight_of_scale(name) is None)
    return Contents(
        scan,
        weights,
        scales,
        tuple(doubles),
        named,
        kept=tuple(name for name in kept if not is_leftover(config, name)),
        left_out=frozenset(key for key in entries if is_leftover(config, key)),
    )


@dataclass(frozen=True)
class Kind:
    """All tensors whose names differ in numbers alone.

    shapes, dtypes, scale_dtypes, scale_grids: each that occurs, once. num_bytes: of the tensors
    and their scales.
    """

    name: str
    count: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    scale_dtypes: tuple[str, ...]
    scale_grids: tuple[tuple[int, ...], ...]
    num_bytes: int


def kinds_of(contents: Contents) -> tuple[Kind, ...]:
    """Sort the tensors that a load takes into kinds; scales without a weight have their own."""
    tensors: dict[str, list[Entry]] = defaultdict(list)
    scales: dict[str, list[Entry]] = defaultdict(list)
    for name, entry in contents.weights.items():
        if entry.key not in contents.left_out:
            tensors[folded(name)].append(entry)
            if name in contents.scales:
                scales[folded(name)].append(contents.scales[name])
    for name, scale in contents.scales.items():
        if name not in contents.weights and scale.key not in contents.left_out:
            tensors[folded(scale.key)].append(scale)
    return tuple(_kind(name, tensors[name], scales[name]) for name in sorted(tensors))


def _kind(name: str, entries: list[Entry], scales: list[Entry]) -> Kind:
    return Kind(
        name,
        len(entries),
        _once(entry.shape for entry in entries),
        _once(entry.dtype for entry in entries),
        _once(scale.dtype for scale in scales),
        _once(scale.shape for scale in scales),
        sum(entry.num_bytes for entry in [*entries, *scales]),
    )


def _once(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(values))


def grid_of(name: str, shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...] | None:
    """Return the shape of the scales of a weight [N, K] or [E, N, K]; None for other shapes.

    name: canonical; gate and up in one tensor have whole blocks each.
    """
    if len(shape) not in (2, 3):
        return None
    *experts, rows, columns = shape
    halves = 2 if name.endswith(_FUSED_GATE_UP) and rows % 2 == 0 else 1
    num_rows = halves * -(-rows // (halves * block[0]))
    return (*experts, num_rows, -(-columns // block[1]))


def is_ambiguous(name: str, shape: tuple[int, ...], block: tuple[int, int]) -> bool:
    """Whether the scales of gate and up in one tensor fit two cuts into blocks.

    There are then as many as for a cut of all rows, in which one block has rows of both.
    """
    is_fused = name.endswith(_FUSED_GATE_UP) and len(shape) == 3
    return is_fused and (shape[1] % 2 == 1 or has_ambiguous_blocks(shape[1] // 2, block[0]))


def readings_of(name: str, shape: tuple[int, ...], grid: tuple[int, ...]) -> Iterator[str]:
    """Yield the kinds of scales that fit a weight's shape and grid, likeliest first.

    Squares come before other blocks.
    """
    if math.prod(grid) == 1:
        yield "one for the tensor"
    if grid in (shape[:-1], (*shape[:-1], 1)):
        yield "one for each channel"
    sizes = (128, 64, 32, 256, 16, 512, 1)
    for block in sorted(product(sizes, sizes), key=lambda block: block[0] != block[1]):
        if grid_of(name, shape, block) == grid:
            yield f"blocks of {list(block)}"
