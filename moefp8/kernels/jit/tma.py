"""Tensor maps: how the tensor memory accelerator (TMA) finds a box of a tensor."""

import ctypes
from collections.abc import Iterable
from ctypes import c_uint32, c_uint64
from functools import lru_cache
from typing import NamedTuple

import torch

from .driver import Driver, current_driver

# CUtensorMapDataType of cuda.h. TMA copies e4m3 as bytes.
_DATA_TYPES = {torch.float8_e4m3fn: 0, torch.uint8: 0, torch.float32: 7, torch.bfloat16: 9}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_INTERLEAVE_NONE = 0
_L2_PROMOTIONS = {64: 1, 128: 2, 256: 3}
_FILL_ZEROS = 0
MAP_BYTES = 128
_ALIGNMENT = 128  # cuda.h asks for 64 in CUDA 12 and for 128 in CUDA 13
_SOME_ADDRESS, _OTHER_ADDRESS = 1 << 20, 3 << 20


class Box(NamedTuple):
    """A tensor map without its address: how TMA moves boxes of a tensor.

    shape, box: elements, innermost first; strides_bytes: those of all but the innermost dimension.
    swizzle_bytes: 0, 32, 64 or 128.
    l2_bytes: what the L2 cache fetches from memory at a time: 64, 128 or 256.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    swizzle_bytes: int
    l2_bytes: int = 256


class TensorMaps(NamedTuple):
    """One CUtensorMap, or several in a row, as one argument of a kernel.

    They hold no tensor's address: each call of a launch writes its own.

    data: their bytes.
    begin_with_address: whether the first 8 bytes of a map are its address, and nothing else depends
        on it. CUDA calls a map opaque, so `_encode` asks `cuTensorMapReplaceAddress`.
    """

    data: bytes
    begin_with_address: bool


def tensor_map(spec: Box) -> TensorMaps:
    """The map of a tensor; beyond its edges, zeros are read.

    Raises JitError if a rule of the TMA is broken (CUDA driver API, cuTensorMapEncodeTiled), and
    without a driver.
    """
    return _encode(current_driver(), spec)


def join_maps(maps: Iterable[TensorMaps]) -> TensorMaps:
    """One argument of a kernel: a struct of these maps."""
    data, flags = zip(*maps, strict=True)
    return TensorMaps(b"".join(data), all(flags))


@lru_cache(4096)
def _encode(driver: Driver, spec: Box) -> TensorMaps:
    dtype, shape, strides_bytes, box, swizzle_bytes, l2_bytes = spec
    rank = len(shape)
    device_index = driver.current_device()  # any GPU will do
    encode = driver.library.cuTensorMapEncodeTiled
    replace = driver.library.cuTensorMapReplaceAddress
    storage = ctypes.create_string_buffer(MAP_BYTES + _ALIGNMENT)
    address = -(-ctypes.addressof(storage) // _ALIGNMENT) * _ALIGNMENT
    arguments = (
        address,
        _DATA_TYPES[dtype],
        rank,
        _SOME_ADDRESS,
        (c_uint64 * rank)(*shape),
        (c_uint64 * rank)(*strides_bytes),
        (c_uint32 * rank)(*box),
        (c_uint32 * rank)(*[1] * rank),  # every element of a box, not each second, ...
        _INTERLEAVE_NONE,
        _SWIZZLES[swizzle_bytes],
        _L2_PROMOTIONS[l2_bytes],
        _FILL_ZEROS,
    )
    result = driver.in_context(device_index, lambda: int(encode(*arguments)))
    if result:
        driver.check(result, f"tensor_map: {spec}")
    data = ctypes.string_at(address, MAP_BYTES)
    result = driver.in_context(device_index, lambda: int(replace(address, _OTHER_ADDRESS)))
    moved = _OTHER_ADDRESS.to_bytes(8, "little") + data[8:]
    begins = data[:8] == _SOME_ADDRESS.to_bytes(8, "little")
    return TensorMaps(data, not result and begins and ctypes.string_at(address, MAP_BYTES) == moved)
