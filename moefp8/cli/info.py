"""Show GPU, driver, compiler and cache, and what will run where and why."""

import argparse
import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import torch

from .. import __version__
from ..checkpoint.errors import printable
from ..kernels.common.registry import runs_our_kernels
from ..kernels.gemm.tuned import file_name, measured
from ..kernels.jit import (
    JitError,
    cache_state,
    compiler_description,
    current_driver,
    max_cache_bytes,
)

_MAX_FACT = 1000
_KERNEL_MODULE = Path("/proc/driver/nvidia/version")
_SETTINGS = (
    *("MOEFP8_CACHE_DIR", "MOEFP8_CACHE_MAX_BYTES", "MOEFP8_COMPILER"),
    *("MOEFP8_NVRTC", "MOEFP8_INTERLEAVE", "MOEFP8_STRICT"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_HOME"),
)


def add_to(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="for programs")


def run(arguments: argparse.Namespace) -> int:
    facts = list(gather())
    if arguments.json:
        found: dict[str, list[str]] = {}
        for name, fact in facts:
            found.setdefault(name, []).append(fact)
        print(json.dumps(found, indent=1))
        return 0
    for name, fact in facts:
        print(f"{name:<9}{printable(fact, _MAX_FACT)}")
    return 0


def gather() -> Iterator[tuple[str, str]]:
    """(topic, a sentence or a fact)"""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    yield "moefp8", f"{__version__}, {versions}"
    yield "driver", _driver()
    yield from (("GPU", fact) for fact in _gpus())
    yield "CPU", "PyTorch's operations with the numerics of the kernels: for development and tests"
    compiler, has_compiler = _compiler()
    yield "compiler", compiler
    yield from (("cache", fact) for fact in _cache())
    yield from (("tuned", fact) for fact in _tuned())
    yield from (("setting", f"{x}={os.environ[x]}") for x in _SETTINGS if x in os.environ)
    yield "so", _verdict(has_compiler)


def _driver() -> str:
    try:
        newest = f"knows CUDA up to {current_driver().version()}"
    except JitError as error:
        return str(error)
    line = _KERNEL_MODULE.read_text().partition("\n")[0] if _KERNEL_MODULE.exists() else ""
    words = [word for word in line.split() if word[:1].isdigit() and "." in word]
    return f"{words[0]}, {newest}" if words else newest


def _gpus() -> Iterator[str]:
    if torch.version.cuda is None:
        yield f"not used: torch {torch.__version__} is not built for CUDA"
        return
    if not torch.cuda.is_available():
        yield "none that torch can use (see nvidia-smi and CUDA_VISIBLE_DEVICES)"
        return
    for i in range(torch.cuda.device_count()):
        of = torch.cuda.get_device_properties(i)
        what = f"cuda:{i} {of.name}, compute capability {of.major}.{of.minor}"
        size = f"{of.multi_processor_count} SMs, {of.total_memory / 2**30:.0f} GiB"
        if runs_our_kernels(i):
            where = "moefp8's kernels"
        else:
            where = (
                "PyTorch's operations, slow: the kernels are for compute capability 9.0 (Hopper)"
            )
        yield f"{what}, {size}: runs {where}"


def _compiler() -> tuple[str, bool]:
    try:
        return compiler_description(), True
    except JitError as error:
        return str(error), False


def _cache() -> Iterator[str]:
    state = cache_state()
    try:
        bound = f" of {max_cache_bytes() / 2**20:.1f} MiB" if max_cache_bytes() else ""
    except JitError as error:
        bound = f"; {error}"
    size = f"{state.num_bytes / 2**20:.1f} MiB"
    yield f"{state.folder or 'none'}: {state.num_kernels} kernels, {size}{bound}"
    if state.problem:
        yield f"cannot be used, so every process compiles anew: {state.problem}"


def _tuned() -> Iterator[str]:
    for i in range(torch.cuda.device_count()):
        if not runs_our_kernels(i):
            continue
        found = measured(i).found
        faster = sum(config is not None for sizes in found.values() for config in sizes.values())
        if found:
            yield f"cuda:{i}: {len(found)} layers, {faster} sizes not by default, {file_name(i)}"
        else:
            yield f"cuda:{i}: nothing; the default serves (python -m moefp8 bench --tune measures)"


def _verdict(has_compiler: bool) -> str:
    hopper = [i for i in range(torch.cuda.device_count()) if runs_our_kernels(i)]
    if not hopper:
        return "everything runs on PyTorch's operations: there is no Hopper GPU that torch can use"
    names = ", ".join(f"cuda:{i}" for i in hopper)
    if not has_compiler and not cache_state().num_kernels:
        return f"calls on {names} will raise: there is no compiler, and no kernel in the cache"
    return f"calls on {names} run moefp8's kernels, compiled when first needed"
