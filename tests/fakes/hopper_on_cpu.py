"""Run kernels with TMA, mbarriers, WGMMA and clusters on a CPU, as their launchers launch them.

g++ compiles a kernel's own source, and hopper_on_cpu.hpp stands for the device pieces. It draws,
from a seed, in which order threads run and when asynchronous work is done. What it does not see:
fences between generic and asynchronous accesses, reads of shared memory that an arrival overtakes,
and how fast all of that is.
"""

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

from moefp8.kernels import jit
from moefp8.kernels.jit.source import DEVICE_FOLDER
from tests.fakes.emulator import Emulator

_RUNTIME = Path(__file__).with_name("hopper_on_cpu.hpp")
_SHARED = "extern __shared__ __align__(1024) uint8_t memory[];"
_OWN_SHARED = "uint8_t* memory = shared_memory + current_cta * kCtaBytes;"


@lru_cache
def _descriptors() -> str:
    """What wgmma.cuh says of descriptors, which is C++."""
    text = (DEVICE_FOLDER / "wgmma.cuh").read_text()
    begin, end = text.index("// Describes"), text.index("// Orders register accesses")
    return text[begin:end]


def build(kernel: jit.Kernel, num_maps: int, change: tuple[str, str] = ("", "")) -> Callable:
    """The kernel as a function of (parameters, [grid, block, cluster, seed]) that returns a fault.

    num_maps: how many tensor maps come before its `Arguments`.
    change: a text that its sources have once, and what stands there instead.
    """
    sources = {x.name: x.read_text() for x in (kernel.source, *kernel.source.parent.glob("*.cuh"))}
    if change[0]:
        assert sum(text.count(change[0]) for text in sources.values()) == 1, change
    maps = "".join(f"*(const TensorMap*)parameters[{i}], " for i in range(num_maps))
    call = f"{kernel.name}({maps}*(const Arguments*)parameters[{num_maps}])"
    main = (
        f'#include "{_RUNTIME.name}"\n{_descriptors()}\n#include "{kernel.source.name}"\n'
        'extern "C" const char* run(void** parameters, const int* x) {\n'
        f"  return launch([&] {{ {call}; }}, x[0], x[1], x[2], x[3]);\n}}\n"
    )
    files = {name: text.replace(*change) for name, text in sources.items()}
    files = {name: text.replace(_SHARED, _OWN_SHARED) for name, text in files.items()}
    files |= {x.name: "" for x in DEVICE_FOLDER.glob("*.cuh")}
    files |= {_RUNTIME.name: _RUNTIME.read_text(), "main.cpp": main}
    return _compiled(tuple(files.items()))


@lru_cache(maxsize=64)
def _compiled(files: tuple[tuple[str, str], ...]) -> Callable:
    options = ["-std=c++20", "-O1", "-w", "-Wno-psabi", "-ffp-contract=off", "-shared", "-fPIC"]
    with TemporaryDirectory() as folder:
        for name, text in files:
            (Path(folder) / name).write_text(text)
        subprocess.run(["g++", *options, "main.cpp", "-o", "made.so"], cwd=folder, check=True)
        run = ctypes.CDLL(str(Path(folder) / "made.so")).run
    run.restype = ctypes.c_char_p
    return run


def is_possible() -> bool:
    return shutil.which("g++") is not None


class HopperOnCpu(Emulator):
    """A library for `FakeDriver` that runs launches by `build`.

    change: as there. seed: of the next launch; each has another one.
    """

    def __init__(self, change: tuple[str, str] = ("", ""), seed: int = 0) -> None:
        super().__init__()
        self.change, self.seed = change, seed

    def cuTensorMapEncodeTiled(self, at, dtype, rank, address, shape, strides, box, *rest):
        super().cuTensorMapEncodeTiled(at, dtype, rank, address, shape, strides, box, *rest)
        size = self.maps[-1].dtype.itemsize
        ones = [1] * (3 - rank)
        values = [address, size, rank, *shape, *ones, size, *list(strides)[: rank - 1]]
        values += [*[0] * (3 - rank), *box, *ones, self.maps[-1].swizzle]
        (ctypes.c_uint64 * len(values)).from_address(at)[:] = values
        return 0

    def compute(self, made: SimpleNamespace, parameters: list[int]) -> None:
        run = build(made.kernel, len(parameters) - 1, self.change)
        self.seed += 1
        words = (ctypes.c_void_p * len(parameters))(*parameters)
        numbers = (ctypes.c_int * 4)(made.grid, made.block, made.cluster, self.seed)
        fault = run(words, numbers)
        assert not fault, fault.decode()
