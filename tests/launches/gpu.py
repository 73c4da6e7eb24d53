"""A stand-in for a Hopper GPU that records what is launched and computes nothing.

Tensors are on the meta device, so they take no memory and PyTorch computes nothing of them either.
Within `Gpu`, they have addresses, which the record shows by the name of their tensor. The ops of
moefp8 run what they run on a Hopper GPU.
"""

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from ctypes import c_char, c_int, c_uint, c_void_p
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moefp8.kernels import jit
from moefp8.kernels.gemm.sm90 import tuned

NUM_SMS = 132  # of an H200
MAP_BYTES = 128
# Each tensor's storage, and each workspace, has 64 GiB of addresses to itself. No pair of 32-bit
# numbers in arguments looks like one: the upper one would be above 1.8e9.
_FIRST, _ROOM = 0x6D0E << 48, 1 << 36


class _Config(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("num_attributes", c_uint),
    )


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h: an id and a union of 64 bytes."""

    _fields_ = (("id", c_int), ("pad", c_int), ("value", c_uint * 3), ("rest", c_char * 52))


@dataclass
class Launched:
    """A launch as the driver gets it; arguments: the bytes of each.

    attributes: id -> the first three numbers.
    """

    kernel: jit.Kernel
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int
    attributes: dict[int, tuple[int, ...]]
    arguments: list[bytes]


@dataclass
class Written:
    """A tensor that PyTorch writes between launches: how, which, and what it copies there.

    layouts: of each tensor that is concerned. addresses: theirs.
    """

    op: str
    layouts: list[str]
    addresses: list[int]


@dataclass
class Memory:
    """Addresses of tensors' storages and of workspaces, in the order in which they were asked for.

    owners: each region's storage, or the number of a workspace.
    live, most: bytes of the workspaces that are not freed, now and at most.
    """

    owners: list[torch.UntypedStorage | int] = field(default_factory=list)
    live: dict[int, int] = field(default_factory=dict)
    most: int = 0
    num_workspaces: int = 0
    _of_storage: dict[int, int] = field(default_factory=dict)

    def _place(self, owner: torch.UntypedStorage | int) -> int:
        self.owners.append(owner)  # it also keeps the storage, so that no other has its identity
        return _FIRST + _ROOM * (len(self.owners) - 1)

    def address_of(self, x: torch.Tensor) -> int:
        storage = x.untyped_storage()
        begin = self._of_storage.get(storage._cdata)
        if begin is None:
            begin = self._of_storage[storage._cdata] = self._place(storage)
        return begin + x.storage_offset() * x.element_size()

    def allocate(self, num_bytes: int) -> int:
        address = self._place(self.num_workspaces)
        self.num_workspaces += 1
        self.live[address] = num_bytes
        self.most = max(self.most, sum(self.live.values()))
        return address

    def free(self, address: int) -> None:
        self.live.pop(address)

    def find(self, word: int) -> tuple[torch.UntypedStorage | int, int] | None:
        """The owner of an address and the offset in bytes from its beginning; None for a number."""
        which, offset = divmod(word - _FIRST, _ROOM)
        return (self.owners[which], offset) if 0 <= which < len(self.owners) else None


class Library:
    """libcuda, as far as launches need it. It has no graphs: each call makes its launches."""

    def __init__(self) -> None:
        self.kernels: list[jit.Kernel] = []
        self.launched: list[Launched | Written] = []

    def cuStreamCreate(self, stream: Any, flags: int) -> int:
        return 1

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        return 0

    def cuTensorMapEncodeTiled(
        self, at: int, dtype: int, rank: int, address: int, shape: Any, strides: Any, *rest: Any
    ) -> int:
        """A map is its address and, in clear, all that it was encoded from."""
        box, ones, *options = rest
        words = [address, dtype, rank, *shape, *strides]
        numbers = [*box, *ones, *options]
        text = ctypes.string_at((ctypes.c_uint64 * len(words))(*words), 8 * len(words))
        text += ctypes.string_at((c_uint * len(numbers))(*numbers), 4 * len(numbers))
        assert len(text) <= MAP_BYTES
        ctypes.memmove(at, text.ljust(MAP_BYTES, b"\0"), MAP_BYTES)
        return 0

    def cuTensorMapReplaceAddress(self, at: int, address: int) -> int:
        ctypes.c_uint64.from_address(at).value = address
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: Any, extra: Any) -> int:
        config = _Config.from_address(ctypes.addressof(config._obj))
        kernel = self.kernels[function.value - 1]
        attributes = (_Attribute * config.num_attributes).from_address(config.attributes or 1)
        sizes = [y - x for x, y in pairwise(parameters)]
        sizes.append(ctypes.sizeof(jit.struct_of(kernel.source)))
        self.launch(
            Launched(
                kernel,
                tuple(config.grid),
                tuple(config.block),
                config.shared_bytes,
                {x.id: tuple(x.value) for x in attributes},
                [ctypes.string_at(*pair) for pair in zip(parameters, sizes, strict=True)],
            )
        )
        return 0

    def launch(self, made: Launched | Written) -> None:
        self.launched.append(made)


class Driver(jit.Driver):
    """A driver of one Hopper GPU whose memory has addresses and no bytes."""

    def __init__(self, library: Library, num_sms: int) -> None:
        super().__init__(library)
        self.sms, self.memory = num_sms, Memory()

    def load(self, kernel: jit.Kernel, device_index: int) -> jit.Function:
        kernels = self.library.kernels
        if kernel not in kernels:
            kernels.append(kernel)
        handle = c_void_p(kernels.index(kernel) + 1)
        return jit.Function(kernel, device_index, handle, 232448)

    def num_sms(self, device_index: int) -> int:
        return self.sms

    def current_stream(self, device_index: int) -> int:
        return 7

    def current_device(self) -> int:
        return 0

    def is_capturing(self) -> bool:
        return False

    def capture_id(self, device_index: int) -> int | None:
        return None

    def is_lost(self, function: jit.Function) -> bool:
        return False

    def on_device(self, device_index: int) -> Any:
        return nullcontext()

    def arch(self, device_index: int) -> str:
        return "sm_90a"

    def allocate(self, num_bytes: int, stream: int) -> int:
        return self.memory.allocate(num_bytes)

    def free(self, address: int) -> None:
        self.memory.free(address)


class _OnGpu(TorchDispatchMode):
    """Ops of moefp8 run the body that the dispatcher has for CUDA, whichever device they see.

    Of PyTorch's operations, those that write what is there are recorded, in order with launches.
    """

    _KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    _WRITING = "copy_", "zero_", "fill_"

    def __init__(self, driver: Driver) -> None:
        super().__init__()
        self._driver = driver

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace == "moefp8":
            with self:  # ops that it calls come here, too
                return func.redispatch(self._KEYS, *args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name in self._WRITING:
            tensors = [x for x in args if isinstance(x, torch.Tensor)]
            addresses = [self._driver.memory.address_of(x) for x in tensors]
            written = Written(name, [layout_of(x) for x in tensors], addresses)
            self._driver.library.launch(written)
        return func(*args, **(kwargs or {}))


def layout_of(x: torch.Tensor) -> str:
    dtype = str(x.dtype).removeprefix("torch.")
    return f"{dtype} {[*x.shape]} strides {[*x.stride()]}"


@contextmanager
def recording(library: Library | None = None, num_sms: int = NUM_SMS) -> Iterator[Driver]:
    """A GPU of its own, on which nothing is loaded, prepared or tuned.

    Tensors on the meta device have addresses meanwhile, and say that they have memory.
    """
    driver = Driver(library or Library(), num_sms)
    with (
        jit.using(driver),
        mock.patch.object(torch.cuda, "is_available", return_value=False),
        mock.patch.object(tuned, "measured", _always(tuned.NOTHING)),
        mock.patch.object(torch.Tensor, "data_ptr", _method(driver.memory.address_of)),
        mock.patch.object(torch.Tensor, "get_device", _always(0)),
        with_memory(),
        _OnGpu(driver),
    ):
        yield driver


def _always(value: Any) -> Any:
    return lambda _: value


def _method(function: Callable[[torch.Tensor], int]) -> Any:
    return lambda x: function(x)


def with_memory() -> Any:
    """A context in which no tensor says that it is on the meta device."""
    return mock.patch.object(torch.Tensor, "is_meta", property(lambda x: False))
