"""A kernel variant: its source, its name, and how it becomes a cubin."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from ...system.threads import ForksWait, Once
from .cache import cached, keep
from .cubin import CompileError, Cubin, JitError, Program
from .interleave import VERSION, interleaved
from .nvcc import Nvcc
from .nvrtc import Nvrtc
from .source import files_of

ARCHITECTURE = "sm_90a"
OPTIONS = (
    f"--gpu-architecture={ARCHITECTURE}",
    "--std=c++20",
    "--ptxas-options=-v",  # registers and spills, for `Cubin.problems`
    "--ptxas-options=-warn-spills",
)
_FORMAT = 1  # the version of a cache entry's format
_COMPILE_TIME = re.compile(r"^.*\bCompile time\b.*\n?", re.MULTILINE)

_COMPILERS: dict[str, type[Nvrtc | Nvcc]] = {"nvrtc": Nvrtc, "nvcc": Nvcc}
_started: Once[str, Nvrtc | Nvcc] = Once()
# NVRTC has locks of its own: a child forked while a thread held one would wait for it for ever.
_compiling = ForksWait()


@dataclass(frozen=True)
class Kernel:
    """One kernel variant.

    source: the .cu file; `#include "x.cuh"`, in headers too, means the file beside source, else
        the one in `moefp8/kernels/device`.
    name: C++ name of the `__global__` function, e.g. `combine_kernel<Input::kHalf, true>`.
    interleaving: which FFMAs of its promotions yield, see `interleave`; empty: as compiled.
        `MOEFP8_INTERLEAVE=0` leaves all kernels as compiled.
    """

    source: Path
    name: str
    interleaving: str = ""

    def __str__(self) -> str:
        return f"{self.source.name}: {self.name}"


def compile_kernel(kernel: Kernel) -> Cubin:
    """The cubin, cached or compiled; needs no GPU. Raises JitError with the compiler's log."""
    return _keyed(kernel)[1]


def _keyed(kernel: Kernel) -> tuple[str, Cubin]:
    program, compiler = _program(kernel), _compiler()
    pattern = "" if os.environ.get("MOEFP8_INTERLEAVE") == "0" else kernel.interleaving
    key = _key(program, compiler, pattern)
    return key, cached(key, lambda: _compile(kernel, program, compiler, pattern))


def compile_kernels(
    kernels: Iterable[Kernel],
    num_threads: int | None = None,
    done: Callable[[], object] = lambda: None,
) -> list[Cubin]:
    """Compile by num_threads threads; None: by one for each processor of this process.

    done: called after each, by any thread. Raises the first JitError once all threads are idle.
    """
    kernels = list(kernels)

    def compile_one(kernel: Kernel) -> Cubin:
        cubin = compile_kernel(kernel)
        done()
        return cubin

    num_threads = min(num_threads or num_processors(), len(kernels)) or 1
    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(compile_one, kernels))  # an error or Ctrl-C cancels what waits


def keep_kernels(kernels: Iterable[Kernel]) -> None:
    """Have compiled kernels on disk, where processes that start later find them.

    Raises JitError, saying why that cannot be.
    """
    keep(dict(map(_keyed, kernels)))


def num_processors() -> int:
    if hasattr(os, "sched_getaffinity"):  # fewer than the machine has, in a container
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _compiler() -> Nvrtc | Nvcc:
    """NVRTC, or what `MOEFP8_COMPILER` names; both see the same text and options."""
    name = os.environ.get("MOEFP8_COMPILER", "nvrtc")
    if name not in _COMPILERS:
        raise JitError(f"MOEFP8_COMPILER must be nvrtc or nvcc, got {name!r}")

    def start() -> Nvrtc | Nvcc:
        with _compiling:  # NVRTC is opened, and compiles an empty file
            return _COMPILERS[name]()

    return _started.get(name, start)


def compiler_description() -> str:
    """Which compiler is used, and where it is. Raises JitError without any."""
    compiler = _compiler()
    return f"{compiler.version.strip()}, {compiler.path}"


def _compile(kernel: Kernel, program: Program, compiler: Nvrtc | Nvcc, pattern: str) -> Cubin:
    try:
        with _compiling:
            cubin = compiler.compile(program, OPTIONS)
    except CompileError as error:
        raise JitError(
            f"{kernel} does not compile\n"
            f"source: {kernel.source}\n"
            f"options: {' '.join(OPTIONS)}\n"
            f"compiler: {compiler.version}\n{error}"
        ) from None
    log = _COMPILE_TIME.sub("", cubin.log)  # the same kernel is the same bytes, each time
    image = interleaved(cubin.image, pattern) if pattern else cubin.image
    return replace(cubin, log=log, image=image)


def _program(kernel: Kernel) -> Program:
    """The source and all that it includes, as text, so that the key covers what is compiled."""
    return Program(kernel.name, kernel.source.name, files_of(kernel.source))


def _key(program: Program, compiler: Nvrtc | Nvcc, pattern: str) -> str:
    """A digest of all that the cubin depends on. It runs on every GPU of its architecture."""
    files = sorted(program.files.items())
    made = [compiler.version, OPTIONS, pattern, VERSION if pattern else None]
    parts = [_FORMAT, *made, program.main, program.expression, files]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
