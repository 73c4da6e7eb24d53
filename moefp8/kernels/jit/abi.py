"""The ctypes class of a struct that a kernel takes, read from the kernel's source.

So a kernel's arguments are declared once, in its .cu. The reader understands what follows, and
refuses the rest:

    struct Arguments {
      const uint8_t* x;               // a pointer, alone in its declaration
      int64_t row_bytes, num_rows;    // numbers of a fixed size, `int` and `float`
      const uint8_t* w[kMaxMatrices]; // an array: of a number, or of a `constexpr int` of a number
      Divisor num_parts;              // another struct of these sources
      __device__ int f() const;       // member functions come last, and say `__device__`
    };
"""

import ctypes
import re
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, ClassVar

from ...system.threads import Once
from .source import files_of, without_comments

_NUMBERS: dict[str, Any] = {  # base.cuh defines those with `_t`
    "int": ctypes.c_int,
    "float": ctypes.c_float,
    "uint8_t": ctypes.c_uint8,
    "uint16_t": ctypes.c_uint16,
    "uint32_t": ctypes.c_uint32,
    "uint64_t": ctypes.c_uint64,
    "int64_t": ctypes.c_int64,
}
_DECLARATOR = r"\w+(?:\[\w+\])?"
_POINTER = re.compile(rf"(?P<const>const )?\w+ ?\* ?(?P<declarator>{_DECLARATOR})")
_VALUES = re.compile(rf"(?P<type>\w+) (?P<declarators>{_DECLARATOR}(?: ?, ?{_DECLARATOR})*)")
_LITERAL = re.compile(r""""(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])'""")
_MEMBERS = (
    "a member is a number of a fixed size, a pointer that is alone in its declaration, a struct, "
    "or an array of these, without an initialiser; write it so"
)


class Struct(ctypes.Structure):
    """A struct of a kernel's source.

    _reads_: the names of its pointers to const, that is to data which the kernel only reads. Those
        of structs within it are in their own `_reads_`.
    """

    _reads_: ClassVar[frozenset[str]]


_Members = tuple[tuple[str, Any], ...]
_classes: Once[tuple[str, _Members, frozenset[str]], type[Struct]] = Once()


@cache
def struct_of(source: Path, name: str = "Arguments") -> type[Struct]:
    """The class of `struct name` in a .cu or in what that includes.

    Structs within it have classes of their own, `struct_of(source, "Groups")`. Structs of one name
    with the same members are one class, whatever source they are read from. Raises ValueError for
    what the reader does not understand, and JitError for a file that is missing.
    """
    fields, reads = dict[str, Any](), set[str]()
    for statement in _members(source, name):
        where = f"{source.name}: struct {name}: `{statement}`"
        if pointer := _POINTER.fullmatch(statement):
            declarators, kind = [pointer["declarator"]], ctypes.c_void_p
        elif values := _VALUES.fullmatch(statement):
            declarators = re.split(" ?, ?", values["declarators"])
            kind = _class_of(source, values["type"], where)
        else:
            raise ValueError(f"{where} cannot be read: {_MEMBERS}")
        for declarator in declarators:
            field, _, count = declarator.rstrip("]").partition("[")
            fields[field] = kind * _number(source, count) if count else kind
            if pointer and pointer["const"]:
                reads.add(field)
    members, only_read = tuple(fields.items()), frozenset(reads)

    def make() -> type[Struct]:
        return type(name, (Struct,), {"_fields_": members, "_reads_": only_read})

    return _classes.get((name, members, only_read), make)


def offset_of(struct: type[ctypes.Structure], field: str) -> int:
    """The offset of a field in the struct, in bytes."""
    offset: int = getattr(struct, field).offset
    return offset


def _members(source: Path, name: str) -> Iterator[str]:
    """The declarations of the struct's members, in order, each on one line."""
    bodies = _bodies(source, name)
    if len(bodies) != 1:
        raise ValueError(f"{source.name}: `struct {name}` must be there once, found {len(bodies)}")
    where, has_functions = f"{source.name}: struct {name}:", False
    if "#" in bodies[0]:
        raise ValueError(f"{where} the preprocessor must not change its members")
    for statement in filter(None, (" ".join(x.split()) for x in bodies[0].split(";"))):
        if "__device__" in statement:
            has_functions = True
        elif has_functions:
            raise ValueError(f"{where} `{statement}` must come before the member functions")
        else:
            yield statement


def _bodies(source: Path, name: str) -> list[str]:
    """The text between the braces of each `struct name`, with `{};` for braces within."""
    bodies, text = list[str](), _text(source)
    for match in re.finditer(rf"struct\s+{name}\b([^;{{]*)\{{", text):
        before = text[: match.start()].rstrip()
        if before.endswith((">", "enum")) or match[1].strip():
            raise ValueError(
                f"{source.name}: `{' '.join(match[0].split())}`: a struct that a kernel takes must "
                "be no template, no enum and no derived class"
            )
        body, depth = "", 1
        for piece in re.finditer(r"[{}]|[^{}]+", text[match.end() :]):
            depth += (piece[0] == "{") - (piece[0] == "}")
            if depth == 0:
                break
            if depth == 1:
                body += "{};" if piece[0] == "}" else piece[0]
        bodies.append(body)
    return bodies


def _class_of(source: Path, kind: str, where: str) -> Any:
    if kind in _NUMBERS:
        return _NUMBERS[kind]
    if not _bodies(source, kind):
        raise ValueError(
            f"{where}: {kind} must be a struct of these sources, or one of {', '.join(_NUMBERS)}"
        )
    return struct_of(source, kind)


def _number(source: Path, count: str) -> int:
    if count.isdigit():
        return int(count)
    numbers = re.findall(rf"\bconstexpr\s+int\s+{count}\s*=\s*(\d+)\s*;", _text(source))
    if len(numbers) != 1:
        raise ValueError(
            f"{source.name}: [{count}]: `constexpr int {count} = ` a number must be there once, "
            f"found {len(numbers)}"
        )
    return int(numbers[0])


@lru_cache(4)  # several structs are read from the same sources, one after another
def _text(source: Path) -> str:
    """All files of a source, without comments, and with empty strings."""
    text = "\n".join(map(without_comments, files_of(source).values()))
    return _LITERAL.sub('""', text)
