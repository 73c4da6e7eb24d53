"""What a checkpoint holds, by the names of its tensors: weights, their scales, what is left out."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..files.config import BLOCK, block_sizes, is_leftover
from ..files.header import Entry
from ..files.names import canonical, folded, weight_of_scale
from ..files.source import Scan

FUSED_GATE_UP = "gate_up_proj"


@dataclass(frozen=True)
class Contents:
    """The tensors of a checkpoint that can be read.

    weights: canonical name -> tensor that is no scale; scales: canonical name of a weight -> its
    scale; doubles: tensors whose canonical name another has already; named: canonical names of all
    keys that headers or the index contain, readable or not; kept: the names of weights among them
    that a load takes, which leaves out MTP layers and rotary tables.
    """

    scan: Scan
    weights: dict[str, Entry]
    scales: dict[str, Entry]
    doubles: tuple[tuple[Entry, Entry], ...]
    named: frozenset[str]
    kept: tuple[str, ...]

    @property
    def config(self) -> dict[str, Any]:
        return self.scan.source.config

    def is_left_out(self, entry: Entry) -> bool:
        return entry.key in self._left_out

    @cached_property
    def _left_out(self) -> frozenset[str]:
        return frozenset(key for key in self.scan.source.entries if is_leftover(self.config, key))

    def has_power_of_two_scales(self) -> bool:
        """Whether config.json promises them; DeepSeek-V3.1 does, and its o_proj has others."""
        quantization = self.config.get("quantization_config")
        return isinstance(quantization, dict) and quantization.get("scale_fmt") == "ue8m0"

    def block(self) -> tuple[int, int]:
        """Return the block of config.json if it says one that can be meant, else 128 x 128."""
        found = block_sizes(self.config)
        block = found[0] if found and all(each == found[0] for each in found) else BLOCK
        is_block = isinstance(block, list) and len(block) == 2
        if not is_block or not all(type(size) is int and size > 0 for size in block):
            block = BLOCK
        return block[0], block[1]


def contents_of(scan: Scan) -> Contents:
    weights: dict[str, Entry] = {}
    scales: dict[str, Entry] = {}
    doubles = []
    named = frozenset(canonical(key) for key in scan.named)
    for key, entry in scan.source.entries.items():
        weight = weight_of_scale(key)
        if weight and key.endswith(".scale") and canonical(weight) not in named:
            weight = None  # a tensor of its own, such as Gemma 4's routers have
        names = weights if weight is None else scales
        name = canonical(key if weight is None else weight)
        if name in names:
            doubles.append((entry, names[name]))
        else:
            names[name] = entry
    kept = tuple(
        name
        for name in sorted(named)
        if weight_of_scale(name) is None and not is_leftover(scan.source.config, name)
    )
    return Contents(scan, weights, scales, tuple(doubles), named, kept)


@dataclass(frozen=True)
class Kind:
    """All tensors whose names differ in numbers alone.

    shapes, dtypes, scale_dtypes, scale_grids: each that occurs, once. num_bytes: the tensors and
    their scales have so many.
    """

    name: str
    count: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    scale_dtypes: tuple[str, ...]
    scale_grids: tuple[tuple[int, ...], ...]
    num_bytes: int


def kinds_of(contents: Contents) -> tuple[Kind, ...]:
    """Sort what a load takes into kinds; scales without a weight are a kind of their own."""
    groups: dict[str, list[tuple[Entry, Entry | None]]] = {}
    for name, entry in contents.weights.items():
        if not contents.is_left_out(entry):
            groups.setdefault(folded(name), []).append((entry, contents.scales.get(name)))
    for name, scale in contents.scales.items():
        if name not in contents.weights and not contents.is_left_out(scale):
            groups.setdefault(folded(scale.key), []).append((scale, None))
    return tuple(_kind(name, pairs) for name, pairs in sorted(groups.items()))


def _kind(name: str, pairs: list[tuple[Entry, Entry | None]]) -> Kind:
    entries = [entry for entry, _ in pairs]
    scales = [scale for _, scale in pairs if scale is not None]
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

    name: it is canonical; gate and up in one tensor have whole blocks each.
    """
    if len(shape) not in (2, 3):
        return None
    *experts, rows, columns = shape
    halves = 2 if name.endswith(FUSED_GATE_UP) and rows % 2 == 0 else 1
    num_rows = halves * -(-rows // (halves * block[0]))
    return (*experts, num_rows, -(-columns // block[1]))


def is_ambiguous(name: str, shape: tuple[int, ...], block: tuple[int, int]) -> bool:
    """Whether the scales of gate and up in one tensor do not tell how they are cut.

    They are then as many as for one tensor of all rows, of which one block holds rows of both.
    """
    if not name.endswith(FUSED_GATE_UP) or len(shape) != 3 or shape[1] % (2 * block[0]) == 0:
        return False
    return grid_of(name, shape, block) == grid_of("", shape, block)


def readings_of(name: str, shape: tuple[int, ...], grid: tuple[int, ...]) -> Iterator[str]:
    """Yield what the scales of a weight can be if the expected blocks do not fit, likeliest first.

    Squares come before other blocks.
    """
    if math.prod(grid) == 1:
        yield "one for the tensor"
    if grid in (shape[:-1], (*shape[:-1], 1)):
        yield "one for each channel"
    sizes = (128, 64, 32, 256, 16, 512, 1)
    blocks = sorted(((n, k) for n in sizes for k in sizes), key=lambda block: block[0] != block[1])
    for block in blocks:
        if grid_of(name, shape, block) == grid:
            yield f"blocks of {list(block)}"
