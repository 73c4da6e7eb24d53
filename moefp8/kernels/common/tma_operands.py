"""Matrices for TMA: they are checked, copied where it cannot address them, described for its maps.

A matrix is [rows, columns]; several of one shape are [matrices, rows, columns]. TMA can address
them if columns are contiguous, addresses and both strides are multiples of 16 bytes, and rows do
not overlap.
"""

import torch

from ..jit import Box
from .blocks import TMA_BYTES, round_up_to_tma


def fits(x: torch.Tensor) -> bool:
    """Whether TMA can address x."""
    columns = x.shape[-1]
    if columns > 1 and x.stride(-1) != 1:
        return False
    pitch, size = _pitch(x), x.element_size()
    if x.data_ptr() % TMA_BYTES or pitch * size % TMA_BYTES or pitch < columns:
        return False
    if x.ndim == 2 or x.shape[0] == 1:
        return True
    return x.stride(0) > 0 and x.stride(0) * size % TMA_BYTES == 0


def empty_fitting(x: torch.Tensor) -> torch.Tensor:
    """Uninitialised memory that fits, for what is in x."""
    *rows, columns = x.shape
    return x.new_empty(*rows, round_up_to_tma(columns, x.element_size()))[..., :columns]


def fitting(x: torch.Tensor) -> torch.Tensor:
    """x itself, or a copy that fits."""
    return x if fits(x) else empty_fitting(x).copy_(x)


def lying_as(like: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """x itself, or a copy with the strides of `like`, for a kernel that knows only these.

    Where `like` is aligned, so is what is returned.
    """
    alike = x.stride() == like.stride()
    if alike and (x.data_ptr() % TMA_BYTES == 0 or like.data_ptr() % TMA_BYTES):
        return x
    return torch.empty_strided(x.shape, like.stride(), dtype=x.dtype, device=x.device).copy_(x)


def box_of(x: torch.Tensor, box: tuple[int, int], swizzle_bytes: int, l2_bytes: int = 256) -> Box:
    """A `Box` of (columns, rows) of x, which fits."""
    pitch = _pitch(x)
    strides, boxes = [pitch], list(box)
    if x.ndim == 3:
        strides.append(x.stride(0) if x.shape[0] > 1 else pitch * x.shape[1])
        boxes.append(1)
    size = x.element_size()
    shape = tuple(reversed(x.shape))
    strides_bytes = tuple(y * size for y in strides)
    return Box(x.dtype, shape, strides_bytes, tuple(boxes), swizzle_bytes, l2_bytes)


def _pitch(x: torch.Tensor) -> int:
    """The pitch of the rows of x, in elements; the stride of a single row says nothing."""
    return x.stride(-2) if x.shape[-2] > 1 else round_up_to_tma(x.shape[-1], x.element_size())
