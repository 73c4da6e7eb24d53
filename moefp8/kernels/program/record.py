"""The record of an op: the steps that run in a row, and the memory that they share.

A record holds no tensor and no address. A description writes one from the layouts of a call's
tensors, on any machine; `place.py` and `prepare.py` read it.
"""

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import gcd, prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from ..common.blocks import E4M3, TMA_BYTES, num_blocks, round_up, round_up_to_tma
from ..common.tma_operands import can_address
from ..jit import Kernel, Struct, struct_of

if TYPE_CHECKING:
    from ..gemm.interface import Gemms


class Place(NamedTuple):
    """A place in memory: `plus` bytes after the beginning of the input or buffer `base`."""

    base: str
    plus: int = 0

    def after(self, num_bytes: int) -> "Place":
        return Place(self.base, self.plus + num_bytes)


class Word(NamedTuple):
    """An input of the call, by name, that is a 64-bit number and not an address."""

    base: str
    plus: int = 0


class Tensor(NamedTuple):
    """The layout of a tensor, and where it begins.

    strides: in elements. alignment: 16, or the largest power of two below that divides the address.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    place: Place
    alignment: int = TMA_BYTES

    @classmethod
    def of(cls, x: torch.Tensor, name: str) -> "Tensor":
        """The layout of x, an input of the call."""
        alignment = gcd(x.data_ptr(), TMA_BYTES)
        return cls(tuple(x.shape), x.stride(), x.dtype, Place(name), alignment)

    @classmethod
    def contiguous(
        cls,
        name: str,
        *shape: int,
        dtype: torch.dtype = torch.bfloat16,
        alignment: int = TMA_BYTES,
    ) -> "Tensor":
        """A contiguous input of a call."""
        strides = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
        return cls(shape, strides, dtype, Place(name), alignment)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def is_aligned(self) -> bool:
        """Whether the address is a multiple of 16."""
        return self.alignment == TMA_BYTES

    @property
    def fits(self) -> bool:
        """Whether TMA can address it."""
        return can_address(self.shape, self.strides, self.element_size(), self.alignment)

    @property
    def mT(self) -> "Tensor":
        """The transpose of the last two dimensions, as `torch.Tensor.mT`."""
        (*shape, m, n), (*strides, m_stride, n_stride) = self.shape, self.strides
        return self._replace(shape=(*shape, n, m), strides=(*strides, n_stride, m_stride))

    def batched(self) -> "Tensor":
        """The same with a first dimension of size 1."""
        size = self.shape[0] * self.strides[0]
        return self._replace(shape=(1, *self.shape), strides=(size, *self.strides))

    def first(self) -> "Tensor":
        """The first of the matrices."""
        return self._replace(shape=self.shape[1:], strides=self.strides[1:])

    def element_size(self) -> int:
        return self.dtype.itemsize

    def bytes_of_stride(self, axis: int) -> int:
        return self.strides[axis] * self.dtype.itemsize


class Codes(NamedTuple):
    """E4M3 codes, and the FP32 scales of their blocks."""

    data: Tensor
    scale_inv: Tensor

    @classmethod
    def of(cls, data: torch.Tensor, scale_inv: torch.Tensor, name: str) -> "Codes":
        """The codes that are the inputs `name` and `name_scales` of a call."""
        return cls(Tensor.of(data, name), Tensor.of(scale_inv, f"{name}_scales"))

    @classmethod
    def contiguous(cls, name: str, *shape: int) -> "Codes":
        """Weights [..., N, K] in rows of whole 16 bytes, and scales, the inputs of a call."""
        *batch, n, k = shape
        data = Tensor.contiguous(name, *batch, n, round_up(k, TMA_BYTES), dtype=E4M3)
        blocks = num_blocks(n), num_blocks(k)
        scales = Tensor.contiguous(f"{name}_scales", *batch, *blocks, dtype=torch.float32)
        return cls(data._replace(shape=shape), scales)

    def first(self) -> "Codes":
        return Codes(self.data.first(), self.scale_inv.first())

    def batched(self) -> "Codes":
        return Codes(self.data.batched(), self.scale_inv.batched())


def layouts(**tensors: torch.Tensor | None) -> dict[str, Any]:
    """The layout of each tensor, which is the call's input of that name; None for None."""
    return {name: None if x is None else Tensor.of(x, name) for name, x in tensors.items()}


