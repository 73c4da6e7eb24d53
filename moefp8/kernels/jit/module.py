"""A cubin in a GPU's memory: a function to launch, loaded once per kernel and GPU."""

import ctypes
from ctypes import c_int, c_void_p
from dataclasses import dataclass

from . import driver
from .cubin import Cubin
from .kernel import ARCHITECTURE, Kernel, compile_kernel
from .once import Once

# CUfunction_attribute and CUdevice_attribute of cuda.h
_STATIC_SHARED_BYTES = 1
_MAX_DYNAMIC_SHARED_BYTES = 8
_SHARED_BYTES_OPTIN = 97
_COMPUTE_CAPABILITY = (75, 76)


@dataclass(frozen=True)
class Function:
    """A kernel on one GPU.

    handle: CUfunction; its launches share it. Null once the context is lost, until one restores it.
    max_shared_bytes: dynamic shared memory that a launch may ask for.
    """

    kernel: Kernel
    device_index: int
    handle: c_void_p
    max_shared_bytes: int

    def __str__(self) -> str:
        return f"{self.kernel} on cuda:{self.device_index}"

    def restore(self) -> None:
        """Load it again, into the context that the GPU has now."""
        handle, _ = _load(self.kernel, self.device_index)
        self.handle.value = handle.value

    def is_lost(self) -> bool:
        """Whether the driver does not know it any more."""
        lib, known = driver.library(), c_int()

        def ask() -> int:
            result = lib.cuFuncGetAttribute(ctypes.byref(known), _STATIC_SHARED_BYTES, self.handle)
            return int(result)

        return driver.within(driver.primary_context(self.device_index), ask) != 0


_functions: Once[tuple[Kernel, int], Function] = Once()


def load(kernel: Kernel, device_index: int) -> Function:
    """Compiled if need be, and put on that GPU on the first call; also while a graph is captured.

    Raises JitError, or OutOfMemoryError.
    """

    def build() -> Function:
        return Function(kernel, device_index, *_load(kernel, device_index))

    return _functions.get((kernel, device_index), build)


def _forget() -> None:
    for function in _functions.values():
        function.handle.value = None


driver.when_lost(_forget)


def _load(kernel: Kernel, device_index: int) -> tuple[c_void_p, int]:
    """`handle` and `max_shared_bytes` of a `Function`."""
    cubin = compile_kernel(kernel)
    lib = driver.library()
    name = f"{kernel} on cuda:{device_index}"
    context = driver.primary_context(device_index)
    with driver.outside_capture(), driver.current(context):
        handle = _get_function(name, cubin, device_index)
        static = c_int()
        result = lib.cuFuncGetAttribute(ctypes.byref(static), _STATIC_SHARED_BYTES, handle)
        driver.check(result, f"{name}: its static shared memory")
        shared = driver.device_attribute(device_index, _SHARED_BYTES_OPTIN) - static.value
        result = lib.cuFuncSetAttribute(handle, _MAX_DYNAMIC_SHARED_BYTES, shared)
        driver.check(result, f"{name}: {shared} bytes of dynamic shared memory")
    return handle, shared


def _get_function(name: str, cubin: Cubin, device_index: int) -> c_void_p:
    """The module stays loaded for good."""
    lib, module, handle = driver.library(), c_void_p(), c_void_p()
    result = lib.cuModuleLoadData(ctypes.byref(module), cubin.image)
    driver.check(result, f"{name}: cannot be loaded", _why_not_loaded(result, device_index))
    result = lib.cuModuleGetFunction(ctypes.byref(handle), module, cubin.symbol.encode())
    driver.check(result, f"{name}: no symbol {cubin.symbol} in its cubin")
    return handle


def _why_not_loaded(result: int, device_index: int) -> str:
    incompatible = (driver.INVALID_IMAGE, driver.NO_BINARY_FOR_GPU, driver.UNSUPPORTED_PTX_VERSION)
    if result not in incompatible:
        return ""
    capability = ".".join(
        str(driver.device_attribute(device_index, i)) for i in _COMPUTE_CAPABILITY
    )
    if capability != "9.0":
        return f"it is compiled for {ARCHITECTURE}, the GPU has compute capability {capability}"
    return (
        f"the driver knows CUDA {driver.driver_version()}, and a kernel compiled by CUDA 13 needs "
        "a driver of 580 or newer: install one, or replace nvidia-cuda-nvrtc by "
        "`pip install nvidia-cuda-nvrtc-cu12`"
    )
