"""Interleave the FFMAs of a promotion: some of them let another warp issue.

Promotion adds the products of the tensor cores to FP32 sums, in runs of `FFMA sum, product, scale,
sum`. No FFMA needs another, so one warp could issue a whole run on end, while a warp of another
warpgroup on the same scheduler waits to issue its next WGMMAs. An FFMA that yields lets that warp
issue in between. The operand cache is lost then, so its reuse bits are cleared, too.

NVRTC 12.9 and newer let every other FFMA yield, where a CTA has more than two warpgroups. NVRTC
12.8, which comes with torch 2.8 to 2.10, lets none. Fewer than every other are better than both:
`benchmarks/results/interleaving.json` says by how much.

An instruction has 128 bits. The upper 64 hold register C in bits 0 to 7, the stall in 41 to 44, the
yield bit in 45, which is 0 if it yields, and in 58 to 60 whether operands A, B and C stay in the
cache.
"""

import struct
from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from .elf import code_ranges

VERSION = 1  # changes with what `interleaved` does
_LEAST = 4  # FFMAs that make a run
_FFMA = 0x223  # all its operands are registers
_NO_REGISTER = 255  # RZ, which reads as zero
_SOURCE_C = (1 << 41) - 1  # register C with its modifiers, and those of A and B
_YIELD = 1 << 45
_REUSE_B, _REUSE = 1 << 59, 7 << 58


class _Instruction(NamedTuple):
    at: int  # its place in the image
    low: int
    high: int

    @property
    def is_promotion(self) -> bool:
        """An FFMA that adds to a register in place, without modifiers, whatever its predicate."""
        sum_in, sum_out = self.high & _SOURCE_C, self.low >> 16 & 0xFF
        return self.low & 0xFFF == _FFMA and sum_in == sum_out != _NO_REGISTER

    @property
    def factor(self) -> int:
        """Register B, the scale, which the next FFMA most often reads, too."""
        return self.low >> 32 & 0xFF


def interleaved(image: bytes, pattern: str) -> bytes:
    """A cubin in which the n-th FFMA of each run yields if the n-th digit of `pattern` is 0.

    `pattern` repeats. An FFMA that does not yield keeps operand B if the next one reads it.
    """
    patched = bytearray(image)
    for run in promotions(image):
        for i, x in enumerate(run):
            if pattern[i % len(pattern)] == "1":
                is_shared = i + 1 < len(run) and run[i + 1].factor == x.factor
                high = x.high | _YIELD | is_shared * _REUSE_B
            else:
                high = x.high & ~(_YIELD | _REUSE)
            struct.pack_into("<Q", patched, x.at + 8, high)
    return bytes(patched)


def promotions(image: bytes) -> Iterator[list[_Instruction]]:
    """Runs of promoting FFMAs with no other instruction in between."""
    for begin, end in code_ranges(image):
        words = struct.iter_unpack("<2Q", memoryview(image)[begin:end])
        instructions = (_Instruction(begin + 16 * i, *pair) for i, pair in enumerate(words))
        for are_promotions, neighbours in groupby(instructions, lambda x: x.is_promotion):
            run = list(neighbours)
            if are_promotions and len(run) >= _LEAST:
                yield run
