"""A compiler's input and output: a program; a compiled kernel, and its form on disk."""

import hashlib
import re
import struct
from dataclasses import dataclass

_LENGTHS = struct.Struct("<2Q")
# The last is what ptxas says where it serialises WGMMAs or ignores a setmaxnreg.
_PROBLEM = re.compile(
    r"\b[1-9]\d* bytes (spill (stores|loads)|stack frame)|Potential Performance Loss"
)


class JitError(RuntimeError):
    """A kernel cannot be compiled, loaded or launched; the message says why and the way out."""


class CompileError(Exception):
    """A program does not compile; the message is the compiler's log."""


@dataclass(frozen=True)
class Program:
    """expression: the kernel in C++; main: its source's file name; files: name -> text, all."""

    expression: str
    main: str
    files: dict[str, str]


@dataclass(frozen=True)
class Cubin:
    """image: an ELF file for the driver; symbol: the kernel in it; log: the compiler's, verbose."""

    image: bytes
    symbol: str
    log: str

    def problems(self) -> list[str]:
        """Lines of the log about spills, local arrays, serialised WGMMAs, ignored setmaxnregs.

        These cost only speed, so users do not see them; tests demand an empty list.
        """
        return [line.strip() for line in self.log.splitlines() if _PROBLEM.search(line)]

    def to_bytes(self, key: str) -> bytes:
        symbol, log = self.symbol.encode(), self.log.encode()
        payload = _LENGTHS.pack(len(symbol), len(log)) + symbol + log + self.image
        return _checksum(key, payload) + payload

    @classmethod
    def from_bytes(cls, key: str, data: bytes) -> "Cubin | None":
        """None if data is not what `to_bytes` gave for that key: cut off, altered or swapped."""
        checksum, payload = data[:32], data[32:]
        if checksum != _checksum(key, payload):
            return None
        num_symbol, num_log = _LENGTHS.unpack_from(payload)
        rest = payload[_LENGTHS.size :]
        symbol, log = rest[:num_symbol], rest[num_symbol : num_symbol + num_log]
        return cls(rest[num_symbol + num_log :], symbol.decode(), log.decode())


def _checksum(key: str, payload: bytes) -> bytes:
    return hashlib.sha256(key.encode() + payload).digest()
