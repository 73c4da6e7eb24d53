"""A move makes one tensor of the target, or an FP8 weight and its scales, of pieces of the source.

E experts, H hidden, I intermediate.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ...kernels import num_blocks
from ...layers import Conversion
from ..errors import CheckpointError
from ..files.header import FP8, TORCH_DTYPES, Entry
from ..files.names import scale_of_weight

ONE_BY_ONE = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True)
class Piece:
    """num_bytes of entry's file from byte begin on; is_transposed: they hold a matrix [K, N]."""

    entry: Entry
    begin: int
    num_bytes: int
    is_transposed: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.entry.dtype]

    def num_rows(self, num_columns: int) -> int:
        """Count the rows of the matrix that the piece becomes."""
        return self.num_bytes // max(num_columns * self.dtype.itemsize, 1)


@dataclass(frozen=True)
class Move:
    """Pieces, one above the other, become the tensor `key` of this shape.

    In FP8, it is a matrix or a stack of matrices, each cut into blocks by itself; halves: 2 if gate
    and up, one above the other in a matrix, are cut by themselves. A piece begins with a block. Any
    other tensor is one piece, and is copied.
    """

    pieces: tuple[Piece, ...]
    key: str
    shape: tuple[int, ...]
    is_fp8: bool = True
    halves: int = 1

    @property
    def part_rows(self) -> int:
        """The rows of each part of an FP8 weight that is cut into blocks by itself."""
        return self.shape[-2] // self.halves

    @property
    def entry(self) -> Entry:
        """The first entry, which messages name."""
        return self.pieces[0].entry

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)

    def outputs(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Return (key, dtype, shape) of each tensor it makes; a 128x128 block has one scale."""
        if not self.is_fp8:
            return [(self.key, self.entry.dtype, self.shape)]
        *stack, _, k = self.shape
        grid = (*stack, self.halves * num_blocks(self.part_rows), num_blocks(k))
        return [(self.key, FP8, self.shape), (scale_of_weight(self.key), "F32", grid)]

    def num_output_bytes(self) -> int:
        return sum(TORCH_DTYPES[x].itemsize * math.prod(shape) for _, x, shape in self.outputs())


def cut(entry: Entry, num_pieces: int = 1, *, is_transposed: bool = False) -> tuple[Piece, ...]:
    """Cut entry into pieces of equal size."""
    size = entry.num_bytes // num_pieces
    begins = (entry.begin + number * size for number in range(num_pieces))
    return tuple(Piece(entry, begin, size, is_transposed) for begin in begins)


def whole(entry: Entry, is_fp8: bool = True) -> Move:
    """Move all of entry as it is."""
    return Move(cut(entry), entry.key, entry.shape, is_fp8)


def turned(entry: Entry) -> Move:
    """Move all of a matrix that is stored as [K, N]."""
    return Move(cut(entry, is_transposed=True), entry.key, entry.shape[::-1])


def apart(entry: Entry) -> Iterator[Move]:
    """Take `X.experts.gate_up_proj` [E, 2I, H] or `X.experts.down_proj` [E, H, I] apart.

    The matrices get DeepSeek's names; gate and up, one above the other, become two.
    """
    if not entry.num_bytes:  # it may claim any number of experts
        raise CheckpointError(f"{entry}: an empty stack cannot be quantized; skip it")
    module, _, name = entry.key.rpartition(".")
    num_experts, num_rows, num_columns = entry.shape
    names = ONE_BY_ONE[name]
    shape = (num_rows // len(names), num_columns)
    for number, piece in enumerate(cut(entry, num_experts * len(names))):
        expert, i = divmod(number, len(names))
        yield Move((piece,), f"{module}.{expert}.{names[i]}.weight", shape)


Moves = dict[str, list[Move]]  # key -> its moves; none if the move of another key takes it
Selected = tuple[str, Moves, Conversion]  # basis, moves, and modules
