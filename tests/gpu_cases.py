"""What the tests of kernels share: what needs a GPU, and how arguments reach a kernel."""

import ctypes
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from moefp8.kernels import jit

NUM_SMS = 132  # of an H200
NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def on_gpu(test):
    for mark in NEEDS_GPU:
        test = mark(test)
    return test


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Any wait for the device is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def assert_arguments_fit(
    arguments: type[ctypes.Structure], kernel: jit.Kernel, folder: Path
) -> None:
    """The struct `Arguments` of the kernel's source has their fields, in order and in size."""
    names = [name for name, *_ in arguments._fields_]
    in_order = ", ".join(f".{name} = {{}}" for name in names)  # C++ refuses any other order
    checks = [
        f"constexpr Arguments kInOrder = {{{in_order}}};",
        f"static_assert(sizeof(Arguments) == {ctypes.sizeof(arguments)});",
        *(
            f"static_assert(sizeof(Arguments::{name}) == {getattr(arguments, name).size});"
            for name in names
        ),
    ]
    for header in kernel.source.parent.glob("*.cuh"):
        shutil.copy(header, folder)
    source = folder / "checked.cu"
    source.write_text("\n".join([kernel.source.read_text(), *checks]))
    jit.compile_kernel(jit.Kernel(source, kernel.name))
