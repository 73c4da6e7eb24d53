"""Matrices for TMA: whether it can address them, and copies for those that it cannot.

A matrix is [rows, columns]; several of one shape are [matrices, rows, columns]. TMA can address
them if columns are contiguous, addresses and both strides are multiples of 16 bytes, and rows do
not overlap.
"""

from collections.abc import Sequence

import torch

from .blocks import TMA_BYTES, round_up_to_tma


def fits(x: torch.Tensor) -> bool:
    """Whether TMA can address x."""
    return can_address(x.shape, x.stride(), x.element_size(), x.data_ptr())


def can_address(
    shape: Sequence[int], strides: Sequence[int], element_size: int, address: int
) -> bool:
    """Whether TMA can address matrices of this shape there; strides are in elements."""
    columns, pitch = shape[-1], pitch_of(shape, strides, element_size)
    if columns > 1 and strides[-1] != 1:
        return False
    if address % TMA_BYTES or pitch * element_size % TMA_BYTES or pitch < columns:
        return False
    if len(shape) == 2 or shape[0] == 1:
        return True
    return strides[0] > 0 and strides[0] * element_size % TMA_BYTES == 0


def empty_fitting(x: torch.Tensor) -> torch.Tensor:
    """Uninitialised memory for a copy of x that fits."""
    *rows, columns = x.shape
    return x.new_empty(*rows, round_up_to_tma(columns, x.element_size()))[..., :columns]


def fitting(x: torch.Tensor) -> torch.Tensor:
    """x itself, or a copy that fits."""
    return x if fits(x) else empty_fitting(x).copy_(x)


def with_strides_of(like: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """x itself, or a copy with the strides of `like`, for a kernel that takes these for both.

    If `like` is aligned, so is the result.
    """
    has_strides = x.stride() == like.stride()
    if has_strides and (x.data_ptr() % TMA_BYTES == 0 or like.data_ptr() % TMA_BYTES):
        return x
    return torch.empty_strided(x.shape, like.stride(), dtype=x.dtype, device=x.device).copy_(x)


def pitch_of(shape: Sequence[int], strides: Sequence[int], element_size: int) -> int:
    """The pitch of rows, in elements; the stride of a single row has no meaning."""
    return strides[-2] if shape[-2] > 1 else round_up_to_tma(shape[-1], element_size)
