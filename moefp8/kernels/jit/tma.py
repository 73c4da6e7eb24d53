"""Tensor maps: how the tensor memory accelerator (TMA) finds a box of a tensor."""

import ctypes
from collections.abc import Sequence
from ctypes import c_uint32, c_uint64
from functools import lru_cache

import torch

from .driver import current_driver

# CUtensorMapDataType of cuda.h. TMA copies e4m3 as bytes.
_DATA_TYPES = {
    torch.float8_e4m3fn: 0,
    torch.uint8: 0,
    torch.float32: 7,
    torch.bfloat16: 9,
}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_INTERLEAVE_NONE = 0
_L2_PROMOTIONS = {64: 1, 128: 2, 256: 3}
_FILL_ZEROS = 0
MAP_BYTES = 128
_ALIGNMENT = 128  # cuda.h asks for 64 in CUDA 12 and for 128 in CUDA 13


class TensorMaps:
    """One CUtensorMap, or some behind each other, as one argument of a kernel.

    memory: their bytes.
    begin_with_address: whether the first 8 bytes of a map are its address, and nothing else depends
        on it. CUDA calls a map opaque, so this is found out by `cuTensorMapReplaceAddress`.
    """

    __slots__ = ("begin_with_address", "memory")

    def __init__(self, count: int) -> None:
        self.memory = (c_uint64 * (count * MAP_BYTES // 8))()
        self.begin_with_address = True


def tensor_map(
    address: int,
    dtype: torch.dtype,
    shape: Sequence[int],
    strides_bytes: Sequence[int],
    box: Sequence[int],
    swizzle_bytes: int,
    l2_bytes: int = 256,
) -> TensorMaps:
    """The map of a tensor at a device address, whose copies move boxes; zeros beyond its edges.

    shape, box: elements, innermost first; strides_bytes: of all but the innermost dimension.
    swizzle_bytes: 0, 32, 64 or 128.
    l2_bytes: what the L2 cache fetches from memory at a time: 64, 128 or 256.

    Raises ValueError or TypeError if a rule of the TMA is broken (CUDA driver API,
    cuTensorMapEncodeTiled), and JitError without a driver.
    """
    strides = tuple(strides_bytes)
    layout = _layout(dtype, tuple(shape), strides, tuple(box), swizzle_bytes, l2_bytes)
    return _encode(address, layout)


def tensor_map_array(maps: Sequence[TensorMaps]) -> TensorMaps:
    """One argument of a kernel: a struct of as many maps."""
    made = TensorMaps(len(maps))
    for i, x in enumerate(maps):
        ctypes.memmove(ctypes.byref(made.memory, i * MAP_BYTES), x.memory, MAP_BYTES)
    made.begin_with_address = all(x.begin_with_address for x in maps)
    return made


class _Layout:
    """All arguments of a map but the address, checked, as the driver wants them."""

    def __init__(
        self,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        strides_bytes: tuple[int, ...],
        box: tuple[int, ...],
        swizzle_bytes: int,
        l2_bytes: int,
    ) -> None:
        rank = len(shape)
        self.name = f"{dtype} {list(shape)}, strides {list(strides_bytes)} bytes, box {list(box)}"
        self.before_address = (_DATA_TYPES[dtype], rank)
        self.after_address = (
            (c_uint64 * rank)(*shape),
            (c_uint64 * rank)(*strides_bytes),
            (c_uint32 * rank)(*box),
            (c_uint32 * rank)(*[1] * rank),  # every element of a box, not each second, ...
            _INTERLEAVE_NONE,
            _SWIZZLES[swizzle_bytes],
            _L2_PROMOTIONS[l2_bytes],
            _FILL_ZEROS,
        )


def _encode(address: int, layout: _Layout) -> TensorMaps:
    _require("address must be a multiple of 16 bytes", address % 16 == 0, f"{address:#x}")
    driver = current_driver()
    storage = ctypes.create_string_buffer(2 * MAP_BYTES + _ALIGNMENT)
    at = -(-ctypes.addressof(storage) // _ALIGNMENT) * _ALIGNMENT

    def encode() -> int:
        arguments = (at, *layout.before_address, address, *layout.after_address)
        return int(driver.library.cuTensorMapEncodeTiled(*arguments))

    device_index = driver.current_device()  # any GPU will do
    result = driver.in_context(device_index, encode)
    driver.check(result, f"tensor_map: {layout.name} at {address:#x}")
    made = TensorMaps(1)
    ctypes.memmove(made.memory, at, MAP_BYTES)
    # A twin at another address must differ in the first word alone, and that must be the address.
    twin, other = at + MAP_BYTES, address ^ 1 << 20
    ctypes.memmove(twin, at, MAP_BYTES)
    replace = driver.library.cuTensorMapReplaceAddress
    result = driver.in_context(device_index, lambda: int(replace(twin, other)))
    words = (c_uint64 * (MAP_BYTES // 8)).from_address(twin)
    alike = [other, *made.memory[1:]]
    made.begin_with_address = not result and made.memory[0] == address and [*words] == alike
    return made


@lru_cache(4096)
def _layout(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides_bytes: tuple[int, ...],
    box: tuple[int, ...],
    swizzle_bytes: int,
    l2_bytes: int,
) -> _Layout:
    if dtype not in _DATA_TYPES:
        allowed = ", ".join(str(x).removeprefix("torch.") for x in _DATA_TYPES)
        raise TypeError(f"tensor_map: dtype must be one of {allowed}, got {dtype}")
    rank = len(shape)
    _require("shape must have 1 to 5 dimensions", 1 <= rank <= 5, list(shape))
    _require(
        "box must be as long as shape, and strides_bytes one shorter",
        (len(strides_bytes) + 1, len(box)) == (rank, rank),
        f"{list(shape)}, {list(strides_bytes)}, {list(box)}",
    )
    sizes = all(1 <= size <= 1 << 32 for size in shape)
    _require("sizes must be 1 to 2**32 (nothing to copy? launch nothing)", sizes, list(shape))
    strides = all(0 <= stride < 1 << 40 and stride % 16 == 0 for stride in strides_bytes)
    rule = "strides_bytes must be multiples of 16 below 2**40 (pad the rows)"
    _require(rule, strides, list(strides_bytes))
    _require("sides of box must be 1 to 256", all(1 <= x <= 256 for x in box), list(box))
    _require("swizzle_bytes must be 0, 32, 64 or 128", swizzle_bytes in _SWIZZLES, swizzle_bytes)
    _require("l2_bytes must be 64, 128 or 256", l2_bytes in _L2_PROMOTIONS, l2_bytes)
    inner = box[0] * dtype.itemsize
    _require("the inner side of box must be a multiple of 16 bytes", inner % 16 == 0, inner)
    rule = f"the inner side of box must be at most swizzle_bytes = {swizzle_bytes}"
    _require(rule, not swizzle_bytes or inner <= swizzle_bytes, f"{inner} bytes")
    return _Layout(dtype, shape, strides_bytes, box, swizzle_bytes, l2_bytes)


def _require(rule: str, holds: bool, came: object) -> None:
    if not holds:
        raise ValueError(f"tensor_map: {rule}, got {came}")
