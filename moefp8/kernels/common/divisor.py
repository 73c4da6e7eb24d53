"""Division by a number that only the host knows, for kernels."""

import ctypes
from ctypes import c_uint32

from .blocks import ceil_div


class Divisor(ctypes.Structure):
    """`Divisor` in divisor.cuh: `n // value == n * magic >> shift` for every n below 2**31."""

    _fields_ = (("value", c_uint32), ("magic", c_uint32), ("shift", c_uint32))

    @classmethod
    def of(cls, value: int) -> "Divisor":
        shift = 31 + (value - 1).bit_length()
        return cls(value, ceil_div(1 << shift, value), shift)
