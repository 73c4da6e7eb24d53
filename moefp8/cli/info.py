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
from ..kernels.gemm.sm90.tuned import file_name, measured
from ..kernels.jit import (
    JitError,
    cache_state,
    compiler_description,
    current_driver,
    max_cache_bytes,
)
from ..kernels.targets import gpus_with_kernels, runs_kernels

_MAX_FACT = 1000
_CUDA_SETTINGS = ("CUDA_VISIBLE_DEVICES", "CUDA_HOME")
_KERNEL_MODULE = Path("/proc/driver/nvidia/version")


def add_to(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="for programs")


def run(arguments: argparse.Namespace) -> int:
    found = _facts()
    if arguments.json:
        print(json.dumps(found, indent=1))
    else:
        for topic, facts in found.items():
            for fact in facts:
                print(f"{topic:<9}{printable(fact, _MAX_FACT)}")
    return 0


def _facts() -> dict[str, list[str]]:
    """Return topic -> sentences and facts, at least one."""
    try:
        compiler, has_compiler = compiler_description(), True
    except JitError as error:
        compiler, has_compiler = str(error), False
    gpus = gpus_with_kernels()
    names = sorted(x for x in os.environ if x.startswith("MOEFP8_") or x in _CUDA_SETTINGS)
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    found = {
        "moefp8": [f"{__version__}, {versions}"],
        "driver": [_driver()],
        "GPU": [*_gpus()],
        "CPU": ["PyTorch's operations with the numerics of the kernels: for development and tests"],
        "compiler": [compiler],
        "cache": [*_cache()],
        "tuned": [*map(_tuned, gpus)],
        "setting": [f"{name}={os.environ[name]}" for name in names],
        "so": [_verdict(gpus, has_compiler)],
    }
    return {topic: facts for topic, facts in found.items() if facts}


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
        slow = "PyTorch's operations, slow: the kernels are for compute capability 9.0 (Hopper)"
        where = "moefp8's kernels" if runs_kernels(i) else slow
        yield f"{what}, {size}: runs {where}"


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


def _tuned(index: int) -> str:
    found = measured(index).configs
    if not found:
        return f"cuda:{index}: nothing; the default serves (python -m moefp8 bench --tune measures)"
    faster = sum(config is not None for sizes in found.values() for config in sizes.values())
    path = file_name(index)
    return f"cuda:{index}: {len(found)} layers, {faster} sizes not by default, {path}"


def _verdict(gpus: list[int], has_compiler: bool) -> str:
    if not gpus:
        return "everything runs on PyTorch's operations: there is no Hopper GPU that torch can use"
    names = ", ".join(f"cuda:{i}" for i in gpus)
    if not has_compiler and not cache_state().num_kernels:
        return f"calls on {names} will raise: there is no compiler, and no kernel in the cache"
    return f"calls on {names} run moefp8's kernels, compiled when first needed"
