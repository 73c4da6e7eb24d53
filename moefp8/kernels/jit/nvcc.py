"""nvcc, the compiler of an installed CUDA toolkit: `MOEFP8_COMPILER=nvcc`."""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .cubin import CompileError, Cubin, JitError, Program


class Nvcc:
    """nvcc as a process of its own, in a folder that holds just the program's files.

    version: changes whenever its output may change, as `Nvrtc.version` does.
    """

    def __init__(self) -> None:
        self.path = _find_nvcc()
        self.version = f"nvcc {self._run('--version').stdout}"

    def _run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [self.path, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def compile(self, program: Program, options: Sequence[str]) -> Cubin:
        """Raises CompileError."""
        with tempfile.TemporaryDirectory(prefix="moefp8-") as folder:
            for name, text in program.files.items():
                path = Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            # Taking the kernel's address instantiates it, and nothing else.
            use = f"const void* used = (const void*)({program.expression});"
            main, output = Path(folder, "_main.cu"), Path(folder, "_main.cubin")
            main.write_text(f'#include "{program.main}"\n{use}\n')
            done = self._run("-cubin", *options, f"-I{folder}", "-o", str(output), str(main))
            log = done.stdout + done.stderr
            if done.returncode:
                raise CompileError(log)
            image = output.read_bytes()
        return Cubin(image, _entry_point(image, program.expression), log)


def _entry_point(image: bytes, expression: str) -> str:
    """The mangled name of `a::kernel<...>`, in which `6kernel` is a part."""
    name = expression.partition("<")[0].split("::")[-1].strip()
    part = re.compile(rf"(?<!\d){len(name)}{name}")
    # A cubin has a section of constants for each kernel, and for nothing else.
    kernels = {match.decode() for match in re.findall(rb"\.nv\.constant0\.(\w+)", image)}
    symbols = [symbol for symbol in kernels if part.search(symbol)]
    if len(symbols) != 1:
        raise CompileError(f"expected one kernel {name} in nvcc's output, got {symbols}")
    return symbols[0]


def _find_nvcc() -> str:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    path = (home and shutil.which("nvcc", path=os.path.join(home, "bin"))) or shutil.which("nvcc")
    if not path:
        raise JitError(
            "MOEFP8_COMPILER=nvcc, but no nvcc is in $CUDA_HOME/bin or PATH; set one of them, or "
            "unset MOEFP8_COMPILER to compile with NVRTC"
        )
    return path