class TensorMap(NamedTuple):
    """How TMA moves boxes of a tensor; see `Box`.

    box: (columns, rows). is_written: whether the kernel stores through the map; else it loads.
    """

    tensor: Tensor
    box: tuple[int, int]
    swizzle_bytes: int = 0
    l2_bytes: int = 256
    is_written: bool = False


# Values of a structure's fields by name: numbers, places, words, lists of these, and dicts for
# structures in it. A field that is None, or not named, is 0.
Arguments: TypeAlias = dict[str, Any]


@dataclass
class Span:
    """Numbers of tokens, `first` to `last`, for which an op has the kernels that `first` has.

    A description lowers `last` with each choice that depends on the number of tokens.
    """

    first: int
    last: int


class Target(NamedTuple):
    """The GPU that a record is described for.

    arch: as NVRTC names it. num_sms: how many SMs it has. gemms: describes its GEMMs.
    """

    arch: str
    num_sms: int
    gemms: "Gemms"


class Address(NamedTuple):
    """A word of a kernel's structure, `offset` bytes from its beginning, that a call gives."""

    offset: int
    value: Place | Word
    is_written: bool  # whether the kernel may write there


class Step(NamedTuple):
    """A launch of a kernel, without addresses.

    grid, block: CTAs, and threads of each.
    maps: tensor maps, in the kernel's order; those of one parameter follow each other.
    structure: the kernel's last parameter, `struct Arguments` in its source, without `addresses`.
    early: the inputs and buffers that the kernel touches before it waits for the step before it.
    programmatic: whether it may start before the stream's previous kernel ends.
    shared_bytes: of dynamic shared memory. cluster: CTAs of a cluster.
    touched: the inputs and buffers that maps and arguments point to, each once, in their order.
    written: those that the kernel may write.
    """

    kernel: Kernel
    grid: int
    block: int
    maps: tuple[tuple[TensorMap, ...], ...]
    structure: ctypes.Structure
    addresses: tuple[Address, ...]
    early: frozenset[str]
    programmatic: bool
    shared_bytes: int
    cluster: int
    touched: tuple[str, ...]
    written: frozenset[str]


def packed(struct: type[Struct], arguments: Arguments) -> tuple[Struct, list[Address]]:
    """The structure with all numbers, and where addresses and words of a call go.

    Raises ValueError if the structure has no field of a name.
    """
    structure, addresses = struct(), list[Address]()
    _pack(structure, arguments, 0, addresses)
    return structure, addresses


def _pack(structure: Any, arguments: Arguments, begin: int, addresses: list[Address]) -> None:
    struct = type(structure)
    for name, value in arguments.items():
        member = getattr(struct, name, None)
        if member is None:
            raise ValueError(f"record: {struct.__name__} has no {name!r}")
        kind = type(value)
        if kind is Place or kind is Word:
            is_written = kind is Place and name not in struct._reads_
            addresses.append(Address(begin + member.offset, value, is_written))
        elif kind is dict:
            _pack(getattr(structure, name), value, begin + member.offset, addresses)
        elif kind is list or kind is tuple:
            array = getattr(structure, name)
            size = member.size // len(array)
            for i, each in enumerate(value):
                if type(each) is Place or type(each) is Word:
                    offset = begin + member.offset + i * size
                    addresses.append(Address(offset, each, name not in struct._reads_))
                else:
                    array[i] = each
        elif value is not None:
            setattr(structure, name, value)


