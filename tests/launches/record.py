"""What one call launches, as text that two versions of the library can be compared by.

Between launches are PyTorch's operations that copy to tensors or fill them, but no others.

Addresses are written by name: `x+256` is 256 bytes after the beginning of x's storage. The memory
of the call itself, a workspace or a tensor that the call allocates, has no name of its own:

- in the exact text it is `workspace0+256` or `tensor0+256`, numbered as they first appear;
- modulo offsets it is `scratch0`: within each launch, addresses are numbered as they appear.
"""

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from moefp8.kernels.jit import Kernel
from tests.launches.gpu import MAP_BYTES, Driver, Launched, Memory, Written, layout_of

_WORD = 8
_ATTRIBUTES = {4: "cluster", 6: "programmatic"}  # CUlaunchAttributeID of cuda.h
_DIGITS = 10  # of a digest


@dataclass(frozen=True)
class Record:
    """A call's launches.

    exact, modulo_offsets: the text, with and without places in the call's own memory.
    workspace_bytes: the most that workspaces take at a time.
    tensor_bytes: of all other tensors that the call allocates and that appear in the text, but for
        results.
    """

    exact: str
    modulo_offsets: str
    workspace_bytes: int
    tensor_bytes: int
    num_launches: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.workspace_bytes, self.tensor_bytes, self.num_launches


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def record_of(
    driver: Driver,
    inputs: Mapping[str, torch.Tensor],
    results: Mapping[str, torch.Tensor],
    listed: Iterable[Kernel] = (),
) -> Record:
    """The record of what was launched with these inputs and gave these results.

    listed: kernels that `precompile` would compile, in any order.
    """
    named = {**inputs, **results}
    names = {x.untyped_storage()._cdata: name for name, x in reversed(named.items())}
    layouts = [f"{x}: {layout_of(y)} offset {y.storage_offset()}" for x, y in named.items()]
    layouts += sorted(f"listed: {x} {x.interleaving}" for x in {*listed})
    memory, launched = driver.memory, driver.library.launched
    exact, modulo = _Exact(memory, names), _Modulo(memory, names)
    texts = []
    for symbols in (exact, modulo):
        lines = [line for made in launched for line in _lines(made, symbols)]
        texts.append("\n".join([*layouts, *lines, ""]))
    sizes = [x.nbytes() for x in exact.owners if isinstance(x, torch.UntypedStorage)]
    num_launches = sum(isinstance(x, Launched) for x in launched)
    return Record(*texts, memory.most, sum(sizes), num_launches)


class _Exact:
    """Symbols of addresses; owners: the workspaces and tensors without a name, as they appear."""

    def __init__(self, memory: Memory, names: Mapping[int, str]) -> None:
        self._memory, self._names = memory, names
        self.owners: list[torch.UntypedStorage | int] = []
        self._symbols: dict[int, str] = {}

    def begin_launch(self) -> None:
        """Names hold for all launches."""

    def __call__(self, word: int) -> str | None:
        """The name of an address; None if it is a number."""
        place = self._memory.find(word)
        if place is None:
            return None
        owner, offset = place
        is_workspace = isinstance(owner, int)
        name = None if is_workspace else self._names.get(owner._cdata)
        return f"{name}+{offset}" if name else self.scratch(owner, offset)

    def scratch(self, owner: torch.UntypedStorage | int, offset: int) -> str:
        is_workspace = isinstance(owner, int)
        key = -1 - owner if is_workspace else owner._cdata
        if key not in self._symbols:
            kind = "workspace" if is_workspace else "tensor"
            number = sum(name.startswith(kind) for name in self._symbols.values())
            self._symbols[key] = f"{kind}{number}"
            self.owners.append(owner)
        return f"{self._symbols[key]}+{offset}"


class _Modulo(_Exact):
    """All memory of the call is scratch memory, and a launch knows no other launch's."""

    def begin_launch(self) -> None:
        self._scratch: dict[str, str] = {}

    def scratch(self, owner: torch.UntypedStorage | int, offset: int) -> str:
        place = super().scratch(owner, offset)
        return self._scratch.setdefault(place, f"scratch{len(self._scratch)}")


Symbols = Callable[[int], str | None]


def _lines(made: Launched | Written, symbols: _Exact) -> Iterator[str]:
    symbols.begin_launch()
    if isinstance(made, Written):
        pairs = zip(made.addresses, made.layouts, strict=True)
        yield f"{made.op} " + ", from ".join(f"{symbols(x)} {layout}" for x, layout in pairs)
        return
    kernel = made.kernel
    yield f"{kernel.source.name}: {kernel.name}"
    if kernel.interleaving:
        yield f"  interleaving {kernel.interleaving}"
    attributes = [
        f"{_ATTRIBUTES.get(number, f'attribute {number}')} {_dims(value)}"
        for number, value in sorted(made.attributes.items())
    ]
    sizes = f"grid {_dims(made.grid)}, block {_dims(made.block)}, shared {made.shared_bytes}"
    yield "  " + ", ".join([sizes, *attributes])
    *maps, structure = made.arguments
    for i, data in enumerate(maps):
        yield from (f"  map {i}: {x}" for x in _maps(data, symbols))
    for i, text in enumerate(_words(structure, symbols)):
        yield f"  {i * _WORD:4}: {text}"


def _dims(value: Iterable[int]) -> str:
    """x, y and z; x alone where the others are 0 or 1."""
    first, *rest = value
    return str(first) if set(rest) <= {0, 1} else str((first, *rest))


def _words(data: bytes, symbols: Symbols) -> Iterator[str]:
    """Words of 8 bytes: an address, or two numbers of 32 bits."""
    data = data.ljust(-(-len(data) // _WORD) * _WORD, b"\0")
    for (word,) in struct.iter_unpack("<Q", data):
        yield symbols(word) or f"{word & 0xFFFFFFFF} {word >> 32}"


def _maps(data: bytes, symbols: Symbols) -> Iterator[str]:
    """Tensor maps as `Library.cuTensorMapEncodeTiled` makes them."""
    for begin in range(0, len(data), MAP_BYTES):
        words = struct.unpack_from("<16Q", data, begin)
        address, dtype, rank = words[:3]
        if not 1 <= rank <= 3:
            yield f"no map: {data[begin : begin + MAP_BYTES].hex()}"
            continue
        numbers = struct.unpack_from(f"<{2 * rank + 4}I", data, begin + _WORD * (3 + 2 * rank))
        yield (
            f"{symbols(address) or address}, dtype {dtype}, shape {[*words[3 : 3 + rank]]}, "
            f"strides {[*words[3 + rank : 2 + 2 * rank]]}, box {[*numbers[:rank]]}, "
            f"steps {[*numbers[rank : 2 * rank]]}, options {[*numbers[2 * rank :]]}"
        )
