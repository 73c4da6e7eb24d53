"""A kernel variant: its source, its name, and how it becomes a cubin."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
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

_FORMAT = 1  # the version of a cache entry's format
_COMPILE_TIME = re.compile(r"^.*\bCompile time\b.*\n?", re.MULTILINE)

_COMPILERS: dict[str, type[Nvrtc | Nvcc]] = {"nvrtc": Nvrtc, "nvcc": Nvcc}
_started: Once[str, Nvrtc | Nvcc] = Once()
# NVRTC has locks of its own: a child forked while a thread held one would wait for it for ever.
_compiling = ForksWait()


def options_for(arch: str) -> tuple[str, ...]:
    """The compiler's options for an architecture, as NVRTC and nvcc name it: "sm_90a"."""
    return (
        f"--gpu-architecture={arch}",
        "--std=c++20",
        "--ptxas-options=-v",  # registers and spills, for `Cubin.problems`
        "--ptxas-options=-warn-spills",
    )


@dataclass(frozen=True)
class Kernel:
    """One kernel variant, for any architecture whose instructions suffice.

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


def compile_kernel(kernel: Kernel, arch: str) -> Cubin:
    """The cubin for an architecture, cached or compiled; needs no GPU.

    arch: as NVRTC names it: "sm_90a". Raises JitError with the compiler's log.
    """
    return _keyed(kernel, arch)[1]


def _keyed(kernel: Kernel, arch: str) -> tuple[str, Cubin]:
    program, compiler, options = _program(kernel), _compiler(), options_for(arch)
    pattern = "" if os.environ.get("MOEFP8_INTERLEAVE") == "0" else kernel.interleaving
    key = _key(program, compiler, options, pattern)
    return key, cached(key, lambda: _compile(kernel, program, compiler, options, pattern))


def compile_kernels(
    kernels: Iterable[Kernel],
    arch: str,
    num_threads: int | None = None,
    done: Callable[[], object] = lambda: None,
) -> list[Cubin]:
    """Compile for an architecture by num_threads threads; None: by one for each processor of this
    process.

    done: called after each, by any thread. Raises the first JitError once all threads are idle.
    """
    kernels = list(kernels)

    def compile_one(kernel: Kernel) -> Cubin:
        cubin = compile_kernel(kernel, arch)
        done()
        return cubin

    num_threads = min(num_threads or num_processors(), len(kernels)) or 1
    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(compile_one, kernels))  # an error or Ctrl-C cancels what waits


def keep_kernels(kernels: Mapping[str, Iterable[Kernel]]) -> None:
    """Have compiled kernels on disk, where processes that start later find them.

    kernels: architecture -> those compiled for it. Raises JitError, saying why that cannot be.
    """
    keep(dict([_keyed(kernel, arch) for arch, some in kernels.items() for kernel in some]))


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


def _compile(
    kernel: Kernel,
    program: Program,
    compiler: Nvrtc | Nvcc,
    options: tuple[str, ...],
    pattern: str,
) -> Cubin:
    try:
        with _compiling:
            cubin = compiler.compile(program, options)
    except CompileError as error:
        raise JitError(
            f"{kernel} does not compile\n"
            f"source: {kernel.source}\n"
            f"options: {' '.join(options)}\n"
            f"compiler: {compiler.version}\n{error}"
        ) from None
    log = _COMPILE_TIME.sub("", cubin.log)  # the same kernel is the same bytes, each time
    image = interleaved(cubin.image, pattern) if pattern else cubin.image
    return replace(cubin, log=log, image=image)


def _program(kernel: Kernel) -> Program:
    """The source and all that it includes, as text, so that the key covers what is compiled."""
    return Program(kernel.name, kernel.source.name, files_of(kernel.source))


def _key(program: Program, compiler: Nvrtc | Nvcc, options: tuple[str, ...], pattern: str) -> str:
    """A digest of all that the cubin depends on. It runs on every GPU of its architecture."""
    files = sorted(program.files.items())
    made = [compiler.version, options, pattern, VERSION if pattern else None]
    parts = [_FORMAT, *made, program.main, program.expression, files]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
