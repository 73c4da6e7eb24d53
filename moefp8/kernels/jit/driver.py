"""The one object through which kernels reach a GPU: loaded functions and prepared launches."""

import ctypes
import threading
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from ctypes import c_int, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ...system.threads import Once
from .cubin import Cubin
from .kernel import Kernel, compile_kernel
from .libcuda import INVALID_IMAGE, NO_BINARY_FOR_GPU, UNSUPPORTED_PTX_VERSION, Libcuda

P = TypeVar("P")

# CUfunction_attribute and CUdevice_attribute of cuda.h
_STATIC_SHARED_BYTES = 1
_MAX_DYNAMIC_SHARED_BYTES = 8
_SHARED_BYTES_OPTIN = 97
_COMPUTE_CAPABILITY = (75, 76)
_IS_CAPTURING = 1  # CUstreamCaptureStatus


@dataclass(frozen=True)
class Function:
    """A kernel on one GPU.

    handle: CUfunction, which all launches share. It is null once the context is lost, until one of
        them restores it.
    max_shared_bytes: how much dynamic shared memory a launch may ask for.
    """

    kernel: Kernel
    device_index: int
    handle: c_void_p
    max_shared_bytes: int

    def __str__(self) -> str:
        return f"{self.kernel} on cuda:{self.device_index}"


def _arch_of(major: int, minor: int) -> str:
    """The architecture of a compute capability, with all that its GPUs alone have: from 9.0 on."""
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


class _ThreadState(threading.local):
    """The prepared launches of one thread."""

    def __init__(self) -> None:
        self.prepared: dict[Hashable, Any] = {}


