"""What a compiler takes and gives."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .cubin import Cubin


@dataclass(frozen=True)
class Program:
    """expression: the kernel in C++; main: its source's file name; files: name -> text, all."""

    expression: str
    main: str
    files: dict[str, str]


class CompileError(Exception):
    """The compiler's log."""


class Compiler(Protocol):
    version: str  # changes whenever its output may change
    path: str

    def compile(self, program: Program, options: Sequence[str]) -> Cubin:
        """Raises CompileError."""
