"""Where machine code is in a cubin, which is a 64-bit little-endian ELF file."""

import struct
from ctypes import LittleEndianStructure, c_uint32, c_uint64

from .fields import fields

_PROGBITS = 1
_EXECUTABLE = 4  # SHF_EXECINSTR


class _Section(LittleEndianStructure):
    """Elf64_Shdr"""

    _fields_ = fields(
        (c_uint32, "name kind"),
        (c_uint64, "flags address offset size"),
        (c_uint32, "link info"),
        (c_uint64, "alignment entry_size"),
    )


def code_ranges(image: bytes) -> list[tuple[int, int]]:
    """Begin and end of each range of machine code in `image`."""
    (table,) = struct.unpack_from("<Q", image, 0x28)
    size, count = struct.unpack_from("<2H", image, 0x3A)
    sections = (_Section.from_buffer_copy(image, table + i * size) for i in range(count))
    code = (x for x in sections if x.kind == _PROGBITS and x.flags & _EXECUTABLE)
    return [(x.offset, x.offset + x.size) for x in code]
