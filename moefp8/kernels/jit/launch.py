"""Launch a kernel: everything prepared once, so that a launch is one call of the driver."""

import ctypes
from collections.abc import Iterable, Sequence
from ctypes import Structure, c_char, c_int, c_uint, c_void_p
from typing import Any

import torch

from . import driver
from .cubin import JitError
from .module import Function
from .tma import TensorMap

_CLUSTER_DIMENSION = 4
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_WRONG_CONTEXT = (driver.INVALID_CONTEXT, driver.INVALID_HANDLE, driver.CONTEXT_IS_DESTROYED)


def current_stream(device_index: int) -> int:
    """`torch.cuda.current_stream(device_index).cuda_stream`, without making an object."""
    stream: int = torch._C._cuda_getCurrentRawStream(device_index)
    return stream


class Attribute(Structure):
    """CUlaunchAttribute: an id and a union of 64 bytes, of which we use up to three uints."""

    _fields_ = (("id", c_int), ("pad", c_int), ("value", c_uint * 3), ("rest", c_char * 52))


class Config(Structure):
    """CUlaunchConfig"""

    _fields_ = (
        ("grid_x", c_uint),
        ("grid_y", c_uint),
        ("grid_z", c_uint),
        ("block_x", c_uint),
        ("block_y", c_uint),
        ("block_z", c_uint),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("num_attributes", c_uint),
    )


class Launch:
    """A launch of function over grid x block threads, to be called as often as wanted.

    arguments: in the kernel's order; ctypes objects, and tensor maps for `__grid_constant__` ones.
        All are kept alive, but not the memory that they point to.
    stream: a CUstream, e.g. `current_stream(device_index)`.
    shared_bytes: dynamic shared memory. cluster: CTAs per cluster, along x.
    programmatic: may start before the stream's previous kernel ends (griddepcontrol.wait).
    Raises JitError, here or when called. Any thread may call it, while none changes `arguments`.
    """

    __slots__ = ("_config", "_function", "_handle", "_keep", "_launch", "_parameters", "_what")

    def __init__(
        self,
        function: Function,
        grid: int,
        block: int,
        arguments: Sequence[Any],
        *,
        stream: int,
        shared_bytes: int = 0,
        cluster: int = 1,
        programmatic: bool = False,
    ) -> None:
        if shared_bytes > function.max_shared_bytes:
            raise JitError(
                f"{function}: shared_bytes must be at most {function.max_shared_bytes}, "
                f"got {shared_bytes}"
            )
        attributes = []
        if cluster > 1:
            attributes.append(Attribute(_CLUSTER_DIMENSION, 0, (cluster, 1, 1)))
        if programmatic:
            attributes.append(Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, (1, 0, 0)))
        array = (Attribute * len(attributes))(*attributes)
        first = ctypes.addressof(array) if attributes else None
        config = Config(*(grid, 1, 1, block, 1, 1), shared_bytes, stream, first, len(attributes))
        addresses = [
            x.address if isinstance(x, TensorMap) else ctypes.addressof(x) for x in arguments
        ]
        self._keep = (config, array, tuple(arguments))
        self._function = function
        self._what = (grid, block, shared_bytes, cluster)
        self._config = ctypes.byref(config)
        self._handle = function.handle
        self._parameters = (c_void_p * len(addresses))(*addresses)
        self._launch = driver.library().cuLaunchKernelEx

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Of the kernel: what is written into them, later calls launch with."""
        return self._keep[2]

    def __call__(self) -> None:
        result = self._launch(self._config, self._handle, self._parameters, None)
        if result:
            self._relaunch(result)

    def on(self, device_index: int) -> None:
        """The same from a thread whose current GPU may be another one."""
        launch_all((self,), device_index)

    def _relaunch(self, result: int) -> None:
        """A thread that has not used CUDA yet has no context, or it is another GPU's.

        If the context was destroyed since the kernel was loaded, so were the tensors that this call
        was given: it fails, and later ones load the kernel again.
        """
        function = self._function
        if not function.handle:
            function.restore()
            result = self._call()
        if result in _WRONG_CONTEXT:
            context = driver.primary_context(function.device_index)
            result = driver.within(context, self._call)
            if result == driver.INVALID_HANDLE and function.is_lost():
                result = driver.CONTEXT_IS_DESTROYED
        if result:
            grid, block, shared_bytes, cluster = self._what
            what = f"{grid=}, {block=}, {shared_bytes=}, {cluster=}"
            driver.check(result, f"{function}: cannot be launched with {what}")

    def _call(self) -> int:
        return int(self._launch(self._config, self._handle, self._parameters, None))


def launch_all(launches: Iterable[Launch], device_index: int) -> None:
    """In order, from a thread whose current GPU may be another one."""
    if device_index == torch.cuda.current_device():
        for launch in launches:
            launch()
    else:
        with torch.cuda.device(device_index):
            for launch in launches:
                launch()
