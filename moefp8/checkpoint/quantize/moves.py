"""A move makes one tensor of the target, or an FP8 weight and its scales, of pieces of the source.

E experts, H hidden, I intermediate.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from ...kernels import num_blocks
from ..errors import CheckpointError
from ..files.header import FP8, TORCH_DTYPES, Entry
from ..files.names import scale_of_weight


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
        """Count the rows of the matrix that it becomes."""
        return self.num_bytes // max(num_columns * self.dtype.itemsize, 1)


@dataclass(frozen=True)
class Move:
    """Pieces, one above the other, become the tensor `key` of this shape.

    In FP8, that is a matrix, or a stack of matrices whose numbers of rows are multiples of 128; all
    of its pieces but the last have such numbers too. Any other tensor is one piece, and is copied.
    """

    pieces: tuple[Piece, ...]
    key: str
    shape: tuple[int, ...]
    is_fp8: bool = False

    @property
    def entry(self) -> Entry:
        """Return the first entry, where messages name one."""
        return self.pieces[0].entry

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)

    def outputs(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Return (key, dtype, shape) of what it becomes; a 128x128 block has one scale."""
        if not self.is_fp8:
            return [(self.key, self.entry.dtype, self.shape)]
        *stack, n, k = self.shape
        scale = (scale_of_weight(self.key), "F32", (*stack, num_blocks(n), num_blocks(k)))
        return [(self.key, FP8, self.shape), scale]

    def matrix(self) -> tuple[int, int]:
        """Return (N, K); a stack counts as one matrix above the other."""
        *stack, n, k = self.shape
        return math.prod(stack) * n, k

    def num_output_bytes(self) -> int:
        sizes = ((TORCH_DTYPES[dtype].itemsize, shape) for _, dtype, shape in self.outputs())
        return sum(itemsize * math.prod(shape) for itemsize, shape in sizes)


@dataclass
class Selected:
    """What becomes FP8, and what stays. basis: what told.

    moves: key -> what becomes of it; none for a key that goes into another's. swapped: what
    `convert` swaps; kept: module -> why it stays; experts: those of kept that are experts.
    homes: key of moves -> its module; unknown: keys of no module.
    """

    basis: str
    moves: dict[str, list[Move]] = field(default_factory=dict)
    swapped: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    experts: set[str] = field(default_factory=set)
    homes: dict[str, str] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)


def whole(entry: Entry, key: str, *, is_fp8: bool) -> Move:
    """Move all of entry as it is."""
    return Move((Piece(entry, entry.begin, entry.num_bytes),), key, entry.shape, is_fp8)


def transposed(entry: Entry) -> Move:
    """Move a matrix that is stored as [K, N]."""
    piece = Piece(entry, entry.begin, entry.num_bytes, is_transposed=True)
    return Move((piece,), entry.key, entry.shape[::-1], is_fp8=True)


def apart(entry: Entry) -> Iterator[Move]:
    """Take `X.experts.gate_up_proj` [E, 2I, H] or `X.experts.down_proj` [E, H, I] apart.

    The matrices get DeepSeek's names; gate and up, one above the other, become two.
    """
    if not entry.num_bytes:  # it may claim any number of experts
        raise CheckpointError(f"{entry}: an empty stack cannot be quantized; skip it")
    module, _, name = entry.key.rpartition(".")
    num_experts, num_rows, num_columns = entry.shape
    names = ("gate_proj", "up_proj") if name == "gate_up_proj" else ("down_proj",)
    shape = (num_rows // len(names), num_columns)
    cut = iter(_cut(entry, num_experts * len(names)))
    for expert in range(num_experts):
        for name in names:
            yield Move((next(cut),), f"{module}.{expert}.{name}.weight", shape, is_fp8=True)


def fused(gate: Entry, up: Entry, key: str, num_experts: int) -> Move:
    """Make [E, 2I, H] of gate and up, each [E * I, H] or [E, I, H]."""
    pairs = zip(_cut(gate, num_experts), _cut(up, num_experts), strict=True)
    *rows, num_columns = gate.shape
    shape = (num_experts, 2 * math.prod(rows) // num_experts, num_columns)
    return Move(tuple(piece for pair in pairs for piece in pair), key, shape, is_fp8=True)


def transposed_stack(down: Entry, key: str, num_experts: int) -> Move:
    """Make [E, H, I] of the transposes of matrices that are stored as [E * I, H]."""
    pieces = tuple(_cut(down, num_experts, is_transposed=True))
    rows, num_columns = down.shape
    return Move(pieces, key, (num_experts, num_columns, rows // num_experts), is_fp8=True)


def _cut(entry: Entry, num_pieces: int, *, is_transposed: bool = False) -> Iterator[Piece]:
    num_bytes = entry.num_bytes // num_pieces
    for number in range(num_pieces):
        yield Piece(entry, entry.begin + number * num_bytes, num_bytes, is_transposed)
