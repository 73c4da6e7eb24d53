"""E4M3 numbers, their scale blocks, and the memory layout of the scales of activations.

A scale block is 1x128 (activations) or 128x128 (weights), written rows x columns. E4M3 is
`torch.float8_e4m3fn`: largest value 448, no infinity.
"""

from collections.abc import Sequence

import torch

BLOCK = 128
E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
MIN_AMAX = 1e-4  # DeepSeek-V3's floor: a block of zeros still has a scale to divide by
MIN_GRADIENT_AMAX = 2.0**-60  # gradients are often below 1e-4: that floor would make them zeros

TMA_BYTES = 16  # addresses and row pitches are multiples of it, where TMA loads or stores


def ceil_div(x: int, y: int) -> int:
    return (x + y - 1) // y


def round_up(x: int, multiple: int) -> int:
    return ceil_div(x, multiple) * multiple


def round_up_to_tma(columns: int, element_size: int) -> int:
    """The smallest row pitch for TMA, in elements; `element_size` in bytes divides `TMA_BYTES`."""
    return round_up(columns, TMA_BYTES // element_size)


def num_blocks(size: int) -> int:
    """How many blocks of 128 cover `size`."""
    return ceil_div(size, BLOCK)


def zero_padded(x: torch.Tensor, axis: int, multiple: int = BLOCK) -> torch.Tensor:
    """x with zeros after it, so that `multiple` divides the axis; x itself if it does already.

    Any axis may be empty; `torch.nn.functional.pad` of torch 2.8 refuses one that it adds 0 to.
    """
    missing = -x.shape[axis] % multiple
    if not missing:
        return x
    shape = [*x.shape]
    shape[axis] = missing
    return torch.cat([x, x.new_zeros(shape)], axis)


def empty_tma_aligned(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """An uninitialised fp32 tensor [..., M, K/128] in the memory order that TMA loads need.

    M is the contiguous axis, and every column starts at a multiple of 16 bytes: the strides are
    (..., 1, M rounded up to 4).
    """
    *batch, m, k_blocks = shape
    pitch = round_up_to_tma(m, torch.float32.itemsize)
    strides = [1, pitch]
    size = k_blocks * pitch
    for extent in reversed(batch):
        strides.insert(0, size)
        size = size * extent
    return torch.empty_strided(tuple(shape), tuple(strides), dtype=torch.float32, device=device)


def tma_aligned(scale_inv: torch.Tensor) -> torch.Tensor:
    """A copy of fp32 `scale_inv` [..., M, K/128] in the memory order of `empty_tma_aligned`."""
    return empty_tma_aligned(scale_inv.shape, scale_inv.device).copy_(scale_inv)


def e4m3_to_float(x: torch.Tensor) -> torch.Tensor:
    """Every E4M3 code, NaN included, as the fp32 number it stands for.

    Equal to `x.float()`, and 3 times as fast on a CPU, where PyTorch casts one element at a time:
    the seven magnitude bits of E4M3 (bias 7) are the upper magnitude bits of FP16 (bias 15), so a
    shift gives the number divided by 2**8.
    """
    bits = x.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    # Code 0x7f is NaN: adding 0x80 to its magnitude 0x3f80, and to no other, carries into bit 14.
    nan = bits.bitwise_and(0x3FFF).add_(0x80).bitwise_and_(0x4000)
    return bits.bitwise_or_(nan).view(torch.float16).float().mul_(2.0**8)


# ---- Division by a number that only the host knows, in kernels ----


def divisor_of(value: int) -> dict[str, int]:
    """The fields of `Divisor` in divisor.cuh: `n // value == n * magic >> shift` for n < 2**31."""
    shift = 31 + (value - 1).bit_length()
    return {"value": value, "magic": ceil_div(1 << shift, value), "shift": shift}