class Driver(Libcuda):
    """libcuda, PyTorch's state of its GPUs, and the functions and launches prepared there.

    max_prepared: how many prepared launches a thread keeps before it forgets all of them, so that
        shapes that come and go do not fill the memory.
    """

    def __init__(self, library: Any = None, max_prepared: int = 1024) -> None:
        super().__init__(library)
        self.max_prepared = max_prepared
        self._functions: Once[tuple[Kernel, int], Function] = Once()
        self._num_sms: dict[int, int] = {}
        self._archs: dict[int, str] = {}
        self.num_losses = 0  # how many contexts were lost, with what was made in them
        self.max_sms: int | None = None  # how many SMs GEMMs may use; None: all
        self._thread_state = _ThreadState()

    # ---- What PyTorch says ----

    def current_stream(self, device_index: int) -> int:
        """`torch.cuda.current_stream(device_index).cuda_stream`, without making an object."""
        stream: int = torch._C._cuda_getCurrentRawStream(device_index)
        return stream

    def current_device(self) -> int:
        """`torch.cuda.current_device()`, where CUDA is known to be initialised."""
        device: int = torch._C._cuda_getDevice()
        return device

    def is_capturing(self) -> bool:
        """Whether the current stream of the current GPU is being captured into a graph."""
        return bool(torch._C._cuda_isCurrentStreamCapturing())

    def capture_id(self, device_index: int) -> int | None:
        """The number, unique in this process, of the capture of that GPU's current stream.

        None if the current GPU's stream is not being captured.
        """
        if not self.is_capturing():
            return None
        status, number = c_int(), c_uint64()
        ask = self.library.cuStreamGetCaptureInfo_v2
        stream = self.current_stream(device_index)
        result = ask(stream, ctypes.byref(status), ctypes.byref(number), None, None, None)
        self.check(result, f"the capture of a stream of cuda:{device_index}")
        return number.value if status.value == _IS_CAPTURING else None

    def on_device(self, device_index: int) -> AbstractContextManager[object]:
        return torch.cuda.device(device_index)

    def allocate(self, num_bytes: int, stream: int) -> int:
        """The address of uninitialised memory on the current GPU, at a multiple of 256 bytes.

        It comes from PyTorch's caching allocator, in a third of the time that a tensor takes. Only
        kernels on `stream` may use it: after `free`, later kernels there may get the same memory.
        """
        address: int = torch._C._cuda_cudaCachingAllocator_raw_alloc(num_bytes, stream)
        return address

    def free(self, address: int) -> None:
        """Give back what `allocate` gave; kernels already on its stream may still use it."""
        torch._C._cuda_cudaCachingAllocator_raw_delete(address)

    def num_sms(self, device_index: int) -> int:
        """How many streaming multiprocessors a GPU has."""
        if device_index not in self._num_sms:
            properties = torch.cuda.get_device_properties(device_index)
            self._num_sms[device_index] = int(properties.multi_processor_count)
        return self._num_sms[device_index]

    def arch(self, device_index: int) -> str:
        """The architecture that kernels for a GPU are compiled for, e.g. "sm_90a"; "" for -1.

        A GPU that is not NVIDIA's has none, "": AMD's compute capabilities mean something else.
        """
        arch = self._archs.get(device_index)
        if arch is None:
            is_nvidia = device_index >= 0 and torch.version.hip is None
            arch = _arch_of(*torch.cuda.get_device_capability(device_index)) if is_nvidia else ""
            self._archs[device_index] = arch
        return arch

    # ---- Functions ----

    def load(self, kernel: Kernel, device_index: int) -> Function:
        """The kernel on that GPU, compiled and loaded if need be, also while a graph is captured.

        Raises JitError, or OutOfMemoryError.
        """

        def build() -> Function:
            return Function(kernel, device_index, *self._load(kernel, device_index))

        return self._functions.get((kernel, device_index), build)

    def restore(self, function: Function) -> None:
        """Load it again, into the context that the GPU has now."""
        handle, _ = self._load(function.kernel, function.device_index)
        function.handle.value = handle.value

    def is_lost(self, function: Function) -> bool:
        """Whether the driver does not know the function any more."""
        known = c_int()

        def ask() -> int:
            ask_attribute = self.library.cuFuncGetAttribute
            return int(ask_attribute(ctypes.byref(known), _STATIC_SHARED_BYTES, function.handle))

        return self.within(self.primary_context(function.device_index), ask) != 0

    def lose(self) -> None:
        super().lose()
        self.num_losses += 1
        for function in self._functions.values():
            function.handle.value = None

    def _load(self, kernel: Kernel, device_index: int) -> tuple[c_void_p, int]:
        """`handle` and `max_shared_bytes` of a `Function`."""
        cubin = compile_kernel(kernel, self.arch(device_index))
        name = f"{kernel} on cuda:{device_index}"
        context = self.primary_context(device_index)
        with self.outside_capture(), self.current(context):
            handle = self._get_function(name, cubin, device_index)
            static = c_int()
            result = self.library.cuFuncGetAttribute(
                ctypes.byref(static), _STATIC_SHARED_BYTES, handle
            )
            self.check(result, f"{name}: its static shared memory")
            shared = self.device_attribute(device_index, _SHARED_BYTES_OPTIN) - static.value
            result = self.library.cuFuncSetAttribute(handle, _MAX_DYNAMIC_SHARED_BYTES, shared)
            self.check(result, f"{name}: {shared} bytes of dynamic shared memory")
        return handle, shared

    def _get_function(self, name: str, cubin: Cubin, device_index: int) -> c_void_p:
        """The function, in a module that stays loaded for good."""
        lib, module, handle = self.library, c_void_p(), c_void_p()
        result = lib.cuModuleLoadData(ctypes.byref(module), cubin.image)
        self.check(result, f"{name}: cannot be loaded", self._why_not_loaded(result, device_index))
        result = lib.cuModuleGetFunction(ctypes.byref(handle), module, cubin.symbol.encode())
        self.check(result, f"{name}: no symbol {cubin.symbol} in its cubin")
        return handle

    def _why_not_loaded(self, result: int, device_index: int) -> str:
        if result not in (INVALID_IMAGE, NO_BINARY_FOR_GPU, UNSUPPORTED_PTX_VERSION):
            return ""
        arch = self.arch(device_index)
        major, minor = (self.device_attribute(device_index, i) for i in _COMPUTE_CAPABILITY)
        if arch != _arch_of(major, minor):
            return f"it is compiled for {arch}, the GPU has compute capability {major}.{minor}"
        return (
            f"the driver knows CUDA {self.version()}, and a kernel compiled by CUDA 13 needs "
            "a driver of 580 or newer: install one, or replace nvidia-cuda-nvrtc by "
            "`pip install nvidia-cuda-nvrtc-cu12`"
        )

    # ---- Prepared launches ----

    def prepared(self) -> dict[Hashable, Any]:
        """The prepared launches of this thread, by layouts: see `kernels/common/prepared.py`."""
        return self._thread_state.prepared

    def keep(self, key: Hashable, prepared: P) -> P:
        kept = self._thread_state.prepared
        if len(kept) >= self.max_prepared:
            kept.clear()
        kept[key] = prepared
        return prepared


_active = Driver()


def current_driver() -> Driver:
    """The driver of this process."""
    return _active


@contextmanager
def using(stand_in: Driver) -> Iterator[Driver]:
    """Let all kernels reach `stand_in` instead, in all threads: for tests."""
    global _active
    before, _active = _active, stand_in
    try:
        yield stand_in
    finally:
        _active = before
