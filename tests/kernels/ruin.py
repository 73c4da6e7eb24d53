"""What ruins a process that uses a GPU, each run in one of its own: see `test_ruin_gpu.py`."""

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from moefp8 import FP8Linear
from moefp8.kernels import jit
from moefp8.kernels.targets import ANY_TARGET
from moefp8.quant.quantize import quantize_1x128, quantize_kernels


@contextmanager
def full_memory(spare: int = 0, *, of_process: bool = False) -> Iterator[None]:
    """No memory of the GPU is left but `spare` bytes, of which PyTorch's allocator knows.

    of_process: this process may take no more, and other processes notice nothing.
    """
    torch.cuda.empty_cache()
    own = torch.empty(spare, dtype=torch.uint8, device="cuda")
    size, total = torch.cuda.mem_get_info()
    if of_process:
        size = spare or 1 << 30
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    held = []
    while size >= 1 << 12:
        try:
            held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.cuda.OutOfMemoryError:
            size //= 2
    del own
    try:
        yield
    finally:
        held.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


def sample() -> tuple[FP8Linear, torch.Tensor]:
    torch.manual_seed(0)
    layer = FP8Linear.from_linear(torch.nn.Linear(512, 384).bfloat16())
    return layer.cuda(), torch.randn(40, 512).bfloat16().cuda()


def kernels_find_no_memory() -> None:
    """Kernels are loaded until memory is full; once there is some, they load and run."""
    layer, x = sample()
    with torch.inference_mode():
        expected = layer(x)
    driver = jit.current_driver()
    function = driver.load(next(quantize_kernels(ANY_TARGET, torch.bfloat16, 1, 128)), 0)
    told = ""
    with full_memory():
        for _ in range(20_000):
            try:
                driver.restore(function)
            except torch.cuda.OutOfMemoryError as error:
                told = str(error)
                break
    print(told or "20000 modules were loaded without any memory")
    assert not told or "torch.cuda.empty_cache()" in told
    with torch.inference_mode(), jit.using(jit.Driver()):
        assert torch.equal(layer(x), expected)


def an_illegal_address() -> None:
    """What fails once fails for good, and says so."""
    x = torch.randn(40, 512, device="cuda")
    quantize_1x128(x, False)
    for launch in jit.current_driver().prepared().values():
        launch.on(0, (16, 16, 16))
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(error)
    for _ in range(2):
        told = error_of(lambda: quantize_1x128(x, False))
        print(told)
        assert "JitError" not in told or "restart the process" in told


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except RuntimeError as error:  # JitError is one
        return f"{type(error).__name__}: {error}"
    raise AssertionError("it went well")


def _reset_by_driver() -> None:
    lib, device = jit.current_driver().library, ctypes.c_int()
    assert lib.cuDeviceGet(ctypes.byref(device), 0) == 0
    assert lib.cuDevicePrimaryCtxReset_v2(device) == 0


def _reset_by_runtime() -> None:
    """PyTorch's own libcudart resets, and so it knows of it."""
    with open("/proc/self/maps") as file:
        paths = {line.split()[-1] for line in file if "libcudart" in line}
    (path,) = paths
    assert ctypes.CDLL(path).cudaDeviceReset() == 0


def _after_a_reset(reset: Callable[[], None]) -> None:
    """Tensors are lost: an error. With new ones, if PyTorch can make them, the second call works.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 is set, as PyTorch's cache would hand out lost memory. Lost
    tensors stay alive to the end: to free them would free what lies there now.
    """
    layer, x = lost = sample()
    with torch.inference_mode():
        for _ in range(4):  # the last ones by a graph, which is lost too
            expected = layer(x).cpu()
    torch.cuda.synchronize()
    reset()
    print("with lost tensors:", error_of(lambda: (layer(x), torch.cuda.synchronize())))
    try:
        layer, x = sample()
    except RuntimeError as error:
        print(f"PyTorch makes no new tensors: {type(error).__name__}: {error}")
        return
    for _ in range(3):
        try:
            with torch.inference_mode():
                y = layer(x).cpu()
        except RuntimeError as error:
            print(f"with new tensors: {type(error).__name__}: {error}")
        else:
            assert torch.equal(y, expected)
            print("with new tensors: right\ndone", flush=True)
            os._exit(0)  # frees nothing
    del lost
    raise AssertionError("launches never work again")


def a_reset_by_the_driver() -> None:
    _after_a_reset(_reset_by_driver)


def a_reset_by_the_runtime() -> None:
    _after_a_reset(_reset_by_runtime)


CASES = kernels_find_no_memory, an_illegal_address, a_reset_by_the_driver, a_reset_by_the_runtime

if __name__ == "__main__":
    {case.__name__: case for case in CASES}[sys.argv[1]]()
    print("done")
