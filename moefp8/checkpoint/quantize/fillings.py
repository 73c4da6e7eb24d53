"""Find the rows of a checkpoint that fill a weight which transformers makes of several tensors.

A conversion of whole rows is run on the numbers of rows in place of the rows.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from ..files.header import TORCH_DTYPES, Entry
from ..model.skeleton import Skeleton, names_of, order_of
from ..model.slots import Slot
from .moves import Piece

_ENTRY = 1 << 40  # more than an entry has rows
_MOVE_ROWS = {  # others change values or the order of columns, which numbers do not show
    "Chunk",
    "Concatenate",
    "ErnieFuseAndSplitTextVisionExperts",
    "MergeModulelist",
    "SplitModulelist",
}


@dataclass(frozen=True)
class Filling:
    """Pieces that fill slot, one above the other. is_converted: they are not all of one entry.

    together: the modules that the same conversion fills, with this one.
    """

    slot: Slot
    pieces: tuple[Piece, ...]
    is_converted: bool = False
    together: frozenset[str] = frozenset()

    def entries(self) -> list[Entry]:
        return list({piece.entry.key: piece.entry for piece in self.pieces}.values())


def converted_fillings(
    entries: Iterable[Entry], skeleton: Skeleton, modules: Collection[str]
) -> Iterator[Filling]:
    """Yield the fillings of weights of modules that are made of rows of these entries.

    A weight that shares an entry with others, as a query cut out of a fused projection does, is
    left out, and so is a transposed weight.
    """
    candidates = (x for x in skeleton.inventory.slots.values() if x.module in modules)
    slots = {x.name: x for x in candidates if len(x.shape) >= 2}
    all_columns = {slot.shape[-1] for slot in slots.values()}
    for name, group in _groups(entries, skeleton).items():
        members = [entry for entry, _, _ in group]
        is_known = all(x.num_bytes and x.shape and x.shape[-1] in all_columns for x in members)
        made = _converted(name, group, skeleton) if is_known else {}
        together = frozenset(target.rpartition(".")[0] for target in made)
        for target, rows in made.items():
            pieces = _pieces(slots[target], rows, members) if target in slots else None
            if pieces is not None:
                yield Filling(slots[target], pieces, is_converted=True, together=together)


def _groups(
    entries: Iterable[Entry], skeleton: Skeleton
) -> dict[str, list[tuple[Entry, Any, str]]]:
    """Return the first name that entries become -> the entries, their steps and patterns.

    Entries are in transformers' order; those for which it has none are left out.
    """
    groups: dict[str, list[tuple[Entry, Any, str]]] = defaultdict(list)
    for entry in entries:
        if match := skeleton.conversion_of(entry.key):
            name, step, pattern = match
            groups[name].append((entry, step, pattern))
    for name, group in list(groups.items()):
        try:
            group.sort(key=lambda member: order_of(member[0].key))
        except ValueError:
            del groups[name]
    return groups


def _converted(
    name: str, group: list[tuple[Entry, Any, str]], skeleton: Skeleton
) -> dict[str, torch.Tensor]:
    """Return name -> row numbers for the tensors that transformers would make of group."""
    step = deepcopy(group[0][1])
    if not names_of(step) <= _MOVE_ROWS:
        return {}
    for number, (entry, _, pattern) in enumerate(group):
        shape = torch.Size((*entry.shape[:-1], 1))
        rows = torch.arange(shape.numel()).reshape(shape) + number * _ENTRY
        step.add_tensor(name, entry.key, pattern, rows)
    try:
        made = step.convert(name, model=skeleton.model, config=skeleton.model.config)
    except Exception:  # it may raise anything for experts that are missing, or of another shape
        return {}
    return made if all(isinstance(x, torch.Tensor) for x in made.values()) else {}


def _pieces(slot: Slot, rows: torch.Tensor, group: list[Entry]) -> tuple[Piece, ...] | None:
    """Return the pieces that fill slot, or None unless rows are all rows of their entries, once."""
    *leading, num_columns = slot.shape
    flat = rows.flatten()
    if list(rows.shape) != [*leading, 1] or len(flat.unique()) != len(flat):
        return None  # a transposed weight, or a part that is there twice
    begins = [0, *((flat.diff() != 1).nonzero().flatten() + 1).tolist()]
    pieces = []
    for begin, end in zip(begins, [*begins[1:], len(flat)], strict=True):
        number, row = divmod(int(flat[begin]), _ENTRY)
        entry = group[number]
        if entry.shape[-1] != num_columns:
            return None
        row_bytes = num_columns * TORCH_DTYPES[entry.dtype].itemsize
        pieces.append(Piece(entry, entry.begin + row * row_bytes, (end - begin) * row_bytes))
    whole = {piece.entry: piece.entry.num_bytes for piece in pieces}
    return tuple(pieces) if sum(x.num_bytes for x in pieces) == sum(whole.values()) else None
