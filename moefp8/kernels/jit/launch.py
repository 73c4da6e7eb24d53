"""A prepared launch: its arguments stay in memory, and a call writes its addresses into them.

The rule about threads: a prepared launch belongs to the thread that prepared it, since a call
writes into it. `kernels/common/prepared.py` keeps them so.
"""

import ctypes
from array import array
from collections.abc import Callable, Iterable, Sequence
from ctypes import Structure, c_char, c_int, c_uint, c_void_p, string_at
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

from .cubin import JitError
from .driver import Function, current_driver
from .fields import fields
from .libcuda import CONTEXT_IS_DESTROYED, INVALID_CONTEXT, INVALID_HANDLE
from .tma import TensorMaps

_CLUSTER_DIMENSION = 4
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_WRONG_CONTEXT = (INVALID_CONTEXT, INVALID_HANDLE, CONTEXT_IS_DESTROYED)
_ALIGNMENT = 128  # for tensor maps cuda.h asks for 64 in CUDA 12 and for 128 in CUDA 13
_WORD = 8

Argument = Structure | TensorMaps


class Attribute(Structure):
    """CUlaunchAttribute: an id and a union of 64 bytes, of which we use up to three uints."""

    _fields_ = (("id", c_int), ("pad", c_int), ("value", c_uint * 3), ("rest", c_char * 52))


class Config(Structure):
    """CUlaunchConfig"""

    _fields_ = fields(
        (c_uint, "grid_x grid_y grid_z block_x block_y block_z shared_bytes"),
        (c_void_p, "stream attributes"),
        (c_uint, "num_attributes"),
    )


@lru_cache(64)
def _attributes(cluster: int, programmatic: bool) -> ctypes.Array[Attribute]:
    attributes = []
    if cluster > 1:
        attributes.append(Attribute(_CLUSTER_DIMENSION, 0, (cluster, 1, 1)))
    if programmatic:
        attributes.append(Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, (1, 0, 0)))
    return (Attribute * len(attributes))(*attributes)


_Place = tuple[int, int, int]  # a word or the address of a map; a `Source`
_Run = tuple[int, int, int]  # the first word; which is the first address; how many there are
_LONG = 16  # from this many addresses on, a run is copied as one


class Source(NamedTuple):
    """`plus` bytes after one of the addresses that a call gives; `which`, counted from 0."""

    which: int
    plus: int = 0


class Pointer(NamedTuple):
    """The place in a kernel's arguments where an address is written.

    argument: which argument of the kernel.
    offset: bytes from its beginning; for a tensor map, where that map begins.
    """

    argument: int
    offset: int
    source: Source


def _split_runs(places: list[_Place]) -> tuple[list[_Place], list[_Run]]:
    """Single places, and long runs in which both words and addresses follow one another."""
    runs: list[list[_Place]] = []
    for place in places:
        word, which, plus = place
        if runs and runs[-1][-1] == (word - 1, which - 1, 0) and plus == 0:
            runs[-1].append(place)
        else:
            runs.append([place])
    single = [place for run in runs if len(run) < _LONG for place in run]
    return single, [(*run[0][:2], len(run)) for run in runs if len(run) >= _LONG]


