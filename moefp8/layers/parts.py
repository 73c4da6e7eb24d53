"""Which part of a whole layer a module holds: notes that `shard` leaves and checkpoints read.

An axis is cut into [begin, end) for each rank. FP8 weights have a scale for each block of 128, so
what is held begins where a block does: zeros (`padding`, at most 127) stand for the entries of
other ranks in front of `begin`, and the scales of all blocks that are touched are held as stored.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from torch import nn

from ..kernels import BLOCK, num_blocks

_ATTRIBUTE = "_moefp8_parts"
Index = tuple[int | slice, ...]


@dataclass(frozen=True)
class Part:
    """[begin, end) of `total` entries along an axis; in memory, `padding` zeros come before them.

    num_halves: 2 where gate and up lie one behind the other, each cut like this.
    """

    begin: int
    end: int
    total: int
    padding: int = 0
    num_halves: int = 1

    @property
    def size(self) -> int:
        """Of the axis here."""
        return self.num_halves * (self.padding + self.end - self.begin)

    @property
    def whole_size(self) -> int:
        return self.num_halves * self.total

    def of_blocks(self) -> "Part":
        """The blocks that these entries touch, each half being cut into blocks by itself."""
        blocks = self.begin // BLOCK, num_blocks(self.end), num_blocks(self.total)
        return Part(*blocks, num_halves=self.num_halves)

    def spans(self) -> Iterator[tuple[slice, slice]]:
        """(place in the whole, place here) of each half."""
        size, width = self.size // self.num_halves, self.end - self.begin
        for half in range(self.num_halves):
            first = half * self.total + self.begin
            last = (half + 1) * size
            yield slice(first, first + width), slice(last - width, last)


def is_stacked(module: nn.Module) -> bool:
    """Experts as [E, 2I, H] and [E, H, I], gate rows first; FP8 (ours) or not (transformers')."""
    stacks = [module._parameters.get(name) for name in ("gate_up_proj", "down_proj")]
    return (
        all(stack is not None and stack.dim() == 3 for stack in stacks)
        and not getattr(module, "is_transposed", False)
        and getattr(module, "is_concatenated", True)
    )


Parts = Mapping[int, Part]  # by axis; other axes are whole


def parts_of(module: nn.Module) -> Mapping[str, Parts]:
    """By name of a parameter; empty for a module that is whole.

    Of a parameter that is noted and None, all is elsewhere. A plain dict: deepcopy and pickle
    keep it.
    """
    parts: Mapping[str, Parts] = module.__dict__.get(_ATTRIBUTE, {})
    return parts


def note_parts(module: nn.Module, parts: Mapping[str, Parts]) -> None:
    """Add to what is noted of `module`."""
    noted = {name: dict(known) for name, known in parts_of(module).items()}
    for name, added in parts.items():
        noted.setdefault(name, {}).update(added)
    setattr(module, _ATTRIBUTE, noted)


def local_shape(shape: Sequence[int], parts: Parts) -> tuple[int, ...]:
    return tuple(parts[axis].size if axis in parts else n for axis, n in enumerate(shape))


def whole_shape(shape: Sequence[int], parts: Parts) -> tuple[int, ...]:
    return tuple(parts[axis].whole_size if axis in parts else n for axis, n in enumerate(shape))


def boxes(shape: Sequence[int], parts: Parts) -> Iterator[tuple[tuple[slice, slice], ...]]:
    """(place in the whole, place here) along every axis, of each piece that is in one piece.

    shape: of the tensor here, or of the whole; axes that are not cut have the same size in both.
    """
    spans = (
        parts[axis].spans() if axis in parts else [(slice(0, n), slice(0, n))]
        for axis, n in enumerate(shape)
    )
    return product(*spans)


def paddings(parts: Parts) -> Iterator[Index]:
    """Where a tensor must be zero."""
    for axis, part in parts.items():
        for _, here in part.spans():
            if part.padding:
                yield (*[slice(None)] * axis, slice(here.start - part.padding, here.start))


def overlaps(shape: Sequence[int], parts: Parts, index: Index) -> Iterator[tuple[Index, Index]]:
    """(place in whole[index], place here) of all that a tensor of `shape` here holds of it."""
    whole = whole_shape(shape, parts)
    for box in boxes(shape, parts):
        there: list[slice] = []
        here: list[int | slice] = []
        for axis, (of_whole, of_here) in enumerate(box):
            wanted = index[axis] if axis < len(index) else slice(None)
            first, last = _bounds(wanted, whole[axis])
            start, stop = max(first, of_whole.start), min(last, of_whole.stop)
            if start >= stop and first < last:
                break
            moved = of_here.start - of_whole.start
            if isinstance(wanted, slice):
                there.append(slice(start - first, stop - first))
                here.append(slice(start + moved, stop + moved))
            else:
                here.append(start + moved)
        else:
            yield tuple(there), tuple(here)


def _bounds(index: int | slice, size: int) -> tuple[int, int]:
    if isinstance(index, slice):
        first, last, _ = index.indices(size)
        return first, last
    return index, index + 1
