"""Source and a kernel's name -> cubin -> launch. This room knows no kernel by name.

The compiler is NVRTC, which torch brings along; compiled kernels stay in the user's cache folder.
The driver is called through ctypes. No compiler, driver or folder is touched before first use.
"""

from .abi import Struct, offset_of, struct_of
from .cache import cache_state, max_cache_bytes, read_beside_kernels, write_beside_kernels
from .cubin import Cubin, JitError
from .driver import Driver, Function, current_driver, using
from .graph import LaunchGraph
from .kernel import (
    Kernel,
    compile_kernel,
    compile_kernels,
    compiler_description,
    keep_kernels,
)
from .launch import Launch, Pointer, Source
from .source import source_digest
from .tma import MAP_BYTES, Box, TensorMaps, join_maps, tensor_map

__all__ = [
    "MAP_BYTES",
    "Box",
    "Cubin",
    "Driver",
    "Function",
    "JitError",
    "Kernel",
    "Launch",
    "LaunchGraph",
    "Pointer",
    "Source",
    "Struct",
    "TensorMaps",
    "cache_state",
    "compile_kernel",
    "compile_kernels",
    "compiler_description",
    "current_driver",
    "join_maps",
    "keep_kernels",
    "max_cache_bytes",
    "offset_of",
    "read_beside_kernels",
    "source_digest",
    "struct_of",
    "tensor_map",
    "using",
    "write_beside_kernels",
]
