"""Source and a kernel's name -> cubin -> launch. Knows no kernel by name; importing costs nothing.

The compiler is NVRTC, which torch brings along; compiled kernels stay in the user's cache folder.
The driver is called through ctypes. No compiler, driver or folder is touched before first use.
"""

from .cubin import Cubin, JitError
from .kernel import Kernel, compile_kernel, compile_kernels
from .launch import Launch, current_stream, launch_all
from .module import Function, load
from .tma import TensorMap, tensor_map, tensor_map_array

__all__ = [
    "Cubin",
    "Function",
    "JitError",
    "Kernel",
    "Launch",
    "TensorMap",
    "compile_kernel",
    "compile_kernels",
    "current_stream",
    "launch_all",
    "load",
    "tensor_map",
    "tensor_map_array",
]
