"""Division by a number that only the host knows, for kernels."""

from typing import NamedTuple

from .blocks import ceil_div


class Divisor(NamedTuple):
    """`Divisor` in divisor.cuh: `n // value == n * magic >> shift` for every n below 2**31."""

    value: int
    magic: int
    shift: int

    @classmethod
    def of(cls, value: int) -> "Divisor":
        shift = 31 + (value - 1).bit_length()
        return cls(value, ceil_div(1 << shift, value), shift)
