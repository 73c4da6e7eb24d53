"""What a cubin holds, a 64-bit little-endian ELF file: its kernels' names, and their code."""

import struct
from collections.abc import Iterator
from ctypes import LittleEndianStructure, c_uint32, c_uint64

from .fields import fields

_PROGBITS, _SYMTAB = 1, 2
_EXECUTABLE = 4  # SHF_EXECINSTR
_FUNCTION = 2  # STT_FUNC
_CUDA_ENTRY = 0x10  # STO_CUDA_ENTRY in st_other: a __global__ function, not a device function


class _Section(LittleEndianStructure):
    """Elf64_Shdr"""

    _fields_ = fields(
        (c_uint32, "name kind"),
        (c_uint64, "flags address offset size"),
        (c_uint32, "link info"),
        (c_uint64, "alignment entry_size"),
    )


def code_ranges(image: bytes) -> list[tuple[int, int]]:
    """Where in `image` machine code begins and ends."""
    sections = (x for x in _sections(image) if x.kind == _PROGBITS and x.flags & _EXECUTABLE)
    return [(x.offset, x.offset + x.size) for x in sections]


def entry_points(image: bytes) -> list[str]:
    """Mangled names of the kernels."""
    sections = _sections(image)
    tables = (x for x in sections if x.kind == _SYMTAB)
    return [name for x in tables for name in _kernels_in(image, x, sections[x.link].offset)]


def _kernels_in(image: bytes, table: _Section, strings: int) -> Iterator[str]:
    for at in range(table.offset, table.offset + table.size, table.entry_size):
        name, info, other = struct.unpack_from("<I2B", image, at)
        if info & 0xF == _FUNCTION and other & _CUDA_ENTRY:
            begin = strings + name
            yield image[begin : image.index(b"\0", begin)].decode()


def _sections(image: bytes) -> list[_Section]:
    (table,) = struct.unpack_from("<Q", image, 0x28)
    size, count = struct.unpack_from("<2H", image, 0x3A)
    return [_Section.from_buffer_copy(image, table + i * size) for i in range(count)]
