"""Which part of a whole layer a module holds: notes that `shard` leaves and checkpoints read.

An axis is cut into [begin, end) for each rank. FP8 weights have a scale for each block, so a rank's
tensor begins where a block does: zeros (`padding`, fewer than a block) take the place of other
ranks' entries before `begin`. The rank holds the whole's scales of every block with its entries.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import nn

from ..kernels.common.blocks import ceil_div

_ATTRIBUTE = "_moefp8_parts"
Index = tuple[int | slice, ...]


@dataclass(frozen=True)
class Part:
    """[begin, end) of `total` entries along an axis; in memory, `padding` zeros come before them.

    num_halves is 2 where gate and up, each cut like this, are stored one after the other.
    """

    begin: int
    end: int
    total: int
    padding: int = 0
    num_halves: int = 1

    @property
    def size(self) -> int:
        """The length of the axis in memory."""
        return self.num_halves * (self.padding + self.end - self.begin)

    @property
    def whole_size(self) -> int:
        return self.num_halves * self.total

    def in_blocks(self, block: int) -> "Part":
        """The blocks that these entries are in; each half has blocks of its own."""
        first = (self.begin - self.padding) // block
        blocks = first, ceil_div(self.end, block), ceil_div(self.total, block)
        return Part(*blocks, num_halves=self.num_halves)

    def spans(self) -> Iterator[tuple[slice, slice]]:
        """(place in the whole, place here) of each half."""
        size, width = self.size // self.num_halves, self.end - self.begin
        for half in range(self.num_halves):
            first = half * self.total + self.begin
            last = (half + 1) * size
            yield slice(first, first + width), slice(last - width, last)


def is_stacked(module: nn.Module) -> bool:
    """Whether a module has experts as [E, 2I, H] and [E, H, I], gate rows first, in FP8 or not."""
    stacks = [module._parameters.get(name) for name in ("gate_up_proj", "down_proj")]
    return (
        all(stack is not None and stack.dim() == 3 for stack in stacks)
        and not getattr(module, "is_transposed", False)
        and getattr(module, "is_concatenated", True)
    )


Parts = Mapping[int, Part]  # axis -> its part; other axes are whole


def parts_of(module: nn.Module) -> Mapping[str, Parts]:
    """The parts of a module's parameters by name; empty for a module that is whole.

    A parameter that is noted and None is on other ranks.
    """
    return module.__dict__.get(_ATTRIBUTE, {})


def note_parts(module: nn.Module, parts: Mapping[str, Parts]) -> None:
    """Add `parts` to the notes of `module`: a plain dict, which deepcopy and pickle keep."""
    noted = {name: dict(known) for name, known in parts_of(module).items()}
    for name, added in parts.items():
        noted.setdefault(name, {}).update(added)
    setattr(module, _ATTRIBUTE, noted)


def parts_of_plain(module: nn.Module) -> dict[str, Parts]:
    """The parts of the module's copy without FP8, which has no scales and no padding."""
    return {
        name: {axis: replace(part, padding=0) for axis, part in parts.items()}
        for name, parts in parts_of(module).items()
        if not name.endswith("_scale_inv")
    }


def without_padding(module: nn.Module, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The entries of the whole that are in `tensor`, which has the shape of module.name."""
    for axis, part in parts_of(module).get(name, {}).items():
        halves = tensor.unflatten(axis, (part.num_halves, part.size // part.num_halves))
        own = halves.narrow(axis + 1, part.padding, part.end - part.begin)
        tensor = own.flatten(axis, axis + 1)
    return tensor.contiguous()


def local_shape(shape: Sequence[int], parts: Parts) -> tuple[int, ...]:
    return tuple(parts[axis].size if axis in parts else n for axis, n in enumerate(shape))


def whole_shape(shape: Sequence[int], parts: Parts) -> tuple[int, ...]:
    return tuple(parts[axis].whole_size if axis in parts else n for axis, n in enumerate(shape))


def boxes(shape: Sequence[int], parts: Parts) -> Iterator[tuple[tuple[slice, slice], ...]]:
    """(place in the whole, place here) along every axis, for each piece that is contiguous in both.

    `shape` may be the shape here or the whole shape: only axes that are not cut count.
    """
    spans = (
        parts[axis].spans() if axis in parts else [(slice(0, n), slice(0, n))]
        for axis, n in enumerate(shape)
    )
    return product(*spans)


def paddings(parts: Parts) -> Iterator[Index]:
    """The indices of the padding here, which must be zero."""
    for axis, part in parts.items():
        for _, here in part.spans():
            if part.padding:
                yield (*[slice(None)] * axis, slice(here.start - part.padding, here.start))


def overlaps(shape: Sequence[int], parts: Parts, index: Index) -> Iterator[tuple[Index, Index]]:
    """(place in whole[index], place here) for each piece that a tensor of `shape` here holds."""
    wanted = [*index, *[slice(None)] * (len(shape) - len(index))]
    bounds = [
        x.indices(n)[:2] if isinstance(x, slice) else (x, x + 1)
        for x, n in zip(wanted, whole_shape(shape, parts), strict=True)
    ]
    for box in boxes(shape, parts):
        there: list[slice] = []
        here: list[int | slice] = []
        for x, (first, last), (whole, local) in zip(wanted, bounds, box, strict=True):
            start = max(first, whole.start)
            stop = max(start, min(last, whole.stop))
            if start == stop and first < last:
                break
            moved = local.start - whole.start
            if isinstance(x, slice):
                there.append(slice(start - first, stop - first))
                here.append(slice(start + moved, stop + moved))
            else:
                here.append(start + moved)
        else:
            yield tuple(there), tuple(here)
