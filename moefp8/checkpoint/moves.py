"""A move: a piece of the source that becomes one tensor of the target, or two.

The two are an FP8 weight and its scales. E experts, H hidden, I intermediate.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..kernels import num_blocks
from .errors import CheckpointError
from .header import TORCH_DTYPES, Entry
from .names import scale_of_weight
from .plan import FP8


@dataclass(frozen=True)
class Move:
    """Bytes [begin, begin + num_bytes) of entry's file, as the tensor key of this shape.

    One that becomes FP8 is a matrix, or a stack of matrices whose rows are multiples of 128.
    """

    entry: Entry
    begin: int
    num_bytes: int
    key: str
    shape: tuple[int, ...]
    is_fp8: bool = False

    def outputs(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """(key, dtype, shape) of what it becomes; scales have one number per 128x128 block."""
        if not self.is_fp8:
            return [(self.key, self.entry.dtype, self.shape)]
        *stack, n, k = self.shape
        scale = (scale_of_weight(self.key), "F32", (*stack, num_blocks(n), num_blocks(k)))
        return [(self.key, FP8, self.shape), scale]

    def matrix(self) -> tuple[int, int]:
        """(N, K), of a stack as one matrix above the other."""
        *stack, n, k = self.shape
        return math.prod(stack) * n, k

    def num_output_bytes(self) -> int:
        sizes = ((TORCH_DTYPES[dtype].itemsize, shape) for _, dtype, shape in self.outputs())
        return sum(itemsize * math.prod(shape) for itemsize, shape in sizes)


def pieces(entry: Entry) -> Iterator[Move]:
    """The matrices of `X.experts.gate_up_proj` [E, 2I, H] or `X.experts.down_proj` [E, H, I].

    Two for each expert where gate and up lie above each other, under DeepSeek's names.
    """
    if not entry.num_bytes:  # it may claim any number of experts
        raise CheckpointError(f"{entry}: an empty stack cannot be quantized; skip it")
    module, _, name = entry.key.rpartition(".")
    num_experts, num_rows, num_columns = entry.shape
    names = ("gate_proj", "up_proj") if name == "gate_up_proj" else ("down_proj",)
    shape = (num_rows // len(names), num_columns)
    num_bytes = math.prod(shape) * TORCH_DTYPES[entry.dtype].itemsize
    begin = entry.begin
    for expert in range(num_experts):
        for piece in names:
            yield Move(entry, begin, num_bytes, f"{module}.{expert}.{piece}.weight", shape, True)
            begin += num_bytes


def in_shards(moves: Iterable[Move], max_bytes: int) -> Iterator[list[Move]]:
    """Fill one after the other; a weight and its scales are together."""
    shard: list[Move] = []
    size = 0
    for move in moves:
        num_bytes = move.num_output_bytes()
        if shard and size + num_bytes > max_bytes:
            yield shard
            shard, size = [], 0
        shard.append(move)
        size += num_bytes
    yield shard
