"""The CUDA driver's API, libcuda, through ctypes: bound on first use, every result checked."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from functools import cached_property
from typing import Any, Final

import torch

from ...system.threads import Once
from .cubin import JitError

OUT_OF_MEMORY: Final = 2
INVALID_IMAGE: Final = 200
INVALID_CONTEXT: Final = 201
NO_BINARY_FOR_GPU: Final = 209
UNSUPPORTED_PTX_VERSION: Final = 222
INVALID_HANDLE: Final = 400
CONTEXT_IS_DESTROYED: Final = 709

_LOST = (INVALID_CONTEXT, CONTEXT_IS_DESTROYED)
# After errors of memory (214), an address (700, 716, 717), a time-out (702), an assert (710), the
# hardware's stack (714), an instruction (715, 718) or others (719), no call of the process works.
_FOR_GOOD = (214, 700, 702, 710, 714, 715, 716, 717, 718, 719)
_WAYS_OUT = {
    **dict.fromkeys(
        _LOST,
        "the GPU's context was destroyed, by cudaDeviceReset for instance, and all its tensors "
        "with it: create them again, then repeat the call",
    ),
    **dict.fromkeys(
        _FOR_GOOD,
        "a kernel failed, perhaps another one before this call, and CUDA takes no more calls: "
        "restart the process; with CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer it says which",
    ),
}
_CAPTURE_MODE_RELAXED = 2
_HANDLE = POINTER(c_void_p)
_SIZES, _MODES = [POINTER(c_uint64)] * 2 + [POINTER(c_uint32)] * 2, [c_int] * 4
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (_HANDLE, c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (_HANDLE,),
    "cuThreadExchangeStreamCaptureMode": (POINTER(c_int),),
    "cuModuleLoadData": (_HANDLE, c_char_p),
    "cuModuleGetFunction": (_HANDLE, c_void_p, c_char_p),
    "cuFuncGetAttribute": (POINTER(c_int), c_int, c_void_p),
    "cuFuncSetAttribute": (c_void_p, c_int, c_int),
    "cuTensorMapReplaceAddress": (c_void_p, c_void_p),
    "cuStreamCreate": (_HANDLE, c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamBeginCapture_v2": (c_void_p, c_int),
    "cuStreamEndCapture": (c_void_p, _HANDLE),
    # The stream, its status, the number of the capture; the graph, dependencies, their number.
    "cuStreamGetCaptureInfo_v2": (
        *(c_void_p, POINTER(c_int), POINTER(c_uint64)),
        *(c_void_p, c_void_p, c_void_p),
    ),
    "cuGraphGetNodes": (c_void_p, POINTER(c_void_p), POINTER(c_size_t)),
    "cuGraphKernelNodeGetParams_v2": (c_void_p, c_void_p),
    "cuGraphInstantiateWithFlags": (_HANDLE, c_void_p, c_uint64),
    "cuGraphExecKernelNodeSetParams_v2": (c_void_p, c_void_p, c_void_p),
    "cuGraphLaunch": (c_void_p, c_void_p),
    "cuGraphExecDestroy": (c_void_p,),
    "cuGraphDestroy": (c_void_p,),
    # The map, data type, rank, address; sizes, strides, box, strides of elements; four modes.
    "cuTensorMapEncodeTiled": (c_void_p, c_int, c_uint32, c_void_p, *_SIZES, *_MODES),
}


class Libcuda:
    """The functions of libcuda that we call, and the contexts of the GPUs.

    library: what answers instead of `libcuda.so.1`; tests give a stand-in.
    """

    def __init__(self, library: Any = None) -> None:
        if library is not None:
            self.__dict__["library"] = library
        self._contexts: Once[int, int] = Once()

    @cached_property
    def library(self) -> Any:
        """libcuda, initialised. Raises JitError without a driver or a GPU."""
        try:
            lib = ctypes.CDLL("libcuda.so.1")
            for name, types in _SIGNATURES.items():
                getattr(lib, name).argtypes = types
        except (OSError, AttributeError) as error:  # AttributeError: a function it does not have
            raise JitError(
                f"no NVIDIA driver of version 525 or newer ({error}); install one, or keep the "
                "tensors on the CPU"
            ) from error
        if result := lib.cuInit(0):
            cause = _describe(lib, result)
            raise JitError(f"cuInit: {cause}; check nvidia-smi and CUDA_VISIBLE_DEVICES")
        return lib

    def check(self, result: int, doing: str, way_out: str = "") -> None:
        """Raise JitError, or OutOfMemoryError, `<doing>: <the driver's error>; <way_out>`."""
        if not result:
            return
        if result in _LOST:
            self.lose()
        message = f"{doing}: {_describe(self.library, result)}"
        if result == OUT_OF_MEMORY:
            raise torch.cuda.OutOfMemoryError(
                f"{message}; kernels are outside PyTorch's memory: torch.cuda.empty_cache() frees "
                "what it keeps unused"
            )
        way_out = way_out or _WAYS_OUT.get(result, "")
        raise JitError(f"{message}; {way_out}" if way_out else message)

    def version(self) -> str:
        """The newest CUDA that the driver knows, e.g. `13.0`."""
        version = c_int()
        self.check(self.library.cuDriverGetVersion(ctypes.byref(version)), "cuDriverGetVersion")
        return f"{version.value // 1000}.{version.value % 1000 // 10}"

    def device_attribute(self, device_index: int, attribute: int) -> int:
        value, device = c_int(), self._device(device_index)
        result = self.library.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        self.check(result, f"attribute {attribute} of cuda:{device_index}")
        return value.value

    def _device(self, device_index: int) -> c_int:
        """PyTorch and the driver count devices alike: both heed CUDA_VISIBLE_DEVICES."""
        device = c_int()
        result = self.library.cuDeviceGet(ctypes.byref(device), device_index)
        self.check(result, f"cuda:{device_index}")
        return device

    def primary_context(self, device_index: int) -> int:
        """The context that PyTorch uses too; retained for good, unless it is destroyed."""

        def retain() -> int:
            context, device = c_void_p(), self._device(device_index)
            result = self.library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
            self.check(result, f"context of cuda:{device_index}")
            return context.value or 0

        return self._contexts.get(device_index, retain)

    def lose(self) -> None:
        """Forget what is kept of all GPUs, since a context was destroyed."""
        self._contexts.clear()

    def within(self, context: int, call: Callable[[], int]) -> int:
        """The result of a function of the driver where context is the thread's current one."""
        if result := self.library.cuCtxPushCurrent_v2(context):
            return int(result)
        try:
            return call()
        finally:
            self._pop_context()

    def in_context(self, device_index: int, call: Callable[[], int]) -> int:
        """The result of a function of the driver that needs a context, whichever it is.

        A thread that has not used CUDA yet has none, and gets the GPU's for the call.
        """
        result = call()
        if result == INVALID_CONTEXT:
            result = self.within(self.primary_context(device_index), call)
        return result

    @contextmanager
    def current(self, context: int) -> Iterator[None]:
        """Make context the thread's current one."""
        self.check(self.library.cuCtxPushCurrent_v2(context), "cuCtxPushCurrent")
        try:
            yield
        finally:
            self._pop_context()

    def _pop_context(self) -> None:
        result = self.library.cuCtxPopCurrent_v2(ctypes.byref(c_void_p()))
        self.check(result, "cuCtxPopCurrent")

    @contextmanager
    def outside_capture(self) -> Iterator[None]:
        """Let a CUDA graph that is being captured survive the allocations within."""
        mode = c_int(_CAPTURE_MODE_RELAXED)
        exchange = self.library.cuThreadExchangeStreamCaptureMode
        self.check(exchange(ctypes.byref(mode)), "capture mode")
        try:
            yield
        finally:
            self.check(exchange(ctypes.byref(mode)), "capture mode")


def _describe(lib: Any, result: int) -> str:
    """e.g. `CUDA_ERROR_INVALID_VALUE (1): invalid argument`"""
    name, text = c_char_p(), c_char_p()
    lib.cuGetErrorName(result, ctypes.byref(name))
    lib.cuGetErrorString(result, ctypes.byref(text))
    known, meaning = (x.value or b"unknown error" for x in (name, text))
    return f"{known.decode()} ({result}): {meaning.decode()}"
