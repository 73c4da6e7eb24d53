"""Division by a number that only the host knows, for kernels."""

from .blocks import ceil_div


def divisor_of(value: int) -> dict[str, int]:
    """The fields of `Divisor` in divisor.cuh: `n // value == n * magic >> shift` for n < 2**31."""
    shift = 31 + (value - 1).bit_length()
    return {"value": value, "magic": ceil_div(1 << shift, value), "shift": shift}