class Launch:
    """A launch of function over grid x block threads, to be made as often as wanted.

    Args:
        arguments: ctypes structures, and tensor maps for `__grid_constant__` ones, in the kernel's
            order; they are copied.
        pointers: all addresses in them that a call gives.
        shared_bytes: dynamic shared memory.
        cluster: CTAs of a cluster, along x.
        programmatic: whether it may start before the stream's previous kernel ends
            (griddepcontrol.wait).

    Raises JitError, here or when called.
    """

    def __init__(
        self,
        function: Function,
        grid: int,
        block: int,
        arguments: Sequence[Argument],
        pointers: Iterable[Pointer] = (),
        *,
        shared_bytes: int = 0,
        cluster: int = 1,
        programmatic: bool = False,
    ) -> None:
        if shared_bytes > function.max_shared_bytes:
            raise JitError(
                f"{function}: shared_bytes must be at most {function.max_shared_bytes}, "
                f"got {shared_bytes}"
            )
        self._attributes = attributes = _attributes(cluster, programmatic)
        first = ctypes.addressof(attributes) if len(attributes) else None
        self._config = Config(grid, 1, 1, block, 1, 1, shared_bytes, 0, first, len(attributes))
        self._driver, self.function = current_driver(), function
        self._handle, self._cluster = function.handle, cluster
        self._launch = self._driver.library.cuLaunchKernelEx
        self._addresses: tuple[int, ...] = ()
        starts = self._lay_out(arguments)
        # Addresses in structures are words that are written; those in tensor maps are words too
        # where the driver's own way to replace them does just that.
        self._places: list[_Place] = []
        self._opaque_maps: list[_Place] = []
        for argument, offset, (which, plus) in pointers:
            maps, start = arguments[argument], starts[argument] + offset
            if isinstance(maps, TensorMaps) and not maps.begin_with_address:
                self._opaque_maps.append((self._block + start, which, plus))
            else:
                self._places.append((start // _WORD, which, plus))
        held = {which for _, which, _ in self._places + self._opaque_maps}
        self._places, self._runs = _split_runs(self._places)
        # Picks the addresses of a call that the arguments hold.
        self.pick: Callable[[tuple[int, ...]], Any] = itemgetter(*held) if held else len

    def _lay_out(self, arguments: Sequence[Argument]) -> list[int]:
        """Copy the arguments into one block of memory; return where each begins in it."""
        block, starts, self._sizes = bytearray(), [], list[int]()
        for x in arguments:
            data = x.data if isinstance(x, TensorMaps) else bytes(x)
            block += bytes(-len(block) % _ALIGNMENT)
            starts.append(len(block))
            self._sizes.append(len(data))
            block += data
        block += bytes(-len(block) % _WORD)
        memory = ctypes.create_string_buffer(len(block) + _ALIGNMENT)
        begin = -ctypes.addressof(memory) % _ALIGNMENT
        view = memoryview(memory).cast("B")[begin : begin + len(block)]  # it keeps the memory alive
        view[:] = block
        self._words = view.cast("Q")
        self._block = ctypes.addressof(memory) + begin
        self._parameters = (c_void_p * len(starts))(*(self._block + x for x in starts))
        return starts

    def __call__(self, stream: int, addresses: tuple[int, ...]) -> None:
        """Launch on a CUstream of the thread's current GPU, e.g. `Driver.current_stream`."""
        if addresses != self._addresses:
            self.write(addresses)
        config = self._config
        config.stream = stream
        result = self._launch(ctypes.byref(config), self._handle, self._parameters, None)
        if result:
            self._relaunch(result)

    def on(self, device_index: int, addresses: tuple[int, ...]) -> None:
        """Launch on that GPU's current stream; the thread's current GPU may be another one."""
        driver = self._driver
        stream = driver.current_stream(device_index)
        if device_index == driver.current_device():
            self(stream, addresses)
        else:
            with driver.on_device(device_index):
                self(stream, addresses)

    def write(self, addresses: tuple[int, ...]) -> None:
        """Write the addresses of a call into the arguments."""
        self._addresses = ()  # until all are written
        words = self._words
        for word, which, plus in self._places:
            words[word] = addresses[which] + plus
        for word, which, count in self._runs:
            words[word : word + count] = array("Q", addresses[which : which + count])
        for at, which, plus in self._opaque_maps:
            self._replace_address(at, addresses[which] + plus)
        self._addresses = addresses

    @property
    def shape(self) -> tuple[int, int, int]:
        """(CTAs, threads of each, bytes of dynamic shared memory)"""
        config = self._config
        return config.grid_x, config.block_x, config.shared_bytes

    @property
    def handle(self) -> int | None:
        """CUfunction"""
        return self._handle.value

    @property
    def parameters(self) -> int:
        """The address of the array of addresses of the arguments."""
        return ctypes.addressof(self._parameters)

    def has_arguments(self, parameters: int | None) -> bool:
        """Whether a node has arguments of the same bytes; parameters: where their addresses are."""
        if not parameters:
            return False
        others = (c_void_p * len(self._sizes)).from_address(parameters)
        triples = zip(self._parameters, others, self._sizes, strict=True)
        return all(string_at(own, size) == string_at(x, size) for own, x, size in triples)

    def _replace_address(self, at: int, address: int) -> None:
        """Replace the address in the tensor map that is stored at `at`."""
        driver, function = self._driver, self.function
        replace = driver.library.cuTensorMapReplaceAddress
        result = driver.in_context(function.device_index, lambda: int(replace(at, address)))
        driver.check(result, f"{function}: a tensor map cannot have its address {address:#x}")

    def _relaunch(self, result: int) -> None:
        """Launch in the context of the GPU: the thread may have none yet, or another GPU's.

        If the context was destroyed since the kernel was loaded, so were the tensors of this call:
        it fails, and later calls load the kernel again.
        """
        function, driver = self.function, self._driver
        if not function.handle:
            driver.restore(function)
            result = self._again()
        if result in _WRONG_CONTEXT:
            context = driver.primary_context(function.device_index)
            result = driver.within(context, self._again)
            if result == INVALID_HANDLE and driver.is_lost(function):
                result = CONTEXT_IS_DESTROYED
        if result:
            grid, block, shared_bytes = self.shape
            what = f"{grid=}, {block=}, {shared_bytes=}, cluster={self._cluster}"
            driver.check(result, f"{function}: cannot be launched with {what}")

    def _again(self) -> int:
        config = ctypes.byref(self._config)
        return int(self._launch(config, self._handle, self._parameters, None))