@dataclass
class Record:
    """The steps of an op and their buffers, which a description writes.

    inputs: names of a call's addresses and words, in the order in which a call gives them.
    older: those inputs that are older than the stream's previous kernel, as weights are: the first
        step may touch them before it waits.
    buffers: bytes of memory that lives as long as a call, by name.
    span: the numbers of tokens for which kernels are listed; None: the steps will be launched.
    """

    target: Target
    inputs: Sequence[str]
    older: frozenset[str] = frozenset()
    steps: list[Step] = field(default_factory=list)
    buffers: dict[str, int] = field(default_factory=dict)
    span: Span | None = None

    @property
    def kernels(self) -> list[Kernel]:
        """The kernels of the steps."""
        return [step.kernel for step in self.steps]

    def hold(self, size: int, largest: Callable[[int], int]) -> None:
        """Say up to which number of tokens a choice stays the same.

        size: the number that decided the choice; it is proportional to the number of tokens.
        largest: takes the size of the span's last number, returns the last size of the same choice.
        """
        if self.span is not None:
            most = size * self.span.last // self.span.first
            held = largest(most) * self.span.first // size
            self.span.last = min(self.span.last, max(held, self.span.first))

    def buffer(self, name: str, num_bytes: int) -> Place:
        """Memory for the steps that touch it. Raises ValueError if the name is taken."""
        if name in self.buffers or name in self.inputs:
            raise ValueError(f"record: each name must be used once, got {name!r} again")
        self.buffers[name] = num_bytes
        return Place(name)

    def matrices(
        self,
        name: str,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        row_pitch: int | None = None,
    ) -> Tensor:
        """A buffer of [matrices, rows, columns]; row_pitch: in elements, None: whole 16 bytes."""
        matrices, rows, columns = shape
        pitch = round_up_to_tma(columns, dtype.itemsize) if row_pitch is None else row_pitch
        place = self.buffer(name, matrices * rows * pitch * dtype.itemsize)
        return Tensor(shape, (rows * pitch, pitch, 1), dtype, place)

    def codes(self, name: str, shape: tuple[int, int, int], row_pitch: int | None = None) -> Codes:
        """Buffers of codes [matrices, rows, columns] and of their 1x128 scales, rows innermost."""
        matrices, rows, columns = shape
        data = self.matrices(name, shape, E4M3, row_pitch)
        blocks, pitch = num_blocks(columns), round_up(rows, 4)
        place = self.buffer(f"{name}_scales", matrices * blocks * pitch * 4)
        strides = blocks * pitch, 1, pitch
        return Codes(data, Tensor((matrices, rows, blocks), strides, torch.float32, place))

    def step(
        self,
        kernel: Kernel,
        grid: int,
        block: int,
        arguments: Arguments,
        *,
        programmatic: bool,
        maps: tuple[tuple[TensorMap, ...], ...] = (),
        early: Iterable[Place | None] = (),
        shared_bytes: int = 0,
        cluster: int = 1,
    ) -> None:
        """Append a `Step`. Raises ValueError if it touches what is neither input nor buffer."""
        structure, addresses = packed(struct_of(kernel.source), arguments)
        all_maps = [x for parameter in maps for x in parameter]
        places = [(x.tensor.place, x.is_written) for x in all_maps]
        places += [(x.value, x.is_written) for x in addresses if isinstance(x.value, Place)]
        touched = tuple(dict.fromkeys([place.base for place, _ in places]))
        for base in touched:
            if base not in self.buffers and base not in self.inputs:
                raise ValueError(f"record: {kernel} touches {base!r}, no input and no buffer")
        self.steps.append(
            Step(
                kernel,
                grid,
                block,
                maps,
                structure,
                tuple(addresses),
                frozenset(x.base for x in early if x is not None),
                programmatic,
                shared_bytes,
                cluster,
                touched,
                frozenset([place.base for place, is_written in places if is_written]),
            )
        )
